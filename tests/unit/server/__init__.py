"""Tests of proxy/server."""
