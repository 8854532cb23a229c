"""Which shapes of chats have come lately, and the programs that make their texts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asyncdata.tokenization.template_program import Program

__all__ = ("Shapes",)

Message = dict[str, Any]
Key = tuple[Any, ...]

_MOST_SHAPES = 256
_MOST_MESSAGES = 128
_MOST_PROGRAMS = 8
_FUTILE_PROOFS = 16


class Shapes:
    """Programs by the shape of the chat: its messages' roles and keys, the types of what they hold, and ``more``.

    A shape is looked into when it comes for the second time. As many are kept as came lately, a few hundred; and of
    each a few programs, one for each set of answers that its chats gave. Where the first proofs all fail, none is tried
    any more.

    :param prove: the program of a chat's shape, for chats that give the same answers.
    """

    def __init__(self, prove: Callable[[list[Message], list[Message] | None, Any], Program]) -> None:
        self._prove = prove
        self._young: dict[Key, tuple[Program, ...]] = {}
        self._old: dict[Key, tuple[Program, ...]] = {}
        self._lock = threading.Lock()
        self._num_proofs = self._num_proven = 0
        self._is_futile = False

    def texts(self, messages: list[Message], tools: list[Message] | None, more: Hashable = None) -> list[str] | None:
        """The chat's text, in the program's segments; None for a chat that must be rendered."""
        key = None if self._is_futile else _shape(messages, tools, more)
        if key is None:
            return None

        programs = self._young.get(key)
        if programs is None:
            programs = self._recall(key)
            if programs is None:
                return None

        for program in programs:
            values = program.values(messages, tools)
            if values is not None:
                return program.texts(values)

        return self._learnt(key, programs, messages, tools, more) if len(programs) < _MOST_PROGRAMS else None

    def _recall(self, key: Key) -> tuple[Program, ...] | None:
        """The programs of a shape that came before, None for a new one; either way it has come now."""
        with self._lock:
            if len(self._young) >= _MOST_SHAPES // 2:
                self._young, self._old = {}, self._young
            programs = self._old.pop(key, None)
            self._young[key] = () if programs is None else programs
            return programs

    def _learnt(
        self,
        key: Key,
        programs: tuple[Program, ...],
        messages: list[Message],
        tools: list[Message] | None,
        more: Hashable,
    ) -> list[str] | None:
        with self._lock:
            program = self._prove(messages, tools, more)
            self._young[key] = (*programs, program)
            self._num_proofs += 1
            self._num_proven += program.segments is not None
            self._is_futile = self._num_proofs >= _FUTILE_PROOFS and not self._num_proven
        values = program.values(messages, tools)
        return None if values is None else program.texts(values)


def _shape(messages: list[Message], tools: list[Message] | None, more: Hashable) -> Key | None:
    """What tells shapes apart; None for a chat that has none.

    A message begins with its role, a string, goes on with its keys, strings, and ends with as many types.
    """
    if len(messages) > _MOST_MESSAGES:
        return None

    key: list[Any] = [more, type(tools)]
    for message in messages:
        role = message.get("role")
        if type(role) is not str:
            return None

        key.append(role)
        key += message
        key += map(type, message.values())
    return tuple(key)
