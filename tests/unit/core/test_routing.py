"""How requests are placed where slots are processes."""

from __future__ import annotations

from dataclasses import replace

from proxy.core.placement import Need, Option
from proxy.core.queue import Kind, Lease
from proxy.core.records import Reason, Reuse
from proxy.core.routing import MOST_SENT, Routing
from proxy.core.slots import Content
from tests.unit.factories import chat, content, costs

COSTS = costs()
NOW = 1000.0
ROUTING = Routing(beside=frozenset({"/v1/embeddings"}))


def test_what_a_client_named_means_nothing() -> None:
    """No slot of its own, no look at the rendered prompt, one process is enough."""
    need = ROUTING.admit(Need(chat("q"), wanted=3, wide=True), 0)
    assert (need.wanted, need.exact, need.wide, need.beside) == (None, True, False, False)


def test_idle_work_names_its_process() -> None:
    """The keeper knows where it wants something back."""
    assert ROUTING.admit(Need(chat("q"), wanted=1, idle=True), 0).wanted == 1


def test_what_runs_beside_goes_to_the_first_process() -> None:
    """Which alone must offer embeddings; other paths may go anywhere."""
    need = ROUTING.admit(Need(chat("q"), path="/v1/embeddings", wide=True), 1)
    assert (need.beside, need.wanted) == (True, 1)
    other = ROUTING.admit(Need(chat("q"), path="/v1/other", wide=True), 1)
    assert (other.beside, other.wanted) == (False, None)


def lease(body: bytes | None, *, expects: bool = False, side: bool = False) -> Lease:
    """One that ended."""
    option = Option(slot=0, reason=Reason.COLD, hit=0, n_tokens=5000)
    prompt = replace(chat("q"), side=side)
    made = Lease(option, Kind.NARROW, prompt, Reason.COLD, queued=0.0, started=NOW, body=body)
    made.expects = expects
    return made


def kept(held: Content, ended: Lease) -> Content:
    """What it holds then."""
    after = ROUTING.kept(held, ended, COSTS, NOW)
    assert after is not None
    return after


def test_nothing_is_held_where_nothing_is_reused() -> None:
    """No slot is kept for a conversation that it will have forgotten."""
    routing = Routing(Reuse.NONE)
    assert routing.kept(content(chat("q"), 5000), lease(b"{}", expects=True), COSTS, NOW) is None


def test_what_a_process_holds_after_an_answer() -> None:
    """All of it must be extended, none of it saved; it is kept, and can be sent again."""
    after = kept(content(chat("q"), 5000), lease(b"{}", expects=True))
    assert (after.reuse, after.storable, after.sent) == (Reuse.EXTENSION, False, b"{}")
    assert after.held == NOW + 5.0


def test_a_side_request_is_neither_kept_nor_sent_again() -> None:
    """Nor is a body that is too large, or one that is not known."""
    held = content(chat("q"), 5000)
    after = kept(held, lease(b"{}", side=True))
    assert (after.sent, after.held) == (None, NOW)
    assert kept(held, lease(b"x" * (MOST_SENT + 1))).sent is None
    assert kept(held, lease(None)).sent is None
