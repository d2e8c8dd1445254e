"""All settings: what they are, where they come from, and everything that is wrong with them.

Sources, the strongest first: command-line flags, environment variables (``SLOTKEEPER_BACKEND__URL``
is ``[backend] url``), the TOML file, the defaults below. ``config.example.toml`` explains each.
Sizes are bytes and may be written ``"20GiB"``; times are seconds and may be written ``"30d"``.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from proxy.errors import ConfigError
from proxy.values import Addresses, Key, Keys, Names, Seconds, Size, Switches, size_or_auto

PREFIX = "SLOTKEEPER_"
FLAGS: Mapping[str, str] = {
    "backend.url": "--backend",
    "backend.slot_save_path": "--slot-save-path",
    "server.host": "--host",
    "server.port": "--port",
}
_GIB = 1024**3
_DAY = 86_400


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Server(_Frozen):
    """Where the proxy listens, who may come in, how long things may take."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8088
    keys: Keys = ()
    admin_key: Key = SecretStr("")
    allowed_hosts: Names = ()
    max_body: Annotated[Size, Field(ge=1)] = 64 * 1024**2
    max_queue: Annotated[int, Field(ge=0)] = 1024
    queue_timeout: Seconds = 3600.0
    ping_interval: Annotated[Seconds, Field(gt=0)] = 10.0
    drain_timeout: Seconds = 30.0
    header_timeout: Annotated[Seconds, Field(gt=0)] = 10.0
    body_timeout: Annotated[Seconds, Field(gt=0)] = 60.0
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    hide_titles: bool = False


