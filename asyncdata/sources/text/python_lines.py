"""Lines as Python's text files split them, for readers that must find the same rows as such a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.sources.text.line_scanner import LineReader, read_block, read_row

if TYPE_CHECKING:
    from asyncdata.core.messages import Block, FileRef
    from asyncdata.sources.reader import BlockRows

__all__ = ("PythonLineReader",)

_OPENS, _CLOSES = ord("{"), ord("}")


class PythonLineReader(LineReader):
    """Rows are what ``[line.strip() for line in open(path)]`` would be, less the empty ones.

    A line ends with ``\\n``, ``\\r\\n``, or ``\\r`` alone. White space of Unicode around a row is no part of it.
    """

    def _find(self, fd: int, file: FileRef, block: Block) -> BlockRows:
        found = read_block(fd, file, block, self._slack_bytes, self._max_row_bytes, _read_lines)
        rows = self._stripped(fd, file, block, found)
        # The newline of a \r\n would end an additional empty line here.
        num_ends = read_row(fd, file, *_span(block)).count(b"\r\n") if found.num_blank else 0
        return rows._replace(num_blank=rows.num_blank - num_ends)

    def _stripped(self, fd: int, file: FileRef, block: Block, found: BlockRows) -> BlockRows:
        """The rows without the white space around them; a row of white space only is blank."""
        data, lengths = found.data, found.lengths
        plain = [
            length < 0 or (start >= 0 and data[start] == _OPENS and data[start + length - 1] == _CLOSES)
            for start, length in zip(found.starts, lengths, strict=True)
        ]
        if all(plain):
            return found

        starts, kept, offsets = (type(found.starts)("i") for _ in range(3))
        for is_plain, start, length, offset in zip(plain, found.starts, lengths, found.offsets, strict=True):
            raw = b"" if is_plain else self._raw(fd, file, block, data, start, length, offset)
            before, size = (0, length) if is_plain else _stripped(raw)
            if size:
                starts.append(start + before if start >= 0 else -1)
                kept.append(size)
                offsets.append(offset + before)
        return found._replace(
            starts=starts, lengths=kept, offsets=offsets, num_blank=found.num_blank + len(lengths) - len(kept)
        )

    @staticmethod
    def _raw(
        fd: int, file: FileRef, block: Block, data: bytes | bytearray, start: int, length: int, offset: int
    ) -> bytes:
        return bytes(data[start : start + length]) if start >= 0 else read_row(fd, file, block.start + offset, length)


def _read_lines(fd: int, file: FileRef, offset: int, num_bytes: int) -> bytes:
    data = read_row(fd, file, offset, num_bytes)
    return data.replace(b"\r", b"\n") if b"\r" in data else data


def _span(block: Block) -> tuple[int, int]:
    """Offset and length of the block with the byte before it."""
    start = max(0, block.start - 1)
    return start, block.stop - start


def _stripped(raw: bytes) -> tuple[int, int]:
    """How many bytes of white space are before the text, and how many bytes the text has."""
    text = raw.decode("utf-8", "surrogateescape")
    rest = text.lstrip()
    before = len(raw) - len(rest.encode("utf-8", "surrogateescape"))
    return before, len(rest.rstrip().encode("utf-8", "surrogateescape"))
