"""What a chat template comes to for chats of one shape: constant words with values of the chat between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ("ADD", "NOTHING_PROVEN", "Pieces", "Program", "Step", "filled")

Message = dict[str, Any]

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


class Program(NamedTuple):
    """How the text of a chat follows from what its messages hold.

    :ivar loads: the first values: the number of a message, None for the tools, and the key.
    :ivar steps: what is asked of the values, in this order, and what is made of them.
    :ivar segments: the text, cut where somebody needs to know the length. None: these chats must be rendered.
    :ivar absent: strings that the text must not have.
    """

    loads: tuple[tuple[int | None, str], ...]
    steps: tuple[Step, ...]
    segments: tuple[Pieces, ...] | None
    absent: tuple[str, ...] = ()

    def values(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Any] | None:
        """The values of a chat of the program's shape; None where the program does not hold for it."""
        values = [tools if number is None else messages[number][key] for number, key in self.loads]
        try:
            for source, function, outcome in self.steps:
                found = function(values[source] if isinstance(source, int) else filled(source, values))
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

        texts = [filled(segment, values) for segment in self.segments]
        for words in self.absent:
            if any(words in text for text in texts):
                return None

        return texts

    def checked(self, messages: Sequence[Message], tools: Any, expected: Callable[[], list[str]]) -> Program:
        """The program, without its segments if the chat whose texts are ``expected`` should come out otherwise.

        It cannot, if Jinja means what it meant when this was written.
        """
        values = None if self.segments is None else self.values(messages, tools)
        texts = None if values is None else self.texts(values)
        return self if texts is None or texts == expected() else self._replace(segments=None)


NOTHING_PROVEN = Program((), (), None)
"""Holds for every chat, and says that it must be rendered."""


def filled(pieces: Pieces, values: list[Any]) -> str:
    """The text that the pieces are of."""
    return "".join([piece if isinstance(piece, str) else values[piece] for piece in pieces])
