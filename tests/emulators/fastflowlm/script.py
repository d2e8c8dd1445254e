"""What the model is made to say, and what is made to go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.emulators.fastflowlm.engine import Engine
from tests.emulators.fastflowlm.normalise import Message
from tests.emulators.fastflowlm.templates import wrapped
from tests.emulators.fastflowlm.tokens import encode_pieces

FaultKind = Literal["load", "error", "hang", "drop", "crash"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``text`` in several pieces is generated in tokens that are not canonical."""

    text: str | tuple[str, ...] = ""
    reasoning: str = "Hm."  # only where the model thinks
    calls: tuple[tuple[str, str], ...] = ()  # name, and the arguments as the model writes them

    def tokens(self, engine: Engine) -> list[str]:
        """What is generated for it, without the end of the turn."""
        pieces = [self.text] if isinstance(self.text, str) else list(self.text)
        pieces[0] = wrapped(engine.model, pieces[0], self.reasoning, engine.setting)
        for name, arguments in self.calls:
            call = f'{{"name": "{name}", "arguments": {arguments}}}'
            pieces.append(f"<tool_call>\n{call}\n</tool_call>")
        return encode_pieces(pieces)


def echo(messages: list[Message], seed: int) -> Answer:
    """The answer nobody scripted: it quotes the newest text, so that a mix-up shows."""
    newest = str(messages[-1].get("content", "")) if messages else ""
    quoted = " ".join(newest[:60].split())
    return Answer(f"Heard {seed}: {quoted}" if seed else f"Heard: {quoted}")


@dataclass(slots=True)
class Fault:
    """Something that goes wrong in the next chat requests.

    load: the model cannot be loaded. error: an exception before the first token. hang: one in
    mid-stream, which never ends the stream. drop: the connection dies in mid-stream. crash: the
    process does. ``after`` counts generated tokens (hang, drop, crash).
    """

    kind: FaultKind
    after: int = 0
    times: int = 1
