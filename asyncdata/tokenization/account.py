"""The account of a row: keys that speak are read or refused, and the other keys that no function reads are named."""

from __future__ import annotations

import json
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from asyncdata.core.errors import printable, redacted
from asyncdata.core.messages import MAX_KEYS, NOT_WRITTEN
from asyncdata.tokenization.rows import LIST_OF_OBJECTS, RowFault, decode_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from asyncdata.tokenization.chat_template.template import ChatTemplate

Buffer = bytes | memoryview
Message = dict[str, Any]

_SHOWN = 80
_Other = bool | int | float | None | Annotated[str, msgspec.Meta(max_length=0)]
_NoText, _NoObjects = _Other | list[Any] | dict[str, Any], _Other | list[_Other | str]


class _Metadata(msgspec.Struct):
    train_turns: _Other | str | dict[str, Any] = None


_SYSTEM, _TOOLS = "make it the chat's first message", "set tool_key to it"
_SPEAKING: dict[str, tuple[Any, str]] = {
    "system": (_NoText, _SYSTEM),
    "system_prompt": (_NoText, _SYSTEM),
    "tools": (_NoObjects, _TOOLS),
    "functions": (_NoObjects, _TOOLS),
    "chat_template_kwargs": (_Other | str | list[Any], "set chat_template_kwargs= for all rows"),
    "metadata": (_Metadata | _Other | str | list[Any], "give the turns flags, such as 'train': false"),
}
"""Keys of a row that speak: a type of what says nothing, and the way out. msgspec checks the type, which takes no time
in rows without the key; what is not of the type is looked at."""

_TURN_KEYS = ("reasoning_content", "thinking", "tool_calls", "tool_call_id")


class Account(NamedTuple):
    """What a function does with the keys that it does not read.

    :ivar speaking: keys that a row must not have, as they would change its sample: a type of what says nothing.
    :ivar ignored: keys of which nothing is said.
    :ivar is_told: whether the rest is named in the log, too.
    """

    speaking: Mapping[str, Any] = {}
    ignored: Collection[str] = ()
    is_told: bool = True

    @classmethod
    def of_chats(cls, ignored: Collection[str], tool_key: str | None, *, are_trained: bool) -> Account:
        """Of a function that reads chats. Without a ``tool_key``, they are to have no tools."""
        left = {*ignored, *(["tools"] if tool_key is None else []), *([] if are_trained else ["metadata"])}
        left |= {"metadata"} & {key.removesuffix(".train_turns") for key in ignored}
        return cls({key: kind for key, (kind, _) in _SPEAKING.items() if key not in left}, ignored)

    def refuse(self, row: Mapping[str, Any], raw: Buffer, read: Collection[str] = ()) -> None:
        """Refuse a row with a key that speaks, unless it is among ``read``.

        :raises RowFault: if it has one.
        """
        for key in self.speaking:
            if key not in read and _speaks(key, row.get(key), row):
                name = "metadata.train_turns" if key == "metadata" else key
                raise self.fault("the row", name, _SPEAKING[key][1], raw)

    def refuse_turn(self, turn: Message, name: str, raw: Buffer) -> None:
        """Refuse a turn of a dialect that reads no key that speaks.

        :raises RowFault: if it has one.
        """
        for key in _TURN_KEYS:
            if key not in self.ignored and isinstance(turn.get(key), str | list) and turn[key]:
                raise self.fault(name, key, "use messages with 'role' and 'content'", raw)

    @staticmethod
    def fault(what: str, key: str, way_out: str, raw: Buffer) -> RowFault:
        """The fault of a key that speaks."""
        reason = f"{what} has {key!r}, which is not read and would be lost: {way_out}"
        return RowFault("AD133", f"{reason}; ignore_keys=({key!r},) leaves it out", raw)

    def rest_of(self, raw: Buffer, read: Collection[str]) -> dict[str, str]:
        """The keys of a row that are neither read nor empty: at most 20, each with the beginning of its value."""
        known, row = {*read, *self.ignored}, decode_object(raw)
        rest = islice((key for key in row if key not in known and row[key] not in (None, "", [], {})), MAX_KEYS)
        return {printable(key): _shown(row[key]) for key in rest}


