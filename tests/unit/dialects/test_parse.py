"""Requests as the proxy reads them, and what it sends on.

About proxy.dialects.body, proxy.dialects.text, proxy.dialects.openai_chat,
proxy.dialects.openai_completion, proxy.dialects.llama_completion and proxy.dialects.infill.
"""

from __future__ import annotations

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.prefix import common, extends
from proxy.core.records import Prompt
from proxy.dialects import DIALECTS
from proxy.dialects.base import Call, Unreadable
from proxy.errors import BadRequestError

CHAT, TEXT, NATIVE, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def parse(path: str, **body: Any) -> Call:
    """The call of a body."""
    return DIALECTS[path].parse(orjson.dumps(body))


def prompt(path: str, **body: Any) -> Prompt:
    """The chain of a body."""
    return DIALECTS[path].prompt(parse(path, **body), b"key")


def sent(path: str, slot: int | None, **body: Any) -> Any:
    """What the backend reads."""
    return orjson.loads(DIALECTS[path].upstream(parse(path, **body), slot))


def test_paths() -> None:
    """``/completions`` is llama-server's own API, only ``/v1/completions`` is OpenAI's."""
    assert type(DIALECTS["/completions"]) is type(DIALECTS["/completion"])
    assert type(DIALECTS["/completions"]) is not type(DIALECTS["/v1/completions"])
    assert type(DIALECTS["/chat/completions"]) is type(DIALECTS["/v1/chat/completions"])
    with pytest.raises(TypeError):
        DIALECTS["/x"] = DIALECTS[CHAT]  # type: ignore[index]  # that is the point


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"null", b'{"prompt":"a",}'])
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, INFILL])
def test_what_is_no_object_is_refused(path: str, raw: bytes) -> None:
    """With an error that says so."""
    with pytest.raises(BadRequestError, match="JSON"):
        DIALECTS[path].parse(raw)


@pytest.mark.parametrize(
    "raw", [b'\xef\xbb\xbf{"prompt":"a"}', b'{"prompt":"a"}\0', b"[" * 1100 + b"]" * 1100]
)
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, INFILL])
def test_what_only_the_backend_reads(path: str, raw: bytes) -> None:
    """Not refused: the backend may well answer it."""
    with pytest.raises(Unreadable):
        DIALECTS[path].parse(raw)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": {}}, "messages"),
        (CHAT, {**HI, "stream": 1}, "stream"),
        (CHAT, {**HI, "cache_prompt": "no"}, "cache_prompt"),
        (CHAT, {**HI, "return_progress": 1}, "return_progress"),
        (CHAT, {**HI, "stream_options": {"include_usage": 1}}, "include_usage"),
        (TEXT, {}, "prompt"),
        (NATIVE, {"prompt": None}, "prompt"),
        (NATIVE, {"prompt": 5}, "prompt"),
        (NATIVE, {"prompt": []}, "prompt"),
        (NATIVE, {"prompt": [1, 1.5]}, "prompt"),
        (NATIVE, {"prompt": [1, True]}, "prompt"),
        (NATIVE, {"prompt": ["a", None]}, "prompt"),
    ],
)
def test_wrong_types(path: str, body: dict[str, Any], word: str) -> None:
    """The error names the field."""
    with pytest.raises(BadRequestError, match=word):
        parse(path, **body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": ["odd"]},
        {"messages": [{"role": "user", "content": None}]},
        {**HI, "stream": None, "stream_options": 5, "n": "2", "model": 5, "id_slot": "1"},
    ],
)
def test_odd_requests_are_the_backends_to_judge(body: dict[str, Any]) -> None:
    """What the backend might take is not refused here."""
    call = parse(CHAT, **body)
    assert not call.wide
    assert call.model == ""
    assert call.id_slot is None


def test_of_duplicate_names_the_last_counts() -> None:
    """As in the backend."""
    call = DIALECTS[NATIVE].parse(b'{"prompt":"a","id_slot":0,"id_slot":1}')
    assert call.id_slot == 1


