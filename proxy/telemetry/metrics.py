"""Every Prometheus series of the proxy, in one place.

Labels take values of enums, and names of the table of rules, only: the number of series is fixed
whatever clients send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from proxy.core.normalise import RULES
from proxy.core.normalise.clients import Side
from proxy.core.records import Mode, Reason
from proxy.core.slots import SlotState
from proxy.core.why import Cold

_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PathClass(StrEnum):
    """What kind of request it was."""

    CHAT = "chat"
    COMPLETION = "completion"
    INFILL = "infill"
    COMPUTE = "compute"  # takes leases, not cached: embeddings, rerank, unknown posts
    PLAIN = "plain"  # computes nothing, relayed byte for byte
    OWN = "own"  # /_slotkeeper/


class Outcome(StrEnum):
    """How a save or a restore ended."""

    OK = "ok"
    REFUSED = "refused"  # the backend said no
    FAILED = "failed"  # the connection, the disk or the check failed


class Cause(StrEnum):
    """Why a snapshot was removed."""

    SPACE = "space"  # over one of the limits: bytes, files, age
    SUPERSEDED = "superseded"
    FORGOTTEN = "forgotten"  # with its conversation, by its owner
    REMOVED = "removed"  # by hand


class Source(StrEnum):
    """Where a prompt's tokens came from."""

    SLOT = "slot"  # the KV cache the slot held
    SNAPSHOT = "snapshot"  # a state restored from disk for this request
    COMPUTED = "computed"


class Primed(StrEnum):
    """What became of a displaced conversation that was computed again in idle time."""

    DONE = "done"
    BROKEN_OFF = "broken-off"  # for a request that came
    FAILED = "failed"


class RuleOutcome(StrEnum):
    """What became of a rule of normalisation that had something to do."""

    APPLIED = "applied"
    SHADOW = "shadow"  # only reported
    FAULT = "fault"  # it raised; the original went out


class Where(StrEnum):
    """Which caching step failed, so that the request was forwarded plainly."""

    PARSE = "parse"
    PROMPT = "prompt"
    PLACEMENT = "placement"
    RESTORE = "restore"
    OBSERVE = "observe"
    SAVE = "save"
    STORE = "store"
    NORMALISE = "normalise"
    LEDGER = "ledger"
    EXPLAIN = "explain"