class Backend(_Frozen):
    """The model server behind the proxy; ``url`` may be several addresses, with commas."""

    url: Addresses = "http://127.0.0.1:8080"
    kind: Literal["auto", "llama_server", "fastflowlm", "openai_compatible"] = "auto"
    key: Key = SecretStr("")
    slot_save_path: str = ""
    connect_timeout: Annotated[Seconds, Field(gt=0)] = 2.0
    silence_timeout: Seconds = 0.0
    sole_client: bool = True
    shared_npu: bool = True
    tokenizer: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses one by one."""
        return tuple(self.url.split(","))


class Cache(_Frozen):
    """Snapshots on disk: where, how many, for how long. ``max_bytes`` None means ``"auto"``."""

    enabled: bool = True
    store: str = ""
    max_bytes: Annotated[
        int | None, BeforeValidator(size_or_auto, json_schema_input_type=int | str)
    ] = None
    keep_free: Size = 10 * _GIB
    max_files: Annotated[int, Field(ge=1)] = 256
    max_age: Annotated[Seconds, Field(gt=0)] = 30.0 * _DAY
    policy: Literal["value", "lru"] = "value"
    idle_seconds: Seconds = 3.0
    daily_write: Size = 200 * _GIB
    prewarm: bool = True

    def limit(self, free: int) -> int:
        """Bytes the store may hold, given the ``free`` bytes of its file system."""
        return min(20 * _GIB, free // 10) if self.max_bytes is None else self.max_bytes


class Normalise(_Frozen):
    """Keeping prompts byte-stable, and what is remembered of conversations for it."""

    mode: Literal["safe", "off", "shadow"] = "safe"
    rules: Switches = ()
    ledger: str = ""
    max_conversations: Annotated[int, Field(ge=1)] = 256
    max_bytes: Annotated[Size, Field(ge=1)] = 256 * 1024**2


class Config(_Frozen):
    """The whole configuration; ``Config()`` are the defaults."""

    server: Server = Server()
    backend: Backend = Backend()
    cache: Cache = Cache()
    normalise: Normalise = Normalise()

    @property
    def slot_dir(self) -> Path | None:
        """The backend's slot directory as this process sees it; None: no snapshots."""
        path = self.backend.slot_save_path
        return Path(path).expanduser() if path else None

    @property
    def store_dir(self) -> Path | None:
        """Where snapshots are kept; None: no snapshots."""
        if self.slot_dir is None or not self.cache.enabled:
            return None
        store = self.cache.store
        return Path(store).expanduser() if store else self.slot_dir / "slotkeeper"

    def ledger_dir(self, environ: Mapping[str, str], home: Path) -> Path:
        """Where conversations are remembered: as set, else with the snapshots, else the user's.

        ``environ`` is usually ``os.environ``; a relative path in it is ignored, as XDG has it.
        """
        if self.normalise.ledger:
            return Path(self.normalise.ledger).expanduser()
        if self.store_dir is not None:
            return self.store_dir / "ledger"
        named = (Path(environ.get(name, "")) for name in ("XDG_STATE_HOME", "LOCALAPPDATA"))
        base = next((path for path in named if path.is_absolute()), home / ".local" / "state")
        return base / "slotkeeper" / "ledger"

    def warnings(self) -> list[str]:
        """What is allowed, and probably not meant."""
        found = []
        server, backend, caching = self.server, self.backend, self.cache.enabled
        if not _is_loopback(server.host) and not server.keys:
            found.append(
                f"server.host: {server.host} can be reached from other machines and server.keys"
                " is empty: everybody there can use the model; set server.keys"
            )
        if server.admin_key.get_secret_value() and server.admin_key in server.keys:
            found.append("server.admin_key: also one of server.keys: every client is an admin")
        # Where the kind is not named, who is asked says it once it is known (the mode's advice).
        if caching and not backend.slot_save_path and backend.kind == "llama_server":
            found.append(
                "backend.slot_save_path: not set, so nothing is saved (mode forward); start"
                " llama-server with --slot-save-path DIR and name the same directory here"
            )
        return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load(path: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merge all sources and check the result.

    Args:
        path: the TOML file, None for none.
        overrides: values of command-line flags by full name, ``{"server.port": 9000}``.
        environ: usually ``os.environ``.

    Raises:
        ConfigError: with every problem found, each naming its place, setting and remedy.
    """
    return load_with_places(path, overrides, environ)[0]


def load_with_places(
    path: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Config, dict[str, str]]:
    """``load``, and where each setting that was given came from, by full name."""
    given = _Given()
    problems = list(_read_file(path, given)) if path is not None else []
    _read_environ(environ, given)
    for setting, value in overrides.items():
        given.put(setting, value, FLAGS.get(setting, setting))
    problems += [*given.unknown(), *given.missing_paths()]
    config = Config()
    try:
        config = Config.model_validate(given.sections())
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            setting = ".".join(str(part) for part in fault["loc"][:2])
            problems.append(f"{given.place(setting)}: {setting}: {_explain(setting, fault)}")
    backend = config.backend
    if backend.kind == "llama_server" and len(backend.urls) > 1:
        place = given.place("backend.url")
        problems.append(f"{place}: backend.url: only one address of a llama-server is possible")
    if problems:
        raise ConfigError(problems)
    return config, given.places()


class _Given:
    """What was given, by full name, and where: the later source wins."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, str]] = {}

    def put(self, setting: str, value: Any, place: str) -> None:
        self._values[setting] = (value, place)

    def place(self, setting: str) -> str:
        return self._values[setting][1]

    def places(self) -> dict[str, str]:
        return {setting: place for setting, (_, place) in self._values.items()}

    def sections(self) -> dict[str, Any]:
        """Only what is known, nested as the models are."""
        nested: dict[str, Any] = {}
        for setting, (value, _) in self._values.items():
            section, _, name = setting.partition(".")
            if setting in _KNOWN:
                nested.setdefault(section, {})[name] = value
        return nested

    def unknown(self) -> Iterator[str]:
        for setting, (_, place) in self._values.items():
            if setting not in _KNOWN:
                yield f"{place}: {setting}: {_what_is(setting)}"

    def missing_paths(self) -> Iterator[str]:
        for setting, exists, what in (
            ("backend.slot_save_path", Path.is_dir, "no such directory"),
            ("backend.tokenizer", Path.is_file, "no such file"),
        ):
            value, place = self._values.get(setting, ("", ""))
            if isinstance(value, str) and value and not exists(Path(value).expanduser()):
                make = f"; mkdir -p -m 700 {shlex.quote(str(Path(value).expanduser()))}"
                todo = make if exists is Path.is_dir else ""
                yield f'{place}: {setting}: {what}: "{value}"{todo}'


_SECTIONS: Mapping[str, type[BaseModel]] = {section: type(part) for section, part in Config()}
_KNOWN = [
    f"{section}.{name}" for section, model in _SECTIONS.items() for name in model.model_fields
]
_SECRET = {"server.keys", "server.admin_key", "backend.key"}


def _read_file(path: Path, given: _Given) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        yield f"{path}: cannot be read: {why}"
        return
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"(.*) \(at (?:line (\d+)|end of document)", str(error))
        what, line = (match[1], match[2]) if match else (str(error), None)
        yield f"{path}:{line or len(text.splitlines())}: not TOML: {what}"
        return
    lines = _lines(text)
    for section, content in document.items():
        # What is no known section stays whole and is reported as one unknown name.
        inside = content if section in _SECTIONS and isinstance(content, dict) else {"": content}
        for name, value in inside.items():
            setting = f"{section}.{name}".rstrip(".")
            line = lines.get(setting) or lines.get(section, 1)
            given.put(setting, value, f"{path}:{line}")


