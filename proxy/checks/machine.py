"""Looks at this machine: versions, folders, disk, limits, the proxy's address. All of it blocks."""

from __future__ import annotations

import errno
import importlib
import os
import platform
import secrets
import shutil
import socket
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from proxy import __version__, words
from proxy.checks.finding import Finding, Level
from proxy.client import Client
from proxy.store import files
from proxy.store.shelf import LOCK

if TYPE_CHECKING:
    from proxy.config import Config

FEW_FILES = 256  # open files: below that a handful of clients is too much
SPARE_FILES = 100  # of the proxy's own
TRIAL = 32 * 1024**2  # bytes written to measure the disk
SLOW_DISK = 50e6  # bytes a second: a state of a gigabyte takes 20 s then
MIB = 1024**2


def versions() -> Finding:
    """What runs here."""
    parts = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "orjson", "tokenizers"))
    text = f"slotkeeper {__version__}, Python {platform.python_version()}, {parts}"
    return Finding("versions", Level.OK, f"{text}; {platform.system()} {platform.machine()}")


def settings(config: Config) -> list[Finding]:
    """What is allowed, and probably not meant."""
    return [Finding("settings", Level.WARNING, warning) for warning in config.warnings()]


def open_files(max_queue: int) -> Finding | None:
    """Whether so many clients may wait at once; None where there is no such limit."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_queue + SPARE_FILES
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Finding("open files", Level.OK, f"{words.number(limit)} files may be open at once")
    level = Level.NOTE if limit >= FEW_FILES else Level.WARNING
    text = f"{words.number(limit)} files may be open at once; server.max_queue is {max_queue}"
    return Finding("open files", level, text, f"`ulimit -n {wanted}` if so many clients may wait.")


def address(host: str, port: int) -> Finding:
    """Whether the proxy's address is free. Only asked for when no proxy answers there."""
    error = _refusal(host, port)
    if error is None:
        return Finding("address", Level.OK, f"{host}:{port} is free; no proxy is running")
    todo = "Give slotkeeper another --host or --port."
    if error.errno == errno.EADDRINUSE:
        todo = "Another program has it: give slotkeeper another --port."
    text = f"{host}:{port} cannot be had: {error.strerror}"
    return Finding("address", Level.PROBLEM, text, todo)


def taken(host: str, port: int) -> bool:
    """Whether somebody listens there already; any other fault of the address is none of these."""
    error = _refusal(host, port)
    return error is not None and error.errno == errno.EADDRINUSE


def no_model_server(config: Config) -> Finding | None:
    """A slotkeeper, this one or another, that is named as the model server."""
    own = (_here(config.server.host), config.server.port)
    for url in config.backend.urls:
        parts = urlsplit(url)
        if (_here(parts.hostname or ""), parts.port) == own or Client(url).is_slotkeeper():
            text = f"{url} is a slotkeeper"
            return Finding("backend", Level.PROBLEM, text, "Name the model server: --backend.")
    return None


def _here(host: str) -> str:
    """Names of this machine that are one address."""
    return "127.0.0.1" if host in {"localhost", "0.0.0.0", "::", "::1"} else host  # noqa: S104 - compared, not bound


def driven(store: Path | None) -> bool:
    """Whether a running proxy has this store, and the slots its states come from."""
    if store is None or not (store / LOCK).is_file():
        return False
    lock = files.Lock(store / LOCK)
    try:
        lock.take()
    except files.StoreBusyError:
        return True
    except OSError:  # another user's: the folder's own check says so
        return False
    lock.release()
    return False


def _refusal(host: str, port: int) -> OSError | None:
    """What becomes of listening there; None: it is possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            if os.name == "posix":  # as the server does; on Windows it would take a port in use
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        return error
    return None


def slot_folder(folder: Path) -> Finding:
    """Whether states can pass through the folder, and who else can read them there."""
    name = "slot folder"
    if not folder.is_dir():
        return Finding(name, Level.PROBLEM, f"{folder} is no folder", f"mkdir -p -m 700 {folder}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        text = f"{folder} cannot be read and written by this user"
        return Finding(name, Level.PROBLEM, text, "Run llama-server and slotkeeper as one user.")
    if files.exposed(folder):
        text = f"other users may enter {folder}, and saved states are conversations"
        return Finding(name, Level.WARNING, text, f"chmod 700 {folder}")
    return Finding(name, Level.OK, f"{folder}, this user's alone")


def store(config: Config) -> list[Finding]:
    """Where snapshots are kept, how many there are, and whether there is room for more."""
    folder, slots = config.store_dir, config.slot_dir
    if folder is None or slots is None or not slots.is_dir():
        return []
    try:
        return _store(config, folder, slots)
    except OSError as error:
        text = f"{folder} cannot be looked at: {error.strerror}"
        todo = "It must be a folder of the user slotkeeper runs as."
        return [Finding("store", Level.PROBLEM, text, todo)]


def _store(config: Config, folder: Path, slots: Path) -> list[Finding]:
    kept = [path for path in folder.glob("*/*.kv") if files.STATE_NAME.fullmatch(path.name)]
    there = [status for path in kept if (status := files.regular(path))]
    used = sum(status.st_size for status in there)
    near = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(near).free
    limit = config.cache.limit(shutil.disk_usage(slots).free)
    text = (
        f"{folder}: {words.many(len(there), 'snapshot')}, {words.size(used)} of {words.size(limit)}"
    )
    found = [Finding("store", Level.OK, text)]
    if near.stat().st_dev != slots.stat().st_dev:
        text = f"{folder} is on another file system than {slots}: every save is a copy"
        found = [Finding("store", Level.WARNING, text, "Leave cache.store empty.")]
    keep = config.cache.keep_free
    if free < keep:
        text = f"only {words.size(free)} are free, and cache.keep_free is {words.size(keep)}"
        todo = "Nothing will be saved: make room, or lower cache.keep_free."
        return [*found, Finding("disk", Level.PROBLEM, text, todo)]
    return [*found, Finding("disk", Level.OK, f"{words.size(free)} are free")]


def disk_speed(folder: Path) -> Finding:
    """How fast a state would be written: 32 MiB and their way to the disk, removed afterwards."""
    path = folder / f"probe-{secrets.token_hex(8)}.kv"  # a name that a later start sweeps away
    block = secrets.token_bytes(MIB)
    try:
        begun = time.perf_counter()
        with path.open("xb") as file:
            for _ in range(TRIAL // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = TRIAL / (time.perf_counter() - begun)
    except OSError as error:
        return Finding("disk speed", Level.PROBLEM, f"writing failed: {error.strerror}")
    finally:
        with suppress(OSError):
            files.remove(path)
    text = f"{words.size(speed)} a second can be written"
    if speed < SLOW_DISK:
        todo = "A save stops all slots while it runs: use a faster disk."
        return Finding("disk speed", Level.WARNING, text, todo)
    return Finding("disk speed", Level.OK, text)


def tokenizer(path: str) -> Finding | None:
    """Whether ``backend.tokenizer`` can be read; None when none is named."""
    if not path:
        return None
    try:
        local = Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception:  # noqa: BLE001 - the library raises plain Exception for everything
        todo = "Name a tokenizer.json of the model, or leave backend.tokenizer empty."
        return Finding("tokenizer", Level.PROBLEM, f"{path} is no tokenizer", todo)
    return Finding("tokenizer", Level.OK, f"{path}: {local.get_vocab_size()} tokens")
