"""Errors of the system when memory, files, processes or disk space run out. They are never the fault of a row."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncdata.core.messages import Overflow

_ERRNOS = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS})
_NO_THREAD = "can't start new thread"
_PANIC = "PanicException"
"""What a panic in Rust is in Python. Its text has the system's answer: ``Os { code: 11, ...``, or ``(os error 11)``."""
_MAX_CAUSES = 20


class ShortageError(Exception):
    """A request could not be answered for want of something.

    :ivar row: the request's number of the row that was worked on.
    :ivar excerpt: how that row begins. The message does not show it.
    :ivar place: where that row lies, while rows have no place by their number.
    """

    def __init__(self, cause: BaseException, row: int, excerpt: str) -> None:
        super().__init__(short_of(cause))
        self.cause = cause
        self.row = row
        self.excerpt = excerpt
        self.place: Overflow | None = None


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says so, or follows from one that does."""
    return bool(short_of(error))


def short_of(error: BaseException) -> str:
    """What has run out, in the system's words, without text of a row; empty if the error has another cause."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            return ""

        if words := _words(found):
            return words

        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return ""


def raise_if_shortage(error: BaseException) -> None:
    """Where an error of a row is made of ``error``: none is made of one that is no row's.

    :raises BaseException: ``error`` itself.
    """
    if is_shortage(error):
        raise error


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        found = list(map(short_of, error.exceptions))
        return found[0] if all(found) else ""

    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in _ERRNOS else ""

    if isinstance(error, MemoryError):
        return "out of memory (MemoryError)"

    if isinstance(error, RuntimeError) and error.args == (_NO_THREAD,):
        return _NO_THREAD

    if type(error).__name__ == _PANIC:
        text = str(error)
        codes = (code for code in _ERRNOS if f"code: {code}," in text or f"(os error {code})" in text)
        return next(map(os.strerror, codes), "")

    return str(error) if isinstance(error, ShortageError) else ""
