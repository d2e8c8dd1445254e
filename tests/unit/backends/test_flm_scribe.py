"""How a model writes tool arguments: told by an answer's tokens, and kept for the next start."""

from __future__ import annotations

import asyncio
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from proxy.backends import flm_scribe
from proxy.backends.flm_memory import Memory, Prompt
from proxy.backends.flm_scribe import Scribe
from proxy.backends.flm_spelling import Spelling, mark_of
from proxy.backends.flm_window import Window
from tests.emulators.fastflowlm.tokens import encode, tokenizer_json

MODEL = "qwen3-it:4b"
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"b": {}, "a": {}}}}}]
PROMPT = Prompt(({"role": "user", "content": "?"},), orjson.dumps(TOOLS))
TOLD = '{"a":1,"b":[1,2]}'
WRITTEN = {
    Spelling.SCHEMA: '{"b": [1, 2], "a": 1}',
    Spelling.TOLD: TOLD,
    Spelling.SORTED: '{"a": 1, "b": [1, 2]}',
    Spelling.TIGHT: '{"b":[1,2],"a":1}',
}
LOOSE = {Spelling.SCHEMA, Spelling.SORTED}
TIMINGS = {"cache_n": 0, "predicted_n": 0}


@pytest.fixture
def window(tmp_path: Path) -> Window:
    """With the model's tokenizer."""
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json())
    return Window(path)


