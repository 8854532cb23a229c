"""A sample's text for the terminal: trained text, context, and the turns of a chat.

Without colour, trained text is in ``⟦ ⟧``. Everything other than text is in ``⟨ ⟩``: special tokens, characters that
cannot be shown, bytes without a character, and a note for omitted text. A line break of the text is ``↵``, a tab ``⇥``.
If the text itself contains one of these signs, the sign is shown by its code point.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncdata.cli.inspection.loss_mask import MaskedText
    from asyncdata.tokenization.token_text import Piece

__all__ = ("Cell", "Line", "lines_of", "plain_text", "styled_text")

_SIGNS = {"\n": "↵", "\t": "⇥"}
_RESERVED = "⟦⟧⟨⟩↵⇥"
_MAX_ALIKE = 3
_STYLES = {
    ("text", True): "bold green",
    ("special", True): "bold magenta",
    ("sign", True): "green",
    ("text", False): "dim",
    ("special", False): "dim magenta",
    ("sign", False): "dim yellow",
}


class Cell(NamedTuple):
    """A part of a line.

    :ivar kind: ``text``, ``special`` for a special token, or ``sign`` for a replacement.
    :ivar ends_line: whether the text has a line break after it.
    """

    text: str
    kind: str
    is_trained: bool
    ends_line: bool = False


class Line(NamedTuple):
    """One line of the terminal; ``role`` is the role of the turn that starts here, or empty."""

    role: str
    cells: list[Cell]


class _Stretch(NamedTuple):
    """Pieces of one turn that are all trained or all context; ``role`` is that of the turn that starts here."""

    role: str
    pieces: list[Piece]


def lines_of(masked: MaskedText, max_context_tokens: int = 0) -> list[Line]:
    """The lines that show a text.

    :param max_context_tokens: tokens to show of a stretch of context, half from its start and half from its end; 0 for
        all.
    """
    lines: list[Line] = []
    is_open = False
    for stretch in _stretches(masked):
        if stretch.role or not is_open:
            lines.append(Line(stretch.role, []))
        for cell in _cells(stretch.pieces, max_context_tokens):
            if not lines[-1].cells or not lines[-1].cells[-1].ends_line:
                lines[-1].cells.append(cell)
            else:
                lines.append(Line("", [cell]))
        is_open = not (lines[-1].cells and lines[-1].cells[-1].ends_line)
    return lines


def _stretches(masked: MaskedText) -> Iterator[_Stretch]:
    turns = list(reversed(masked.turns))
    place, number = 0, 0
    keys = []
    roles: dict[int, str] = {}
    for piece in masked.pieces:
        while turns and turns[-1].start <= place:
            number += 1
            roles[number] = _shown(turns.pop().role)
        keys.append((number, piece.is_trained))
        place += len(piece.text)
    for key, group in groupby(zip(keys, masked.pieces, strict=True), key=lambda pair: pair[0]):
        yield _Stretch(roles.pop(key[0], ""), [piece for _, piece in group])


def _cells(pieces: list[Piece], max_tokens: int) -> Iterator[Cell]:
    num_tokens = pieces[-1].stop - pieces[0].start
    if pieces[0].is_trained or max_tokens == 0 or num_tokens <= max_tokens:
        yield from _cells_of_all(pieces)
        return

    first, last = pieces[0].start + (max_tokens + 1) // 2, pieces[-1].stop - max_tokens // 2
    begin = [piece for piece in pieces if piece.stop <= first]
    end = [piece for piece in pieces if piece.start >= last]
    num_left = num_tokens - sum(piece.stop - piece.start for piece in begin + end)
    yield from _cells_of_all(begin)
    yield Cell(f"⟨… {num_left:,} tokens …⟩", "sign", False)
    yield from _cells_of_all(end)


def _cells_of_all(pieces: Iterable[Piece]) -> Iterator[Cell]:
    for (name, is_trained), group in groupby(pieces, key=lambda piece: (piece.name, piece.is_trained)):
        alike = list(group)
        if not name:
            yield from _cells_of_text("".join(piece.text for piece in alike), is_trained)
        elif len(alike) > _MAX_ALIKE:
            yield Cell(f"{_shown(name)} ×{len(alike):,}", "special", is_trained)
        else:
            yield from (Cell(_shown(name), "special", is_trained) for _ in alike)


def _cells_of_text(text: str, is_trained: bool) -> Iterator[Cell]:
    for is_plain, group in groupby(text, key=_is_plain):
        if is_plain:
            yield Cell("".join(group), "text", is_trained)
        else:
            yield from (Cell(_sign(char), "sign", is_trained, ends_line=char == "\n") for char in group)


def _is_plain(char: str) -> bool:
    return char.isprintable() and char not in _RESERVED


def _sign(char: str) -> str:
    """The sign for a character. Single bytes are encoded as by Python's ``surrogateescape``."""
    if char in _SIGNS:
        return _SIGNS[char]

    code = ord(char)
    return f"⟨0x{code - 0xDC00:02X}⟩" if 0xDC80 <= code < 0xDD00 else f"⟨U+{code:04X}⟩"


def _shown(name: str) -> str:
    return "".join(char if _is_plain(char) else f"U+{ord(char):04X}" for char in name)


def plain_text(lines: list[Line]) -> str:
    """The lines without colour; trained text is marked in each line."""
    margin = _margin(lines)
    return "\n".join(f"{line.role:<{margin}}│ {_plain(line.cells)}" for line in lines)


def _plain(cells: list[Cell]) -> str:
    runs = []
    for is_trained, group in groupby(cells, key=lambda cell: cell.is_trained):
        text = "".join(f"⟨{cell.text}⟩" if cell.kind == "special" else cell.text for cell in group)
        runs.append(f"⟦{text}⟧" if is_trained else text)
    return "".join(runs)


def styled_text(lines: list[Line], *, is_masked: bool = True) -> list[tuple[str, str]]:
    """The lines as texts with their styles, as ``Output.styled`` takes them.

    :param is_masked: False to show trained text and context in the same way.
    """
    margin = _margin(lines)
    parts = []
    for line in lines:
        parts.append((f"{line.role:<{margin}}│ ", "cyan"))
        for cell in line.cells:
            style = _STYLES[cell.kind, cell.is_trained]
            parts.append((cell.text, style if is_masked else style.replace("dim", "").strip()))
        parts.append(("\n", ""))
    return parts[:-1]


def _margin(lines: list[Line]) -> int:
    return max((len(line.role) + 1 for line in lines if line.role), default=0)
