"""Prefix chains and the snapshot index."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.prefix import (
    BLOCK_TOKENS,
    TEXT_BLOCK,
    PrefixIndex,
    common,
    common_tokens,
    extends,
    seed,
    segment_chain,
    text_chain,
)
from proxy.core.records import Prompt, Snapshot

SEED = seed(b"tests")


def toks(values: Iterable[int]) -> array[int]:
    """Tokens as the index takes them."""
    return array("i", values)


def snap(
    name: str,
    tokens: Iterable[int],
    *,
    seed: bytes = SEED,
    size: int = 1,
    used: float = 0.0,
    fingerprint: str = "fp",
) -> Snapshot:
    """A snapshot of which only what the index reads is told."""
    held = toks(tokens)
    return Snapshot(name, fingerprint, seed, held, len(held), size, "", 0.0, used, 0.0)


def prompt(segments: list[bytes], seed: bytes = SEED) -> Prompt:
    """A prompt of these segments."""
    chain, ends = segment_chain(seed, segments)
    return Prompt(seed, chain, ends, sum(map(len, segments)))


def lcp(a: Iterable[int], b: Iterable[int]) -> int:
    """The longest common prefix, the slow and sure way."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def ids(ranked: list[tuple[Snapshot, int]]) -> list[tuple[str, int]]:
    """Ids and lengths of a ranking."""
    return [(snapshot.id, held) for snapshot, held in ranked]


def test_seed_tells_parts_apart() -> None:
    """Moving a byte between parts, adding an empty part or swapping parts gives another seed."""
    seeds = {
        seed(b"ab", b"c"),
        seed(b"a", b"bc"),
        seed(b"abc"),
        seed(b"abc", b""),
        seed(b"c", b"ab"),
    }
    assert len(seeds) == 5
    assert all(len(value) == 16 for value in seeds)
    assert seed(b"ab", b"c") == seed(b"ab", b"c")


def test_segment_chain_runs() -> None:
    """A segment's digest depends on all before it; ends are cumulative bytes."""
    chain, ends = segment_chain(SEED, [b"one", b"two", b"two"])
    assert ends == (3, 6, 9)
    assert len(set(chain)) == 3
    assert segment_chain(SEED, [b"one", b"two"])[0] == chain[:2]
    assert segment_chain(SEED, [b"One", b"two"])[0][1] != chain[1]
    assert segment_chain(seed(b"other"), [b"one"])[0] != chain[:1]
    assert segment_chain(SEED, []) == ((), ())


@pytest.mark.parametrize(
    ("size", "blocks"), [(0, 0), (TEXT_BLOCK - 1, 0), (TEXT_BLOCK, 1), (3 * TEXT_BLOCK + 7, 3)]
)
def test_text_chain_takes_full_blocks(size: int, blocks: int) -> None:
    """Only whole blocks count, and they equal the same blocks given as segments."""
    text = bytes(i % 251 for i in range(size))
    chain, ends = text_chain(SEED, text)
    assert ends == tuple(TEXT_BLOCK * (i + 1) for i in range(blocks))
    parts = [text[i * TEXT_BLOCK : (i + 1) * TEXT_BLOCK] for i in range(blocks)]
    assert (chain, ends) == segment_chain(SEED, parts)


def test_common_and_extends() -> None:
    """Common elements lead both chains; extending needs the seed and all of the shorter one."""
    a, b = prompt([b"s", b"u1", b"a1"]), prompt([b"s", b"u1", b"x", b"y"])
    assert common(a, b) == common(b, a) == 2
    assert common(a, a) == 3
    assert common(a, prompt([b"s", b"u1"])) == 2
    assert common(a, prompt([b"s", b"u1"], seed(b"other"))) == 0
    assert extends(a, prompt([b"s", b"u1"]))
    assert extends(a, a)
    assert not extends(a, b)
    assert not extends(prompt([b"s"]), a)
    assert not extends(a, prompt([]))
    same_chain = replace(prompt([b"s"]), seed=seed(b"other"))
    assert not extends(a, same_chain)
    assert common(a, same_chain) == 0


@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 3), max_size=80),
    st.integers(0, 80),
)
def test_common_tokens_is_exact(a: list[int], b: list[int], shared: int) -> None:
    """Equals the slow way whatever the lists."""
    b = a[:shared] + b
    assert common_tokens(toks(a), toks(b)) == lcp(a, b)


@pytest.mark.parametrize("at", [0, 1, 16_383, 16_384, 16_385, 32_768, 99_999])
def test_common_tokens_of_long_prompts(at: int) -> None:
    """A single difference is found wherever it is, around the strides too."""
    a = toks(range(100_000))
    b = a[:]
    assert common_tokens(a, b) == 100_000
    b[at] = -5
    assert common_tokens(a, b) == common_tokens(b, a) == at
    assert common_tokens(a, a[:at]) == at


def test_index_keeps_snapshots() -> None:
    """Adding, finding, renewing and removing; nothing of a removed one stays behind."""
    index = PrefixIndex()
    one, two = snap("one", range(200)), snap("two", range(130))
    index.add(one)
    index.add(two)
    assert len(index) == 2
    assert {s.id for s in index} == {"one", "two"}
    assert index.get("one") is one
    assert index.get("three") is None
    assert index.remove("one") is one
    assert index.remove("one") is None
    assert ids(index.ranked(SEED, toks(range(200)))) == [("two", 130)]
    index.remove("two")
    assert len(index) == 0
    assert not index._holders
    assert not index._levels


def test_index_may_change_while_iterated() -> None:
    """Going over it while removing sees every snapshot once."""
    index = PrefixIndex()
    for i in range(5):
        index.add(snap(str(i), range(i + 1)))
    seen = []
    for snapshot in index:
        seen.append(snapshot.id)
        index.remove(snapshot.id)
    assert seen == ["0", "1", "2", "3", "4"]
    assert len(index) == 0


