"""Output of commands: data to stdout, messages to stderr; styled on a terminal, plain everywhere else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from asyncdata.cli.standard_streams import writing_stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
    from typing import TextIO

__all__ = (
    "Output",
    "fields",
    "is_terminal",
    "logging_to_stderr",
    "printable",
    "shown_path",
    "si",
    "table",
    "to_json",
)

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
    import structlog

    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.ExceptionRenderer(),
            _event_as_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info" if is_verbose else "warning"),
        # Looked up at each event: a command replaces sys.stderr while it runs.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


def _event_as_line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    level, name, trace = event.pop("level"), event.pop("event"), event.pop("exception", "")
    details = " ".join(f"{key}={value!r}" for key, value in event.items())
    return f"asyncdata: {level}: {name} {details}".rstrip() + (f"\n{trace}" if trace else "")


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values, one pair per line, values aligned."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in pairs)


def printable(text: str) -> str:
    """The text on one line, with control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown_path(path: str) -> str:
    """The path, relative if it is in the current folder or below it."""
    here = os.getcwd()
    return os.path.relpath(path, here) if os.path.commonpath([here, os.path.abspath(path)]) == here else path


def si(number: float) -> str:
    """Three digits and a unit: ``812``, ``81.2k``, ``8.12M``."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            digits = 0 if not unit or number >= 99.95 else 1 if number >= 9.995 else 2
            return f"{number:.{digits}f}{unit}"

        number /= 1000
    return f"{number:.0f}T"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
