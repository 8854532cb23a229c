"""A chat template's result for the chats of one shape: constant text with values of the chat in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ("ADD", "NOTHING_PROVEN", "Load", "Pieces", "Program", "Step")

Load = tuple["int | None", str]
"""A value of the chat: the index of its message (None for the tools), and its key."""

Pieces = tuple["str | int", ...]
"""A text in pieces: constant strings, and the indices of values."""

ADD: Any = object()
"""The outcome of a step whose result is added to the values."""


class Step(NamedTuple):
    """A step or a guard: compute ``function`` of a value, and add the result to the values or check it.

    :ivar source: the index of the value; pieces for a text that is joined first.
    :ivar outcome: the result for which the rest of the program holds; :data:`ADD` for a step that adds a value.
    """

    source: int | Pieces
    function: Callable[[Any], Any]
    outcome: Any


class Program:
    """Computes the text of a chat from the values of its messages.

    :param loads: the first values.
    :param steps: the checks of the values and the computations, in order.
    :param parts: the text, split at the borders that a caller needs. None: these chats must be rendered.
    :param absent: strings that no value may contain.
    :ivar steps: the steps, each with its source, function and outcome.
    """

    __slots__ = ("_absent", "_loads", "_texts", "parts", "steps")

    def __init__(
        self,
        loads: Sequence[Load],
        steps: Sequence[Step],
        parts: Sequence[Pieces] | None,
        absent: tuple[str, ...] = (),
    ) -> None:
        self._loads = tuple(loads)
        self.steps = [
            (each.source if isinstance(each.source, int) else _Blank(each.source), *each[1:]) for each in steps
        ]
        self._texts = [] if parts is None else [_Blank(part) for part in parts]
        self._absent = absent
        self.parts = parts

    def values(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Any] | None:
        """The values of a chat of the program's shape; None if the program does not hold for it."""
        values = [tools if number is None else messages[number][key] for number, key in self._loads]
        try:
            for source, function, outcome in self.steps:
                found = function(values[source] if isinstance(source, int) else source.filled(values))
                if outcome is ADD:
                    values.append(found)
                elif found != outcome:
                    return None

        except RecursionError:  # a value that is too deep to be written; the template itself names the line
            return None

        return values

    def texts(self, values: list[Any]) -> list[str] | None:
        """The parts of the text for these values; None if the chat must be rendered."""
        if self.parts is None:
            return None

        for words in self._absent:
            if any(words in value for value in values if isinstance(value, str)):
                return None

        return [text.filled(values) for text in self._texts]

    def checked(self, messages: Sequence[Mapping[str, Any]], tools: Any, expected: Callable[[], list[str]]) -> Program:
        """The program; :data:`NOTHING_PROVEN` if its result for a chat differs from ``expected``.

        This can happen only if a later release of Jinja has changed its behaviour.
        """
        values = None if self.parts is None else self.values(messages, tools)
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
"""The program that holds for every chat, and says that it must be rendered."""
