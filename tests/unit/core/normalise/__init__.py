"""Tests of normalisation."""
