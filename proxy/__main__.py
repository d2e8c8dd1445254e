"""``python -m proxy`` is the command ``slotkeeper``."""

from __future__ import annotations

from proxy.cli import main

if __name__ == "__main__":
    main()