def _lines(text: str) -> dict[str, int]:
    """Line of each section and setting, by full name; the first one counts."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.\"'-]+)\s*\]", line):
            section = header[1]
            found.setdefault(section, number)
        elif pair := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            found.setdefault(f"{section}.{pair[1]}".lstrip("."), number)
    return found


def _read_environ(environ: Mapping[str, str], given: _Given) -> None:
    """Only names with ``__``: Kubernetes sets ``SLOTKEEPER_PORT`` for a service of that name."""
    for variable, value in environ.items():
        name = variable.upper()
        if name.startswith(PREFIX) and "__" in name:
            setting = name.removeprefix(PREFIX).lower().replace("__", ".", 1)
            given.put(setting, value, f"environment variable {variable}")


def _what_is(setting: str) -> str:
    """Why a name is unknown, and which one was meant."""
    section, _, name = setting.rpartition(".")
    if setting in _SECTIONS:
        return f"expected a section: [{setting}]"
    elsewhere = [known for known in _KNOWN if known.endswith(f".{name}")]
    if section in _SECTIONS:
        near = difflib.get_close_matches(name, _SECTIONS[section].model_fields, 1) or elsewhere
    else:
        near = elsewhere or difflib.get_close_matches(setting, [*_SECTIONS, *_KNOWN], 1)
    kind = "setting" if section or elsewhere else "section or setting"
    return f"unknown {kind}" + (f'; did you mean "{near[0]}"?' if near else "")


_EXPECTED: Mapping[str, str] = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "literal_error": "expected one of {expected}",
    "string_too_short": "must not be empty",
    "string_type": "expected text in quotes",
    "tuple_type": 'expected a list like ["a", "b"]',
    "value_error": "{error}",
}


def _explain(setting: str, fault: ErrorDetails) -> str:
    """What was expected and, unless it is a secret, what was found."""
    wanted = _EXPECTED.get(fault["type"], fault["msg"].replace("Input should be", "must be"))
    wanted = wanted.format_map(fault.get("ctx", {}))
    found = fault["input"]
    shown = f'"{found}"' if isinstance(found, str) else str(found)
    if setting in _SECRET or "@" in shown:  # a URL may carry a password
        return wanted
    return f"{wanted}, got {shown[:80]}"
