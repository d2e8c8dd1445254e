"""Prefixes: chains of digests over prompt bytes (the fast hint), and exact ones over tokens.

A chain is a tuple of running digests: element i covers everything up to and including segment i,
so two chains agree on a leading part exactly as far as the prompts' bytes do.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from proxy.core.records import Prompt, Snapshot

BLOCK_TOKENS = 64  # tokens per block of the snapshot index
TEXT_BLOCK = 1024  # bytes per segment of a plain text prompt
_DIGEST = 16  # bytes; collisions are out of reach, and a wrong hint only costs time
_STRIDE = 16_384  # tokens compared at once: 64 KiB stay in the processor's cache

Chain = tuple[tuple[bytes, ...], tuple[int, ...]]


def seed(*parts: bytes) -> bytes:
    """Digest what must be equal before two prompts may share KV; 16 bytes.

    Parts are length-prefixed, so moving a byte from one part to the next changes the result.
    """
    digest = blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def segment_chain(seed: bytes, segments: Sequence[bytes | memoryview]) -> Chain:
    """Running digests over ``segments`` and, beside each, the bytes covered so far."""
    chain: list[bytes] = []
    ends: list[int] = []
    last, end = seed, 0
    for segment in segments:
        digest = blake2b(last, digest_size=_DIGEST)
        digest.update(segment)
        last = digest.digest()
        end += len(segment)
        chain.append(last)
        ends.append(end)
    return tuple(chain), tuple(ends)


def text_chain(seed: bytes, text: bytes) -> Chain:
    """Like ``segment_chain``, over full blocks of ``TEXT_BLOCK`` bytes; the rest is left out."""
    view = memoryview(text)
    whole = len(text) - len(text) % TEXT_BLOCK
    return segment_chain(seed, [view[i : i + TEXT_BLOCK] for i in range(0, whole, TEXT_BLOCK)])


def common(a: Prompt, b: Prompt) -> int:
    """How many leading chain elements two prompts share; 0 when their seeds differ."""
    if a.seed != b.seed:
        return 0
    count = 0
    for ours, theirs in zip(a.chain, b.chain, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def extends(longer: Prompt, shorter: Prompt) -> bool:
    """Whether all of ``shorter``'s chain (at least one element) leads ``longer``'s."""
    held = len(shorter.chain)
    return held > 0 and longer.seed == shorter.seed and longer.chain[:held] == shorter.chain


def common_tokens(a: array[int], b: array[int]) -> int:
    """Length of the longest common prefix, in tokens. Compares slices at C speed."""
    size = min(len(a), len(b))
    for start in range(0, size, _STRIDE):
        stop = min(start + _STRIDE, size)
        if a[start:stop] != b[start:stop]:
            return _first_difference(a, b, start, stop)
    return size


class PrefixIndex:
    """Which snapshots hold how much of a prompt. Finding them costs one pass over its blocks.

    Maps the digest of every whole-block prefix to the snapshots that start with it. Level 0, the
    seed itself, holds all snapshots of that seed, so prompts and snapshots shorter than a block
    are found too.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._snapshots: dict[str, Snapshot] = {}
        self._levels: dict[str, tuple[bytes, ...]] = {}  # per snapshot, its keys into _holders
        self._holders: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        """Count snapshots."""
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        """Go over the snapshots there are now; the index may change meanwhile."""
        return iter(tuple(self._snapshots.values()))

    def get(self, snapshot_id: str) -> Snapshot | None:
        """Find a snapshot by id."""
        return self._snapshots.get(snapshot_id)

    def add(self, snapshot: Snapshot) -> None:
        """Take in a snapshot; one of the same id gives way."""
        self.remove(snapshot.id)
        levels = tuple(_levels(snapshot.seed, snapshot.tokens))
        self._snapshots[snapshot.id] = snapshot
        self._levels[snapshot.id] = levels
        for level in levels:
            self._holders.setdefault(level, set()).add(snapshot.id)

    def remove(self, snapshot_id: str) -> Snapshot | None:
        """Forget a snapshot and return it; None when it is not (or no longer) here."""
        for level in self._levels.pop(snapshot_id, ()):
            holders = self._holders[level]
            holders.discard(snapshot_id)
            if not holders:
                del self._holders[level]
        return self._snapshots.pop(snapshot_id, None)

    def replace(self, snapshot: Snapshot) -> None:
        """Renew what is known of a snapshot (say, its last use). One not here stays out.

        The caller may have read it before an await during which it was evicted.
        """
        old = self._snapshots.get(snapshot.id)
        if old is None:
            return
        if old.seed == snapshot.seed and old.tokens == snapshot.tokens:
            self._snapshots[snapshot.id] = snapshot
        else:
            self.add(snapshot)

    def ranked(
        self, seed: bytes, tokens: array[int], limit: int = 4, without: Collection[str] = ()
    ) -> list[tuple[Snapshot, int]]:
        """Snapshots by the exact number of leading tokens they share with a prompt, most first.

        Ties: the smaller file (all of it must be read), then the later use. Without a match no
        row. Fingerprints are not looked at: ask an index that holds one only. ``without``: ids to
        be thought away.
        """
        found = (row for row in self._matches(seed, tokens) if row[0].id not in without)
        return list(islice(found, limit))

    def covered(
        self, snapshot: Snapshot, without: Collection[str] = (), most: int | None = None
    ) -> int:
        """Leading tokens of ``snapshot`` that another one of its seed and fingerprint holds too.

        ``without``: ids to be thought away (retention plans with it before anything is deleted).
        ``most``: it cannot be more than that; so much found, nobody else is looked at.
        """
        ours, levels = snapshot.tokens, self._levels.get(snapshot.id)
        if levels is None:
            levels = tuple(_levels(snapshot.seed, ours))

        def alone(depth: int) -> bool:
            return next(self._others(snapshot, levels[depth], without), None) is None

        # Whoever shares a level shares every one above it, so the last shared one is bisected for.
        depth = bisect_left(range(len(levels)), 1, key=alone) - 1
        if depth < 0:
            return 0
        held = depth * BLOCK_TOKENS
        most = len(ours) if most is None else most
        for other in self._others(snapshot, levels[depth], without):
            if held >= most:
                break
            # Only who has the next token too can hold more: nearly nobody, and a cheap question.
            if len(other.tokens) > held and other.tokens[held] == ours[held]:
                held = max(held, _refined(other.tokens, ours, depth))
        return held

    def _others(
        self, snapshot: Snapshot, level: bytes, without: Collection[str]
    ) -> Iterator[Snapshot]:
        """Who else, of its fingerprint, holds a level."""
        for other in self._holders.get(level, ()):
            if other != snapshot.id and other not in without:
                found = self._snapshots[other]
                if found.fingerprint == snapshot.fingerprint:
                    yield found

    def _matches(self, seed: bytes, tokens: array[int]) -> Iterator[tuple[Snapshot, int]]:
        """All matches, deepest first. Whoever shares a level shares every one above it."""
        path: list[set[str]] = []
        for level in _levels(seed, tokens):
            holders = self._holders.get(level)
            if holders is None:
                break
            path.append(holders)
        deeper: set[str] = set()
        for depth in range(len(path) - 1, -1, -1):
            found = [
                (held, snapshot)
                for snapshot in (self._snapshots[other] for other in path[depth] - deeper)
                if (held := _refined(snapshot.tokens, tokens, depth))
            ]
            found.sort(key=lambda row: (-row[0], row[1].size, -row[1].last_used, row[1].id))
            yield from ((snapshot, held) for held, snapshot in found)
            deeper = path[depth]


def _levels(seed: bytes, tokens: array[int]) -> Iterator[bytes]:
    """The seed, then one digest per whole block, each over all tokens up to its end."""
    yield seed
    view = memoryview(tokens)
    digest = blake2b(seed, digest_size=_DIGEST)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest.update(view[end - BLOCK_TOKENS : end])
        yield digest.digest()


def _refined(a: array[int], b: array[int], depth: int) -> int:
    """The exact common prefix of two that share ``depth`` whole blocks and not one more."""
    start = depth * BLOCK_TOKENS
    stop = start + BLOCK_TOKENS
    return start + common_tokens(a[start:stop], b[start:stop])


def _first_difference(a: array[int], b: array[int], low: int, high: int) -> int:
    """Where two that agree up to ``low`` and differ before ``high`` differ first."""
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