@pytest.mark.parametrize(
    ("value", "slot"),
    [(0, 0), (3, 3), (1.7, 1), (True, 1), (-1, None), (-2, None), ("1", None), (None, None)],
)
def test_id_slot(value: Any, slot: int | None) -> None:
    """As the backend reads numbers."""
    assert parse(NATIVE, prompt="a", id_slot=value).id_slot == slot


@pytest.mark.parametrize(
    ("path", "body", "wide"),
    [
        (CHAT, {**HI, "n": 1}, False),
        (CHAT, {**HI, "n": 2}, True),
        (CHAT, {**HI, "n": 2.0}, True),
        (CHAT, {**HI, "n": 1.9}, False),
        (NATIVE, {"prompt": "a", "n_cmpl": 3}, True),
        (NATIVE, {"prompt": "a"}, False),
        (NATIVE, {"prompt": ["a"]}, False),
        (NATIVE, {"prompt": ["a", "b"]}, True),
        (NATIVE, {"prompt": [1, 2]}, False),
        (NATIVE, {"prompt": [1, "a", 2]}, False),
        (NATIVE, {"prompt": [[1, 2]]}, False),
        (NATIVE, {"prompt": [[1, 2], [3]]}, True),
        (TEXT, {"prompt": [{"prompt_string": "a"}, "b"]}, True),
        (INFILL, {"n": 2}, True),
    ],
)
def test_wide(path: str, body: dict[str, Any], wide: bool) -> None:
    """Several answers or several prompts take every slot, and are not re-assembled."""
    call = parse(path, **body)
    assert call.wide is wide
    assert call.streamable is not wide


@pytest.mark.parametrize(
    "field",
    [
        {"stop": ["x"]},
        {"stop": "x"},
        {"logprobs": True},
        {"logprobs": 1},
        {"top_logprobs": 2},
        {"n_probs": 1},
        {"return_tokens": True},
        {"response_fields": ["content"]},
        {"verbose": True},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_not_streamed(path: str, field: dict[str, Any]) -> None:
    """What the stream does not hold whole goes as the client sent it, but for the slot."""
    call = parse(path, **HI, prompt="a", **field)
    assert not call.streamable
    cached = {**call.body, "cache_prompt": True}
    assert orjson.loads(DIALECTS[path].upstream(call, None)) == cached
    pinned = {**cached, "id_slot": 1, "n_cache_reuse": 0}
    assert orjson.loads(DIALECTS[path].upstream(call, 1)) == pinned


@pytest.mark.parametrize("body", [{"stop": []}, {"stop": None}, {"logprobs": False}])
def test_streamed_all_the_same(body: dict[str, Any]) -> None:
    """Empty wishes are none."""
    assert parse(CHAT, **HI, **body).streamable


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [*HI["messages"], {"role": "assistant", "content": "He"}]},
        {**HI, "continue_final_message": True},
    ],
)
def test_a_prefill_is_not_streamed(body: dict[str, Any]) -> None:
    """The answer starts with text that is in no event."""
    assert not parse(CHAT, **body).streamable


