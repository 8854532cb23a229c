"""What a chat template comes to for chats of one shape: constant words with values of the chat between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ("ADD", "NOTHING_PROVEN", "Load", "Pieces", "Program", "Step")

Load = tuple["int | None", str]
"""A value of the chat: the number of its message, None for the tools, and the key."""

Pieces = tuple["str | int", ...]
"""A text in pieces: words, and the numbers of the values that stand between them."""

ADD: Any = object()
"""In place of a step's outcome: what it comes to is one more value."""


class Step(NamedTuple):
    """Work out ``function`` of a value, and check what it comes to, or add it to the values.

    :ivar source: the number of the value; pieces for a text that is put together first.
    :ivar outcome: what the rest of the program holds for; :data:`ADD` for a step that adds a value.
    """

    source: int | Pieces
    function: Callable[[Any], Any]
    outcome: Any


class Program:
    """How the text of a chat follows from what its messages hold.

    :param loads: the first values.
    :param steps: what is asked of the values, in this order, and what is made of them.
    :param segments: the text, cut where somebody needs to know the length. None: these chats must be rendered.
    :param absent: strings that no value may have.
    """

    __slots__ = ("_absent", "_loads", "_steps", "_texts", "segments")

    def __init__(
        self,
        loads: Sequence[Load],
        steps: Sequence[Step],
        segments: Sequence[Pieces] | None,
        absent: tuple[str, ...] = (),
    ) -> None:
        self._loads = tuple(loads)
        self._steps = [
            (each.source if isinstance(each.source, int) else _Blank(each.source), *each[1:]) for each in steps
        ]
        self._texts = [] if segments is None else [_Blank(segment) for segment in segments]
        self._absent = absent
        self.segments = segments

    @property
    def num_steps(self) -> int:
        """How much is asked of a chat, and made of it."""
        return len(self._steps)

    def values(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Any] | None:
        """The values of a chat of the program's shape; None where the program does not hold for it."""
        values = [tools if number is None else messages[number][key] for number, key in self._loads]
        try:
            for source, function, outcome in self._steps:
                found = function(values[source] if isinstance(source, int) else source.filled(values))
                if outcome is ADD:
                    values.append(found)
                elif found != outcome:
                    return None

        except RecursionError:  # a value that is too deep to be written; the template itself names the line
            return None

        return values

    def texts(self, values: list[Any]) -> list[str] | None:
        """The segments of the chat whose values they are; None where it must be rendered."""
        if self.segments is None:
            return None

        for words in self._absent:
            if any(words in value for value in values if isinstance(value, str)):
                return None

        return [text.filled(values) for text in self._texts]

    def checked(self, messages: Sequence[Mapping[str, Any]], tools: Any, expected: Callable[[], list[str]]) -> Program:
        """The program; :data:`NOTHING_PROVEN` if the chat whose texts are ``expected`` should come out otherwise.

        It cannot, if Jinja means what it meant when this was written.
        """
        values = None if self.segments is None else self.values(messages, tools)
        texts = None if values is None else self.texts(values)
        return self if texts is None or texts == expected() else NOTHING_PROVEN


class _Blank:
    """Pieces of a text, ready to be filled in."""

    __slots__ = ("_places", "_words")

    def __init__(self, pieces: Pieces) -> None:
        self._words = [piece if isinstance(piece, str) else "" for piece in pieces]
        self._places = [(place, piece) for place, piece in enumerate(pieces) if isinstance(piece, int)]

    def filled(self, values: list[Any]) -> str:
        """The text."""
        words = self._words.copy()
        for place, number in self._places:
            words[place] = values[number]
        return "".join(words)


NOTHING_PROVEN = Program((), (), None)
"""Holds for every chat, and says that it must be rendered."""