def test_add_of_a_known_id_replaces() -> None:
    """The older snapshot of that id leaves no trace."""
    index = PrefixIndex()
    index.add(snap("one", range(200)))
    index.add(snap("one", range(500, 700)))
    assert len(index) == 1
    assert index.ranked(SEED, toks(range(200))) == []
    assert ids(index.ranked(SEED, toks(range(500, 600)))) == [("one", 100)]


def test_replace_renews() -> None:
    """A newer last use, or other tokens, count at once; an unknown id stays out."""
    index = PrefixIndex()
    old = snap("one", range(100))
    index.replace(old)
    assert len(index) == 0
    index.add(old)
    newer = replace(old, last_used=9.0)
    index.replace(newer)
    assert index.get("one") is newer
    index.replace(replace(old, tokens=toks(range(100, 200))))
    assert index.ranked(SEED, toks(range(100))) == []
    index.replace(replace(old, seed=seed(b"other")))
    assert ids(index.ranked(seed(b"other"), toks(range(100)))) == [("one", 100)]


def test_ranked_orders_and_limits() -> None:
    """Deepest first; ties by smaller file, then later use; seeds apart; no empty rows."""
    index = PrefixIndex()
    base = list(range(300))
    index.add(snap("exact", base[:250]))
    index.add(snap("branch", base[:200] + [9] * 90))
    index.add(snap("big", base[:100], size=9, used=5.0))
    index.add(snap("small", base[:100], size=3, used=1.0))
    index.add(snap("small-later", base[:100], size=3, used=2.0))
    index.add(snap("short", base[:10]))
    index.add(snap("stranger", [7, 8, 9] * 60))
    index.add(snap("other", base, seed=seed(b"other")))
    expected = [
        ("exact", 250),
        ("branch", 200),
        ("small-later", 100),
        ("small", 100),
        ("big", 100),
        ("short", 10),
    ]
    assert ids(index.ranked(SEED, toks(base), limit=99)) == expected
    assert ids(index.ranked(SEED, toks(base))) == expected[:4]
    assert ids(index.ranked(SEED, toks(base[:5]), limit=2)) == [("branch", 5), ("exact", 5)]
    rest = ids(index.ranked(SEED, toks(base), 2, without={"exact", "small-later"}))
    assert rest == [expected[1], expected[3]]
    assert index.ranked(SEED, toks([])) == []
    assert index.ranked(seed(b"nobody"), toks(base)) == []


def test_covered_knows_only_its_own_kind() -> None:
    """Another snapshot counts only with the same seed and fingerprint, and unless thought away."""
    index = PrefixIndex()
    mine = snap("mine", range(300))
    index.add(mine)
    assert index.covered(mine) == 0
    index.add(snap("seed", range(300), seed=seed(b"other")))
    index.add(snap("print", range(300), fingerprint="other"))
    assert index.covered(mine) == 0
    index.add(snap("short", range(20)))
    assert index.covered(mine) == 20
    index.add(snap("long", list(range(150)) + [0] * 90))
    assert index.covered(mine) == 150
    assert index.covered(mine, {"long"}) == 20
    assert index.covered(mine, {"long", "short"}) == 0
    assert index.covered(snap("not-in", range(500))) == 300


runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90)), max_size=4)


def spread(shape: list[tuple[int, int]]) -> list[int]:
    """Long token lists that often share long prefixes."""
    return [value for value, count in shape for _ in range(count)]


@given(st.lists(runs, max_size=6), runs)
def test_index_equals_the_slow_way(
    shapes: list[list[tuple[int, int]]], shape: list[tuple[int, int]]
) -> None:
    """Ranking and covering agree with comparing everything with everything."""
    index = PrefixIndex()
    held = {str(i): spread(one) for i, one in enumerate(shapes)}
    for name, tokens in held.items():
        index.add(snap(name, tokens))
    wanted = spread(shape)
    slow = sorted(
        ((name, lcp(tokens, wanted)) for name, tokens in held.items()), key=lambda r: (-r[1], r[0])
    )
    assert ids(index.ranked(SEED, toks(wanted), limit=99)) == [row for row in slow if row[1]]
    for name, tokens in held.items():
        snapshot = index.get(name)
        assert snapshot is not None
        best = max((lcp(tokens, other) for key, other in held.items() if key != name), default=0)
        assert index.covered(snapshot) == best
        rest = {key: other for key, other in held.items() if key not in {name, "0"}}
        left = max((lcp(tokens, other) for other in rest.values()), default=0)
        assert index.covered(snapshot, {"0"}, best) == left


def test_covering_is_found_without_looking_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one long system prompt nobody is compared token by token with everybody else."""
    compared: list[int] = []

    def counting(a: array[int], b: array[int], depth: int) -> int:
        compared.append(depth)
        return lcp(list(a), list(b))

    monkeypatch.setattr("proxy.core.prefix._refined", counting)
    index, trunk = PrefixIndex(), list(range(1000, 1100))
    for n in range(40):
        index.add(snap(str(n), [*trunk, n, *range(200)]))
    assert {index.covered(snapshot) for snapshot in index} == {100}
    assert compared == [1] * 40


def test_block_size_is_what_the_design_says() -> None:
    """The borders of blocks are where tests above look for trouble."""
    assert BLOCK_TOKENS == 64
    index = PrefixIndex()
    for n in (63, 64, 65, 127, 128, 129):
        index.add(snap(str(n), range(n)))
    for n in (1, 63, 64, 65, 127, 128, 129, 200):
        best = index.ranked(SEED, toks(range(n)), limit=1)[0]
        assert best[1] == min(n, 129)
