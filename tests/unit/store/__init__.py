"""Tests of proxy/store."""
