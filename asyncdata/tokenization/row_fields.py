"""Reads the fields of a row, such as its text or chat, its label, metadata and tools, and checks their types."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from asyncdata.core.errors import printable, redacted
from asyncdata.core.messages import MAX_KEYS, NOT_WRITTEN
from asyncdata.tokenization.rows import (
    LIST_OF_OBJECTS,
    MEDIA_KEYS,
    Buffer,
    Message,
    RowDecoder,
    RowFault,
    decode_object,
    decode_value,
    json_type,
    missing_key,
)

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.template import ChatTemplate


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


# The fields

TurnFlag = Literal["loss", "train", "training", "trainable", "weight"]
TURN_FLAGS: tuple[TurnFlag, ...] = get_args(TurnFlag)
"""The keys of a turn by which XTuner, Axolotl, OpenAI and others say whether it is trained."""


def _may_say_turns(metadata: Buffer | None) -> bool:
    return metadata is not None and b'"train_turns"' in bytes(metadata)


def _places(key: str) -> tuple[str, str]:
    """The keys of a row where the value of a key may be: it may lead into an object."""
    return key, key.partition(".")[0]


class Tools(NamedTuple):
    """A row's tools, as JSON text and decoded."""

    text: bytes
    schemas: list[Any]


class RowReader:
    """Reads the fields of rows. Errors name a field by the row's own key.

    :param required: ``{field: key}`` of the fields that a row must have. None as a key: rows have no such field.
    :param optional: ``{field: key}`` of the fields that a row may have.
    :param setting: how the setting is called that gives the key of a field, in errors.
    :param decoded: the fields whose values are decoded; the others are JSON text.
    :param allows_media: whether rows may have media, which their reader does not lose.
    :param account: what is done with keys that are not read; None: nothing, as the sample has the whole row.
    :ivar media: the keys whose values are media, if they are not empty; () if rows may have media.
    :ivar read_keys: the keys that are read.
    """

    def __init__(
        self,
        required: Mapping[str, str | None],
        optional: Mapping[str, str | None],
        setting: str = "{}_key",
        decoded: Sequence[str] = (),
        *,
        allows_media: bool = False,
        account: Account | None = None,
    ) -> None:
        self._keys = {name: key for name, key in {**required, **optional}.items() if key is not None}
        self._required = {name: setting.format(name) for name in required if name in self._keys}
        self._decoded = [name for name in decoded if name in self._keys]
        self._reads_many = bool(self._decoded) and len(set(self._keys.values())) == len(self._keys)
        keys = [self._keys[name] for name in self._decoded]
        found = account or Account()
        media = () if allows_media else [key for key in MEDIA_KEYS if key not in found.ignored]
        self._decode = RowDecoder(tuple(self._keys.values()), keys, media, found.speaking, self._refuse)
        self.media = self._decode.media
        self.account, self.read_keys = account, {*chain.from_iterable(map(_places, self._keys.values()))}
        has_turns = account is not None and "metadata" in account.speaking
        self._checks_turns = has_turns and self._keys.get("metadata") == "metadata"

    def columns(self, rows: Sequence[Buffer]) -> dict[str, list[Any]] | None:
        """The values of each field of all rows, in one call; None for a field that a row lacks.

        None if any row is bad, or may be: then single calls find the row and the reason.
        """
        columns = self._decode.all(rows) if self._reads_many else None
        if columns is None or any(None in columns[number] for number in range(len(self._required))):
            return None

        found = dict(zip(self._keys, columns, strict=True))
        return None if self._checks_turns and any(map(_may_say_turns, found["metadata"])) else found

    def __call__(self, raw: Buffer) -> dict[str, Any]:
        """The values of the fields that the row has.

        :raises RowFault: if the row is not a JSON object, or lacks a required field.
        :raises MediaFault: if it has media.
        """
        found = zip(self._keys, self._decode(raw), strict=True)
        fields: dict[str, Any] = {name: text for name, text in found if text is not None}
        for name in self._required:
            if name not in fields:
                raise self.missing(name, raw)

        for name in self._decoded:
            if name in fields:
                fields[name] = decode_value(fields[name], raw)
        if self._checks_turns and self.account is not None and _may_say_turns(fields.get("metadata")):
            self.account.refuse({"metadata": decode_value(fields["metadata"])}, raw)
        return fields

    def rest(self, raw: Buffer) -> dict[str, str]:
        """The keys that are not read, each with the beginning of its value; none of a bad row, which is told anyway."""
        found: dict[str, str] = {}
        with suppress(RowFault):
            self(raw)
            found |= {} if self.account is None else self.account.rest_of(raw, self.read_keys)
        return found

    def _refuse(self, row: dict[str, Any], raw: bytes) -> None:
        """Refuse a row in which a key speaks that is not read, unless it is no such row at all."""
        needed = [_places(self._keys[name]) for name in self._required]
        if self.account is not None and all(any(row.get(key) is not None for key in keys) for keys in needed):
            self.account.refuse(row, raw, self._keys.values())

    def missing(self, name: str, raw: Buffer, otherwise: str = "") -> RowFault:
        """The fault of a row without a field that it must have; ``otherwise`` as for :func:`missing_key`."""
        return missing_key(raw, self._keys[name], self._required[name], otherwise)

    def text(self, name: str, value: Any, raw: Buffer, way_out: str = "") -> str:
        """The value of a field that must be a string which can be encoded as UTF-8.

        :raises RowFault: if it is not.
        """
        if not isinstance(value, str):
            raise self.wrong_type(name, "a string", value, raw, way_out)

        return self.encodable(name, value, raw)

    def messages(self, name: str, value: Any, raw: Buffer) -> list[Message]:
        """The chat in the value of a field; a string is one user turn.

        :raises RowFault: if it is not a list of messages with a role.
        """
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(messages, list):
            raise self.wrong_type(name, "a string or a list of messages", value, raw)

        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise self.wrong_type(f"{name}[{number}]", "an object with 'role' and 'content'", message, raw)

            if message.get("role") is None:
                has = ", ".join(map(ascii, message)) or "nothing"
                has += "; these are turns of ShareGPT: set dialect='sharegpt'" if "from" in message else ""
                raise RowFault("AD112", f"{self.name(f'{name}[{number}]')} has no 'role'; it has {has}", raw)

        return messages

    def chat(self, name: str, value: Any, raw: Buffer) -> list[Message]:
        """As :meth:`messages`, for a chat that is a list, or this list as JSON text.

        :raises RowFault: also for other text: as one turn of the user it would have nothing to train.
        """
        if isinstance(value, str):
            if not LIST_OF_OBJECTS.match(value):
                raise self.wrong_type(name, "a list of messages", value, raw)

            value = self._decode_inner(name, self.encodable(name, value, raw).encode(), raw)
        return self.messages(name, value, raw)

    def left_out(self, name: str, messages: list[Message], flags: Set[str], raw: Buffer) -> list[int]:
        """The indices of the messages of which a flag says that they are not trained.

        :param name: the row's field with the messages, for errors.
        :param flags: the keys of a message that are flags.
        :raises RowFault: for a flag that is neither yes nor no, or is yes in a message that is not the assistant's.
        """
        if flags.isdisjoint(chain.from_iterable(messages)):  # nearly always
            return []

        found = []
        for number, message in enumerate(messages):
            said = {key: message[key] for key in message if key in flags and message[key] is not None}
            for key, value in said.items():
                reason = ""
                if value not in (0, 1):  # which are false and true, too
                    got = json_type(value).replace("a number", "another number")
                    reason = f"must be true, false, 1 or 0, got {got}"
                elif value and message["role"] != "assistant":
                    reason = "says that the turn is trained, but it is not the assistant's; set it to false"
                if reason:
                    others = tuple(flag for flag in TURN_FLAGS if flag in flags and flag != key)
                    reason = f"{self.name(f'{name}[{number}]')}: {key!r} {reason}; turn_flags={others} ignores it"
                    raise RowFault("AD111", reason, raw)

            if not all(said.values()):
                found.append(number)
        return found

    def tools(self, text: Buffer | None, raw: Buffer) -> Tools | None:
        """The list of tools, which may be JSON text in a string; None for null, or a row without tools.

        :raises RowFault: if they are not a list.
        """
        schemas = None if text is None else decode_value(text, raw)
        if text is None or schemas is None:
            return None

        if isinstance(schemas, str):
            text = self.encodable("tools", schemas, raw).encode()
            schemas = self._decode_inner("tools", text, raw)
        if not isinstance(schemas, list):
            raise self.wrong_type("tools", "a list of JSON schemas", schemas, raw)

        return Tools(bytes(text), schemas)

    def schemas(self, tools: Tools | None, raw: Buffer) -> list[Message] | None:
        """The tools as a template needs them.

        :raises RowFault: if one of them is not a JSON schema.
        """
        if tools is None:
            return None

        for number, schema in enumerate(tools.schemas):
            if not isinstance(schema, dict):
                raise self.wrong_type(f"tools[{number}]", "a JSON schema", schema, raw)

        return tools.schemas

    def _decode_inner(self, name: str, text: bytes, raw: Buffer) -> Any:
        try:
            return decode_value(text)
        except RowFault as fault:
            reason = f"{self.name(name)} is a string, and its text is not JSON: {fault.reason}"
            raise RowFault(fault.code, reason, raw) from None

    def metadata(self, text: Buffer | None, tools: Tools | None, raw: Buffer) -> bytes:
        """The metadata as JSON text, with the tools as its last key: of two equal keys, readers use the last one.

        Empty if the metadata are empty, such as null or ``[]``.

        :raises RowFault: if the row has tools, and the metadata are not an object.
        """
        metadata = b"" if text is None else bytes(text)
        if not metadata.startswith(b"{") and not (metadata and decode_value(metadata, raw)):
            metadata = b""
        if tools is None:
            return metadata

        metadata = metadata or b"{}"
        if not metadata.startswith(b"{"):
            raise self.wrong_type("metadata", "an object, as the row has tools", decode_value(metadata, raw), raw)

        comma = b"," if metadata[1:-1].strip() else b""
        return metadata[:-1] + comma + b'"tools":' + tools.text + b"}"

    def encodable(self, name: str, text: str, raw: Buffer) -> str:
        """``text``, if it can be encoded as UTF-8.

        :raises RowFault: for an unpaired surrogate, which tokenizers reject.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                reason = f"unpaired surrogate \\u{ord(text[error.start]):04x} in {self.name(name)}"
                raise RowFault("AD107", reason, raw) from None
        return text

    def wrong_type(self, name: str, need: str, value: Any, raw: Buffer, way_out: str = "") -> RowFault:
        """The fault of a field that has the wrong type."""
        return RowFault("AD111", f"{self.name(name)} must be {need}, got {json_type(value)}{way_out}", raw)

    def name(self, name: str) -> str:
        """The row's own key, in quotes, for a field ``name`` or an item of it, ``name[number]``."""
        field, bracket, rest = name.partition("[")
        return ascii(self._keys[field]) + bracket + rest
