"""The standard streams of a command: a closed or full stdout is an error, a closed or full stderr is ignored."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

__all__ = ("StdoutError", "discard", "hold_descriptors", "quiet_stderr", "writing_stdout")


class StdoutError(Exception):
    """Stdout cannot be written."""


def hold_descriptors() -> None:
    """Open /dev/null for closed standard streams: otherwise the next opened file would become one."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def discard(stream: TextIO) -> None:
    """Drop buffered output, which Python would otherwise try to write at exit."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, number)
        os.close(devnull)


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Convert errors of writing to stdout, to distinguish them from other errors.

    :raises BrokenPipeError: if the reader has closed the pipe.
    :raises StdoutError: for any other reason.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error.strerror or str(error)) from error


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Ignore errors of writing to stderr."""
    with contextlib.redirect_stderr(_ForgivingStream(sys.stderr)):
        yield


class _ForgivingStream:
    """A text stream that may be closed or full."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        if stream is not None:
            self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError:
                discard(self._stream)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError:
                discard(self._stream)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
