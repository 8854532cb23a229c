"""Locating a message of a chat by its two ends separately: for templates where neither prefixes nor a mark locate it.

The beginning. If the prompt for the message is a prefix of the whole chat, the message begins after it. Otherwise the
chat is rendered with a mark instead of the message, as in ``chat_template.assistant_spans``. The message begins where
the whole chat and the prompt start to differ, as a turn with thoughts differs from a prompt that closes the thoughts.
Their common part must contain the header of the turn.

The end, by one of three proofs:

- The chat up to and including the message is a prefix of the whole chat.
- The text after the mark is also the end of the whole chat, so the message ends before it. The text that the template
  writes after the message before the next generation prompt belongs to the message as its stop token, if the template
  writes the same at the end of a chat. A different token there occurs only in past turns, and is not trained.
- The template drops the beginning of the message in later turns, such as thoughts before a call. Then the text of the
  chat from the beginning up to the special token that ends the message must be a suffix of the chat up to and
  including the message, and there must be only one such place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.tokenization.spans import Span, common_prefix

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.rendered_texts import Texts
    from asyncdata.tokenization.functions.conversation import Conversation

__all__ = ("by_turn",)


class _Marked(NamedTuple):
    """The chat with a mark instead of a message.

    :ivar text: the rendered text.
    :ivar place: the index of the mark.
    :ivar tail: the text after the mark.
    """

    text: str
    place: int
    tail: str


def by_turn(chat: Conversation, number: int) -> Span | None:
    """The range of message ``number``; None if it cannot be proven. Chats of unknown texts are not supported."""
    chat.texts.refuse_unknown("each end of a message for itself")
    marked = _marked(chat, number)
    start = _start(chat, number, marked)
    if start is None:
        return None

    stop = _stop(chat, number, start, marked)
    return None if stop is None or stop < start else (start, stop)


def _marked(chat: Conversation, number: int) -> _Marked | None:
    mark = chat.unused_marks()[0]
    text = chat.with_content(number, mark, keeps_form=True)
    if text is None or text.count(mark) != 1:
        return None

    place = text.index(mark)
    return _Marked(text, place, text[place + 1 :])


def _start(chat: Conversation, number: int, marked: _Marked | None) -> int | None:
    prompt = chat.prompt(number)
    if prompt is not None and chat.text.startswith(prompt):
        return len(prompt)

    header = chat.header_of(number)
    if marked is None or not header:
        return None

    words = chat.words_before(number, *chat.unused_marks(), keeps_form=True)
    first = next((token for token in chat.texts.special if header.startswith(token)), None)
    at = -1 if first is None else words.rfind(first)
    if first is None or at < 0:
        return None

    header_at = marked.place - len(words) + at
    shared = min(header_at + common_prefix(words[at:], header), common_prefix(chat.text, marked.text))
    if shared in (header_at + len(header), marked.place):
        return shared  # the whole header, or as much of it as the template writes

    start = header_at + _whole_words(chat.text[header_at:shared], chat.text[header_at:], chat.texts)
    return start if start > header_at + len(first) else None


def _whole_words(shared: str, text: str, texts: Texts) -> int:
    """The length of the part of ``shared``, a prefix of ``text``, that ends after white space or a special token."""
    length = 0
    for found in re.finditer("|".join([r"\s", *map(re.escape, texts.special)]), text):
        if found.end() <= len(shared):
            length = found.end()
    return length


def _stop(chat: Conversation, number: int, start: int, marked: _Marked | None) -> int | None:
    up_to = chat.up_to(number) or chat.up_to(number, keeps_form=True)
    if up_to is not None and chat.text.startswith(up_to) and len(up_to) >= start:
        return start + len(_said(up_to[start:], chat.texts))

    by_mark = None if marked is None else _stop_by_mark(chat, number, marked)
    return by_mark if by_mark is not None else _stop_by_end(chat, number, start)


def _said(text: str, texts: Texts) -> str:
    """The text without white space after a final special token: the model does not generate that white space."""
    said = text.rstrip()
    return said if said.endswith(texts.special) else text


def _stop_by_mark(chat: Conversation, number: int, marked: _Marked) -> int | None:
    if not chat.text.endswith(marked.tail):
        return None

    end, mark = len(chat.text) - len(marked.tail), marked.text[marked.place]
    last = chat.with_content(number, mark, last=True, keeps_form=True)
    ending = _ending(chat, number, mark)
    if last is None or last.count(mark) != 1 or ending is None:
        return None

    at_end = last.partition(mark)[2]
    if marked.tail.startswith(ending):
        said = _said(ending, chat.texts)
        return end + len(said) if at_end.startswith(said) else end

    stop = chat.texts.stop_at(marked.tail, 0)
    return end + stop.end() if stop is not None and marked.tail == at_end else None


def _ending(chat: Conversation, number: int, mark: str) -> str | None:
    """The text that the template writes between a message and the next generation prompt."""
    asked, header = chat.with_content(number, mark, last=True, keeps_form=True, asks=True), chat.header_of(number)
    if asked is None or not header or asked.count(mark) != 1:
        return None

    rest = asked.partition(mark)[2]
    return rest[: -len(header)] if rest.endswith(header) else None


def _stop_by_end(chat: Conversation, number: int, start: int) -> int | None:
    """The end of a message whose beginning the template has dropped."""
    whole = (chat.alone(number) or "").rstrip()
    token = next((each for each in chat.texts.special if whole.endswith(each)), None)
    if token is None:
        return None

    places = [start + found.end() for found in re.finditer(re.escape(token), chat.text[start:])]
    stops = [stop for stop in places if whole.endswith(chat.text[start:stop]) and stop - start > len(token)]
    return stops[0] if len(stops) == 1 else None
