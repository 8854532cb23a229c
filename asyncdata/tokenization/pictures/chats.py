"""Chats with pictures: the places of pictures in their messages, and in their rendered text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.media import PART_KEYS, medium_of
from asyncdata.tokenization.pictures.files import Picture, picture_of
from asyncdata.tokenization.rows import MEDIA_KEYS, RowFault, is_empty
from asyncdata.tokenization.spans import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.tokenization.pictures.settings import Processor

Message = dict[str, Any]

_PLACE = "<image>"
_PART = {"type": "image"}
_BOTH = (False, True)
"""What is said in other turns, and in answers."""

PLACE_IS_TEXT = "picture_place_is_text"
"""The note of a row that says ``<image>``, and means no picture."""


class Places(NamedTuple):
    """A chat with a part ``{"type": "image"}`` for each picture, the pictures in this order, and notes of the row."""

    messages: list[Message]
    pictures: list[Picture]
    notes: tuple[str, ...]


def with_places(messages: list[Message], images: Any, settings: Processor) -> Places:
    """The places of a chat, and their pictures.

    A part without a picture of its own, or ``<image>`` in a text, is the place of the next one of ``images``. In
    answers, ``<image>`` is text if the other places are as many as the pictures.

    :param images: what the row has beside its chat; None: nothing; []: it says that it has no pictures.
    :raises RowFault: AD114, for more or fewer places than pictures; AD130, for videos and sounds, and pictures of a
        turn that are no parts of its content; AD457, see files.
    """
    listed = images if isinstance(images, list) else [] if images is None else [images]
    left = iter([picture_of(value, f"picture {number} of the row", settings) for number, value in enumerate(listed, 1)])
    parts = [(message["role"] == "assistant", part) for message in messages for part in _parts(message)]
    media = [part for _, part in parts if medium_of(part) is not None]
    num_parts = len(media) - sum(map(bool, map(_own, media)))
    asked, answered = (sum(_text(part).count(_PLACE) for is_answer, part in parts if is_answer is it) for it in _BOTH)
    where: tuple[bool, ...] = _BOTH
    if len(listed) == num_parts + asked:
        where = _BOTH[:1]
    elif len(listed) != num_parts + asked + answered:
        where = ()
        if listed or num_parts or not (media or images == []):
            raise RowFault("AD114", _miscounted(len(listed), num_parts + asked, answered, settings))

    pictures: list[Picture] = []
    changed = [
        _message(message, left, (message["role"] == "assistant") in where, pictures, settings) for message in messages
    ]
    if len(pictures) > settings.max_pictures:
        raise RowFault("AD457", f"the row has {len(pictures)} pictures, more than max_pictures={settings.max_pictures}")

    is_text = (asked and not where) or (answered and True not in where)
    return Places(changed, pictures, (PLACE_IS_TEXT,) if is_text else ())


def _miscounted(num_pictures: int, num_places: int, answered: int, settings: Processor) -> str:
    more = f", and {answered} in answers" if answered else ""
    key = f"Processor(images_key={settings.images_key!r}) names the key of pictures"
    way_out = "" if num_pictures else f"; {key}, and with an empty list under it {_PLACE} is text"
    places = f"its chat has places for {num_places}{more}; a place is {_PLACE} in a text, or a part {_PART}{way_out}"
    return f"the row has {num_pictures} pictures, and {places}"


def _message(
    message: Message, left: Iterator[Picture], has_places: bool, pictures: list[Picture], settings: Processor
) -> Message:
    if beside := [key for key in MEDIA_KEYS if not is_empty(message.get(key))]:
        way_out = f"write {_PART} into its content, and the pictures into the row's {settings.images_key!r}"
        raise RowFault(
            "AD130", f"a turn of the chat has {beside[0]!r} beside its content, which is not read: {way_out}"
        )

    parts = _parts(message)
    if not any(medium_of(part) is not None or (has_places and _PLACE in _text(part)) for part in parts):
        return message

    kept: list[Any] = []
    for part in parts:
        if isinstance(part, dict) and medium_of(part) is not None:
            pictures.append(_picture(part, left, len(pictures) + 1, settings))
            kept.append(_PART)
            continue

        for number, text in enumerate(_text(part).split(_PLACE) if has_places else [_text(part)]):
            if number:
                pictures.append(next(left))
                kept.append(_PART)
            if text:
                kept.append({"type": "text", "text": text})
    return {**message, "content": kept}


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [content]


def _own(part: Message) -> Message:
    """What a part says of its picture; nothing if it is a place."""
    return {key: value for key, value in part.items() if key not in ("type", "text") and value}


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _picture(part: Message, left: Iterator[Picture], number: int, settings: Processor) -> Picture:
    kind = str(part.get("type", "image"))
    if "image" not in kind or any("image" not in key for key in part if key in PART_KEYS and part[key]):
        way_out = "a function of two phases can load videos and sounds (docs/how-to/columns.md)"
        raise RowFault("AD130", f"picture {number} of the chat is {ascii(kind)}, which is not supported; {way_out}")

    if _text(part):
        reason = f"picture {number} of the chat has a 'text' beside it, which is not read: make it a part of its own"
        raise RowFault("AD130", reason)

    own = _own(part)
    return picture_of(own, f"picture {number} of the chat", settings) if own else next(left)


def expanded(text: str, blocks: list[Span], mark: str, texts: Sequence[str]) -> tuple[str, list[Span]]:
    """The text with the pictures' own texts in place of their marks, and the trained blocks, without the pictures.

    :raises RowFault: AD114, if the template has written more or fewer marks.
    """
    pieces = text.split(mark)
    if len(pieces) != len(texts) + 1:
        raise RowFault(
            "AD114",
            f"the template has written {mark!r} {len(pieces) - 1} times for {len(texts)} pictures; it must write one "
            "for each, and a text of the chat must have none",
        )

    found, trained, place, end = [pieces[0]], list[Span](), 0, 0
    for number, piece in enumerate(pieces):
        if number:
            place, end = place + len(mark), end + len(texts[number - 1])
            found += [texts[number - 1], piece]
        stop = place + len(piece)
        trained += [
            (max(block[0], place) - place + end, min(block[1], stop) - place + end)
            for block in blocks
            if max(block[0], place) < min(block[1], stop)
        ]
        place, end = stop, end + len(piece)
    return "".join(found), trained
