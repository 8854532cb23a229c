"""Arguments of tool calls that are JSON text, as OpenAI's are, for templates that need the object."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

from asyncdata.tokenization.rows import RowFault, decode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("guarded", "parsed")

Message = dict[str, Any]


class _JsonText(str):
    """Arguments as text, whose characters are not to be taken one by one: a template that does wants an object's."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        """Not iter() but next() raises, as templates may ask whether there is anything to go through."""
        return map(_refuse, str.__iter__(self))


def _refuse(_: str) -> NoReturn:
    raise TypeError("the arguments of a tool call are text, and the template wants an object")


def guarded(messages: list[Message]) -> list[Message]:
    """The chat, which a template refuses if it goes through the characters of arguments that are text."""
    return _changed(messages, _JsonText)


def parsed(messages: list[Message]) -> list[Message] | None:
    """The chat with arguments that are JSON text of an object as the object; None where there are none."""
    found = _changed(messages, _object)
    return None if found is messages else found


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = decode_value(text.encode())
    except (RowFault, UnicodeEncodeError):
        return None

    return value if isinstance(value, dict) else None


def _changed(messages: list[Message], change: Callable[[str], Any]) -> list[Message]:
    """The chat with what ``change`` makes of arguments that are text; itself if it makes None of them all."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        found = [_call(call, change) for call in calls] if isinstance(calls, list) else []
        is_same = all(map(operator.is_, found, calls or ()))
        changed.append(message if is_same else {**message, "tool_calls": found})
    return messages if all(map(operator.is_, changed, messages)) else changed


def _call(call: Any, change: Callable[[str], Any]) -> Any:
    """A call, which has its arguments itself or in its function."""
    if not isinstance(call, dict):
        return call

    inner = _call(call["function"], change) if isinstance(call.get("function"), dict) else None
    if inner is not None and inner is not call["function"]:
        call = {**call, "function": inner}
    arguments = call.get("arguments")
    made = change(arguments) if isinstance(arguments, str) else None
    return call if made is None else {**call, "arguments": made}
