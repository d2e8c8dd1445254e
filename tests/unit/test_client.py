"""The client of the proxy's own API."""

from __future__ import annotations

import pytest

from proxy.client import ApiError, Client, UnreachableError, segment
from proxy.engine import free_port
from tests.unit.commands.fake_api import FakeApi, refusal


def test_what_is_sent() -> None:
    """The page, the query without what is None, the body as JSON and the key as a bearer."""
    answers = {"GET api/logs": {"a": 1}, "POST api/pause": {}, "DELETE api/snapshots/x%2Fy": {}}
    with FakeApi(answers) as api:
        client = Client(api.url + "/", "secret")
        assert client.get("api/logs", limit=3, level=None) == {"a": 1}
        client.post("api/pause")
        client.delete(f"api/snapshots/{segment('x/y')}")
        assert api.asked == [
            ("GET api/logs?limit=3", None, "Bearer secret"),
            ("POST api/pause", {}, "Bearer secret"),
            ("DELETE api/snapshots/x%2Fy", {}, "Bearer secret"),
        ]


def test_without_a_key_none_is_sent() -> None:
    """No key, no header."""
    with FakeApi({"GET a": {}}) as api:
        Client(api.url).get("a")
        assert api.asked == [("GET a", None, None)]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8088",
        "ftp://h",
        "",
        "http://",
        "http://a b",
        "http://a..b",
        f"http://{'a' * 64}.de",
    ],
)
def test_what_is_no_address(url: str) -> None:
    """It is told so before anything is sent."""
    with pytest.raises(ValueError, match="expected an address"):
        Client(url)


@pytest.mark.parametrize("key", ["se\ncret", "secr\u0142t"])
def test_what_is_no_key(key: str) -> None:
    """It is told so without the key, which an error of the HTTP library would quote."""
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        Client("http://h", key)
    assert key not in str(refused.value)


def test_a_password_in_the_address_is_never_shown() -> None:
    """``url`` is what messages show."""
    assert Client("http://u:p@h:1/base/").url == "http://h:1"


def test_nobody_there() -> None:
    """A refused connection names the address and what to do."""
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UnreachableError, match=r"cannot reach the proxy at http://127\.0\.0\.1"):
        client.get("api/slots")
    assert client.ready() is None
    with pytest.raises(UnreachableError):
        list(client.events())


def test_refusals() -> None:
    """The proxy's own words and hint, and its backend's; for its key, where to put it; for a
    stranger, a doubt.
    """
    answers = {
        "GET a": (404, refusal("No such thing.", "See b.")),
        "GET b": (401, refusal("The admin key is needed here.")),
        "GET c": (404, {"error": {"message": "File Not Found"}}),
        "GET d": (200, b"<html>"),
        "GET e": (302, b""),
        "GET f": (502, {"error": {"message": "no connection", "source": "backend", "hint": "h"}}),
        "GET g": (401, {"error": {"message": "key wrong", "source": "backend"}}),
    }
    with FakeApi(answers) as api:
        client = Client(api.url, "secret")
        errors = {}
        for page in "abcdefg":
            with pytest.raises(ApiError) as caught:
                client.get(page)
            errors[page] = caught.value
    assert (errors["a"].message, errors["a"].hint) == ("No such thing.", "See b.")
    assert errors["a"].status == 404
    assert "SLOTKEEPER_ADMIN_KEY" in errors["b"].hint
    assert (errors["f"].message, errors["f"].hint) == ("no connection", "H")
    assert (errors["g"].message, errors["g"].hint) == ("key wrong", "")
    for page in "cde":
        assert "not as a slotkeeper" in errors[page].message
    assert not any("secret" in f"{error} {error.hint}" for error in errors.values())


def test_ready_is_told_also_when_it_is_not() -> None:
    """503 with a verdict is a verdict; a page of another server is none."""
    with FakeApi({"GET readyz": (503, {"ready": False, "why": "x"})}) as api:
        assert Client(api.url).ready() == {"ready": False, "why": "x"}
    with FakeApi({"GET readyz": {"status": "ok"}}) as api:
        assert Client(api.url).ready() is None


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        ({"alive": True}, True),
        ((421, refusal("Another name.")), True),
        ({"status": "ok"}, False),
        ([], False),
        ((404, {"error": {"message": "File Not Found"}}), False),
        ((200, b"<html>"), False),
    ],
)
def test_is_it_a_slotkeeper(answer: object, is_one: bool) -> None:
    """By the page every one of them has, whoever asks."""
    with FakeApi({"GET healthz": answer}) as api:
        assert Client(api.url).is_slotkeeper() is is_one
    assert not Client(api.url).is_slotkeeper(), "nobody is there"


def test_events() -> None:
    """Kinds and their JSON, signs of life left out; the end of the stream is an error."""
    with FakeApi(events=[("log", {"seq": 1}), ("status", {"ready": True})]) as api:
        seen: list[tuple[str, object]] = []
        with pytest.raises(UnreachableError, match="ended the connection"):
            seen.extend(Client(api.url).events())
        stream = Client(api.url).events()
        assert next(stream) == ("log", {"seq": 1})
        assert next(stream) == ("status", {"ready": True})
        with pytest.raises(UnreachableError):
            next(stream)


def test_events_refused() -> None:
    """Too many listeners: the proxy's words."""
    answers = {"GET api/events": (503, refusal("Too many listeners."))}
    with FakeApi(answers) as api, pytest.raises(ApiError, match="Too many"):
        next(Client(api.url).events())
