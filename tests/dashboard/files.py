"""Where the page's files are, and the policy they are served with."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "proxy" / "dashboard"
AXE = Path(__file__).parent / "vendor" / "axe.js"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
