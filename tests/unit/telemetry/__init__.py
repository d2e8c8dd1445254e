"""Tests of proxy/telemetry."""
