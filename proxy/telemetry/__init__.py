"""What the proxy shows of itself: metrics, logs, the decision log."""
