"""``proxy.commands.decisions``: what the proxy decided, in the user's words."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.commands import decisions
from proxy.core.records import Reason
from tests.unit.commands.fake_api import COLD, OPTION, REQUEST
from tests.unit.commands.test_tables import drawn

UNPROMPTED: dict[str, Any] = {
    **dict.fromkeys(("prompt", "reused", "slot", "title")),
    "conversation": "",
    "client": "",
    "costs": [],
    "path": "/v1/nothing",
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "restore snapshot abababababab into slot 0"),
        ({"snapshot": None, "reason": "slot-hit"}, "use slot 0 as it is"),
        ({"snapshot": None, "reason": "cold"}, "start cold in slot 0"),
        ({"snapshot": None, "reason": "slot-hit", "hit": 31}, "start cold in slot 0"),
        ({"snapshot": None, "reason": "slot-hit", "hit": 31, "prompt": 40}, "use slot 0 as it is"),
        ({"snapshot": None, "reason": "cold", "save_first": True},
         "save slot 0, then start cold in slot 0"),
        ({"snapshot": None, "reason": "slot-hit", "wait": 2.0},
         "wait for slot 0, then use slot 0 as it is"),
        ({"slot": None, "snapshot": None, "reason": "cold"}, "start cold in any slot"),
    ],
)  # fmt: skip
def test_an_option_in_words(changes: dict[str, object], said: str) -> None:
    """What would be done, in the order it is done."""
    assert decisions.how(OPTION | changes) == said


def test_times_have_units() -> None:
    """In the table every time is one, and what costs nothing is a dash."""
    _, line = drawn(decisions.costs([OPTION | {"wait": 2.0}], None)).splitlines()
    assert " ".join(line.split()).endswith("3,660 3,667 2.0 s 41 ms 17 ms - 58 ms")


def test_at_80_columns_no_figure_is_cut() -> None:
    """The option goes on below itself; figures, heads and the mark of the choice stay whole."""
    long = {"hit": 123_456, "prompt": 123_457, "wait": 12.5, "prefill": 754.0, "cost": 766.0}
    choice = OPTION | long | {"save_first": True}
    shown = drawn(decisions.costs([choice, OPTION], choice), width=80)
    head, *lines = shown.splitlines()
    assert head.split() == [
        *("OPTION", "REUSED", "OF", "TOKENS", "WAIT", "PREFILL", "TRANSFER", "LOSS", "COST")
    ]
    assert "…" not in shown
    assert lines[0].startswith("> wait for")
    for figure in ("123,456", "123,457", "12.5 s", "12 min 34 s", "17 ms", "12 min 46 s"):
        assert figure in lines[0]
    option = " ".join(line[:17].strip("> ") for line in lines)
    assert option.startswith(f"{decisions.how(choice)} restore snapshot")


def test_the_chosen_option_is_marked() -> None:
    """Only the choice has the arrow."""
    other = OPTION | {"slot": 1, "snapshot": None}
    _, first, second = drawn(decisions.costs([other, OPTION], OPTION)).splitlines()
    assert not first.lstrip().startswith(">")
    assert second.startswith(">")


def test_what_was_done_is_marked() -> None:
    """In a request in full: of the options for its slot the cheapest."""
    rows = [OPTION | {"slot": 1}, OPTION, OPTION | {"snapshot": None, "cost": 9.0}]
    full = drawn(decisions.request_in_full(REQUEST | {"costs": rows}, 0.0)).splitlines()
    (line,) = [line for line in full if line.startswith(">")]
    assert "restore snapshot abababababab into slot 0" in line


def test_an_unknown_path() -> None:
    """It is called so, in the list and in full, whatever slots it was given."""
    row = REQUEST | UNPROMPTED | {"reason": "wide", "status": 404}
    shown = " ".join(decisions.request(row).plain.split())
    assert shown.endswith("r2 unknown path 404 2.5 s /v1/nothing")
    full = drawn(decisions.request_in_full(row, 0.0))
    assert "got           unknown path: the model server has no such path" in full
    assert "wide" not in full


def test_what_takes_every_slot() -> None:
    """The word is explained; figures that nobody knows are left out."""
    row = REQUEST | UNPROMPTED | {"reason": "wide", "path": "/v1/rerank"}
    shown = decisions.request(row).plain
    assert shown.endswith("2.5 s  /v1/rerank  it took every slot: it cannot name one")
    assert "reused" not in shown


def test_every_reason_is_explained() -> None:
    """But the one that is never in the decision log."""
    assert set(decisions.MEANT) == {str(one) for one in Reason} - {"pass"}


def test_a_request_in_full_without_much() -> None:
    """What is not known is a dash or left out; what is special is said."""
    rest = {"side": "title", "note": "full", "rules": [], "cold": {"cause": "x"}}
    full = drawn(decisions.request_in_full(REQUEST | UNPROMPTED | rest, 0.0))
    for text in (
        "side request  title",
        "note          full",
        "none changed anything",
        "because  x",
    ):
        assert text in full, text
    assert "reused  " not in full


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"reason": "slot-hit", "reused": 3600}, "\x1b[32mslot-hit, 98 %"),
        ({"reason": "slot-hit", "reused": 110}, "\x1b[33mslot-hit, 3 %"),
        ({"reason": "restored", "reused": 3666}, "\x1b[32mrestored, > 99 %"),
        ({"reason": "slot-hit", "reused": None}, "\x1b[33mslot-hit "),
        ({"reason": "slot-hit", "reused": None, "prompt": None}, "\x1b[32mslot-hit "),
        ({"reason": "cold", "reused": 20}, "\x1b[33mcold, < 1 %"),
    ],
)
def test_reusing_little_is_not_green(changes: dict[str, object], shown: str) -> None:
    """The colour goes by the share, which stands beside the word."""
    assert shown in drawn(decisions.request(REQUEST | changes), colour=True)


def test_a_difference_is_told_in_a_line() -> None:
    """The words that differ; nothing is made up where the sides are not known."""
    clocks = {"before": "It is 14:02:11, and you", "after": "It is 14:09:59, and you"}
    told = decisions.because(COLD | clocks)
    assert told.endswith("at character 118: 14:02:11 → 14:09:59")
    assert decisions.because(COLD | {"before": ""}).endswith(": nothing → 14:03")
    assert decisions.because(COLD | {"before": "", "after": ""}).endswith("character 118")
    assert decisions.because({"cause": "system"}) == ""
    assert decisions.because(None) == ""
