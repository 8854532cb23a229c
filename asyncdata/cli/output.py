"""Output of commands: data to stdout, messages to stderr; styled on a terminal, plain everywhere else."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from asyncdata.core.errors import printable

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}
"""The words of a style -> the terminal's code (ECMA-48, SGR)."""


class Output:
    """Writes data and messages. A style is words such as ``bold red``, and seen on a terminal only.

    :ivar as_json: whether data is written as JSON.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def data(self, text: str, style: str = "") -> None:
        """Write a line or several of data."""
        with writing_stdout():
            _write(sys.stdout, text, style)

    def styled(self, parts: Iterable[tuple[str, str]]) -> None:
        """Write texts in their styles, also where stdout is not a terminal."""
        with writing_stdout():
            _write(sys.stdout, "".join(_styled(text, style) for text, style in parts))

    def json(self, value: Any) -> None:
        """Write data as one line of JSON."""
        with writing_stdout():
            _write(sys.stdout, to_json(value))

    def put(self, value: Any, as_text: Callable[[Any], str]) -> None:
        """Write data as JSON if requested, otherwise as text."""
        if self.as_json:
            self.json(value)
        else:
            self.data(as_text(value))

    def say(self, text: str, style: str = "") -> None:
        """Write a line or several to stderr, for people."""
        _write(sys.stderr, text, style)


def to_json(value: Any) -> str:
    """One line of ASCII, which every encoding has."""
    return json.dumps(value, allow_nan=False)


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _write(stream: TextIO, text: str, style: str = "") -> None:
    if is_terminal(stream) and not os.environ.get("NO_COLOR"):
        text = _styled(text, style)
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def _styled(text: str, style: str) -> str:
    codes = ";".join(str(_CODES[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


@contextlib.contextmanager
def logging_to_stderr(*, is_verbose: bool) -> Iterator[None]:
    """Send the library's events to stderr inside the block: warnings, or all of them."""
    logger, handler = logging.getLogger("asyncdata"), _StderrHandler()
    level, propagates = logger.level, logger.propagate
    logger.setLevel("INFO" if is_verbose else "WARNING")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write to what is stderr now: a command replaces it while it runs."""
        sys.stderr.write(f"asyncdata: {record.levelname.lower()}: {self.format(record)}\n")


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one pair per line, values aligned."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in pairs)


def shown_path(path: str) -> str:
    """The path as it can be printed, relative if it is in the current folder or below it."""
    here = os.getcwd()
    is_below = os.path.commonpath([here, os.path.abspath(path)]) == here
    return printable(os.path.relpath(path, here) if is_below else path)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# The standard streams: a closed or full stdout is an error, a closed or full stderr is ignored


class StdoutError(Exception):
    """Stdout cannot be written."""


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
def guarded_streams() -> Iterator[None]:
    """Ignore errors of writing to stderr, and keep the numbers of closed standard streams from other files."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
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
