"""Tool definitions: first-seen order and bytes, nothing invented, nothing hidden."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.normalise.base import Item
from proxy.core.normalise.tools import REMEMBERED, remembered
from tests.unit.core.normalise.kit import Desk, assistant, rules, tool, user

LONG = "an answer that is long enough"


def turns(*lists: list[Any] | None, switches: tuple[str, ...] = ()) -> list[Any]:
    """The tools that went out, turn by turn of one conversation."""
    desk, history, out = Desk(rules=switches), [user("q")], []
    for number, tools in enumerate(lists):
        more: dict[str, Any] = {} if tools is None else {"tools": tools}
        made = desk.ask(*history, **more)
        desk.hear(made, assistant(f"{LONG} {number}"))
        history += [assistant(f"{LONG} {number}"), user("r")]
        out.append(orjson.loads(made.raw).get("tools"))
    return out


def names(tools: list[Any]) -> str:
    """One letter per tool."""
    return "".join(one["function"]["name"] for one in tools)


def letters(text: str) -> list[Any]:
    """Tools by one letter each."""
    return [tool(name) for name in text]


def test_the_first_request_is_not_sorted() -> None:
    """Its order is the order."""
    assert names(turns(letters("cab"))[0]) == "cab"


def test_new_ones_go_to_the_end_and_stay_there() -> None:
    """Late servers come behind, in the order they came."""
    sent = turns(letters("cab"), letters("abcxd"), letters("dxcba"))
    assert [names(tools) for tools in sent] == ["cab", "cabxd", "cabxd"]


def test_a_removed_tool_is_gone_and_comes_back_to_its_place() -> None:
    """The model must not call what the client no longer has."""
    sent = turns(letters("abc"), letters("cb"), None, letters("cab"))
    assert [tools and names(tools) for tools in sent] == ["abc", "bc", None, "abc"]


def test_a_changed_definition_is_sent_as_it_is_now() -> None:
    """At its old place; from then on it is the first-seen one."""
    new = tool("b", description="now does more")
    turned = {"function": dict(reversed(new["function"].items())), "type": "function"}
    sent = turns(letters("ab"), [new, tool("a")], [turned, tool("a")])
    assert sent[1] == [tool("a"), new]
    assert orjson.dumps(sent[2]) == orjson.dumps(sent[1])


def test_the_order_within_a_list_is_meaning() -> None:
    """``required`` and ``enum`` in another order are another definition."""
    one = tool("a", parameters={"required": ["x", "y"]})
    other = tool("a", parameters={"required": ["y", "x"]})
    assert turns([one], [other])[1] == [other]


def test_two_of_one_name_are_left_alone() -> None:
    """Which is which cannot be told; nothing is dropped, either."""
    twins = [tool("b"), tool("a"), tool("b", description="other")]
    sent = turns(letters("ab"), twins, switches=("+removed-tools",))
    assert sent[1] == twins


def test_tools_without_a_name_are_left_alone() -> None:
    """An unknown kind of tool (web search ...) stands where the client put it."""
    strange = {"type": "web_search"}
    sent = turns([strange, tool("a")], [tool("a"), strange], [tool("b"), tool("a")])
    assert sent[1] == [tool("a"), strange]
    kept = turns([strange, tool("a")], letters("ba"), switches=("+removed-tools",))
    assert kept[1] == letters("ab")


def test_an_unnamed_tool_is_not_put_back() -> None:
    """A kept tool has a name the model can call it by."""
    kept = turns(
        [{"type": "web_search"}, tool("a"), tool("b")], letters("b"), switches=("+removed-tools",)
    )
    assert kept[1] == letters("ab")


def test_another_conversation_has_an_order_of_its_own() -> None:
    """Nothing but system clocks crosses conversations."""
    desk = Desk()
    desk.ask(user("q"), tools=letters("ab"))
    assert not desk.ask(user("another"), tools=letters("ba")).changes


def test_only_moved_tools_are_moved() -> None:
    """Their bytes stay the client's."""
    desk = Desk()
    odd = b'{ "type":"function", "function":{"name":"a","n":123456789012345678901234567890} }'
    raw = b'{"messages":[%s],"tools":[%s]}'
    one, two = orjson.dumps(user("q")), orjson.dumps(tool("b"))
    desk.hear(desk.raw(raw % (one, odd + b"," + two)), assistant(LONG))
    more = b",".join(map(orjson.dumps, (user("q"), assistant(LONG), user("r"))))
    made = desk.raw(raw % (more, two + b"," + odd))
    assert rules(made) == ["tool-order"]
    assert made.raw == raw % (more, odd + b"," + two)


def test_the_order_is_bounded() -> None:
    """A client that invents names does not fill the memory."""
    order = remembered((), [Item(tool(str(number))) for number in range(REMEMBERED + 5)])
    assert len(order) == REMEMBERED
    assert remembered(order, None) is order
    assert remembered(order, [Item(tool("3"))]) is order
