"""IO to clients."""