@pytest.mark.parametrize(
    ("path", "body", "store"),
    [
        (CHAT, HI, True),
        (CHAT, {**HI, "cache_prompt": False}, False),
        (CHAT, {**HI, "n_cache_reuse": 256}, False),
        (CHAT, {**HI, "n_cache_reuse": 0, "lora": None}, True),
        (CHAT, {**HI, "lora": []}, False),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        (NATIVE, {"prompt": "a"}, True),
        (NATIVE, {"prompt": [1, 2]}, True),
        (NATIVE, {"prompt": [1, "a"]}, False),
        (NATIVE, {"prompt": {"prompt_string": "a", "multimodal_data": []}}, False),
        (NATIVE, {"prompt": [1, 2**40]}, False),
        (NATIVE, {"prompt": ["a", "b"]}, False),
        (INFILL, {"input_prefix": "a"}, False),
    ],
)
def test_store(path: str, body: dict[str, Any], store: bool) -> None:
    """Never stored: what is no function of tokens, and what nobody could look up again."""
    assert parse(path, **body).store is store


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (NATIVE, {"prompt": "a"}, ("text", "a")),
        (TEXT, {"prompt": ["a"]}, ("text", "a")),
        (NATIVE, {"prompt": [1, 2]}, ("tokens", [1, 2])),
        (NATIVE, {"prompt": [[1, 2]]}, ("tokens", [1, 2])),
        (NATIVE, {"prompt": [1, "a"]}, ("none", None)),
        (NATIVE, {"prompt": ["a", "b"]}, ("none", None)),
        (NATIVE, {"prompt": {"prompt_string": "a"}}, ("none", None)),
        (INFILL, {"input_prefix": "a"}, ("none", None)),
        (CHAT, {"messages": [{"content": [{"type": "input_audio"}]}]}, ("none", None)),
        (
            CHAT,
            {**HI, "tools": [1], "add_generation_prompt": False, "grammar": "x", "stream": True},
            ("render", {**HI, "tools": [1], "add_generation_prompt": False}),
        ),
    ],
)
def test_rendered(path: str, body: dict[str, Any], kind: tuple[str, Any]) -> None:
    """How the exact tokens are learnt, with nothing ``/apply-template`` could stumble over."""
    assert DIALECTS[path].rendered(parse(path, **body)) == kind


def test_tokens_are_known_at_once() -> None:
    """A prompt of tokens needs nobody to count."""
    assert prompt(NATIVE, prompt=[1, 2]).tokens == array("i", [1, 2])
    assert prompt(NATIVE, prompt="a").tokens is None


def test_upstream_of_a_streaming_client() -> None:
    """Progress is asked for, usage is not; the client's bytes lead."""
    body = {**HI, "stream": True}
    pinned = {"cache_prompt": True, "id_slot": 1, "n_cache_reuse": 0}
    assert sent(CHAT, 1, **body) == {**body, **pinned, "return_progress": True}
    raw = orjson.dumps(body)
    assert DIALECTS[CHAT].upstream(DIALECTS[CHAT].parse(raw), 1).startswith(raw[:-1])
    asked = {**body, "return_progress": True}
    assert sent(CHAT, None, **asked) == {**asked, "cache_prompt": True}


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, INFILL])
def test_whether_to_reuse_is_always_said(path: str) -> None:
    """Old builds do not unless asked; the client's own word counts, a doubt of ours counts more."""
    body = {**HI, "prompt": "a"}
    assert sent(path, None, **body)["cache_prompt"] is True
    assert sent(path, None, **body, cache_prompt=None)["cache_prompt"] is True
    assert sent(path, None, **body, cache_prompt=False)["cache_prompt"] is False
    for said in ({}, {"cache_prompt": True}):
        call = parse(path, **body, **said)
        assert orjson.loads(DIALECTS[path].upstream(call, 1, fresh=True))["cache_prompt"] is False


@pytest.mark.parametrize(
    ("path", "usage"),
    [(CHAT, {"stream_options": {"include_usage": True}}), (TEXT, {}), (NATIVE, {}), (INFILL, {})],
)
def test_upstream_of_a_client_that_waits(path: str, usage: dict[str, Any]) -> None:
    """Streamed upstream; usage is asked for only where the stream would lack it."""
    body = {**HI, "prompt": "a", "stream": False}
    extra = {"cache_prompt": True, "stream": True, "return_progress": True, **usage}
    assert sent(path, None, **body) == {**body, **extra}


def test_upstream_overrides_the_slot() -> None:
    """Where the proxy may not pin, the client's wish is taken back."""
    assert sent(NATIVE, None, prompt="a", id_slot=1)["id_slot"] == -1
    assert sent(NATIVE, 0, prompt="a", id_slot=1)["id_slot"] == 0
    assert sent(NATIVE, None, prompt="a", id_slot="x")["id_slot"] == "x"


