"""Decisions: pure tables and functions, no IO, no clock."""
