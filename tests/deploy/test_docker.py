"""The images and how they are put together, read as far as that goes without a Docker daemon."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from proxy.config import PREFIX, load
from proxy.server.gate import OPEN
from tests.deploy.files import DEPLOY, ROOT, read, read_yaml, unit

COMPOSE: dict[str, Any] = read_yaml("docker/compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = read("docker/Dockerfile")
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", read("docker/.env.example"), re.MULTILINE))
LONG_RUNNING = ("llama-server", "slotkeeper", "prometheus", "grafana")


def steps() -> list[list[str]]:
    """The Dockerfile's instructions, as words."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [line.split() for line in joined.splitlines()]


def last_stage() -> list[list[str]]:
    """What the image that runs is made of."""
    begins = max(n for n, words in enumerate(steps()) if words[0] == "FROM")
    return steps()[begins:]


def filled(text: str) -> str:
    """As compose fills in variables from the example, its blanks filled in."""

    def value(match: re.Match[str]) -> str:
        return EXAMPLE[match[1]] or f"filled-in-{match[1]}"

    return re.sub(r"\$\{(\w+):[-?][^}]*\}", value, text)


def test_what_is_copied_exists_and_is_let_through() -> None:
    """Each COPY names files of the repository that .dockerignore does not hold back."""
    allowed = re.findall(r"^!(.*)$", read("docker/Dockerfile.dockerignore"), re.MULTILINE)
    copied = {
        name
        for words in steps()
        if words[0] == "COPY" and not words[1].startswith("--from")
        for name in words[1:-1]
    }
    assert copied == set(allowed)
    for name in copied:
        assert (ROOT / name).exists(), name


def test_only_locked_packages_are_installed() -> None:
    """Everything but our own wheel comes with its hash, and what goes again is in the lock."""
    run = [" ".join(words) for words in steps() if words[0] == "RUN"]
    installs = [line for line in "&&".join(run).split("&&") if "pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes --only-binary :all: -r requirements.lock" in installs[0]
    assert "--no-deps /dist/slotkeeper-" in installs[1]
    (line,) = [part for part in "&&".join(run).split("&&") if "uninstall" in part]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for name in line.split("--yes")[1].split():
        assert f"\n{name}==" in lock, name


def test_the_image_runs_as_nobody_special() -> None:
    """The user has the number that llama-server has in compose.yaml, and owns the two folders."""
    words = {step[0]: step for step in last_stage()}
    assert words["USER"] == ["USER", "slotkeeper"]
    assert words["ENTRYPOINT"] == ["ENTRYPOINT", '["slotkeeper"]']
    made = " ".join(words["RUN"])
    assert "--uid 10001" in made
    assert "-o slotkeeper -g slotkeeper -m 0700 /slots /state" in made
    assert SERVICES["llama-server"]["user"] == "10001:10001"


def test_the_image_says_how_it_is() -> None:
    """Health is asked with what is in the image, on a page that wants no key."""
    (health,) = [" ".join(step) for step in last_stage() if step[0] == "HEALTHCHECK"]
    match = re.search(r'CMD \["python", "-c", "(.*)"\]$', health)
    assert match
    compile(match[1], "healthcheck", "exec")
    (page,) = re.findall(r"http://127\.0\.0\.1:8088(/[\w/]+)", match[1])
    assert page in OPEN


def test_every_variable_is_explained() -> None:
    """What compose.yaml asks for is in the example; what has no default must be filled in."""
    text = read("docker/compose.yaml")
    asked = dict(re.findall(r"\$\{(\w+):([-?])", text))
    assert set(asked) == set(EXAMPLE)
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        assert EXAMPLE[name] == default, name
    assert {name for name, value in EXAMPLE.items() if not value} <= {
        name for name, kind in asked.items() if kind == "?"
    }


def test_the_settings_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy accepts its environment, and finds nothing odd about it."""
    environ = {name: filled(v) for name, v in SERVICES["slotkeeper"]["environment"].items()}
    assert all(name.startswith(PREFIX) for name in environ)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # not on this machine
    config = load(None, {}, environ)
    assert config.warnings() == []
    assert config.server.keys
    assert config.server.admin_key.get_secret_value()


def test_llama_server_is_started_as_the_unit_starts_it() -> None:
    """The flags are those of the systemd unit, but for where things are."""

    def flags(words: list[str]) -> dict[str, str]:
        pairs = (word.partition("=") for word in words if word.startswith("--"))
        return {name: value for name, _, value in pairs}

    (line,) = unit("llama-server.service")["ExecStart"]
    words = re.sub(r" (?!--)", "=", line.replace("${", "").replace("}", "")).split()
    theirs, ours = flags(words), flags(SERVICES["llama-server"]["command"])
    elsewhere = {"--model", "--host", "--slot-save-path"}
    assert set(ours) == set(theirs)
    for flag in set(ours) - elsewhere:
        assert re.sub(r"\$\{(\w+):-\w+\}", r"\1", ours[flag]) == theirs[flag], flag


def test_nobody_goes_past_the_proxy() -> None:
    """llama-server has no port outside, only the proxy and Grafana have, on this machine."""
    published = {name for name, service in SERVICES.items() if "ports" in service}
    assert published == {"slotkeeper", "grafana"}
    for name in published:
        (port,) = SERVICES[name]["ports"]
        assert filled(port).startswith("127.0.0.1:")
    assert SERVICES["llama-server"]["networks"] == ["inside"]
    assert COMPOSE["networks"]["inside"] == {"internal": True}


def test_the_proxy_ends_before_the_backend() -> None:
    """It depends on llama-server, so it is stopped first, and it has time for that."""
    assert SERVICES["slotkeeper"]["depends_on"] == ["llama-server"]
    assert SERVICES["slotkeeper"]["stop_grace_period"] == "3m"
    assert unit("slotkeeper.service")["TimeoutStopSec"] == ["180"], "the same time as there"


def test_one_folder_for_both() -> None:
    """The slots are one volume at one place, made by the image whose user owns it."""
    for name in ("llama-server", "slotkeeper", "volumes"):
        assert "slots:/slots" in SERVICES[name]["volumes"]
    waits = SERVICES["llama-server"]["depends_on"]
    assert waits == {"volumes": {"condition": "service_completed_successfully"}}
    assert SERVICES["volumes"]["image"] == SERVICES["slotkeeper"]["image"]


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_containers_are_confined(name: str) -> None:
    """No capability, no new privileges, nothing written but to volumes; volumes are declared."""
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "prometheus")
    for mount in service["volumes"]:
        source = filled(mount).split(":")[0]
        if source.startswith("../"):
            assert (DEPLOY / "docker" / source).exists(), source
        elif not source.startswith("."):
            assert source in COMPOSE["volumes"]


def test_images_are_named_by_version() -> None:
    """Ours is built; the others are pinned, but for llama-server's, which has no stable tags."""
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


def test_prometheus_may_look() -> None:
    """It has the admin key as a file and calls the proxy by a name that the proxy answers to."""
    (job,) = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    environment = SERVICES["slotkeeper"]["environment"]
    variable = COMPOSE["secrets"][secret]["environment"]
    assert f"${{{variable}:" in environment["SLOTKEEPER_SERVER__ADMIN_KEY"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in shlex.split(environment["SLOTKEEPER_SERVER__ALLOWED_HOSTS"])
