"""What is the machine's fault, and what is a row's."""

from __future__ import annotations

import errno
import os

import pytest

from tests.support.parts import ShortageError, is_shortage, raise_if_shortage, short_of


class PanicException(BaseException):
    """What a panic in Rust is."""


def following(error: BaseException, cause: BaseException | None = None, **context: BaseException) -> BaseException:
    """The error as it is after ``raise error from cause``, or while another one was handled."""
    error.__cause__, error.__context__ = cause, context.get("handled", cause)
    error.__suppress_context__ = "handled" not in context
    return error


def in_a_circle() -> BaseException:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    return first


SHORTAGES = [
    (MemoryError("of row 7"), "out of memory (MemoryError)"),
    *((OSError(number, "row 7"), os.strerror(number)) for number in (errno.ENOMEM, errno.EDQUOT, errno.ENFILE)),
    (OSError(errno.EMFILE, "row 7"), "Too many open files"),
    (RuntimeError("can't start new thread"), "can't start new thread"),
    (PanicException('Os { code: 11, kind: WouldBlock, message: "row 7" }'), os.strerror(errno.EAGAIN)),
    (PanicException("row 7 (os error 24)"), "Too many open files"),
    (ExceptionGroup("two", [MemoryError(), OSError(errno.EMFILE, "x")]), "out of memory (MemoryError)"),
    (following(ValueError("row 7"), MemoryError()), "out of memory (MemoryError)"),
    (following(ValueError("row 7"), handled=OSError(errno.ENOSPC, "x")), "No space left on device"),
    (ShortageError(MemoryError(), 3, "row 7"), "out of memory (MemoryError)"),
]


@pytest.mark.parametrize(("error", "words"), SHORTAGES, ids=[repr(error) for error, _ in SHORTAGES])
def test_a_shortage_is_told_in_the_systems_words_and_none_of_the_rows(error, words):
    assert short_of(error) == words
    assert is_shortage(error)
    with pytest.raises(type(error)):
        raise_if_shortage(error)


OTHERS = [
    ValueError("memory"), RuntimeError("can't start new thread of row 7"), FileNotFoundError(errno.ENOENT, "x"),
    OSError("no number"), PanicException("index out of bounds"), ExceptionGroup("two", [MemoryError(), ValueError()]),
    following(ValueError(), handled=KeyError()), RecursionError(), in_a_circle(),
]  # fmt: skip


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_another_error_is_a_rows(error):
    assert short_of(error) == ""
    raise_if_shortage(error)


def test_what_was_handled_and_hidden_is_no_cause():
    error = following(ValueError(), handled=MemoryError())
    assert is_shortage(error)

    error.__suppress_context__ = True
    assert not is_shortage(error)
