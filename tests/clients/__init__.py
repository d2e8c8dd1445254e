"""Real client programs through the proxy; `make clients`."""