def test_several_prompts_are_left_alone() -> None:
    """The engine's own null events would change with progress."""
    call = parse(NATIVE, prompt=["a", "b"], stream=True, cache_prompt=False)
    assert DIALECTS[NATIVE].upstream(call, None) is call.raw


def test_a_longer_conversation_extends_a_shorter_one() -> None:
    """Whatever form the shorter one's content had."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    longer = [*HI["messages"], {"role": "assistant", "content": "x"}]
    assert extends(prompt(CHAT, messages=longer), prompt(CHAT, messages=parts))
    assert not extends(prompt(CHAT, messages=parts), prompt(CHAT, messages=longer))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("reasoning_effort", "none"),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_templates_render_is_in_the_chain_only(name: str, value: Any) -> None:
    """It ends the common chain, but two such prompts may still share what they have in common."""
    one, other = prompt(CHAT, **HI), prompt(CHAT, **HI, **{name: value})
    assert one.seed == other.seed
    assert common(one, other) == 0


@pytest.mark.parametrize(
    "more", [{"temperature": 1}, {"stream": True}, {"add_generation_prompt": False}, {"seed": 4}]
)
def test_what_is_not_rendered_is_not_in_the_chain(more: dict[str, Any]) -> None:
    """Sampling, transport and the prompt's end do not part conversations."""
    assert prompt(CHAT, **HI, **more) == prompt(CHAT, **HI)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, INFILL])
def test_keys_and_lora_part_everything(path: str) -> None:
    """Another API key or LoRA set shares nothing."""
    body = {**HI, "prompt": "a" * 5000, "input_prefix": "a" * 5000}
    call = parse(path, **body)
    seeds = {
        DIALECTS[path].prompt(call, b"key").seed,
        DIALECTS[path].prompt(call, b"other").seed,
        prompt(path, **body, lora=[{"id": 0, "scale": 1.0}]).seed,
        prompt(path, **body, lora=[]).seed,
    }
    assert len(seeds) == 4


def test_short_prompts_that_share_nothing() -> None:
    """What no template renders has no size: else two short prompts would seem to share it."""
    one = prompt(CHAT, messages=[{"role": "user", "content": "Name three rivers."}])
    other = prompt(CHAT, messages=[{"role": "system", "content": "Answer briefly."}])
    shared = common(one, other)
    assert one.ends[shared - 1] == 0 < one.size
    tools = prompt(CHAT, tools=[{"type": "function", "function": {"name": "x"}}], **HI)
    assert tools.ends[0] > 0


@given(st.text(min_size=1), st.text())
def test_text_chains(start: str, rest: str) -> None:
    """A prompt that goes on shares all full blocks of the shorter one; the size counts bytes."""
    base = start * (3000 // len(start) + 1)
    short, long = prompt(NATIVE, prompt=base), prompt(TEXT, prompt=base + rest)
    assert common(short, long) == len(short.chain) > 0
    assert short.size == len(base.encode())


def test_infill_goes_by_layout() -> None:
    """Context files come first, so a growing prefix keeps their part."""
    extra = [{"filename": "a.py", "text": "x" * 4000}]
    one = prompt(INFILL, input_extra=extra, input_prefix="a" * 3000, input_suffix="z")
    other = prompt(INFILL, input_extra=extra, input_prefix="a" * 500 + "b" * 3000, input_suffix="z")
    assert 0 < common(one, other) < len(one.chain)


def test_unknown_prompts_have_a_chain_all_the_same() -> None:
    """Mixed prompts are still told apart and recognised."""
    mixed = [1, "a" * 5000]
    assert prompt(NATIVE, prompt=mixed) == prompt(NATIVE, prompt=mixed)
    assert common(prompt(NATIVE, prompt=mixed), prompt(NATIVE, prompt=[2, *mixed])) == 0
