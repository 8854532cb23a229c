"""What is the machine's fault, and what is a row's."""

from __future__ import annotations

import errno
import os

import pytest

from asyncdata.core.shortage import ShortageError, is_shortage, raise_if_shortage, short_of

pytestmark = pytest.mark.thorough


class PanicException(BaseException):
    """What a panic in Rust is."""


def following(error: BaseException, cause: BaseException, *, is_hidden: bool = False) -> BaseException:
    try:
        try:
            raise cause
        except BaseException:
            raise error from None if is_hidden else cause
    except BaseException as found:
        return found


def in_the_handling_of(error: BaseException, cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        finally:
            raise error
    except BaseException as found:
        return found


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("of row 7"), "out of memory (MemoryError)"),
        (OSError(errno.ENOMEM, "x"), os.strerror(errno.ENOMEM)),
        (BlockingIOError(errno.EAGAIN, "x"), os.strerror(errno.EAGAIN)),
        (OSError(errno.EMFILE, "row 7"), "Too many open files"),
        (OSError(errno.ENFILE, "x"), os.strerror(errno.ENFILE)),
        (OSError(errno.ENOSPC, "x"), "No space left on device"),
        (OSError(errno.EDQUOT, "x"), os.strerror(errno.EDQUOT)),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (PanicException('Os { code: 11, kind: WouldBlock, message: "row 7" }'), os.strerror(errno.EAGAIN)),
        (PanicException("row 7 (os error 24)"), "Too many open files"),
        (ExceptionGroup("two", [MemoryError(), OSError(errno.EMFILE, "x")]), "out of memory (MemoryError)"),
        (following(ValueError("row 7"), MemoryError()), "out of memory (MemoryError)"),
        (in_the_handling_of(ValueError("row 7"), OSError(errno.ENOSPC, "x")), "No space left on device"),
        (ShortageError(MemoryError(), 3, "row 7"), "out of memory (MemoryError)"),
    ],
)
def test_a_shortage_is_told_in_the_systems_words_and_none_of_the_rows(error, words):
    assert short_of(error) == words
    assert is_shortage(error)
    with pytest.raises(type(error)):
        raise_if_shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("memory"),
        KeyError("(os error 24)"),
        RuntimeError("can't start new thread of row 7"),
        FileNotFoundError(errno.ENOENT, "x"),
        OSError("no number"),
        PanicException("index out of bounds"),
        ExceptionGroup("two", [MemoryError(), ValueError()]),
        following(ValueError(), MemoryError(), is_hidden=True),
        RecursionError(),
        SystemExit(3),
    ],
)
def test_another_error_is_a_rows(error):
    assert short_of(error) == ""
    raise_if_shortage(error)


def test_causes_in_a_circle_come_to_an_end():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first

    assert not is_shortage(first)
