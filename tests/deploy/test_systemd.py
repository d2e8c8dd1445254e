"""The units: checked by systemd itself, and against what the proxy and llama-server need."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy import keeper
from proxy.config import Config, load
from proxy.store import files
from tests.deploy.files import DEPLOY, ROOT, read, tool, unit

SYSTEMD = DEPLOY / "systemd"
UNITS = ("slotkeeper.service", "llama-server.service")
MOST_EXPOSED = 1.5  # of 10: "OK" begins above it
SLOTS = "/var/lib/llm/slots"
SLOTKEEPER, LLAMA, LLM = 61001, 61002, 61003  # ids that nobody has


def run(*command: str | Path) -> str:
    """The output of a program that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = result.stdout + result.stderr
    assert result.returncode == 0, told
    return told


def test_the_units_are_understood(tmp_path: Path) -> None:
    """``systemd-analyze verify`` has nothing to say about them (programs stand in for ours)."""
    analyze = tool("systemd-analyze", "systemd")
    for name in UNITS:
        text = re.sub(r"\nExecStart=\S+", "\nExecStart=/bin/true", read(f"systemd/{name}"))
        (tmp_path / name).write_text(text)
    assert run(analyze, "verify", "--man=no", *(tmp_path / name for name in UNITS)) == ""


def test_verify_would_notice(tmp_path: Path) -> None:
    """A misspelt setting is told, so the test above proves something."""
    analyze = tool("systemd-analyze", "systemd")
    file = tmp_path / "slotkeeper.service"
    file.write_text(read("systemd/slotkeeper.service").replace("UMask=", "UMaks="))
    told = subprocess.run(
        [analyze, "verify", "--man=no", file], capture_output=True, text=True, check=False
    )
    assert "UMaks" in told.stderr


def test_the_proxy_is_locked_in() -> None:
    """``systemd-analyze security`` rates the proxy's unit at most 1.5."""
    analyze = tool("systemd-analyze", "systemd")
    told = run(analyze, "security", "--offline=true", "--no-pager", SYSTEMD / "slotkeeper.service")
    match = re.search(r"exposure level for slotkeeper\.service: ([\d.]+)", told)
    assert match
    assert float(match[1]) <= MOST_EXPOSED


def test_the_proxy_ends_before_the_backend() -> None:
    """It is ordered after llama-server, so it stops first, and lives on without it."""
    settings = unit("slotkeeper.service")
    assert "llama-server.service" in " ".join(settings["After"])
    assert settings["Wants"] == ["llama-server.service"]
    assert "Requires" not in settings


