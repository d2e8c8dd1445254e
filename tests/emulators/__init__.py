"""Servers that cannot run here, rebuilt from what is known of them, for the tests."""
