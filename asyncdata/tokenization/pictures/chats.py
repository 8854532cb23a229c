"""Chats with pictures: the places of pictures in their messages, and in their rendered text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.tokenization.media import PART_KEYS, medium_of
from asyncdata.tokenization.pictures.files import picture_of
from asyncdata.tokenization.rows import RowFault
from asyncdata.tokenization.spans import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.tokenization.pictures.files import Picture
    from asyncdata.tokenization.pictures.settings import Processor

Message = dict[str, Any]

_PLACE = "<image>"
_PART = {"type": "image"}


def with_places(messages: list[Message], images: Any, settings: Processor) -> tuple[list[Message], list[Picture]]:
    """The messages with ``{"type": "image"}`` for each picture, and the pictures in this order.

    A place without a picture of its own, or the text ``<image>``, is of the next one of ``images``.

    :raises RowFault: AD114, for more or fewer places than pictures; AD130, for videos and sounds; AD457, see files.
    """
    listed = images if isinstance(images, list) else [] if images is None else [images]
    left = iter([picture_of(value, f"picture {number} of the row", settings) for number, value in enumerate(listed, 1)])
    pictures: list[Picture] = []
    changed = [_message(message, left, bool(listed), pictures, settings) for message in messages]
    num_left = sum(1 for _ in left)
    if num_left:
        raise RowFault(
            "AD114",
            f"the row has {len(listed)} pictures, and its chat has places for {len(listed) - num_left}; a place is "
            f"{_PLACE} in a text, or a part {_PART}",
        )

    if len(pictures) > settings.max_pictures:
        raise RowFault("AD457", f"the row has {len(pictures)} pictures, more than max_pictures={settings.max_pictures}")

    return changed, pictures


def _message(
    message: Message, left: Iterator[Picture], has_images: bool, pictures: list[Picture], settings: Processor
) -> Message:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    if not any(medium_of(part) is not None or (has_images and _PLACE in _text(part)) for part in parts):
        return message

    kept: list[Any] = []
    for part in parts:
        if isinstance(part, dict) and medium_of(part) is not None:
            pictures.append(_picture(part, left, len(pictures) + 1, settings))
            kept.append(_PART)
            continue

        for number, text in enumerate(_text(part).split(_PLACE) if has_images else [_text(part)]):
            if number:
                pictures.append(_next(left))
                kept.append(_PART)
            if text:
                kept.append({"type": "text", "text": text})
    return {**message, "content": kept}


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _picture(part: Message, left: Iterator[Picture], number: int, settings: Processor) -> Picture:
    kind = str(part.get("type", "image"))
    if "image" not in kind or any("image" not in key for key in part if key in PART_KEYS and part[key]):
        way_out = "a function of two phases can load videos and sounds (docs/how-to/columns.md)"
        raise RowFault("AD130", f"picture {number} of the chat is {ascii(kind)}, which is not supported; {way_out}")

    own = {key: value for key, value in part.items() if key not in ("type", "text") and value}
    return picture_of(own, f"picture {number} of the chat", settings) if own else _next(left)


def _next(left: Iterator[Picture]) -> Picture:
    for picture in left:
        return picture
    raise RowFault("AD114", "the chat has more places for pictures than the row has pictures")


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
