"""The whole proxy on real sockets, before a fake llama-server that can be told to fail."""
