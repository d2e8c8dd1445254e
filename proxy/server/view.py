"""What the proxy's own pages show, read from the live objects.

The only prompt text is a title of 60 characters and the quotes of the decision log, for those the
gate lets in (DESIGN.md rule 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from proxy.core.records import Mode
from proxy.errors import SlotkeeperError
from proxy.server import running, status
from proxy.telemetry.series import COLUMNS, STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.core.ledger import Conversation
    from proxy.core.slots import Slot
    from proxy.curator import Curator
    from proxy.keeper import Keeper
    from proxy.scheduler import Scheduler
    from proxy.server.record import Recorder
    from proxy.server.status import About
    from proxy.telemetry.history import Decision, History
    from proxy.telemetry.logs import Ring
    from proxy.telemetry.metrics import Metrics
    from proxy.telemetry.series import Series
    from proxy.transfer import Transfer

_LEFT = "The disk refuses: some of this conversation may still be on it."


class Talks(Protocol):
    """The conversations there are (``server.normaliser.Normaliser``)."""

    def conversations(self) -> Sequence[Conversation]:
        """The last used first."""

    def conversation(self, conversation: str) -> Conversation | None:
        """One by id."""

    def forget(self, conversation: str) -> bool:
        """Drop one; False when it is not known."""


class Written(Protocol):
    """Where they are kept (``store.ledger.LedgerWriter``)."""

    async def flush(self) -> bool:
        """Bring what changed to disk; False when the disk refuses."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Whom the pages ask. ``transfer`` and ``curator`` None: nothing is ever saved.

    ``ledger`` None: conversations are kept in memory alone.
    """

    scheduler: Scheduler
    keeper: Keeper
    history: History
    metrics: Metrics
    recorder: Recorder
    talks: Talks
    series: Series
    ring: Ring
    transfer: Transfer | None = None
    curator: Curator | None = None
    ledger: Written | None = None


class View:
    """An ``AdminView``."""

    def __init__(self, sources: Sources, about: About, clock: Callable[[], float]) -> None:
        """``clock`` gives unix seconds."""
        self._from = sources
        self._about = about
        self._clock = clock

    # The proxy

    def status(self) -> Mapping[str, Any]:
        """The headline; see ``server.status``."""
        parts, about, now = self._from, self._about, self._clock()
        ready, details = self.ready()
        slots = parts.scheduler.total_slots
        return {
            "version": about.version,
            "started": about.started,
            "now": now,
            **details,
            "ready": ready,
            "paused": parts.keeper.paused,
            "draining": parts.scheduler.draining,
            "backend": status.backend(parts.keeper, parts.metrics, about, slots),
            "store": (
                {**parts.curator.usage(), "slot_dir": about.slot_dir} if parts.curator else None
            ),
            "queue": status.queue(parts.metrics),
            "totals": status.totals(parts.metrics),
            "first_token": status.first_token(parts.history, now),
            "hide_titles": about.hide_titles,
        }

    def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """Ready: the backend answers and the proxy is not shutting down."""
        parts = self._from
        verdict, draining = parts.keeper.verdict, parts.scheduler.draining
        details = {
            "mode": str(parts.scheduler.mode),
            "why": "slotkeeper is shutting down" if draining else verdict.why,
            "advice": verdict.advice or self._unsaved(),
            "restores": self._restores(),
        }
        return parts.keeper.up and not draining, details

    def _unsaved(self) -> str:
        """What to do that states are saved again, where the mode lets them be."""
        transfer, saving = self._from.transfer, self._from.scheduler.mode is Mode.EXCLUSIVE
        return transfer.refused.advice if saving and transfer and transfer.refused else ""

    def _restores(self) -> str:
        """Whether snapshots are restored; where nothing is driven, or answers, none is."""
        parts = self._from
        if parts.transfer and parts.transfer.retired:
            return "retired"
        driven = parts.keeper.up and parts.scheduler.mode is Mode.EXCLUSIVE
        return "in use" if driven and parts.transfer else "not used"

    def metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition."""
        return self._from.metrics.render()

    def history(self, seconds: float) -> Mapping[str, Any]:
        """One row per minute of the last ``seconds``, oldest first."""
        now = self._clock()
        self._from.series.note(now, status.counters(self._from.metrics))
        return {"step": STEP, "columns": COLUMNS, "rows": self._from.series.rows(now - seconds)}

    def logs(self, limit: int, level: str = "debug", after: int = 0) -> Sequence[Mapping[str, Any]]:
        """The newest lines of the log, oldest first."""
        return self._from.ring.recent(limit, level=level, after=after)

    # What it works on

    def slots(self) -> Sequence[Mapping[str, Any]]:
        """One row per slot; ``used`` and ``since`` are unix seconds."""
        return [self._slot(row) for row in self._from.scheduler.table]

    def _slot(self, row: Slot) -> Mapping[str, Any]:
        content = row.content
        talk = self._from.talks.conversation(content.prompt.conversation) if content else None
        return {
            "index": row.index,
            "state": str(row.state),
            "conversation": (content.prompt.conversation or None) if content else None,
            "title": self._title(talk.title if talk else ""),
            "client": (talk.client or None) if talk else None,
            "tokens": content.n_tokens if content else None,
            "saved_tokens": content.n_saved if content else 0,
            "used": content.used if content else None,
            "since": row.since or None,
            "storable": content.storable if content else True,
        }

    def running(self) -> Sequence[Mapping[str, Any]]:
        """Requests that wait or run, the oldest first."""
        now = self._clock()
        found = (running.row(one, came, now) for one, came in self._from.recorder.live())
        return [{**row, "title": self._title(row["title"])} for row in found if row is not None]

    def snapshots(self) -> Sequence[Mapping[str, Any]]:
        """One row per snapshot of the current fingerprint, the last used first."""
        curator = self._from.curator
        if curator is None:
            return []
        rows = []
        for snapshot, worth in curator.snapshots():
            talk = self._from.talks.conversation(snapshot.conversation)
            rows.append(
                {
                    "id": snapshot.id,
                    "fingerprint": snapshot.fingerprint,
                    "tokens": snapshot.n_tokens,
                    "prompt_tokens": snapshot.n_prompt,
                    "bytes": snapshot.size,
                    "created": snapshot.created,
                    "last_used": snapshot.last_used,
                    "restores": snapshot.restores,
                    "barred": curator.barred(snapshot.id),
                    "pinned": snapshot.pinned,
                    "conversation": snapshot.conversation or None,
                    "title": self._title(talk.title if talk else ""),
                    "value": worth.value,
                    "seconds_saved": round(worth.seconds, 3),
                }
            )
        return rows

    def conversations(self) -> Sequence[Mapping[str, Any]]:
        """One row per conversation, the last used first; ``bytes``: of its messages and tools."""
        return [
            {
                "id": row.id,
                "client": row.client,
                "messages": len(row.lines),
                "used": row.used,
                "prompt_n": row.prompt_n,
                "title": self._title(row.title),
                "bytes": row.size,
            }
            for row in self._from.talks.conversations()
        ]

    # The decision log

    def requests(self, limit: int, after: str = "") -> Sequence[Mapping[str, Any]]:
        """The newest first; only those newer than the request ``after``, as long as it is here."""
        shared = self._from.history.shared()
        found = self._from.history.recent(limit, after)
        return [self._row(one, shared.get(one.request_id, 1)) for one in found]

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        """One of them, the newest of that id; ``note`` says if there are more."""
        found = self._from.history.get(request_id)
        return None if found is None else self.decided(found)

    def decided(self, decision: Decision) -> Mapping[str, Any]:
        """A row of the decision log."""
        return self._row(decision, self._from.history.shared().get(decision.request_id, 1))

    def _row(self, decision: Decision, same: int) -> Mapping[str, Any]:
        """``same``: how many have its id."""
        note = decision.note
        if same > 1:
            more = f"one of {same} requests with this id, which the client chose"
            note = f"{note}; {more}" if note else more
        return {**decision.as_json(), "title": self._title(decision.title), "note": note}

    def _title(self, title: str | None) -> str | None:
        return None if self._about.hide_titles else title or None

    # Forgetting

    async def forget(self, conversation: str) -> int | None:
        """Remove a conversation and its snapshots, for good; how many those were.

        None: neither is known. Raises ``SlotkeeperError`` when the disk refuses: a second try may
        remove the rest.
        """
        parts = self._from
        known = parts.talks.forget(conversation)
        parts.scheduler.table.unsave(conversation)
        parts.history.forget(conversation)
        try:
            snapshots = await parts.transfer.forget(conversation) if parts.transfer else 0
            written = await parts.ledger.flush() if parts.ledger else True
        except OSError as error:
            raise SlotkeeperError(_LEFT, hint="Try again.") from error
        if not written:
            raise SlotkeeperError(_LEFT, hint="It is tried again by itself.")
        return snapshots if known or snapshots else None
