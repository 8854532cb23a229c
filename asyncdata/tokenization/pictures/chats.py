"""Chats with media: their places in messages, and in the rendered text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.column_writer import Span
from asyncdata.tokenization.media import PART_KEYS, kind_of, medium_of
from asyncdata.tokenization.pictures.files import NOUNS, Medium, named_medium
from asyncdata.tokenization.rows import MEDIA_KEYS, RowFault, is_empty

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncdata.tokenization.pictures.settings import Processor

Message = dict[str, Any]

_BOTH = (False, True)
"""What is said in other turns, and in answers."""

PLACE_IS_TEXT = "{}_place_is_text"
"""The note of a row that says ``<image>``, or ``<video>``, and means no picture, or no video."""

PLACED_FIRST = "{}_placed_first"
"""The note of a row whose chat has no places: its pictures come first."""


class Places(NamedTuple):
    """A chat with a part ``{"type": kind}`` for each medium, the media in this order, and notes of the row."""

    messages: list[Message]
    media: list[Medium]
    notes: tuple[str, ...]


class _Kind(NamedTuple):
    """The media of one kind that a row has beside its chat, and where its text has places for them."""

    left: Iterator[Medium]
    where: tuple[bool, ...]


def with_places(messages: list[Message], given: Mapping[str, Any], settings: Processor) -> Places:
    """The places of a chat, and their media.

    A part without a medium of its own, or ``<image>`` in a text, is the place of the next one of ``images``; so it is
    for other kinds. In answers, ``<image>`` is text if the other places are as many as the pictures. A chat of nothing
    but texts without places has its media, if they are of one kind, before the first text of the user, as TRL does it.

    :param given: what the row has beside its chat, for each kind that may be read; None: nothing; []: it says that it
        has no such media.
    :raises RowFault: AD114, for more or fewer places than media; AD130, for kinds that are not read, and media of a
        turn that are no parts of its content; AD457, see files.
    """
    messages, first = _with_first(messages, given)
    parts = [(message["role"] == "assistant", part) for message in messages for part in _parts(message)]
    found, notes = {}, [PLACED_FIRST.format(NOUNS[kind]) for kind in first]
    for kind, values in given.items():
        found[kind], is_text = _placed(kind, values, parts, settings)
        notes += [PLACE_IS_TEXT.format(NOUNS[kind])] * is_text
    media: list[Medium] = []
    changed = [_message(message, found, media, settings) for message in messages]
    if len(media) > settings.max_pictures:
        what = " and ".join(f"{NOUNS[kind]}s" for kind in sorted({medium.kind for medium in media}))
        raise RowFault("AD457", f"the row has {len(media)} {what}, more than max_pictures={settings.max_pictures}")

    return Places(changed, media, tuple(notes))


def _with_first(messages: list[Message], given: Mapping[str, Any]) -> tuple[list[Message], list[str]]:
    """The messages, with places before the first text of the user, if there are none; and the kind of these places."""
    kinds = [kind for kind, values in given.items() if values]
    if len(kinds) != 1:
        return messages, []

    at = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    texts = ["" if (content := message.get("content")) is None else content for message in messages]
    is_bare = all(isinstance(text, str) and not any(f"<{kind}>" in text for kind in given) for text in texts)
    if at is None or not is_bare:
        return messages, []

    number = len(values) if isinstance(values := given[kinds[0]], list) else 1
    content = [_part(kinds[0])] * number + [{"type": "text", "text": texts[at]}]
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]], kinds


def _placed(kind: str, values: Any, parts: list[tuple[bool, Any]], settings: Processor) -> tuple[_Kind, bool]:
    """The media of a kind, and whether a place is text."""
    listed = values if isinstance(values, list) else [] if values is None else [values]
    named = [
        named_medium(kind, value, f"{NOUNS[kind]} {number} of the row", settings)
        for number, value in enumerate(listed, 1)
    ]
    media = [part for _, part in parts if (medium := medium_of(part)) is not None and kind_of(medium) == kind]
    num_parts = len(media) - sum(map(bool, map(_own, media)))
    asked, answered = (
        sum(_text(part).count(f"<{kind}>") for is_answer, part in parts if is_answer is it) for it in _BOTH
    )
    where: tuple[bool, ...] = _BOTH
    if len(listed) == num_parts + asked:
        where = _BOTH[:1]
    elif len(listed) != num_parts + asked + answered:
        where = ()
        if listed or num_parts or not (media or values == []):
            raise RowFault("AD114", _miscounted(kind, len(listed), num_parts + asked, answered, settings))

    return _Kind(iter(named), where), bool((asked and not where) or (answered and True not in where))


def _miscounted(kind: str, num_media: int, num_places: int, answered: int, settings: Processor) -> str:
    more, nouns = f", and {answered} in answers" if answered else "", f"{NOUNS[kind]}s"
    name = f"{kind}s_key"
    key = f"Processor({name}={settings.key_of(kind)!r}) names the key of {nouns}"
    way_out = "" if num_media else f"; {key}, and with an empty list under it <{kind}> is text"
    place = f"a place is <{kind}> in a text, or a part {_part(kind)}"
    return f"the row has {num_media} {nouns}, and its chat has places for {num_places}{more}; {place}{way_out}"


def _message(message: Message, kinds: Mapping[str, _Kind], media: list[Medium], settings: Processor) -> Message:
    if beside := [key for key in MEDIA_KEYS if not is_empty(message.get(key))]:
        kind = kind_of(beside[0])
        way_out = (
            f"write {_part(kind)} into its content, and the {NOUNS[kind]}s into the row's {settings.key_of(kind)!r}"
        )
        raise RowFault(
            "AD130", f"a turn of the chat has {beside[0]!r} beside its content, which is not read: {way_out}"
        )

    said = [kind for kind, of in kinds.items() if (message["role"] == "assistant") in of.where]
    place = re.compile(f"<({'|'.join(said)})>" if said else "(?!)()")
    parts = _parts(message)
    if not any(medium_of(part) is not None or place.search(_text(part)) for part in parts):
        return message

    kept: list[Any] = []
    for part in parts:
        if isinstance(part, dict) and medium_of(part) is not None:
            media.append(_medium(part, kinds, media, settings))
            kept.append(_part(media[-1].kind))
            continue

        for number, text in enumerate(place.split(_text(part))):
            if number % 2:
                media.append(next(kinds[text].left))
                kept.append(_part(text))
            elif text:
                kept.append({"type": "text", "text": text})
    return {**message, "content": kept}


def _part(kind: str) -> Message:
    """A place, as a template takes it."""
    return {"type": kind}


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [content]


def _own(part: Message) -> Message:
    """What a part says of its medium; nothing if it is a place."""
    return {key: value for key, value in part.items() if key not in ("type", "text") and value}


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _medium(part: Message, kinds: Mapping[str, _Kind], media: Sequence[Medium], settings: Processor) -> Medium:
    what = medium_of(part) or ""
    kind = kind_of(what)
    number = 1 + sum(medium.kind == kind for medium in media)
    name = f"{NOUNS[kind]} {number} of the chat"
    if kind not in kinds or any(kind not in key for key in part if key in PART_KEYS and part[key]):
        way_out = f"a function of two phases can load {NOUNS[kind]}s (docs/how-to/columns.md)"
        raise RowFault("AD130", f"{name} is {ascii(what)}, which is not supported by the processor; {way_out}")

    if _text(part):
        raise RowFault("AD130", f"{name} has a 'text' beside it, which is not read: make it a part of its own")

    own = _own(part)
    return named_medium(kind, own, name, settings) if own else next(kinds[kind].left)


def expanded(
    text: str, blocks: list[Span], marks: Mapping[str, str], kinds: Sequence[str], texts: Sequence[str]
) -> tuple[str, list[Span]]:
    """The text with the media's own texts in place of their marks, and the trained blocks, without the media.

    :param marks: what the template writes for a medium, by kind; ``kinds``: of the media.
    :raises RowFault: AD114, if the template has written more or fewer marks, or in another order.
    """
    found = re.split("|".join(f"({re.escape(mark)})" for mark in marks.values()), text)
    step = len(marks) + 1
    pieces, marked = found[::step], list(zip(*(found[number::step] for number in range(1, step)), strict=True))
    written = [kind for each in marked for kind, mark in zip(marks, each, strict=True) if mark is not None]
    if written != [*kinds]:
        kind = next((kind for kind in marks if written.count(kind) != kinds.count(kind)), written[0])
        raise RowFault(
            "AD114",
            f"the template has written {marks[kind]!r} {written.count(kind)} times for {kinds.count(kind)} "
            f"{NOUNS[kind]}s; it must write one for each, in their order, and a text of the chat must have none",
        )

    joined, trained, place, end = [pieces[0]], list[Span](), 0, 0
    for number, piece in enumerate(pieces):
        if number:
            place, end = place + len(marks[kinds[number - 1]]), end + len(texts[number - 1])
            joined += [texts[number - 1], piece]
        stop = place + len(piece)
        trained += [
            (max(block[0], place) - place + end, min(block[1], stop) - place + end)
            for block in blocks
            if max(block[0], place) < min(block[1], stop)
        ]
        place, end = stop, end + len(piece)
    return "".join(joined), trained
