"""Tests of one module each, without a network."""
