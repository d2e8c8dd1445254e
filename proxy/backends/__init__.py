"""IO to model servers."""