def test_the_manager_is_told() -> None:
    """What service.py says is what the unit waits for: ready, the watchdog, a reload by SIGHUP."""
    settings = unit("slotkeeper.service")
    assert settings["Type"] == ["notify"]
    assert settings["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(settings["WatchdogSec"][0]) >= 30


def test_times_are_long_enough() -> None:
    """A start has room for the proof, a stop for the drain and for saving afterwards."""
    settings = unit("slotkeeper.service")
    assert int(settings["TimeoutStartSec"][0]) > keeper.PROOF_SECONDS + keeper.PATIENCE_SECONDS
    assert int(settings["TimeoutStopSec"][0]) >= 2 * Config().server.drain_timeout + 60


def test_two_users_of_one_group() -> None:
    """Both units have the group and the umask; each has a user of its own."""
    ours, theirs = (unit(name) for name in UNITS)
    for settings in (ours, theirs):
        assert settings["UMask"] == ["0007"]
        assert settings["SupplementaryGroups"] == ["llm"]
        assert settings["ReadWritePaths"] == [SLOTS]
    assert ours["User"] != theirs["User"]
    assert "RestrictSUIDSGID" not in ours, "it forbids 2770"


def test_the_launch_line() -> None:
    """llama-server is started so that the proof can end in mode exclusive (README, Modes)."""
    (command,) = unit("llama-server.service")["ExecStart"]
    for flags in (
        "--no-kv-unified",
        "--cache-ram 0",
        "--slot-prompt-similarity 0",
        f"--slot-save-path {SLOTS}",
        "--parallel ${LLAMA_SLOTS}",
        "--batch-size ${LLAMA_BATCH}",
        "--host 127.0.0.1",
    ):
        assert f" {flags} " in f"{command} ", flags
    for flag in ("context-shift", "cache-reuse", "sleep-idle", "no-slots", "kv-unified-per"):
        assert f"--{flag}" not in command, flag


def test_variables_of_the_launch_line() -> None:
    """Each variable has a default in the unit or a value in the environment file."""
    settings = unit("llama-server.service")
    given = set(re.findall(r"(\w+)=", settings["Environment"][0]))
    given |= set(re.findall(r"^(\w+)=", read("systemd/llama-server.env"), re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+)\}", settings["ExecStart"][0])) == given
    commented = set(re.findall(r"^#(\w+)=", read("systemd/llama-server.env"), re.MULTILINE))
    assert commented < given


def test_the_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is installed with the unit is a good one and names the unit's folders."""
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # not on this machine
    config = load(SYSTEMD / "config.toml", {}, {})
    assert config.slot_dir == Path(SLOTS)
    assert config.normalise.ledger.startswith("/var/lib/slotkeeper/")
    assert config.warnings() == []


def test_users_and_folders(tmp_path: Path) -> None:
    """Systemd makes the users, the group and the folders with the rights they need."""
    sysusers, tmpfiles = tool("systemd-sysusers", "systemd"), tool("systemd-tmpfiles", "systemd")
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    for kind in ("sysusers", "tmpfiles"):
        place = tmp_path / "usr" / "lib" / f"{kind}.d"
        place.mkdir(parents=True)
        shutil.copy(SYSTEMD / f"slotkeeper.{kind}.conf", place / "slotkeeper.conf")
    (tmp_path / "etc").mkdir()
    run(sysusers, f"--root={tmp_path}")
    run(tmpfiles, "--create", f"--root={tmp_path}")
    lines = [line.split(":") for line in (tmp_path / "etc/group").read_text().split()]
    groups = {name: (int(number), set(users.split(","))) for name, _, number, users in lines}
    assert groups["llm"][1] == {"llama", "slotkeeper"}
    folder = (tmp_path / SLOTS[1:]).stat()
    assert stat.S_IMODE(folder.st_mode) == 0o2770
    assert folder.st_gid == groups["llm"][0]
    settings = (tmp_path / "etc/slotkeeper").stat()
    assert (stat.S_IMODE(settings.st_mode), settings.st_gid) == (0o750, groups["slotkeeper"][0])


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as tmpfiles makes it, where another user can get at it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can be two users")
    with tempfile.TemporaryDirectory(prefix="slotkeeper-") as base:
        Path(base).chmod(0o755)
        folder = Path(base) / "slots"
        folder.mkdir()
        os.chown(folder, LLAMA, LLM)
        folder.chmod(0o2770)
        yield folder


BECOME = """
import os, sys
from pathlib import Path
from proxy.store import files
user, *groups = map(int, sys.argv[1].split(","))
os.setgroups(groups)
os.setgid(user)
os.setuid(user)
os.umask(0o007)
slots, *names = map(Path, sys.argv[2:])
"""
WRITE = BECOME + "(slots / names[0]).write_bytes(b'state')"
READ = BECOME + "assert (slots / names[0]).read_bytes() == b'state'"
KEEP = (
    BECOME
    + """
saved, store, lent = slots / names[0], slots / "slotkeeper", slots / names[1]
assert files.make_dir(store, shared=True)
files.seal(saved, shared=True)
files.move(saved, store / "kept.kv")
assert files.link(store / "kept.kv", lent), "refused: a copy would be needed"
files.seal(store, shared=True)
"""
)


def by(user: int, groups: list[int], code: str, *arguments: str | Path) -> str:
    """Run Python that becomes that user, with the rights the units give; what it complains of."""
    who = ",".join(map(str, [user, *groups]))
    result = subprocess.run(
        [sys.executable, "-c", code, who, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.stderr


def test_files_are_linked_between_the_users(shared: Path) -> None:
    """What one user saved, the other keeps and lends back by a link; a third cannot look in."""
    saved, lent = files.fresh("sks-{}.kv"), files.fresh("skr-{}.kv")
    assert by(LLAMA, [LLM], WRITE, shared, saved) == ""
    assert by(SLOTKEEPER, [LLM], KEEP, shared, saved, lent) == ""
    assert by(LLAMA, [LLM], READ, shared, lent) == ""
    assert stat.S_IMODE((shared / "slotkeeper").stat().st_mode) == 0o2770
    kept = (shared / "slotkeeper" / "kept.kv").stat()
    assert (stat.S_IMODE(kept.st_mode), kept.st_gid, kept.st_nlink) == (0o660, LLM, 2)
    assert "PermissionError" in by(SLOTKEEPER, [], READ, shared, lent)
