"""Finds the media of a chat (pictures, videos, sounds), and leaves the media of a row out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.row_fields import LIST_OF_OBJECTS
from asyncdata.tokenization.rows import MEDIA_KEYS, RowFault, decode_object, decode_value, is_empty

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ("MEDIA_LEFT_OUT", "PART_KEYS", "is_plain_text", "medium_of", "without_media")

Buffer = bytes | memoryview

MEDIA_LEFT_OUT = "media_left_out"
"""The note of a sample whose row had media."""

_KINDS = ("image", "video", "audio")
PART_KEYS = frozenset({*MEDIA_KEYS, "image_url", "video_url", "audio_url", "input_audio"})
"""The keys of a content part that have a medium, if they are not empty."""


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
