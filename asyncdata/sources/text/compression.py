"""Reads the text of a file that may be compressed, and finds positions where decoding can start in the middle.

gzip (RFC 1952) is made of members, zstd (RFC 8878) of frames; at the start of each a decoder can begin. What is cut off
or damaged is found by the checks that both formats carry, and named: nothing ends silently.
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.sources.reader import FileChangedError, unreadable
from asyncdata.sources.same_file import SameFile, shrunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO

    from asyncdata.core.messages import FileRef
    from asyncdata.sources.remote.object_file import ObjectFile

__all__ = ("CODING_OF_SUFFIX", "CodedText", "coding_of", "decoded_start", "is_decodable")

_PIECE_BYTES = 256 * 1024
_MIN_PIECE_BYTES = 256 * 1024
_INPUT_BYTES = {"gzip": 64 * 1024, "zstd": 8 * 1024}
"""zstd's decoder decodes all of its input at once, so it gets small pieces."""

CODING_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
"""The coding by the file's suffix; its first bytes decide."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes((n, 0x2A, 0x4D, 0x18)) for n in range(0x50, 0x60)))  # or one to be skipped
_UNITS = {"gzip": ("AD121", "member"), "zstd": ("AD122", "frame")}


def coding_of(head: bytes) -> str:
    """``gzip``, ``zstd`` or ``plain``: the coding of a file that begins with ``head``."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"

    return "zstd" if head.startswith(_ZSTD_MAGICS) else "plain"


