"""Finds the texts of a sample's tokens, and the line and the text of a row, in a process of its own.

In this process, loading a tokenizer would hold the GIL for most of a second. The helper has a low priority, and ends
with the recorder's thread.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.line_numbers import line_number
from asyncdata.core.parent import end_with_parent
from asyncdata.telemetry.records import MAX_VALUE, Piece
from asyncdata.workers.pool.popen import ENVIRONMENT, command_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.token_text import TokenTexts

__all__ = ("Found", "HelperProcess", "Tokenizer", "Wanted", "main")

_TIMEOUT_S = 60.0
_NICE = 10
"""A tenth of a CPU where none is idle: there, a vocabulary is loaded in ten seconds, for which the recorder waits."""


class Tokenizer(msgspec.Struct, frozen=True):
    """A folder or a name on the hub, as a tokenize function names it."""

    name: str
    revision: str | None = None


class Wanted(msgspec.Struct, frozen=True):
    """What is to be found.

    :ivar path: the row's file, and ``byte_offset`` in it; empty if it has no line that could be found.
    :ivar tokenizer: of ``ids``; None: their texts are not wanted.
    :ivar num_bytes: of the row, whose text is wanted; 0: it is not.
    """

    path: str = ""
    byte_offset: int = 0
    tokenizer: Tokenizer | None = None
    ids: list[int] = []
    trained: list[tuple[int, int]] = []
    num_bytes: int = 0


class Found(msgspec.Struct, frozen=True):
    """The line, from 1; the texts; the row's first characters. Where they cannot be found: 0, and none."""

    line: int = 0
    pieces: list[Piece] = []
    excerpt: str = ""


_encode = msgspec.json.Encoder().encode
_decode_wanted = msgspec.json.Decoder(Wanted).decode
_decode_found = msgspec.json.Decoder(Found).decode
_MAX_COUNTED_BYTES = 1 << 32
"""The line of a row is found by reading its file up to there: in a second for so many bytes."""


class HelperProcess:
    """Asks the process. If it cannot be started, or fails, nothing is found any more.

    Must be called in one thread, which the process does not outlive; only :meth:`abort` may be called in any.

    :param tokenizers: those that will be asked for.
    """

    def __init__(self, tokenizers: Sequence[Tokenizer] = ()) -> None:
        self._tokenizers = list(dict.fromkeys(tokenizers))
        self._process: subprocess.Popen[bytes] | None = None
        self._is_lost = False

    def start(self) -> None:
        """Start it, so that it has loaded the tokenizers when it is asked."""
        try:
            self._process = self._process or self._started()
        except Exception:
            self._is_lost = True

    def abort(self) -> None:
        """End a call that is under way, and find nothing from now on."""
        self._is_lost, process = True, self._process
        if process is not None:
            process.kill()

    def __call__(self, wanted: Wanted) -> Found:
        """What was found."""
        if self._is_lost:
            return Found()

        try:
            return _decode_found(self._answer(_encode(wanted) + b"\n"))
        except Exception:  # no process, no memory for one, or it was killed: the record has ids and byte offset
            self._is_lost = True
            self.close()
            return Found()

    def _answer(self, request: bytes) -> bytes:
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        answers = select.poll()
        answers.register(process.stdout, select.POLLIN)
        if not answers.poll(_TIMEOUT_S * 1000):
            raise TimeoutError

        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[bytes]:
        tokenizers = msgspec.to_builtins(self._tokenizers)
        command = command_of(__name__, {"parent": os.getpid(), "tokenizers": tokenizers})
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            # Ctrl-C is for the trainer only. Not a new session: with autogroups, Linux gives each session an equal
            # share of the CPUs, whatever the priorities of its processes are.
            process_group=0,
        )

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return

        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        process.wait()


def main(parent: int, tokenizers: list[dict[str, Any]]) -> None:
    """The process: a line of JSON for each line of JSON.

    :param tokenizers: to load at once.
    """
    end_with_parent(parent)
    with suppress(OSError):
        os.nice(_NICE)
    texts = {tokenizer: _texts_of(tokenizer) for tokenizer in msgspec.convert(tokenizers, list[Tokenizer])}
    for line in sys.stdin.buffer:
        wanted = _decode_wanted(line)
        found_texts = None if wanted.tokenizer is None else texts.get(wanted.tokenizer)
        pieces = [] if found_texts is None else _pieces(found_texts, wanted)
        found = Found(_line_of(wanted), pieces, _excerpt_of(wanted))
        sys.stdout.buffer.write(_encode(found) + b"\n")
        sys.stdout.buffer.flush()


def _line_of(wanted: Wanted) -> int:
    try:
        is_near = wanted.path and 0 <= wanted.byte_offset <= _MAX_COUNTED_BYTES
        return line_number(wanted.path, wanted.byte_offset) if is_near else 0
    except OSError:
        return 0


def _excerpt_of(wanted: Wanted) -> str:
    if not wanted.path or wanted.byte_offset < 0 or wanted.num_bytes <= 0:
        return ""

    try:
        with open(wanted.path, "rb") as file:
            start = os.pread(file.fileno(), min(wanted.num_bytes, 4 * MAX_VALUE), wanted.byte_offset)
    except OSError:
        return ""

    return start.decode("utf-8", "replace")[:MAX_VALUE]


def _texts_of(tokenizer: Tokenizer) -> TokenTexts | None:
    from asyncdata.core.errors import ConfigError
    from asyncdata.tokenization.token_text import TokenTexts
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

    try:
        return TokenTexts(TokenizerFiles(resolve(tokenizer.name, tokenizer.revision).folder).load())
    except ConfigError:
        return None


def _pieces(texts: TokenTexts, wanted: Wanted) -> list[Piece]:
    from asyncdata.telemetry.excerpts import whole_text

    trained = [False] * len(wanted.ids)
    for start, stop in wanted.trained:
        trained[start:stop] = [True] * len(trained[start:stop])
    found = texts(wanted.ids, trained)
    return [Piece(p.start, p.stop, whole_text(p.text), p.is_trained, bool(p.name)) for p in found]
