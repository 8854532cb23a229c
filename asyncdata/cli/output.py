"""Output of commands: data to stdout, messages to stderr; styled on a terminal, plain everywhere else. And the exact
text of each token, for inspection.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from asyncdata.core.errors import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


# The texts of tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


_NO_BYTE = 0xFFFF


def _byte_of_char() -> dict[int, int]:
    """The characters for bytes in byte-level vocabularies, as in GPT-2: printable bytes are themselves.

    For ``str.translate`` to a text in Latin-1, which does not have the character that stands for no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    of_others = {256 + at: byte for at, byte in enumerate(others)}
    return {**dict.fromkeys(others, _NO_BYTE), **{byte: byte for byte in printable}, **of_others}


_BYTE_OF_CHAR = _byte_of_char()


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a sample: one token, or those over which a character is split.

    :ivar text: a byte that is not part of a complete character is U+DC00 plus the byte, as in ``surrogateescape``.
    :ivar name: the name of a special token, or the number of an unknown one; empty for all others.
    :ivar is_trained: whether all of them are trained.
    """

    start: int
    stop: int
    text: str
    name: str
    is_trained: bool


class TokenTexts:
    """Splits a sample's tokens into pieces. Their joined texts are the text that the tokenizer decodes.

    Byte-level tokens are converted to their bytes, so that a character that is split over tokens is complete. Any other
    token is decoded together with the one before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._whole: dict[int, str] = {}  # texts of byte-level tokens that are complete characters, by their ids
        self._steps = {step.get("type") for step in state.get("decoders", [state])}

    def __call__(self, ids: Sequence[int], is_trained: Sequence[bool]) -> list[Piece]:
        """The pieces of a sample.

        :param ids: its tokens.
        :param is_trained: whether each token is trained; a piece has no mixture of both.
        """
        return list(self._pieces(ids, is_trained))

    def _pieces(self, ids: Sequence[int], is_trained: Sequence[bool]) -> Iterator[Piece]:
        run = _Run()
        before: int | None = None  # the last token other than a byte
        for at, id in enumerate(ids):
            whole = self._whole.get(id)
            if whole is not None and run.start == at:
                yield Piece(at, at + 1, whole, "", is_trained[at])
                run.start = at + 1
                continue

            token = self._tokenizer.id_to_token(id)
            name = str(id) if token is None else self._names.get(id, "")
            if name or (at and is_trained[at] != is_trained[at - 1]):
                yield from run.end(at, is_trained[run.start])
            if name:
                yield Piece(at, at + 1, name, name, is_trained[at])
                run.start, before = at + 1, id
                continue

            byte = self._bytes(token or "")
            if byte is None:
                run.add(self._decoded(id, before))
                before = id
            else:
                run.add(byte)
                with suppress(UnicodeDecodeError):
                    self._whole[id] = byte.decode()
            if run.is_whole:
                yield from run.end(at + 1, is_trained[at])
        yield from run.end(len(ids), run.start < len(ids) and is_trained[run.start])

    def _bytes(self, token: str) -> bytes | None:
        """The bytes of a byte-level token; None for any other token."""
        if self._steps <= {"ByteLevel", "Fuse"} and self._steps:
            try:
                return token.translate(_BYTE_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()

        found = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in self._steps else None
        return bytes.fromhex(found[1]) if found else None

    def _decoded(self, id: int, before: int | None) -> bytes:
        """A token's text after the token before it: some tokenizers remove a space at the start of a text."""
        ids = [id] if before is None else [before, id]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        alone = self._tokenizer.decode(ids[:-1], skip_special_tokens=False)
        return (text.removeprefix(alone) if text.startswith(alone) else self._tokenizer.decode([id])).encode()


class _Run:
    """Tokens whose bytes are not complete characters yet.

    :ivar start: the first of them.
    :ivar is_whole: whether the bytes so far are complete characters.
    """

    def __init__(self) -> None:
        self.start = 0
        self.is_whole = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""

    def add(self, data: bytes) -> None:
        """Add the next token's bytes."""
        self._text += self._decoder.decode(data)
        self.is_whole = not self._decoder.getstate()[0]

    def end(self, stop: int, is_trained: bool) -> Iterator[Piece]:
        """The piece of the tokens up to ``stop``; none if there are none."""
        text = self._text + self._decoder.decode(b"", final=True)
        if self.start < stop:
            yield Piece(self.start, stop, text, "", is_trained)
        self.start, self._text, self.is_whole = stop, "", True


def without_texts(ids: Sequence[int], is_trained: Sequence[bool]) -> list[Piece]:
    """The pieces of tokens without a tokenizer: each is shown as its number."""
    return [Piece(at, at + 1, str(id), str(id), is_trained[at]) for at, id in enumerate(ids)]
