"""The recent shapes of chats, and the programs that compute their texts."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.chat_template.compiled.program import NOTHING_PROVEN

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from asyncdata.tokenization.chat_template.compiled.program import Program

__all__ = ("SeenShape", "Shapes", "seen_shapes")

Message = dict[str, Any]
Key = tuple[Any, ...]

_MOST_SHAPES = 256
_MOST_MESSAGES = 128
_MOST_PROGRAMS = 8
_MOST_MISSES = 64
_MOST_FUTILE_PROOFS = 32


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
        self._known = lru_cache(_MOST_SHAPES)(_Known.of)
        self._lock = threading.Lock()
        self._num_proofs = self._num_proven = 0
        self._is_futile = False

    @property
    def num_kept(self) -> int:
        """How many shapes are known."""
        return self._known.cache_info().currsize

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


class _Known:
    """The record of a shape.

    :ivar is_new: whether the shape has not occurred before.
    :ivar num_misses: how many more chats matched no program than matched one, since the limit of programs was reached.
    """

    __slots__ = ("is_new", "num_misses", "programs")

    def __init__(self) -> None:
        self.is_new = True
        self.programs: tuple[Program, ...] = ()
        self.num_misses = 0

    @classmethod
    def of(cls, _: Key) -> _Known:
        """The record of a shape that has not occurred lately."""
        return cls()


def _named(message: Message) -> str:
    keys = ", ".join(sorted(map(str, message.keys() - {"role", "content"})))
    return f"{message.get('role')}" + (f" ({keys})" if keys else "")


def _shape(messages: list[Message], tools: list[Message] | None, more: Hashable) -> Key:
    """The identity of a shape: for each message its role, its keys, and the types of their values."""
    key: list[Any] = [more, type(tools)]
    for message in messages:
        key.append(message.get("role"))
        key += message
        key += map(type, message.values())
    return tuple(key)