class _Unit(Protocol):
    """The decoder of one member or frame."""

    @property
    def is_whole(self) -> bool:
        """Whether its end was reached, and its checksum is right."""
        ...

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Some decoded text, and the rest of ``data``."""
        ...


class _Member:
    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)  # with gzip's header, length and CRC

    @property
    def is_whole(self) -> bool:
        return self._zlib.eof

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        text = self._zlib.decompress(data, _PIECE_BYTES)
        return text, self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail


class _Frame:
    def __init__(self) -> None:
        import zstandard

        self._zstd = zstandard.ZstdDecompressor().decompressobj()

    @property
    def is_whole(self) -> bool:
        return self._zstd.eof

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        text = self._zstd.decompress(data) if data else b""
        return text, self._zstd.unused_data if self._zstd.eof else b""


def is_decodable(coding: str) -> bool:
    """Whether the library for ``coding`` is installed."""
    if coding == "zstd":
        try:
            import zstandard  # noqa: F401 - only tests whether it is installed
        except ImportError:
            return False

    return True


def decoded_start(head: bytes, coding: str) -> bytes:
    """What can be decoded of a text of which only ``head`` is there.

    :raises SourceError: if it is damaged.
    """
    try:
        return (_Member() if coding == "gzip" else _Frame()).decode(head)[0]
    except Exception as error:  # zlib.error, or zstandard.ZstdError
        raise SourceError(f"{_UNITS[coding][0]} its first {coding} {_UNITS[coding][1]} is damaged ({error})") from error


class CodedText:
    """The text of one file, read to the size that the file had at the start.

    :param coding: see :func:`coding_of`.
    :param check: called for each piece; it raises when the text is no longer needed.
    :param stored: reads the file, if it is an object; it is closed after that.
    """

    def __init__(
        self, file: FileRef, coding: str, check: Callable[[], object], stored: ObjectFile | None = None
    ) -> None:
        self._file = file
        self._stored = stored
        self._coding = coding
        self._check = check
        self._entries: deque[tuple[int, int]] = deque()

    def entry(self, offset: int) -> tuple[int, int]:
        """Where a decoder can begin so as to come to ``offset`` of the text soonest: in the file, and in the text.

        Of a text that is being read; entries before the one that is returned are forgotten.
        """
        if self._coding == "plain":
            return offset, offset

        while len(self._entries) > 1 and self._entries[1][1] <= offset:
            self._entries.popleft()
        return self._entries[0]

    def pieces(self, entry: tuple[int, int], offset: int) -> Iterator[bytes]:
        """The text from ``offset`` on, in pieces that are not empty. The text between ``entry`` and ``offset`` is
        decoded and skipped.

        :raises SourceError: if the file is truncated or damaged, after the text before that.
        :raises SourceChangedError: if the file has become shorter.
        """
        if self._stored is not None:
            with closing(self._stored) as stored:
                yield from self._pieces(stored, stored, entry, offset)
            return

        with closing(SameFile(self._file)) as same, open(same.fd, "rb", buffering=0, closefd=False) as file:
            yield from self._pieces(file, same, entry, offset)

    def _pieces(
        self, file: FileIO | ObjectFile, same: SameFile | ObjectFile, entry: tuple[int, int], offset: int
    ) -> Iterator[bytes]:
        num_to_skip = offset - entry[1]
        file.seek(entry[0])
        for piece in _collected(self._decoded(file, entry[1]), partial(_refuse_changed, same)):
            self._check()
            if num_to_skip < len(piece):
                yield piece[num_to_skip:] if num_to_skip else piece
            num_to_skip = max(0, num_to_skip - len(piece))

    def _decoded(self, file: FileIO | ObjectFile, place: int) -> Iterator[bytes]:
        """The text from its byte ``place`` on."""
        if self._coding == "plain":
            while data := self._read(file):
                yield data
            return

        data = b""
        while data := self._padding_left_out(file, data):
            self._entries.append((file.tell() - len(data), place))
            unit: _Unit = _Member() if self._coding == "gzip" else _Frame()
            while not unit.is_whole:
                text, data = self._decode(file, unit, data)
                place += len(text)
                yield text

    def _decode(self, file: FileIO | ObjectFile, unit: _Unit, data: bytes) -> tuple[bytes, bytes]:
        """Some text of ``unit``, and the rest of the bytes that were read."""
        data = data or self._read(file)
        try:
            text, left = unit.decode(data)
        except Exception as error:  # zlib.error, or zstandard.ZstdError, which cannot be named without importing it
            raise self._fault(f"is damaged ({error})") from error

        if not data and not text and not unit.is_whole:
            raise self._fault(f"ends early, at byte {self._file.num_bytes}: it was cut off, or is still being written")

        return text, left

    def _padding_left_out(self, file: FileIO | ObjectFile, data: bytes) -> bytes:
        """The bytes from the next member or frame on; empty at the end of the file."""
        while True:
            if self._coding == "gzip" and self._entries:
                data = data.lstrip(b"\0")  # tapes and some writers fill up the last member with zeros
            if data:
                return data

            data = self._read(file)
            if not data:
                return data

    def _read(self, file: FileIO | ObjectFile) -> bytes:
        """The next bytes; empty at the end that the file had at the start."""
        place = file.tell()
        num_wanted = min(_INPUT_BYTES.get(self._coding, _PIECE_BYTES), self._file.num_bytes - place)
        try:
            data = file.read(num_wanted) if num_wanted > 0 else b""
        except OSError as error:
            raise unreadable(error, self._file.path, place) from error

        if data or num_wanted <= 0:
            return data

        raise SourceChangedError(shrunk(self._file, place))

    def _fault(self, what: str) -> SourceError:
        code, unit = _UNITS[self._coding]
        start = self._entries[-1][0]
        return SourceError(
            f"{code} {self._file.path}: the {self._coding} {unit} that begins at byte {start} {what}. All rows before "
            f"that are delivered; restore the file, and try it with: {self._coding} -t"
        )


def _refuse_changed(same: SameFile | ObjectFile) -> None:
    try:
        same.check()
    except FileChangedError as error:
        raise SourceChangedError(str(error)) from error


def _collected(pieces: Iterator[bytes], check: Callable[[], object]) -> Iterator[bytes]:
    """The same bytes in larger pieces: a file may have a compressed member for every line.

    :param check: called before a piece is given, and before a fault is raised.
    """
    held: list[bytes] = []
    num_bytes = 0
    fault = None
    while fault is None:
        try:
            piece = next(pieces)
        except StopIteration:
            break
        except SourceError as error:
            fault, piece = error, b""
        held.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _MIN_PIECE_BYTES:
            check()
            yield b"".join(held)
            held, num_bytes = [], 0
    check()
    if num_bytes:
        yield b"".join(held)
    if fault is not None:
        raise fault