class _Make:
    """Makes metrics under the common prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"slotkeeper_{name}", text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"slotkeeper_{name}", text, labels, registry=self._registry)

    def seconds(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        name = f"slotkeeper_{name}_seconds"
        return Histogram(name, text, labels, registry=self._registry, buckets=bounds)


class Metrics:
    """The series, in a registry of their own. Times are seconds, sizes bytes."""

    def __init__(self) -> None:
        """All series begin at 0."""
        self._registry = CollectorRegistry()
        make = _Make(self._registry)
        self._of_requests(make)
        self._of_conversations(make.counter, make.gauge)
        self._of_snapshots(make)
        self._of_the_backend(make.counter, make.gauge)
        self._begin()

    def _of_requests(self, make: _Make) -> None:
        counter, gauge, seconds = make.counter, make.gauge, make.seconds
        self._requests = counter(
            "requests_total", "Requests answered.", "path_class", "reason", "status_class"
        )
        self._request_seconds = seconds("request", "From first to last byte.", _LONG)
        self._first_token = seconds("first_token", "Until the first token.", _LONG, "reason")
        self._tokens = counter(
            "prompt_tokens_total", "Prompt tokens by where they came from.", "source"
        )
        self._saved_seconds = counter(
            "saved_seconds_total", "Prefill spared by reuse, by what computing costs here."
        )
        self._queue_seconds = seconds("queue", "Waiting for a slot.", _LONG)
        self.queue_length = gauge("queue_length", "Requests waiting for a slot.")
        self.leases_active = gauge("leases_active", "Leases held.")
        self.pings = counter("pings_total", "Events sent while the backend was silent.")
        self.disconnects = counter("disconnects_total", "Clients that left before the end.")
        self._faults = counter(
            "faults_total", "Caching faults after which requests were forwarded plainly.", "where"
        )

    def _of_conversations(
        self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]
    ) -> None:
        self._rules = counter(
            "rules_total", "Rules of normalisation that had something to do.", "rule", "outcome"
        )
        self._cold = counter(
            "cold_total", "Requests that reused less than their conversation's last one.", "cause"
        )
        self._side_requests = counter(
            "side_requests_total", "Requests of clients beside the conversation.", "kind"
        )
        self.conversations = gauge("conversations", "Conversations in the ledger.")

    def _of_snapshots(self, make: _Make) -> None:
        counter, gauge, seconds = make.counter, make.gauge, make.seconds
        self._saves = counter("saves_total", "Slots saved to disk.", "outcome")
        self._save_seconds = seconds("save", "A save, as the proxy waited for it.", _SHORT)
        self._save_bytes = counter("save_bytes_total", "Bytes saved.")
        self._restores = counter("restores_total", "Snapshots restored.", "outcome")
        self._restore_seconds = seconds("restore", "A restore, likewise.", _SHORT)
        self._restore_bytes = counter("restore_bytes_total", "Bytes restored.")
        self.ineffective_restores = counter(
            "ineffective_restores_total", "Restores the engine then made no use of."
        )
        self.restores_retired = gauge("restores_retired", "1 if restores are tried no more.")
        self._evictions = counter("evictions_total", "Snapshots removed.", "cause")
        self.store_bytes = gauge("store_bytes", "Size of all snapshots.")
        self.store_limit_bytes = gauge("store_limit_bytes", "What the store may hold.")
        self.store_files = gauge("store_files", "Number of snapshots.")
        self.disk_free_bytes = gauge("disk_free_bytes", "Free space where the store is.")

    def _of_the_backend(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self._slots = gauge("slots", "Slots by what they are doing.", "state")
        self.backend_up = gauge("backend_up", "1 if the backend answered last time.")
        self.backend_restarts = counter("backend_restarts_total", "Restarts noticed.")
        self.moved = counter("moved_total", "Requests another server took over from a dead one.")
        self._primes = counter(
            "primes_total", "Displaced conversations computed again in idle time.", "outcome"
        )
        self._mode = gauge("mode", "1 for what may be done to the backend now.", "mode")

    def _begin(self) -> None:
        """A series that exists only after its first event breaks rates and alerts."""
        for metric, values in (
            (self._first_token, Reason),
            (self._faults, Where),
            (self._saves, Outcome),
            (self._restores, Outcome),
            (self._primes, Primed),
            (self._evictions, Cause),
            (self._slots, SlotState),
            (self._mode, Mode),
            (self._tokens, Source),
            (self._cold, Cold),
            (self._side_requests, (kind for kind in Side if kind is not Side.MAIN)),
        ):
            for value in values:
                metric.labels(value)
        for rule, outcome in product(RULES, RuleOutcome):
            self._rules.labels(rule.name, outcome)

    def request(
        self,
        path_class: PathClass,
        reason: Reason,
        status: int,
        *,
        total: float,
        queued: float | None = None,
        first_token: float | None = None,
    ) -> None:
        """A request was answered, ``status`` is the one the client got.

        ``queued``: seconds it waited for a slot, None where it wanted none.
        """
        status_class = f"{status // 100}xx" if 100 <= status < 600 else "other"  # noqa: PLR2004
        self._requests.labels(path_class, reason, status_class).inc()
        self._request_seconds.observe(total)
        if queued is not None:
            self._queue_seconds.observe(queued)
        if first_token is not None:
            self._first_token.labels(reason).observe(first_token)

    def prompt(self, *, reused: int, computed: int, restored: bool, saved: float) -> None:
        """The engine's own figures for one prompt, in tokens.

        ``restored``: a snapshot was put into the slot first; ``saved``: seconds that computing
        the reused ones would have taken.
        """
        self._tokens.labels(Source.SNAPSHOT if restored else Source.SLOT).inc(reused)
        self._tokens.labels(Source.COMPUTED).inc(computed)
        self._saved_seconds.inc(max(0.0, saved))

    def rule(self, name: str, outcome: RuleOutcome) -> None:
        """A rule had something to do in one request; ``name`` is one of ``RULES``."""
        self._rules.labels(name, outcome).inc()

    def cold(self, cause: Cold) -> None:
        """A request reused less than its conversation's last prompt."""
        self._cold.labels(cause).inc()

    def side_request(self, kind: Side) -> None:
        """A request came; those of the conversation itself are no side requests."""
        if kind is not Side.MAIN:
            self._side_requests.labels(kind).inc()

    def saved(self, outcome: Outcome, *, seconds: float = 0.0, size: int = 0) -> None:
        """A save ended; only a good one counts its seconds and bytes."""
        self._saves.labels(outcome).inc()
        if outcome is Outcome.OK:
            self._save_seconds.observe(seconds)
            self._save_bytes.inc(size)

    def restored(self, outcome: Outcome, *, seconds: float = 0.0, size: int = 0) -> None:
        """A restore ended; only a good one counts its seconds and bytes."""
        self._restores.labels(outcome).inc()
        if outcome is Outcome.OK:
            self._restore_seconds.observe(seconds)
            self._restore_bytes.inc(size)

    def primed(self, outcome: Primed) -> None:
        """A displaced conversation was computed again, or was begun with."""
        self._primes.labels(outcome).inc()

    def evicted(self, cause: Cause, count: int = 1) -> None:
        """Snapshots were removed."""
        self._evictions.labels(cause).inc(count)

    def fault(self, where: Where) -> None:
        """Caching failed at this step; the request went on without it."""
        self._faults.labels(where).inc()

    def slots(self, counts: Mapping[SlotState, int]) -> None:
        """How many slots do what now."""
        for state in SlotState:
            self._slots.labels(state).set(counts.get(state, 0))

    def mode(self, now: Mode) -> None:
        """What may be done to the backend from now on."""
        for mode in Mode:
            self._mode.labels(mode).set(mode is now)

    def read(self, *names: str) -> dict[tuple[str, ...], float]:
        """Samples of these names (without the prefix) as they stand, by name and label values."""
        some = self._registry.restricted_registry([f"slotkeeper_{name}" for name in names])
        return {
            (sample.name.removeprefix("slotkeeper_"), *sample.labels.values()): sample.value
            for family in some.collect()
            for sample in family.samples
        }

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
