"""However a file is cut into blocks, its rows are those of a Python program that opens it as text and strips lines."""

from __future__ import annotations

import io
import tempfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata.core.messages import Block, FileRef, Job
from asyncdata.core.specs import ReaderSpec
from asyncdata.sources.text.python_lines import PythonLineReader

pytestmark = pytest.mark.thorough

MAX_ROW_BYTES = 1 << 20

pieces = st.sampled_from(
    [
        *(b"\n", b"\r\n", b"\r", b"\r\r", b" ", b"\t", b"\v\f", b"\x1c", b"{}", b'{"a": 1}', b"x" * 20, b"\xff"),
        *(char.encode() for char in ("\u2028", "\u3000", "\u0085", "\u00a0", "é")),
        '\u3000{"b": "\u2028"}\u2028'.encode(),
    ]
)
contents = st.lists(pieces, max_size=20).map(b"".join)


def found_by_python(data: bytes) -> tuple[list[bytes], int]:
    """The rows, and the blank lines."""
    lines = list(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape"))
    rows = [line.strip() for line in lines]
    return [row.encode("utf-8", "surrogateescape") for row in rows if row], sum(not row for row in rows)


def found_by_blocks(data: bytes, block_bytes: int, slack_bytes: int) -> tuple[list[bytes], int]:
    rows, num_blank = [], 0
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        reader = PythonLineReader(job(file.name, len(data), block_bytes, slack_bytes))
        for start in range(0, len(data), block_bytes):
            block = Block(0, start, min(start + block_bytes, len(data)))
            found = reader.read_block(block, 1 << 62)
            num_blank += found.num_blank
            for begin, length, inside in zip(found.starts, found.lengths, found.offsets, strict=True):
                offset = start + inside
                row = data[offset : offset + length]
                assert begin < 0 or found.data[begin : begin + length] == row
                rows.append(row)
        reader.close()
    return rows, num_blank


def job(path: str, num_bytes: int, block_bytes: int, slack_bytes: int) -> Job:
    return Job(
        files=[FileRef(path, num_bytes)],
        tokenize=None,
        max_row_bytes=MAX_ROW_BYTES,
        block_bytes=block_bytes,
        slack_bytes=slack_bytes,
        reader=ReaderSpec("asyncdata.sources.text.python_lines:PythonLineReader"),
    )


@given(contents, st.integers(1, 64), st.integers(0, 16))
@example(b"{}\r{}\r", 2, 0)
@example(b"{}\r\n{}\r\n", 3, 0)
@example(b"{}\r\n{}\r\n", 1, 0)
@example("\u3000\n{}".encode(), 1, 0)
@example(b"{}" + b" " * 40 + b"\r{}", 4, 2)
def test_rows_and_blank_lines_are_those_of_python(data: bytes, block_bytes: int, slack_bytes: int) -> None:
    assert found_by_blocks(data, block_bytes, slack_bytes) == found_by_python(data)
