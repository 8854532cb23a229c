"""Elements of arrays by the block that holds their first byte: in any order, those that are found from the front."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import JsonArraySource, SourceError
from asyncdata.core.messages import Job
from asyncdata.sources.text import json_array_reader
from asyncdata.sources.text.json_array_reader import ArrayReader
from asyncdata.sources.text.json_array_stream import split_array

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata.sources.text.json_array_blocks import ArrayBlocks

Rows = list[tuple[int, int, bytes]]

ALL = 1 << 62
MAX_ROW_BYTES = 60

texts = st.text(st.sampled_from('a"\\,:[]{} \né'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(st.sampled_from(" \t\r\n"), max_size=4)


@st.composite
def arrays(draw: st.DrawFn) -> bytes:
    mark, elements = draw(st.sampled_from(["", "\ufeff"])), draw(st.lists(values, max_size=20))
    parts = [draw(spaces) + json.dumps(element, ensure_ascii=False) + draw(spaces) for element in elements]
    return f"{mark}{draw(spaces)}[{','.join(parts) or draw(spaces)}]{draw(spaces)}".encode()


def blocks_of(path: Path, block_bytes: int, max_row_bytes: int = MAX_ROW_BYTES) -> ArrayBlocks:
    blocks = JsonArraySource(str(path), max_row_bytes=max_row_bytes).open(block_bytes).as_blocks(block_bytes)
    assert blocks is not None
    return blocks


def reader_of(blocks: ArrayBlocks, slack_bytes: int = 10) -> ArrayReader:
    job = Job(
        files=blocks.files,
        tokenize=None,
        max_row_bytes=blocks.max_row_bytes,
        block_bytes=blocks.block_bytes,
        slack_bytes=slack_bytes,
    )
    return ArrayReader(job, **blocks.reader.settings)


def rows_of(
    reader: ArrayReader, blocks: ArrayBlocks, number: int, num_bytes: int = ALL
) -> list[tuple[int, int, bytes]]:
    """Offset in the file, length and text of each row of a block."""
    (block,) = blocks.blocks([number])
    found = reader.read_block(block, num_bytes)
    assert len(found.data) <= num_bytes
    rows = list(zip(found.starts, found.lengths, found.offsets, strict=True))
    return [(block.start + offset, n, bytes(found.data[s : s + n]) if s >= 0 else b"") for s, n, offset in rows]


def split(text: bytes) -> tuple[list[tuple[int, int]], str]:
    """Offset and length of each element, as a stream finds them, and what is wrong after them."""
    found: list[tuple[int, int]] = []
    try:
        for rows in split_array([text], 0, 0, ALL, "PATH"):
            found += zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=True)
    except SourceError as error:
        return found, str(error)

    return found, ""


@pytest.mark.thorough
@given(data=st.data(), text=arrays(), block_bytes=st.integers(1, 50), piece_bytes=st.integers(1, 80))
def test_blocks_in_any_order_have_the_elements_of_the_array(tmp_path_factory, data, text, block_bytes, piece_bytes):
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_bytes(text)
    blocks = blocks_of(path, block_bytes)
    reader = reader_of(blocks)
    numbers = data.draw(st.permutations(range(blocks.num_blocks))) + data.draw(
        st.lists(st.integers(0, blocks.num_blocks - 1), max_size=5)
    )
    found: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_array_reader, "_PIECE_BYTES", piece_bytes)
        for number in numbers:
            rows = rows_of(reader, blocks, number)
            assert found.setdefault(number, rows) == rows
            assert all(number * block_bytes <= offset < (number + 1) * block_bytes for offset, _, _ in rows)
    reader.close()

    rows = [row for number in sorted(found) for row in found[number]]
    expected, fault = split(text)
    assert fault == ""
    assert [offset for offset, _, _ in rows] == [offset for offset, _ in expected]
    assert [n for _, n, _ in rows] == [n if n <= MAX_ROW_BYTES else -1 for _, n in expected]
    for (offset, n), (_, _, seen) in zip(expected, rows, strict=True):
        assert seen in (text[offset : offset + n], b"")


@pytest.mark.thorough
@given(
    text=arrays(),
    harm=st.sampled_from([b",", b"]", b"}", b"", b"x", b'"']),
    place=st.floats(0, 1),
    block_bytes=st.integers(1, 60),
    piece_bytes=st.integers(1, 80),
)
def test_only_blocks_from_the_fault_on_report_it(tmp_path_factory, text, harm, place, block_bytes, piece_bytes):
    start = text.index(b"[") + 1
    cut = start + round(place * (len(text) - start))
    text = text[:cut] + (harm + text[cut:] if harm else b"")
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_bytes(text)
    expected, fault = split(text)
    blocks = blocks_of(path, block_bytes, 1 << 20)
    reader = reader_of(blocks)
    found: list[tuple[int, int]] = []
    faults: list[str] = []
    first_bad = blocks.num_blocks
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_array_reader, "_PIECE_BYTES", piece_bytes)
        for number in range(blocks.num_blocks):
            try:
                rows = rows_of(reader, blocks, number)
            except SourceError as error:
                faults.append(str(error).replace(str(path), "PATH"))
                first_bad = min(first_bad, number)
            else:
                assert not faults, "what follows a fault is not part of the array"
                found += [(offset, n) for offset, n, _ in rows]
    reader.close()

    assert found == [row for row in expected if row[0] < first_bad * block_bytes]
    assert bool(faults) == bool(fault)
    assert {_without_excerpt(found) for found in faults} == ({_without_excerpt(fault)} if fault else set())


def _without_excerpt(fault: str) -> str:
    """How much of what comes after the end is shown depends on how much is read at once."""
    return re.sub(r"there is b['\"].*", "", fault)


def test_rows_that_find_no_room_are_read_one_by_one(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'["one", "two", "three"]')
    blocks = blocks_of(path, 100)
    reader = reader_of(blocks)

    assert rows_of(reader, blocks, 0, 12) == [(1, 5, b'"one"'), (8, 5, b'"two"'), (15, 7, b"")]
    assert rows_of(reader, blocks, 0, 0) == [(1, 5, b""), (8, 5, b""), (15, 7, b"")]
    reader.close()


def test_going_back_begins_at_the_last_element_known_before(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([f"row {number:04d}" for number in range(400)]), encoding="utf-8")
    blocks = blocks_of(path, 100)
    reader = reader_of(blocks)
    expected = [rows_of(reader, blocks, number) for number in range(blocks.num_blocks)]
    asked: list[int] = []
    really = json_array_reader.read_row

    def noting(fd: int, file: Any, offset: int, num_bytes: int) -> bytes:
        asked.append(offset)
        return really(fd, file, offset, num_bytes)

    monkeypatch.setattr(json_array_reader, "read_row", noting)
    assert rows_of(reader, blocks, 30) == expected[30]
    assert min(asked) >= 3000, "not from the front"
    reader.close()


def test_no_more_than_some_files_are_remembered_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(json_array_reader, "_MAX_SCANS", 2)
    for number in range(4):
        (tmp_path / f"{number}.json").write_text(json.dumps([[number, row] for row in range(50)]), encoding="utf-8")
    blocks = JsonArraySource(str(tmp_path)).open(64).as_blocks(64)
    assert blocks is not None
    reader = reader_of(blocks)
    forwards = [rows_of(reader, blocks, number) for number in range(blocks.num_blocks)]
    backwards = [rows_of(reader, blocks, number) for number in reversed(range(blocks.num_blocks))]

    assert backwards[::-1] == forwards
    assert sum(map(len, forwards)) == 200
    reader.close()
