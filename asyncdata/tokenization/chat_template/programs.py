"""Programs that compute the texts of chats, by the shape of the chat: each is constant text with values in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

Message = dict[str, Any]

_MOST_SHAPES = 256
_MOST_MESSAGES = 128
_MOST_PROGRAMS = 8
_MOST_MISSES = 64
_MOST_FUTILE_PROOFS = 32

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
        self, loads: Sequence[Load], steps: Sequence[Step], parts: Sequence[Pieces] | None, absent: tuple[str, ...] = ()
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


class SeenShape(NamedTuple):
    """A shape for which a proof was tried.

    :ivar messages: the role of each message, with its keys other than role and content.
    """

    messages: tuple[str, ...]
    has_tools: bool
    is_proven: bool


_seen: list[SeenShape] | None = None


@contextmanager
def seen_shapes() -> Iterator[list[SeenShape]]:
    """Try a proof when a shape first occurs, and collect the results: for commands that read only a few rows."""
    global _seen
    before, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = before


class Shapes:
    """Programs by the shape of the chat: the roles and keys of its messages, the types of their values, and ``more``.

    A proof is tried when a shape occurs for the second time. The last few hundred shapes are kept, each with a few
    programs: one for each set of answers to its guards. Attempts end for a template of which the first attempts prove
    nothing, and for a shape whose chats keep failing the guards of all its programs.

    :param prove: makes the program for chats like one.
    """

    def __init__(self, prove: Callable[[list[Message], list[Message] | None, Any], Program]) -> None:
        self._prove = prove
        self._known = lru_cache(_MOST_SHAPES)(lambda _: _Known())
        self._lock = threading.Lock()
        self._num_proofs = self._num_proven = 0
        self._is_futile = False

    def texts(self, messages: list[Message], tools: list[Message] | None, more: Hashable = None) -> list[str] | None:
        """The parts of the chat's text; None if the chat must be rendered."""
        if self._is_futile or len(messages) > _MOST_MESSAGES:
            return None

        try:
            known = self._known(_shape(messages, tools, more))
        except TypeError:  # a role that is a list
            return None

        if known.is_new:
            known.is_new = False
            if _seen is None:
                return None

        for program in known.programs:
            values = program.values(messages, tools)
            if values is not None:
                known.num_misses -= known.num_misses > 0
                return program.texts(values)

        program = self._learnt(known, messages, tools, more)
        values = program.values(messages, tools)
        return None if values is None else program.texts(values)

    def _learnt(self, known: _Known, messages: list[Message], tools: list[Message] | None, more: Hashable) -> Program:
        """A new program for chats like this one, for which no program of its shape holds."""
        if len(known.programs) >= _MOST_PROGRAMS:
            known.num_misses += 1
            if known.num_misses >= _MOST_MISSES:
                known.programs = (NOTHING_PROVEN,)
            return NOTHING_PROVEN

        is_clear = all(type(message.get("role")) is str for message in messages)
        program = self._prove(messages, tools, more) if is_clear else NOTHING_PROVEN
        if _seen is not None:
            _seen.append(SeenShape(tuple(map(_named, messages)), tools is not None, program.parts is not None))
        with self._lock:
            known.programs = (*known.programs, program)
            self._num_proofs += 1
            self._num_proven += program.parts is not None
            self._is_futile = self._num_proofs >= _MOST_FUTILE_PROOFS and not self._num_proven
        return program


class _Known(msgspec.Struct):
    """The record of a shape.

    :ivar is_new: whether the shape has not occurred before.
    :ivar num_misses: how many more chats matched no program than matched one, since the limit of programs was reached.
    """

    is_new: bool = True
    programs: tuple[Program, ...] = ()
    num_misses: int = 0


def _named(message: Message) -> str:
    keys = ", ".join(sorted(map(str, message.keys() - {"role", "content"})))
    return f"{message.get('role')}" + (f" ({keys})" if keys else "")


def _shape(messages: list[Message], tools: list[Message] | None, more: Hashable) -> tuple[Any, ...]:
    """The identity of a shape: for each message its role, its keys, and the types of their values."""
    key: list[Any] = [more, type(tools)]
    for message in messages:
        key.append(message.get("role"))
        key += message
        key += map(type, message.values())
    return tuple(key)
