"""``/__emu/``: what only an emulator has, for clients in another process (section 6, item 9)."""

from __future__ import annotations

from typing import Any

from tests.emulators.fastflowlm.call import Call
from tests.emulators.fastflowlm.routes import Handler
from tests.emulators.fastflowlm.script import Answer, Fault


async def state(call: Call) -> None:
    """Everything but the requests."""
    await call.answer(call.emu.as_json())


async def records(call: Call) -> None:
    """The requests, oldest first."""
    await call.answer({"records": [record.as_json() for record in call.emu.records]})


async def script(call: Call) -> None:
    """``{"answers": ["text", {"text": ..., "reasoning": ..., "calls": [[name, args]]}]}``."""
    for answer in call.body.get("answers", []):
        call.emu.answers.append(_answer(answer))
    await call.answer({"waiting": len(call.emu.answers)})


def _answer(value: Any) -> Answer:
    if isinstance(value, str):
        return Answer(value)
    text = value.get("text", "")
    return Answer(
        text if isinstance(text, str) else tuple(text),
        value.get("reasoning", "Hm."),
        tuple((name, arguments) for name, arguments in value.get("calls", [])),
    )


async def fault(call: Call) -> None:
    """``{"kind": "load|error|hang|drop|crash", "after": 3, "times": 1}``."""
    body = call.body
    call.emu.faults.append(Fault(body["kind"], body.get("after", 0), body.get("times", 1)))
    await call.answer({"faults": len(call.emu.faults)})


async def reset(call: Call) -> None:
    """Forget the requests, the script and the faults; not the model."""
    call.emu.records.clear()
    call.emu.answers.clear()
    call.emu.faults.clear()
    await call.answer({})


DEBUG: dict[str, Handler] = {
    "GET /__emu/state": state,
    "GET /__emu/records": records,
    "POST /__emu/script": script,
    "POST /__emu/fault": fault,
    "POST /__emu/reset": reset,
}