def _shown(value: Any) -> str:
    text = redacted(printable(json.dumps(value, ensure_ascii=False)[: 10 * _SHOWN]))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _speaks(key: str, value: Any, row: Mapping[str, Any]) -> bool:
    if key in ("system", "system_prompt"):
        return isinstance(value, str) and bool(value.strip()) and not any(map(_begins_with_system, row.values()))

    if isinstance(value, dict) and key == "metadata":
        return isinstance(value.get("train_turns"), list) and bool(value["train_turns"])

    if isinstance(value, dict):
        return any(each is not None for each in value.values())

    if key == "chat_template_kwargs" or not isinstance(value, list):
        is_text = isinstance(value, str) and key != "chat_template_kwargs"
        return is_text and bool(LIST_OF_OBJECTS.match(value)) and value.strip() != "[]"

    return any(isinstance(each, dict) for each in value)


def _begins_with_system(value: Any) -> bool:
    """Whether a value is a chat with a system prompt of its own."""
    if isinstance(value, str) and LIST_OF_OBJECTS.match(value):
        return '"system"' in value

    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and "system" in (first.get("role"), first.get("from"))


# What a template does not write

_MARK, _TEXT, _ID = "Zq7wXk3Vb", "Hj4tRm8Yd", "a1b2c3d4e"
_ASKS, _SAYS = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}
_FUNCTION = {"name": _MARK, "description": "It.", "arguments": {}, "parameters": {"type": "object", "properties": {}}}
_TOOL: Message = {"id": _ID, "type": "function", "function": _FUNCTION}
_CALLS = {**_SAYS, "content": _TEXT, "tool_calls": [_TOOL]}
_REASONS, _THINKS = {**_SAYS, "reasoning_content": _MARK}, {**_SAYS, "content": f"<think>\n{_MARK}\n</think>\n\nIt is."}
_PROBES: dict[str, list[Message]] = {
    "tools": [_ASKS, _SAYS],
    "system": [{"role": "system", "content": _MARK}, _ASKS, _SAYS],
    "tool_calls": [_ASKS, _CALLS, {"role": "tool", "content": "It is.", "tool_call_id": _ID}, _SAYS],
    "reasoning_content": [_ASKS, _REASONS],
    "earlier_reasoning_content": [_ASKS, _REASONS, _ASKS, _SAYS],
    "earlier_thinking": [_ASKS, _THINKS, _ASKS, _SAYS],
}
"""What a chat may have, and a chat that has it, with a mark in its place."""


NOTED_KEYS = frozenset({"tool_calls", "reasoning_content", "thinking", "reasoning"})
_LEAST = {"system": 2, "earlier_thinking": 3}
"""The messages that a chat must have to have it, where turns need no other key for it than ``content``."""


class NotWritten:
    """What templates do not write of chats. Each is tried once; what it refuses, a row's own error tells.

    :param ignored: keys of which nothing is said.
    """

    def __init__(self, ignored: Collection[str]) -> None:
        self._ignored = ignored

    def __call__(self, template: ChatTemplate, messages: list[Message], tools: list[Message] | None) -> tuple[str, ...]:
        """The notes of a chat."""
        lost = template.not_written
        if lost is None:
            lost = template.not_written = [kind for kind in _PROBES if _is_lost(kind, template)]
        least = next((number for kind, number in _LEAST.items() if kind in lost), sys.maxsize)
        if not tools and len(messages) < least and NOTED_KEYS.isdisjoint(chain.from_iterable(messages)):
            return ()  # nearly always

        has = {kind for kind in _kinds(messages, tools) if kind.removeprefix("earlier_") not in self._ignored}
        return tuple(f"{kind}{NOT_WRITTEN}" for kind in lost if kind in has)


def _is_lost(kind: str, template: ChatTemplate) -> bool:
    try:
        text = template.rendered(template.fitted(_PROBES[kind]), [_TOOL] if kind == "tools" else None)
    except RowFault:
        return False

    return _MARK not in text or (kind == "tool_calls" and _TEXT not in text)


def _kinds(messages: list[Message], tools: list[Message] | None) -> Iterator[str]:
    yield "tools" if tools else ""
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for number, message in enumerate(messages):
        earlier, content = "earlier_" if number < last else "", message.get("content")
        if content and message["role"] == "system":
            yield "system"
        if message["role"] == "assistant":
            yield "tool_calls" if content and message.get("tool_calls") else ""
            if any(map(message.get, NOTED_KEYS - {"tool_calls"})):
                yield f"{earlier}reasoning_content"
            yield f"{earlier}thinking" if isinstance(content, str) and "</think>" in content else ""
