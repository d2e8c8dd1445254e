"""An emulator of FastFlowLM's HTTP server, exact where a proxy can notice (fastflowlm.md 6)."""

from __future__ import annotations

from tests.emulators.fastflowlm.clock import Clock
from tests.emulators.fastflowlm.models import CATALOGUE, Model, resolve
from tests.emulators.fastflowlm.options import PROFILES, Options, Profile
from tests.emulators.fastflowlm.records import Hold, Record
from tests.emulators.fastflowlm.script import Answer, Fault
from tests.emulators.fastflowlm.server import Emulator

__all__ = [
    "CATALOGUE",
    "PROFILES",
    "Answer",
    "Clock",
    "Emulator",
    "Fault",
    "Hold",
    "Model",
    "Options",
    "Profile",
    "Record",
    "resolve",
]
