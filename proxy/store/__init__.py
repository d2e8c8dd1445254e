"""IO to disk: the catalogue, the state files, and the facade that keeps both off the event loop."""
