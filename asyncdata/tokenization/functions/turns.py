"""Checks the turns of a chat whose content is not text: what a chat template would lose of them without a word."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.chat_template.call_arguments import parsed
from asyncdata.tokenization.media import PART_KEYS, is_plain_text, medium_of
from asyncdata.tokenization.rows import MEDIA_KEYS, MediaFault, RowFault

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.template import ChatTemplate
    from asyncdata.tokenization.row_fields import RowReader

__all__ = ("ReadChat", "unusual_turns")

Buffer = bytes | memoryview
Message = dict[str, Any]

_SPEAKERS = ("system", "developer", "user", "assistant")
"""The roles whose turns say something. What a tool returns may have any form, and may be nothing."""

_MEDIA = frozenset(MEDIA_KEYS)


def unusual_turns(messages: list[Message]) -> list[int]:
    """The numbers of the turns whose content is not text, or which have media beside it; nearly always none."""
    return [
        number
        for number, message in enumerate(messages)
        if type(message.get("content")) is not str or (len(message) > 2 and not _MEDIA.isdisjoint(message))
    ]


class ReadChat(NamedTuple):
    """The chat of a row.

    :ivar row: reads the rows.
    :ivar name: the row's field with the chat, for errors.
    :ivar raw: the row.
    """

    row: RowReader
    name: str
    messages: list[Message]
    tools: list[Message] | None
    raw: Buffer

    def refuse_media(self, unusual: list[int]) -> None:
        """Check that the unusual turns have no media, unless rows may have them.

        :raises MediaFault: if one has.
        """
        if self.row.media:
            for number in unusual:
                self._refuse_media(number)

    def check_written(self, unusual: list[int], text: str, template: ChatTemplate) -> None:
        """Check that a template has written what the unusual turns say.

        :param text: the rendered chat.
        :raises RowFault: for a turn without content, or a content part that is not written as text.
        """
        for number in unusual:
            message = self.messages[number]
            content = message.get("content")
            if content is None or content in ([], {}):
                self._check_other_keys(number, text, template)
            elif isinstance(content, list):
                self._check_parts(number, [part for part in content if isinstance(part, dict)], text, template)

    def _refuse_media(self, number: int) -> None:
        message = self.messages[number]
        content = message.get("content")
        suspects = [part for part in content if not is_plain_text(part)] if isinstance(content, list) else [content]
        if not _MEDIA.isdisjoint(message):
            suspects.append(message)
        medium = next(filter(None, map(medium_of, suspects)), None)
        if medium is not None:
            raise MediaFault(f"{self._place(number)} has {ascii(medium)}", self.row.media, self.raw)

    def _check_other_keys(self, number: int, text: str, template: ChatTemplate) -> None:
        """Check that the template writes another key of a turn without content."""
        message = self.messages[number]
        if message["role"] not in _SPEAKERS or (message.get("tool_calls") and template.names("tool_calls")):
            return

        bare: Message = {key: message[key] for key in ("role", "content") if key in message}
        chat = [*self.messages[:number], bare, *self.messages[number + 1 :]]
        if any(_rendered(each, self.tools, template) == text for each in (chat, parsed(chat)) if each is not None):
            others = ", ".join(ascii(key) for key in message if key not in bare)
            what = f"no 'content', and the template writes nothing of its {others}" if others else "no 'content'"
            raise self._fault("AD132", number, f"has {what}")

    def _check_parts(self, number: int, parts: list[Message], text: str, template: ChatTemplate) -> None:
        """Check that the template writes the parts of a content as text."""
        message = self.messages[number]
        may_be = "[{'" in text and any("type" in part or "text" in part for part in parts)
        if may_be and str(message["content"]) in text:
            reason = "has a list of parts, which the template writes as Python's text; join their texts to a string"
            raise self._fault("AD131", number, reason)

        for part in parts if message["role"] in _SPEAKERS else ():
            if not is_plain_text(part) and not _is_written(part, text, template):
                has = ", ".join(map(ascii, part))
                raise self._fault("AD131", number, f"has a part that the template does not write: an object of {has}")

    def _place(self, number: int) -> str:
        return self.row.name(f"{self.name}[{number}]")

    def _fault(self, code: str, number: int, reason: str) -> RowFault:
        return RowFault(code, f"{self._place(number)} {reason}", self.raw)


def _rendered(messages: list[Message], tools: list[Message] | None, template: ChatTemplate) -> str | None:
    with suppress(RowFault):
        return template.rendered(messages, tools)

    return None


def _is_written(part: Message, text: str, template: ChatTemplate) -> bool:
    kind, words = part.get("type"), part.get("text")
    if isinstance(words, str):
        # A template may take a part with the key of a medium for one, even if it is null.
        return (kind == "text" and part.keys().isdisjoint(PART_KEYS)) or words.strip() in text

    return isinstance(kind, str) and kind != "text" and template.names(kind)
