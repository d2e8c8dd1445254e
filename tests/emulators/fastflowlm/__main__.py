"""``python -m tests.emulators.fastflowlm [TAG]``: the emulator for any client."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import orjson

from tests.emulators.fastflowlm.options import PROFILES, Options
from tests.emulators.fastflowlm.process import NO_MODEL
from tests.emulators.fastflowlm.script import Answer
from tests.emulators.fastflowlm.server import Emulator

CRASHED = 139  # what a shell says of a segmentation fault


def parse(arguments: list[str]) -> tuple[Options, Path | None]:
    """Read a command line: flm's own options first, then the emulator's."""
    parser = argparse.ArgumentParser(prog="flm-emu", description=__doc__)
    parser.add_argument("model", nargs="?", default=NO_MODEL)
    parser.add_argument("--port", type=int, default=52625)
    parser.add_argument("--ctx-len", type=int, default=-1)
    parser.add_argument("--prefill-chunk-len", type=int, default=-1)
    parser.add_argument("--socket", type=int, default=10)
    parser.add_argument("--q-len", type=int, default=10)
    parser.add_argument("--cors", type=int, default=1)
    parser.add_argument("--asr", type=int, default=0)
    parser.add_argument("--embed", type=int, default=0)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="0.9.45")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--script", type=Path, help="a JSON list of answers, given in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", choices=("on", "off"), default="on")
    parser.add_argument("--ub", choices=("crash", "error"), default="crash")
    parser.add_argument("--strict-restore", action="store_true")
    found = parser.parse_args(arguments)
    given = vars(found)
    script = given.pop("script")
    for name in ("cors", "asr", "embed"):
        given[name] = bool(given[name])
    given["leak"] = found.leak == "on"
    return Options(**given), script


async def serve(options: Options, answers: list[Answer]) -> int:
    """Run until the process is ended, or crashes by emulation."""
    emu = Emulator(options)
    emu.answers.extend(answers)
    async with emu:
        print(f"flm-emu {emu.profile.version} at {emu.url} with {emu.current_tag}", flush=True)
        await emu.stopping.wait()
    return CRASHED if emu.crashed else 0


def main() -> int:
    """The program."""
    options, script = parse(sys.argv[1:])
    texts = orjson.loads(script.read_bytes()) if script else []
    answers = [Answer(text) for text in texts]
    try:
        return asyncio.run(serve(options, answers))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
