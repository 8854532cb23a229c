"""However a file is cut into blocks, its rows are those that Python finds in the whole of it, each once."""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from asyncdata.core.messages import Block, FileRef
from asyncdata.sources.text.line_scanner import read_block, read_row
from tests.property.model import rows_of

pytestmark = pytest.mark.thorough

BOM = b"\xef\xbb\xbf"
NO_LIMIT = 1 << 20

pieces = st.sampled_from(
    [b"\n", b"\r\n", b"\n\n", b" ", b"   ", b"\t", b"\r", b"\v\f", b"\x00", b"{}", b'{"a": 1}', b"x" * 20, BOM, b"\xff"]
)
contents = st.builds(
    lambda mark, parts, end: mark + b"".join(parts) + end,
    st.sampled_from([b"", BOM]),
    st.lists(pieces, max_size=20) | st.lists(st.binary(max_size=8), max_size=8),
    st.sampled_from([b"", b"\n"]),
)
block_sizes = st.integers(1, 64)
over_reads = st.integers(0, 16)


def scan(
    data: bytes, block_bytes: int, slack_bytes: int, max_row_bytes: int = NO_LIMIT, num_bytes: int | None = None
) -> tuple[list[tuple[int, int, bytes]], int]:
    """(offset, length, bytes) of every row, block after block, as workers find and read them; and the blank lines."""
    num_bytes = len(data) if num_bytes is None else num_bytes
    rows, num_blank = [], 0
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        fd, ref = file.fileno(), FileRef(file.name, num_bytes)
        for start in range(0, num_bytes, block_bytes):
            block = Block(0, start, min(start + block_bytes, num_bytes))
            found = read_block(fd, ref, block, slack_bytes, max_row_bytes)
            assert len(found.data) <= 1 + block_bytes + slack_bytes, "more than its place in the slot"
            num_blank += found.num_blank
            for begin, length, inside in zip(found.starts, found.lengths, found.offsets, strict=True):
                offset = start + inside
                assert start <= offset < block.stop or data[:offset] == BOM, "a row of another block"
                if length < 0:
                    rows.append((offset, length, b""))
                elif begin < 0:
                    rows.append((offset, length, read_row(fd, ref, offset, length)))
                else:
                    rows.append((offset, length, found.data[begin : begin + length]))
    return rows, num_blank


def in_the_whole(data: bytes, max_row_bytes: int = NO_LIMIT) -> list[tuple[int, int, bytes]]:
    rows = rows_of(data, max_row_bytes=max_row_bytes)
    return [
        (row.offset, len(row.data), row.data) if len(row.data) <= max_row_bytes else (row.offset, -1, b"")
        for row in rows
    ]


def has_room_for_the_mark(data: bytes, block_bytes: int, slack_bytes: int) -> bool:
    """Of a file that begins with a byte order mark, the first read has to show a byte after it."""
    return not data.startswith(BOM) or block_bytes + slack_bytes > len(BOM)


@given(contents, block_sizes, over_reads, st.integers(1, 60))
@example(BOM + b'{"a": 1}\n', 1, 3, 60)
@example(BOM + b"\n{}\n", 2, 2, 60)
@example(BOM, 4, 0, 60)
@example(b"{}\n" + b" " * 50 + b"\n{}", 4, 0, 60)
@example(b"{}\n" + b" " * 50 + b"{}\n{}", 4, 0, 60)
@example(b"{}\n" + b" " * 50 + b"\n{}", 64, 0, 10)
@example(b'{"a": 1}\n' * 7, 9, 0, 8)
def test_every_row_is_found_once_by_the_block_that_holds_its_first_byte(
    data: bytes, block_bytes: int, slack_bytes: int, max_row_bytes: int
) -> None:
    assume(has_room_for_the_mark(data, block_bytes, slack_bytes))

    rows, _ = scan(data, block_bytes, slack_bytes, max_row_bytes)

    assert rows == in_the_whole(data, max_row_bytes)


@given(contents, block_sizes, over_reads)
def test_a_line_is_a_row_or_is_counted_as_blank(data: bytes, block_bytes: int, slack_bytes: int) -> None:
    assume(has_room_for_the_mark(data, block_bytes, slack_bytes))

    rows, num_blank = scan(data, block_bytes, slack_bytes)

    text = data.removeprefix(BOM)
    assert len(rows) + num_blank == text.count(b"\n") + (not text.endswith(b"\n") and len(text) > 0)


@given(contents, block_sizes, over_reads, st.integers(0, 100))
def test_a_file_that_grows_keeps_the_rows_it_had_at_the_start(
    data: bytes, block_bytes: int, slack_bytes: int, num_bytes: int
) -> None:
    num_bytes = min(num_bytes, len(data))
    assume(has_room_for_the_mark(data, block_bytes, slack_bytes))

    rows, _ = scan(data, block_bytes, slack_bytes, num_bytes=num_bytes)

    assert rows == in_the_whole(data[:num_bytes])
