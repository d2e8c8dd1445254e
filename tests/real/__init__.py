"""The whole proxy, or a part, in front of the real engine."""
