"""Public reports of lost prompt caches, slow prefill and proxies that broke things."""
