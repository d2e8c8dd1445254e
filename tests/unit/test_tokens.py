"""Counting: by a local tokenizer where it agrees with the backend, else by the backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from proxy.errors import BackendRefusedError
from proxy.tokens import Counter

WORDS = {"one": 1, "two": 2, "three": 3, "?": 0}


class Backend:
    """Counts by the same words, shifted where it disagrees."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.asked: list[str] = []

    async def render(self, body: Mapping[str, Any]) -> str:
        """The messages' contents."""
        return " ".join(message["content"] for message in body["messages"])

    async def tokenize(self, text: str) -> list[int]:
        """Recorded."""
        self.asked.append(text)
        return [WORDS[word] + self.shift for word in text.split()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json of three words."""
    made = Tokenizer(WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (("tokens", [5, 6]), [5, 6]),
        (("text", "one two"), [1, 2]),
        (("render", {"messages": [{"content": "two"}, {"content": "three"}]}), [2, 3]),
        (("none", None), None),
    ],
)
async def test_every_kind_of_prompt(how: tuple[str, Any], wanted: list[int] | None) -> None:
    """Tokens are taken as they are, texts counted, chats rendered first; media are not known."""
    found = await Counter(Backend()).exact(how)
    assert (None if found is None else found.tolist()) == wanted


async def test_a_local_tokenizer_is_checked_once(tokenizer: Path) -> None:
    """Where it agrees with the backend on the first prompt, the backend is not asked again."""
    backend = Backend()
    counter = Counter(backend, tokenizer)
    for text, wanted in (("one two", [1, 2]), ("three", [3]), ("two", [2])):
        found = await counter.exact(("text", text))
        assert found is not None
        assert found.tolist() == wanted
    assert backend.asked == ["one two"]


async def test_a_tokenizer_of_another_model(tokenizer: Path) -> None:
    """Where it does not agree, the backend's count is right, then and from then on."""
    backend = Backend(shift=10)
    counter = Counter(backend, tokenizer)
    for text, wanted in (("one two", [11, 12]), ("three", [13])):
        found = await counter.exact(("text", text))
        assert found is not None
        assert found.tolist() == wanted
    assert backend.asked == ["one two", "three"]


async def test_what_the_backend_raises() -> None:
    """A backend that refuses is the caller's to deal with."""

    class Refusing(Backend):
        async def tokenize(self, text: str) -> list[int]:
            raise BackendRefusedError("no", answer=500)

    with pytest.raises(BackendRefusedError):
        await Counter(Refusing()).exact(("text", "one"))
