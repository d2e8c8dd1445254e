"""Slotkeeper: a caching reverse proxy for local LLM servers."""

__version__ = "0.1.0"
