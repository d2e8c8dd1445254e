"""Tests of what is under deploy/."""