def answer(*calls: str, text: str = "I look.", first: int = 0) -> dict[str, Any]:
    """As the server tells it; ``calls`` are their arguments."""
    made = [
        {"id": f"c{n}", "function": {"name": "f", "arguments": told}}
        for n, told in enumerate(calls, first)
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def tokens(text: str, *calls: str) -> int:
    """How many the model generated for it, the end of the turn included."""
    whole = [f'<tool_call>\n{{"name": "f", "arguments": {one}}}\n</tool_call>' for one in calls]
    return 1 + sum(len(encode(part)) for part in (text, *whole))


async def hear(scribe: Scribe, window: Window, message: dict[str, Any], predicted: int) -> None:
    """An answer has ended."""
    timings = {**TIMINGS, "predicted_n": predicted}
    scribe.spellings.last = MODEL
    await scribe.heard(Memory(), window, PROMPT, message, timings)
    await scribe.keep()


async def miss(scribe: Scribe, number: int = 0) -> None:
    """A call that went out by the first guess is not found again."""
    message = answer(TOLD, first=number)
    (call,) = message["tool_calls"]
    scribe.spellings.sent({mark_of(call): frozenset({scribe.spellings.guess(MODEL)})})
    memory = Memory(repeated=[call])
    scribe.spellings.last = MODEL
    await scribe.heard(memory, Window(None), PROMPT, answer(), TIMINGS)
    await scribe.keep()


@pytest.mark.parametrize("one", Spelling)
@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("size", [1, 3])
async def test_an_answer_tells_its_blanks(
    window: Window, one: Spelling, off: int, size: int
) -> None:
    """By the tokens it took; that they may differ by one where texts meet changes nothing."""
    scribe, message = Scribe(), answer(*[TOLD] * size)
    await hear(scribe, window, message, tokens("I look.", *[WRITTEN[one]] * size) + off)
    for call in message["tool_calls"]:
        guess = scribe.spellings.guess(MODEL, mark_of(call))
        assert (guess in LOOSE) is (one in LOOSE)


async def test_what_tells_nothing(window: Window, tmp_path: Path) -> None:
    """No call, no tokenizer, another way to write, arguments that are the same in all ways."""
    message = answer(TOLD)
    (call,) = message["tool_calls"]
    right = tokens("I look.", TOLD)
    for looked, said, predicted in (
        (window, answer(), tokens("I look.")),
        (Window(None), message, right),
        (window, message, right + 40),
        (window, {**message, "tool_calls": [{"id": "x"}]}, right),
    ):
        scribe = Scribe()
        await hear(scribe, looked, said, predicted)
        assert scribe.spellings.guess(MODEL, mark_of(call)) is Spelling.SCHEMA
        assert not scribe.spellings._possible
    same = answer("{}")
    await hear(scribe, window, same, tokens("I look.", "{}"))
    assert scribe.spellings.guess(MODEL, mark_of(same["tool_calls"][0])) is Spelling.SCHEMA


async def test_it_is_kept(tmp_path: Path) -> None:
    """A miss is written down at once, in a folder that may not be there yet, for the next start."""
    path = tmp_path / "new" / "models.json"
    scribe = Scribe(lambda: path)
    await scribe.open()
    await miss(scribe)
    assert [one.name for one in path.parent.iterdir()] == ["models.json"]
    again = Scribe(lambda: path)
    await again.open()
    await again.open()
    assert again.spellings.guess(MODEL) is scribe.spellings.guess(MODEL) is Spelling.TOLD
    stamp = path.stat().st_mtime_ns
    await hear(again, Window(None), answer(), 1)
    assert path.stat().st_mtime_ns == stamp  # nothing new, nothing written


async def test_nothing_is_said_of_what_was_asked(tmp_path: Path) -> None:
    """Only models are named."""
    path = tmp_path / "models.json"
    scribe = Scribe(lambda: path)
    await scribe.open()
    await miss(scribe)
    habit = {"marks": [-1, 0, 0, 0], "credit": 0, "found": False, "doubt": 0, "trust": 1}
    assert orjson.loads(path.read_bytes()) == {"last": MODEL, "models": {MODEL: habit}}


async def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Is said once, and replaced by what is learned anew."""
    path = tmp_path / "models.json"
    path.write_bytes(b"{broken")
    scribe = Scribe(lambda: path)
    with capture_logs() as logged:
        await scribe.open()
        await scribe.open()
    assert [line["event"] for line in logged] == ["fastflowlm.unlearned"]
    await miss(scribe)
    fresh = Scribe(lambda: path)
    await fresh.open()
    assert fresh.spellings.guess(MODEL) is Spelling.TOLD


async def test_a_disk_that_fails(tmp_path: Path) -> None:
    """Costs nothing but the memory of it."""
    (tmp_path / "file").write_bytes(b"")
    scribe = Scribe(lambda: tmp_path / "file" / "models.json")
    with capture_logs() as logged:
        await scribe.open()
        await miss(scribe)
    assert [line["event"] for line in logged] == ["fastflowlm.unlearned", "fastflowlm.unkept"]
    assert scribe.spellings.guess(MODEL) is Spelling.TOLD


async def test_nowhere_to_keep_it() -> None:
    """Then it is known until the end."""
    scribe = Scribe()
    await scribe.open()
    await miss(scribe)
    assert scribe.spellings.guess(MODEL) is Spelling.TOLD


async def test_a_file_of_nobody(tmp_path: Path) -> None:
    """As long as another process may have it, it is neither read nor written."""
    path = tmp_path / "models.json"
    path.write_bytes(b"{broken")
    mine: list[Path] = []
    scribe = Scribe(lambda: mine[0] if mine else None)
    with capture_logs() as logged:
        await scribe.open()
        await miss(scribe)
        await scribe.keep(final=True)
        mine.append(path)
        await scribe.keep(final=True)  # it was not read, so it is not written
    assert (path.read_bytes(), logged) == (b"{broken", [])


async def test_models_that_take_turns(tmp_path: Path) -> None:
    """Which one was heard last is written at the end only, or with what is new besides."""
    path = tmp_path / "models.json"
    scribe = Scribe(lambda: path)
    await scribe.open()
    await scribe.keep(final=True)
    assert not path.exists()  # nothing was heard
    await miss(scribe)
    kept = path.read_bytes()
    for model in ("other", MODEL, "other"):
        scribe.spellings.last = model
        await scribe.keep()
        assert path.read_bytes() == kept
    await scribe.keep(final=True)
    assert orjson.loads(path.read_bytes())["last"] == "other"


def files_in(folder: Path) -> list[str]:
    """Their names."""
    return [one.name for one in folder.iterdir()]


async def test_two_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write one after the other, and what is newer stays."""
    path, going, go = tmp_path / "models.json", threading.Event(), threading.Event()
    begun: list[bytes] = []
    write = flm_scribe._write

    def slow(where: Path, data: bytes) -> None:
        begun.append(data)
        going.set()
        go.wait(10)
        write(where, data)

    monkeypatch.setattr(flm_scribe, "_write", slow)
    scribe = Scribe(lambda: path)
    await scribe.open()
    one = asyncio.create_task(miss(scribe))
    await asyncio.to_thread(going.wait, 10)
    two = asyncio.create_task(miss(scribe, 1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(begun) == 1
    go.set()
    await asyncio.gather(one, two)
    assert path.read_bytes() == scribe.spellings.habits() == begun[1] != begun[0]


async def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is said once, leaves nothing behind, and is tried again; what is kept is its owner's."""
    path = tmp_path / "models.json"
    scribe = Scribe(lambda: path)
    await scribe.open()

    def full(_self: Path, _to: Path) -> Path:
        raise OSError("disk full")

    with monkeypatch.context() as patch, capture_logs() as logged:
        patch.setattr(Path, "replace", full)
        await miss(scribe)
        await scribe.keep()
    assert [line["event"] for line in logged] == ["fastflowlm.unkept"]
    assert files_in(tmp_path) == []
    await scribe.keep()
    assert files_in(tmp_path) == [path.name]
    assert sys.platform == "win32" or stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_tokenizer_that_breaks(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs what would have been learned; it is counted, and its words are not told."""

    async def broken(_texts: object) -> list[int]:
        raise RuntimeError("a secret")

    monkeypatch.setattr(window, "counts", broken)
    scribe = Scribe()
    with capture_logs() as logged:
        await hear(scribe, window, answer(TOLD), 9)
    assert scribe.faults == 1
    assert logged == [
        {"event": "fastflowlm.unheard", "error": "RuntimeError", "times": 1, "log_level": "warning"}
    ]
