"""Unit tests of the drivers."""
