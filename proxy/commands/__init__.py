"""What each command of ``slotkeeper`` does; ``proxy/cli.py`` gives them their names."""
