"""What the real server throws, or dies of."""

from __future__ import annotations

from typing import Any


class JsonError(Exception):
    """An exception of nlohmann::json; its text is what a client reads."""


class UndefinedBehaviour(Exception):  # noqa: N818  # the standard's name for it
    """The real process would most likely crash here."""


class Interrupted(Exception):  # noqa: N818  # a std::exception on the other side
    """Something was thrown while an answer was generated."""


class Crash(Exception):  # noqa: N818  # an event, not an error
    """The process dies."""


class Disconnected(Exception):  # noqa: N818  # a state, and no mistake of ours
    """The connection is gone; nothing can be written."""


def kind_of(value: Any) -> str:
    """The name nlohmann::json has for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def type_error(wanted: str, value: Any) -> JsonError:
    """``type must be X, but is Y`` as ``get<T>`` throws it."""
    return JsonError(
        f"[json.exception.type_error.302] type must be {wanted}, but is {kind_of(value)}"
    )


def member(value: Any, name: str) -> Any:
    """``value[name]`` of a value that is const: what is not there is undefined (section 1.4).

    Raises:
        JsonError: it is no object.
        UndefinedBehaviour: it has no such member.
    """
    if not isinstance(value, dict):
        raise JsonError(
            "[json.exception.type_error.305] cannot use operator[] with a string argument with "
            f"{kind_of(value)}"
        )
    if name not in value:
        raise UndefinedBehaviour(f"operator[] of a const object without {name}")
    return value[name]


def string_of(value: Any) -> str:
    """``get<std::string>()``.

    Raises:
        JsonError: it is no string.
    """
    if not isinstance(value, str):
        raise type_error("string", value)
    return value
