"""Tests of the commands: what is asked of the proxy, what is printed, how it ends."""
