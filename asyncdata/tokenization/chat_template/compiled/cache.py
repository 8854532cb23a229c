"""Which shapes of chats have come lately, and the programs that make their texts."""

from __future__ import annotations

import threading
from contextlib import contextmanager
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
    """A shape that was looked into.

    :ivar messages: each one's role, with its keys beside the role and the content.
    """

    messages: tuple[str, ...]
    has_tools: bool
    is_proven: bool


_seen: list[SeenShape] | None = None


@contextmanager
def seen_shapes() -> Iterator[list[SeenShape]]:
    """Have every shape looked into when it first comes, and tell what was found: for who looks at a few rows only."""
    global _seen
    before, _seen = _seen, []
    try:
        yield _seen
    finally:
        _seen = before


class Shapes:
    """Programs by the shape of the chat: its messages' roles and keys, the types of what they hold, and ``more``.

    A shape is looked into when it comes for the second time. A few hundred are kept, those that came last, and of each
    a few programs, one for each set of answers that its chats gave. What is of no use is not tried for ever: a template
    of which nothing is proven at first, and a shape whose chats keep giving other answers.

    :param prove: makes the program for chats like one.
    """

    def __init__(self, prove: Callable[[list[Message], list[Message] | None, Any], Program]) -> None:
        self._prove = prove
        self._young: dict[Key, _Known] = {}
        self._old: dict[Key, _Known] = {}
        self._lock = threading.Lock()
        self._num_proofs = self._num_proven = 0
        self._is_futile = False

    @property
    def num_kept(self) -> int:
        """How many shapes are known."""
        return len(self._young) + len(self._old)

    def texts(self, messages: list[Message], tools: list[Message] | None, more: Hashable = None) -> list[str] | None:
        """The chat's text, in the program's segments; None for a chat that must be rendered."""
        if self._is_futile or len(messages) > _MOST_MESSAGES:
            return None

        key = _shape(messages, tools, more)
        try:
            known = self._young.get(key) or self._recall(key)
        except TypeError:  # a role that is a list
            return None

        if known is None:
            if _seen is None:
                return None

            known = self._young[key]
        for program in known.programs:
            values = program.values(messages, tools)
            if values is not None:
                known.num_misses -= known.num_misses > 0
                return program.texts(values)

        program = self._learnt(known, messages, tools, more)
        values = program.values(messages, tools)
        return None if values is None else program.texts(values)

    def _recall(self, key: Key) -> _Known | None:
        """A shape that came before, None for a new one; either way it has come now."""
        with self._lock:
            if len(self._young) >= _MOST_SHAPES // 2:
                self._young, self._old = {}, self._young
            known = self._old.pop(key, None)
            self._young[key] = known or _Known()
            return known

    def _learnt(self, known: _Known, messages: list[Message], tools: list[Message] | None, more: Hashable) -> Program:
        """The program for chats like this one, for which those of its shape do not hold."""
        if len(known.programs) >= _MOST_PROGRAMS:
            known.num_misses += 1
            if known.num_misses >= _MOST_MISSES:
                known.programs = (NOTHING_PROVEN,)
            return NOTHING_PROVEN

        is_clear = all(type(message.get("role")) is str for message in messages)
        program = self._prove(messages, tools, more) if is_clear else NOTHING_PROVEN
        if _seen is not None:
            _seen.append(SeenShape(tuple(map(_named, messages)), tools is not None, program.segments is not None))
        with self._lock:
            known.programs = (*known.programs, program)
            self._num_proofs += 1
            self._num_proven += program.segments is not None
            self._is_futile = self._num_proofs >= _MOST_FUTILE_PROOFS and not self._num_proven
        return program


class _Known:
    """What is known of a shape.

    :ivar num_misses: by how many more chats than others came to none of the programs, when they were as many as may be.
    """

    __slots__ = ("num_misses", "programs")

    def __init__(self) -> None:
        self.programs: tuple[Program, ...] = ()
        self.num_misses = 0


def _named(message: Message) -> str:
    keys = ", ".join(sorted(map(str, message.keys() - {"role", "content"})))
    return f"{message.get('role')}" + (f" ({keys})" if keys else "")


def _shape(messages: list[Message], tools: list[Message] | None, more: Hashable) -> Key:
    """What tells shapes apart: a message begins with its role, goes on with its keys, and ends with as many types."""
    key: list[Any] = [more, type(tools)]
    for message in messages:
        key.append(message.get("role"))
        key += message
        key += map(type, message.values())
    return tuple(key)
