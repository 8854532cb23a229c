"""Arguments of tool calls as JSON text, the format of OpenAI, for templates that need an object."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

from asyncdata.tokenization.rows import RowFault, decode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("guarded", "parsed")

Message = dict[str, Any]


class _JsonText(str):
    """Arguments as text that cannot be iterated: a template that iterates over them needs the object."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        """next() raises, but iter() does not, because templates may test whether a value is iterable."""
        return map(_refuse, str.__iter__(self))


def _refuse(_: str) -> NoReturn:
    raise TypeError("the arguments of a tool call are text, and the template wants an object")


def guarded(messages: list[Message]) -> list[Message]:
    """The chat with guarded arguments: a template that iterates over the characters of text fails."""
    return _changed(messages, _JsonText)


def parsed(messages: list[Message]) -> list[Message] | None:
    """The chat with the objects of arguments that are JSON text; None if there are no such arguments."""
    found = _changed(messages, _object)
    return None if found is messages else found


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = decode_value(text.encode())
    except (RowFault, UnicodeEncodeError):
        return None

    return value if isinstance(value, dict) else None


def _changed(messages: list[Message], change: Callable[[str], Any]) -> list[Message]:
    """The chat with ``change`` applied to text arguments; the same object if it returns None for all."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        found = [_call(call, change) for call in calls] if isinstance(calls, list) else []
        is_same = all(map(operator.is_, found, calls or ()))
        changed.append(message if is_same else {**message, "tool_calls": found})
    return messages if all(map(operator.is_, changed, messages)) else changed


def _call(call: Any, change: Callable[[str], Any]) -> Any:
    """The changed call. Its arguments are its own key, or a key of its function."""
    if not isinstance(call, dict):
        return call

    inner = _call(call["function"], change) if isinstance(call.get("function"), dict) else None
    if inner is not None and inner is not call["function"]:
        call = {**call, "function": inner}
    arguments = call.get("arguments")
    made = change(arguments) if isinstance(arguments, str) else None
    return call if made is None else {**call, "arguments": made}
