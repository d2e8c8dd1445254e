"""The shape of the code: every module is tested by name, and none grows beyond a screenful."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p for p in (ROOT / "proxy").rglob("*.py") if p.name != "__init__.py")
MAX_LINES = 400
MAX_FUNCTION_LINES = 50


def dotted(module: Path) -> str:
    """``proxy/store/files.py`` -> ``proxy.store.files``."""
    return ".".join(module.relative_to(ROOT).with_suffix("").parts)


@pytest.fixture(scope="module")
def reached() -> set[str]:
    """Modules that a test names: imports, runs, or says it is about."""
    texts = [p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py")]
    words = {word for text in texts for word in re.findall(r"proxy(?:\.\w+)+", text)}
    return {dotted(m) for m in MODULES if dotted(m) in words}


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_every_module_is_tested(module: Path, reached: set[str]) -> None:
    """A module has its own test file in tests/unit, or a test that is about it names it.

    ``base`` modules are types alone, ``__main__`` is a call: their users are tested.
    """
    if module.stem in {"base", "__main__"}:
        return
    relative = module.relative_to(ROOT / "proxy")
    own = ROOT / "tests" / "unit" / relative.with_name(f"test_{relative.name.lstrip('_')}")
    assert own.exists() or dotted(module) in reached, f"{own.relative_to(ROOT)} is missing"


@pytest.mark.parametrize("module", MODULES, ids=dotted)
def test_no_module_or_function_is_too_long(module: Path) -> None:
    """At most 400 lines a module and 50 a function (DESIGN.md, Layout)."""
    source = module.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long
