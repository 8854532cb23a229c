"""Finds the media of a chat (pictures, videos, sounds), leaves them out, and checks turns whose content is not text."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.rows import (
    LIST_OF_OBJECTS,
    MEDIA_KEYS,
    MediaFault,
    RowFault,
    decode_object,
    decode_value,
    is_empty,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncdata.tokenization.chat_template.template import ChatTemplate
    from asyncdata.tokenization.row_fields import RowReader

Buffer = bytes | memoryview

Message = dict[str, Any]

MEDIA_LEFT_OUT = "media_left_out"
"""The note of a sample whose row had media."""

_KINDS = ("image", "video", "audio")
PART_KEYS = frozenset({*MEDIA_KEYS, "image_url", "video_url", "audio_url", "input_audio"})
"""The keys of a content part that have a medium, if they are not empty."""

_SPEAKERS = ("system", "developer", "user", "assistant")
"""The roles whose turns say something. What a tool returns may have any form, and may be nothing."""

_MEDIA = frozenset(MEDIA_KEYS)
_CALLS = ("tool_calls", "function_call")

_OF_ANTHROPIC = {
    "tool_use": "; write the call into 'tool_calls' of its turn",
    "tool_result": "; make it a turn of its own, of the role 'tool', whose content may have text and media",
}


def is_plain_text(part: Any) -> bool:
    """Whether a content part is ``{"type": "text", "text": ...}`` and nothing else, as nearly all are."""
    return type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str


def medium_of(part: Any) -> str | None:
    """What makes a content part or a message a medium: its type, as ``image_url``, or a key; None if it is none."""
    if not isinstance(part, dict):
        return None

    return _kind_of(part) or next((key for key in part if key in PART_KEYS and not is_empty(part[key])), None)


def _kind_of(part: dict[str, Any]) -> str | None:
    kind = part.get("type")
    return kind if isinstance(kind, str) and any(word in kind.lower() for word in _KINDS) else None


def kind_of(medium: str) -> str:
    """``image``, ``video`` or ``audio``, of what :func:`medium_of` has found."""
    return next(kind for kind in _KINDS if kind in medium.lower())


def without_media(raw: Buffer, keys: Collection[str]) -> bytes:
    """The row without the values of ``keys``, and without the media in its chats.

    :raises RowFault: if it is not a JSON object.
    """
    row = {key: _chat_without(value) for key, value in decode_object(raw).items() if key not in keys}
    return json.dumps(row, separators=(",", ":")).encode("ascii")


def _chat_without(value: Any) -> Any:
    """The chat without media; any other value as it is. A chat may be JSON text."""
    chat = value
    if isinstance(value, str) and LIST_OF_OBJECTS.match(value):
        try:
            chat = decode_value(value.encode())
        except (RowFault, UnicodeEncodeError):
            return value  # its reader names the fault

    return list(map(_message_without, chat)) if isinstance(chat, list) else value


def _message_without(message: Any) -> Any:
    if not isinstance(message, dict):
        return message

    message = {key: value for key, value in message.items() if key not in MEDIA_KEYS}
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    if any(map(medium_of, parts)):
        kept: Any = [part for each in parts if (part := _part_without(each)) is not None]
        texts = [part.get("text") if isinstance(part, dict) else part for part in kept]
        if all(isinstance(text, str) for text in texts):
            kept = "".join(map(str, texts))
        # An answer of which nothing is left is not an empty answer, which would train the end token.
        message["content"] = kept or (None if message.get("role") == "assistant" else "")
    return message


def _part_without(part: Any) -> Any:
    if medium_of(part) is None:
        return part

    is_text = _kind_of(part) is None and isinstance(part.get("text"), str)
    return {"type": "text", "text": part["text"]} if is_text else None


def _has_only_calls(message: Message) -> bool:
    return message["content"] == "" and any(map(message.get, _CALLS))


class ReadChat:
    """The chat of a row. Nearly always the content of all its turns is text, and there is nothing to check.

    :param row: reads the rows.
    :param name: the row's field with the chat, for errors.
    :param raw: the row.
    :param may_have_pictures: whether ``{"type": "image"}`` is a place of a picture.
    :raises MediaFault: if a turn has media, unless rows may have them.
    """

    def __init__(
        self,
        row: RowReader,
        name: str,
        messages: list[Message],
        tools: list[Message] | None,
        raw: Buffer,
        *,
        may_have_pictures: bool = False,
    ) -> None:
        self._row = row
        self._name = name
        self._messages = messages
        self._tools = tools
        self._raw = raw
        self._unusual = [
            number
            for number, message in enumerate(messages)
            if type(message.get("content")) is not str
            or (len(message) > 2 and (not _MEDIA.isdisjoint(message) or _has_only_calls(message)))
        ]
        for number in self._unusual if row.media and not may_have_pictures else ():
            self._refuse_media(number)

    def check_written(self, text: str, template: ChatTemplate) -> None:
        """Check that a template has written what the turns say whose content is not text.

        :param text: the rendered chat.
        :raises RowFault: for a turn without content, or a content part that is not written as text.
        """
        for number in self._unusual:
            message = self._messages[number]
            content = message.get("content")
            if content is None or content in ([], {}) or _has_only_calls(message):
                self._check_other_keys(number, text, template)
            elif isinstance(content, list):
                self._check_parts(number, [part for part in content if isinstance(part, dict)], text, template)

    def _refuse_media(self, number: int) -> None:
        message = self._messages[number]
        content = message.get("content")
        suspects = [part for part in content if not is_plain_text(part)] if isinstance(content, list) else [content]
        if not _MEDIA.isdisjoint(message):
            suspects.append(message)
        medium = next(filter(None, map(medium_of, suspects)), None)
        if medium is not None:
            raise MediaFault(f"{self._place(number)} has {ascii(medium)}", self._row.media, self._raw)

    def _check_other_keys(self, number: int, text: str, template: ChatTemplate) -> None:
        """Check that the template writes another key of a turn without content."""
        message = self._messages[number]
        if message["role"] not in _SPEAKERS or (message.get("tool_calls") and template.names("tool_calls")):
            return

        bare: Message = {key: message[key] for key in ("role", "content") if key in message}
        chat = [*self._messages[:number], bare, *self._messages[number + 1 :]]
        if _rendered(chat, self._tools, template) == text:
            others = ", ".join(ascii(key) for key in message if key not in bare)
            none = "empty 'content'" if message.get("content") == "" else "no 'content'"
            what = f"{none}, and the template writes nothing of its {others}" if others else none
            raise self._fault("AD132", number, f"has {what}")

    def _check_parts(self, number: int, parts: list[Message], text: str, template: ChatTemplate) -> None:
        """Check that the template writes the parts of a content as text."""
        message = self._messages[number]
        may_be = "[{'" in text and any("type" in part or "text" in part for part in parts)
        if may_be and str(message["content"]) in text:
            reason = "has a list of parts, which the template writes as Python's text; join their texts to a string"
            raise self._fault("AD131", number, reason)

        for part in parts if message["role"] in _SPEAKERS else ():
            if not is_plain_text(part) and not _is_written(part, text, template):
                has = ", ".join(map(ascii, part)) + _OF_ANTHROPIC.get(str(part.get("type")), "")
                raise self._fault("AD131", number, f"has a part that the template does not write: an object of {has}")

    def _place(self, number: int) -> str:
        return self._row.name(f"{self._name}[{number}]")

    def _fault(self, code: str, number: int, reason: str) -> RowFault:
        return RowFault(code, f"{self._place(number)} {reason}", self._raw)


def _rendered(messages: list[Message], tools: list[Message] | None, template: ChatTemplate) -> str | None:
    with suppress(RowFault):
        return template.rendered(template.fitted(messages), tools)

    return None


def _is_written(part: Message, text: str, template: ChatTemplate) -> bool:
    kind, words = part.get("type"), part.get("text")
    if isinstance(words, str):
        # A template may take a part with the key of a medium for one, even if it is null.
        return (kind == "text" and part.keys().isdisjoint(PART_KEYS)) or words.strip() in text

    return isinstance(kind, str) and kind != "text" and template.names(kind)
