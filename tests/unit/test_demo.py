"""``make demo``: what it starts, in which order, and that the engine never outlives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy import demo, service
from proxy.config import Config
from proxy.engine import EngineError, EngineOptions

TAKEN = 7


class FakeEngine:
    """Recorded."""

    def __init__(self, story: list[Any], error: BaseException | None) -> None:
        self.story = story
        self.error = error
        self.url = "http://127.0.0.1:5"

    def __call__(self, model: Path, options: EngineOptions, *, log: Path) -> FakeEngine:
        """Started."""
        self.story.append(("engine", model, options.slot_save_path, log))
        return self

    def wait_healthy(self) -> None:
        """Loading."""
        self.story.append("healthy")
        if self.error is not None:
            raise self.error

    def terminate(self) -> None:
        """Stopped."""
        self.story.append("terminated")


@pytest.fixture
def story() -> list[Any]:
    """What happened."""
    return []


@pytest.fixture
def play(story: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the demo with everything it starts replaced; gives its exit status."""

    def run(error: BaseException | None = None, **environ: str) -> int:
        def serve(
            config: Config, on_ready: Callable[[str], None], load: Callable[[], Config]
        ) -> int:
            assert load() == config, "a SIGHUP finds the same engine"
            story.append(("serve", config.backend.url, config.slot_dir, config.server.port))
            on_ready("http://127.0.0.1:8088")
            return 7

        monkeypatch.setattr(demo, "Engine", FakeEngine(story, error))
        monkeypatch.setattr("proxy.checks.machine.taken", lambda _, port: port == TAKEN)
        monkeypatch.setattr(service, "run", serve)
        monkeypatch.setattr(demo, "bundled_model", lambda: Path("/m/bundled.gguf"))
        for name, value in {"DEMO_STATE": str(tmp_path / "state"), **environ}.items():
            monkeypatch.setenv(name, value)
        return demo.main()

    return run


def test_the_usual_way(
    play: Callable[..., int], story: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine, then proxy in front of it on 8088, banner with URL and curl, engine stopped."""
    state = (tmp_path / "state").resolve()
    assert play() == 7
    assert story == [
        ("engine", Path("/m/bundled.gguf"), state / "slots", state / "engine.log"),
        "healthy",
        ("serve", "http://127.0.0.1:5", state / "slots", 8088),
        "terminated",
    ]
    shown, doing = capsys.readouterr()
    assert "trying out" in doing
    assert "http://127.0.0.1:8088/_slotkeeper/" in shown
    assert "slotkeeper status --url http://127.0.0.1:8088" in shown
    assert "curl -i http://127.0.0.1:8088/v1/chat/completions" in shown
    assert str(state) in shown
    assert (state / "slots").stat().st_mode & 0o777 in {0o700, 0o777}


def test_its_own_settings(play: Callable[..., int], story: list[Any], tmp_path: Path) -> None:
    """Port and model come from the environment."""
    model = tmp_path / "mine.gguf"
    assert play(DEMO_PORT="9", DEMO_MODEL=str(model)) == 7
    assert story[0][1] == model.resolve()
    assert story[2][3] == 9


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("it ended"), 1), (KeyboardInterrupt(), 130)]
)
def test_an_engine_that_does_not_come_up(
    play: Callable[..., int],
    story: list[Any],
    error: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No proxy is started, the engine is stopped, the reason is told in one line."""
    assert play(error) == status
    assert story[-1] == "terminated"
    assert len(story) == 3
    assert ("demo: it ended" in capsys.readouterr().err) == (status == 1)


def test_a_bad_port(
    play: Callable[..., int], story: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that is wrong ends with status 2 and says which; nothing is started."""
    assert play(DEMO_PORT="none") == 2
    assert "server.port" in capsys.readouterr().err
    assert story == []


def test_a_port_that_is_taken(
    play: Callable[..., int], story: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said at once, with what to do, and no engine is started."""
    assert play(DEMO_PORT=str(TAKEN)) == 1
    assert "port 7 is taken: set DEMO_PORT" in capsys.readouterr().err
    assert story == []
