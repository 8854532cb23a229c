"""The fields of a row that a prompt is made of: its text or chat, label, metadata and tools."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.rows import RowDecoder, RowFault, decode_value, json_type, missing_key

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("RowReader", "Tools")

Buffer = bytes | memoryview
Message = dict[str, Any]

_LIST_OF_OBJECTS = re.compile(r"\s*(?:\[\s*\{|\[\s*\]\s*\Z|\{\s*[\"']role[\"'])")
"""How the text of messages begins, or of one of them, which is no list: be it JSON, or what Python prints."""

_REQUIRED = ("prompt", "label")


class Tools(NamedTuple):
    """A row's tools, as JSON text and decoded."""

    text: bytes
    schemas: list[Any]


class RowReader:
    """Takes a row's fields as JSON text, and names them by the row's own keys where something is wrong with them.

    :param keys: the row's key for each field, by the field's name; None: rows have no such field. A row must have its
        ``prompt`` and its ``label``, and may have any other.
    """

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        self._keys = {name: key for name, key in keys.items() if key is not None}
        self._decode = RowDecoder(tuple(self._keys.values()))

    def __call__(self, raw: Buffer) -> dict[str, Buffer]:
        """The JSON text of every field that the row has.

        :raises RowFault: if the row is no JSON object, or lacks what it must have.
        """
        found = zip(self._keys, self._decode(raw), strict=True)
        fields: dict[str, Buffer] = {name: text for name, text in found if text is not None}
        for name in _REQUIRED:
            if name not in fields and name in self._keys:
                raise missing_key(raw, self._keys[name], f"{name}_key")

        return fields

    def messages(self, prompt: Any, raw: Buffer) -> list[Message]:
        """The chat that ``prompt`` is; a string is one user turn.

        :raises RowFault: if it is no list of messages with a role.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list):
            raise self.wrong_type("prompt", "a string or a list of messages", prompt, raw)

        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise self.wrong_type(f"prompt[{number}]", "an object with 'role' and 'content'", message, raw)

            if message.get("role") is None:
                has = ", ".join(map(ascii, message)) or "nothing"
                raise RowFault("AD112", f"{self.name(f'prompt[{number}]')} has no 'role'; it has {has}", raw)

        return messages

    def chat(self, value: Any, raw: Buffer) -> list[Message]:
        """As :meth:`messages`, of a chat that may also be JSON text in a string.

        :raises RowFault: likewise, and if the text begins as a list of objects does, and is no JSON.
        """
        begins = _LIST_OF_OBJECTS.match(value) if isinstance(value, str) else None
        if begins is None:
            return self.messages(value, raw)

        return self.messages(self._decode_inner("prompt", self.encodable("prompt", value, raw).encode(), raw), raw)

    def tools(self, text: Buffer, raw: Buffer) -> Tools | None:
        """The list of tools, which the row may have as JSON text in a string; None for null.

        :raises RowFault: if they are no list.
        """
        schemas = decode_value(text, raw)
        if schemas is None:
            return None

        if isinstance(schemas, str):
            text = self.encodable("tools", schemas, raw).encode()
            schemas = self._decode_inner("tools", text, raw)
        if not isinstance(schemas, list):
            raise self.wrong_type("tools", "a list of JSON schemas", schemas, raw)

        return Tools(bytes(text), schemas)

    def schemas(self, tools: Tools | None, raw: Buffer) -> list[Message] | None:
        """The tools as a template needs them.

        :raises RowFault: if one of them is no JSON schema.
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
            reason = f"{self.name(name)} is a string, and its text is no JSON: {fault.reason}"
            raise RowFault(fault.code, reason, raw) from None

    def metadata(self, text: Buffer | None, tools: Tools | None, raw: Buffer) -> bytes:
        """The row's own text, with its tools at the end: a later key goes before an earlier one of the same name.

        Empty for metadata that Python takes for nothing.

        :raises RowFault: if it is no object, and has to take up tools.
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
        """``text``, which no tokenizer will refuse.

        :raises RowFault: for half of a surrogate pair.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                reason = f"unpaired surrogate \\u{ord(text[error.start]):04x} in {self.name(name)}"
                raise RowFault("AD107", reason, raw) from None
        return text

    def wrong_type(self, name: str, need: str, value: Any, raw: Buffer, way_out: str = "") -> RowFault:
        """The fault of a field that is not what it must be."""
        return RowFault("AD111", f"{self.name(name)} must be {need}, got {json_type(value)}{way_out}", raw)

    def name(self, name: str) -> str:
        """The row's own key for what is here called ``name`` or ``name[number]``."""
        field, bracket, rest = name.partition("[")
        return ascii(self._keys[field]) + bracket + rest
