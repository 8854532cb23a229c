"""Rows are found in a text however it is cut, into blocks or pieces: lines, Python's lines, elements of an array."""

import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from asyncdata import JsonArraySource
from asyncdata.errors import SourceError
from asyncdata.sources import json_array
from tests.support import parts
from tests.support.examples import in_ci
from tests.support.sources import cut, texts_of

Row = tuple[int, int, bytes]
"""Offset in the text, length, and bytes; of a row that is too long, no bytes."""

BOM = b"\xef\xbb\xbf"
NO_LIMIT = 1 << 20

pieces = st.sampled_from(
    [b"\n", b"\r\n", b"\n\n", b" ", b"   ", b"\t", b"\r", b"\v\f", b"\x00", b"{}", b'{"a": 1}', b"x" * 20, BOM, b"\xff"]
)
contents = st.builds(
    lambda mark, texts, end: mark + b"".join(texts) + end,
    st.sampled_from([b"", BOM]),
    st.lists(pieces, max_size=20) | st.lists(st.binary(max_size=8), max_size=8),
    st.sampled_from([b"", b"\n"]),
)
block_sizes = st.integers(1, 64)
over_reads = st.integers(0, 16)
cuts = st.lists(st.integers(1, 12), max_size=60)


def lines_of(text: bytes, max_row_bytes: int = NO_LIMIT) -> list[Row]:
    """As Python splits them; without a mark at the beginning, and without blank lines."""
    start, rows = len(BOM) * text.startswith(BOM), []
    for line in text[start:].split(b"\n"):
        if len(line) > max_row_bytes or line.strip(b" \t\r\v\f"):
            rows.append((start, len(line), line if len(line) <= max_row_bytes else b""))
        start += len(line) + 1
    return rows


@contextmanager
def opened(text: bytes, grown: bytes = b"") -> Iterator[tuple[int, parts.FileRef]]:
    """A file that has grown since it was looked at."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(text + grown)
        file.flush()
        yield file.fileno(), parts.FileRef(file.name, len(text))


def found_by_blocks(
    fd: int, file: parts.FileRef, block_bytes: int, slack_bytes: int, max_row_bytes: int
) -> tuple[list[Row], int]:
    """The rows, block after block, as workers find and read them; and the blank lines."""
    rows, num_blank = [], 0
    for start in range(0, file.num_bytes, block_bytes):
        block = parts.Block(0, start, min(start + block_bytes, file.num_bytes))
        found = parts.read_block(fd, file, block, slack_bytes, max_row_bytes)
        assert len(found.data) <= 1 + block_bytes + slack_bytes, "more than its place in the slot"
        num_blank += found.num_blank
        for begin, length, inside in zip(found.starts, found.lengths, found.offsets, strict=True):
            offset = start + inside
            assert start <= offset < block.stop or offset == len(BOM), "a row of another block"
            text = b"" if length < 0 else found.data[begin : begin + length]
            rows.append((offset, length, text if begin >= 0 else parts.read_row(fd, file, offset, max(length, 0))))
    return rows, num_blank


@given(text=contents, block_bytes=block_sizes, slack_bytes=over_reads, limit=st.integers(1, 60), grown=pieces)
@example(BOM + b'{"a": 1}\n', 1, 3, 60, b"")
@example(BOM + b"\n{}\n", 2, 2, 60, b"{}")
@example(BOM, 4, 0, 60, b"\n{}")
@example(b"{}\n" + b" " * 50 + b"\n{}", 4, 0, 60, b"")
@example(b"{}\n" + b" " * 50 + b"{}\n{}", 4, 0, 60, b"1")
@example(b"{}\n" + b" " * 50 + b"\n{}", 64, 0, 10, b"")
@example(b'{"a": 1}\n' * 7, 9, 0, 8, b"")
@example(b"x" * 10 + b"\n" + b"x" * 11 + b"\n" + b"x" * 10, 64, 0, 10, b"")
@example(b"\r\n{}\r\n \t\r\n\v\f\n", 64, 0, 60, b"")
@example(b"{}\n\x00\n \x00\n\xc2\xa0\n" + BOM + b"\n", 5, 1, 60, b"")
@example(b"one\ntwo\nthree\n", 5, 1, 60, b"four\n")
def test_every_line_is_found_once_by_the_block_that_holds_its_first_byte(text, block_bytes, slack_bytes, limit, grown):
    """Of a file that begins with a mark, the first read has to show a byte after it."""
    assume(not text.startswith(BOM) or block_bytes + slack_bytes > len(BOM))

    with opened(text, grown) as (fd, file):
        rows, num_blank = found_by_blocks(fd, file, block_bytes, slack_bytes, limit)

    assert rows == [(offset, length if length <= limit else -1, row) for offset, length, row in lines_of(text, limit)]
    bare = text.removeprefix(BOM)
    assert len(rows) + num_blank == bare.count(b"\n") + (not bare.endswith(b"\n") and len(bare) > 0)


@pytest.mark.parametrize(
    ("num_left", "start", "stop", "end"), [(3, 0, 14, 3), (3, 8, 14, 7), (3, 4, 6, 3), (10, 8, 10, 10)]
)
def test_a_file_that_has_shrunk_is_told_by_its_name_and_both_its_ends(num_left, start, stop, end):
    with opened(b"one\ntwo\nthree\n") as (fd, file):
        os.truncate(fd, num_left)
        with pytest.raises(parts.FileChangedError) as caught:
            parts.read_block(fd, file, parts.Block(0, start, stop), 0, NO_LIMIT)

    assert str(caught.value).startswith(
        f"AD302 {file.path} shrank: it had 14 bytes at the start, and ends at byte {end} "
    )


python_pieces = st.sampled_from(
    [
        *(b"\n", b"\r\n", b"\r", b"\r\r", b" ", b"\t", b"\v\f", b"\x1c", b"{}", b'{"a": 1}', b"x" * 20, b"\xff"),
        *(char.encode() for char in ("\u2028", "\u3000", "\u0085", "\u00a0", "é")),
        '\u3000{"b": "\u2028"}\u2028'.encode(),
    ]
)


def job_of(files: Any, block_bytes: int, slack_bytes: int, limit: int = NO_LIMIT) -> parts.Job:
    return parts.Job(files=files, tokenize=None, max_row_bytes=limit, block_bytes=block_bytes, slack_bytes=slack_bytes)


@given(st.lists(python_pieces, max_size=20).map(b"".join), block_sizes, over_reads)
@example(b"{}\r{}\r", 2, 0)
@example(b"{}\r\n{}\r\n", 3, 0)
@example(b"{}\r\n{}\r\n", 1, 0)
@example("\u3000\n{}".encode(), 1, 0)
@example(b"{}" + b" " * 40 + b"\r{}", 4, 2)
def test_pythons_lines_are_those_of_a_program_that_opens_the_file_as_text_and_strips_them(text, block_bytes, slack):
    lines = [line.strip() for line in io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", errors="surrogateescape")]
    rows, num_blank = [], 0
    with opened(text) as (_, file):
        reader = parts.PythonLineReader(job_of([file], block_bytes, slack))
        for start in range(0, len(text), block_bytes):
            found = reader.read_block(parts.Block(0, start, min(start + block_bytes, len(text))), 1 << 62)
            num_blank += found.num_blank
            for begin, length, inside in zip(found.starts, found.lengths, found.offsets, strict=True):
                rows.append(text[start + inside : start + inside + length])
                assert begin < 0 or found.data[begin : begin + length] == rows[-1]
        reader.close()

    assert rows == [line.encode("utf-8", "surrogateescape") for line in lines if line]
    assert num_blank == lines.count("")


def placed(split: Iterable[Any], limit: int = NO_LIMIT) -> list[tuple[int, Row]]:
    return [
        (number, (offset, length, text or b""))
        for part in split
        for number, offset, length, text in zip(
            part.numbers.tolist(), part.offsets.tolist(), part.lengths.tolist(), texts_of(part, limit), strict=True
        )
    ]


@given(text=contents, first=cuts, second=cuts, limit=st.integers(0, 30), number=st.floats(0, 0.99))
@example(BOM + b"\n", [1, 1], [], 12, 0)
@example(b"xxxx" + BOM + b"x", [4, 4], [], 0, 0)
@example(BOM + b"xxxx", [2, 2], [], 1, 0)
@example(b"xxxx" + BOM + b"\n", [4], [], 0, 0)
def test_lines_are_the_rows_of_a_text_that_comes_in_pieces_and_goes_on_at_any_place(text, first, second, limit, number):
    split = list(parts.split_lines(cut(text, first), 0, 0, limit))

    begin = len(BOM) * text.startswith(BOM)
    numbered = [(text.count(b"\n", begin, row[0]), row) for row in lines_of(text, limit)]
    assert placed(split, limit) == numbered
    if text[begin:]:
        num_lines = text.count(b"\n", begin) + (not text.endswith(b"\n"))
        assert sum(part.num_blank for part in split) == num_lines - len(numbered)
    if split:
        number = int(number * len(split))
        part = split[number]
        rest = parts.split_lines(cut(text[part.offset :], second), part.offset, part.number, limit)
        assert placed(rest, limit) == placed(split[number:], limit)


strings = st.text(st.sampled_from('a"\\[]{},: \né'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=5,
)
spaces = st.text(st.sampled_from(" \t\r\n"), max_size=4).map(str.encode)


class Array:
    """A JSON array: its text, and where its elements are."""

    def __init__(self, mark: bytes, space: bytes, elements: list[tuple[bytes, Any, bytes]], end: bytes) -> None:
        self.text, self.rows = mark + space + b"[", list[Row]()
        for number, (before, value, after) in enumerate(elements):
            element = json.dumps(value, ensure_ascii=False).encode()
            self.text += b"," * (number > 0) + before
            self.rows.append((len(self.text), len(element), element))
            self.text += element + after
        self.text += (b"" if elements else space) + b"]" + end

    def __repr__(self) -> str:
        return repr(self.text)


arrays = st.builds(
    Array, st.sampled_from([b"", BOM]), spaces, st.lists(st.tuples(spaces, values, spaces), max_size=8), spaces
)


@in_ci(max_examples=40)
@given(array=arrays, first=cuts, second=cuts, limit=st.integers(1, 30), data=st.data())
def test_elements_are_the_rows_of_an_array_in_pieces_from_any_place(array, first, second, limit, data):
    split = list(parts.split_array(cut(array.text, first), 0, 0, limit, "a.json"))

    rows = [(offset, length, text if length <= limit else b"") for offset, length, text in array.rows]
    assert placed(split, limit) == list(enumerate(rows))
    if split:
        part = data.draw(st.sampled_from(split))
        rest = parts.split_array(cut(array.text[part.offset :], second), part.offset, part.number, limit, "a.json")
        assert placed(rest, limit) == list(enumerate(rows))[part.number :]


@pytest.mark.parametrize(
    ("text", "num_good", "reason"),
    [
        (b"[1, 2", 1, "it ends within element 1, which begins at byte 4, without ']'"),
        (b'[1, {"a": "x', 1, "it ends within element 1, which begins at byte 4, without ']'"),
        (b"[1, 2,", 2, "it ends after 2 elements, without ']'"), (b"[", 0, "it ends after 0 elements, without ']'"),
        (b"[1, 2] x", 2, "at byte 7, after its end, there is b'x'"),
        (b"[1][2]", 1, "at byte 3, after its end, there is b'[2]'"),
        (b"[1, , 2]", 1, "at byte 4 element 1 is missing"), (b"[1, 2,]", 2, "at byte 6 element 2 is missing"),
        (b"[,]", 0, "at byte 1 element 0 is missing"), (b"[1, 2}", 1, "at byte 5 there is '}' in place of its ']'"),
        (b'[{"a": [1}, 2]', 0, "it ends within element 0, which begins at byte 1, without ']'"),
        (b"[{'a': 1}, {\"b\" 2} {}, 3]", 3, ""),  # a fault within an element is left to the worker
    ],
)  # fmt: skip
def test_an_incomplete_array_is_named_after_its_elements_and_by_its_blocks(tmp_path, text, num_good, reason):
    rows, fault = found_in_one(text)

    assert len(rows) == num_good
    assert fault == (f"AD120 PATH is not one whole JSON array: {reason}; repair the file" if reason else "")
    (tmp_path / "rows.json").write_bytes(text)
    with array_of(tmp_path, 100) as (reader, blocks):
        if reason:
            with pytest.raises(SourceError, match=re.escape(reason)):
                elements_of(reader, blocks, 0)
        else:
            assert [(offset, length) for offset, length, _ in elements_of(reader, blocks, 0)] == rows


def found_in_one(text: bytes) -> tuple[list[tuple[int, int]], str]:
    """Offset and length of each element, as a stream finds them, and what is wrong after them."""
    found: list[tuple[int, int]] = []
    try:
        for rows in parts.split_array([text], 0, 0, NO_LIMIT, "PATH"):
            found += zip(rows.offsets.tolist(), rows.lengths.tolist(), strict=True)
    except SourceError as error:
        return found, str(error)

    return found, ""


@contextmanager
def array_of(
    folder: Path, block_bytes: int, limit: int = NO_LIMIT
) -> Iterator[tuple[parts.ArrayReader, parts.ArrayBlocks]]:
    blocks = JsonArraySource(str(folder), max_row_bytes=limit).open(block_bytes).as_blocks(block_bytes)
    assert blocks is not None
    reader = parts.ArrayReader(job_of(blocks.files, block_bytes, 10, limit), **blocks.reader.settings)
    yield reader, blocks
    reader.close()


def elements_of(reader: parts.ArrayReader, blocks: parts.ArrayBlocks, number: int) -> list[Row]:
    (block,) = blocks.blocks([number])
    found = reader.read_block(block, 1 << 62)
    rows = zip(found.starts, found.lengths, found.offsets, strict=True)
    return [(block.start + offset, n, bytes(found.data[s : s + n]) if s >= 0 else b"") for s, n, offset in rows]


@in_ci(max_examples=40)
@given(st.data(), arrays, st.integers(1, 50), st.integers(1, 80), st.integers(1, 60))
def test_blocks_in_any_order_have_the_elements(tmp_path_factory, data, array, block_bytes, piece_bytes, limit):
    folder = tmp_path_factory.mktemp("array")
    (folder / "rows.json").write_bytes(array.text)
    found: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patched, array_of(folder, block_bytes, limit) as (reader, blocks):
        parts.change(patched, piece_bytes_of_an_array=piece_bytes)
        numbers = list(range(blocks.num_blocks))
        again = data.draw(st.lists(st.sampled_from(numbers), max_size=5))
        for number in data.draw(st.permutations(numbers)) + again:
            rows = elements_of(reader, blocks, number)
            assert found.setdefault(number, rows) == rows
            assert all(number * block_bytes <= offset < (number + 1) * block_bytes for offset, _, _ in rows)

    rows = [row for number in sorted(found) for row in found[number]]
    for (offset, length, seen), (begin, size, element) in zip(rows, array.rows, strict=True):
        assert (offset, length) == (begin, size if size <= limit else -1)
        assert seen in (element, b"")


@in_ci(max_examples=40)
@given(
    arrays, st.sampled_from([b",", b"]", b"}", b"", b"x", b'"']), st.floats(0, 1), st.integers(1, 60),
    st.integers(1, 80),
)  # fmt: skip
def test_only_blocks_from_the_fault_on_report_it(tmp_path_factory, array, harm, place, block_bytes, piece_bytes):
    start = array.text.index(b"[") + 1
    at = start + round(place * (len(array.text) - start))
    text = array.text[:at] + (harm + array.text[at:] if harm else b"")
    folder = tmp_path_factory.mktemp("array")
    (folder / "rows.json").write_bytes(text)
    found: list[tuple[int, int]] = []
    faults: list[str] = []
    with pytest.MonkeyPatch.context() as patched, array_of(folder, block_bytes) as (reader, blocks):
        parts.change(patched, piece_bytes_of_an_array=piece_bytes)
        for number in range(blocks.num_blocks):
            try:
                rows = elements_of(reader, blocks, number)
            except SourceError as error:
                faults.append(str(error).replace(f"{folder}/rows.json", "PATH"))
            else:
                assert not faults, "what follows a fault is not part of the array"
                found += [(offset, n) for offset, n, _ in rows]
        first_bad = blocks.num_blocks - len(faults)

    expected, fault = found_in_one(text)
    assert found == [row for row in expected if row[0] < first_bad * block_bytes]
    # how much of what comes after the end is shown depends on how much is read at once
    shown = {re.sub(r"there is b['\"].*", "", one) for one in (*faults, fault)}
    assert len(shown) == 1
    assert bool(faults) is bool(fault)


def test_going_back_begins_at_the_last_element_known_before_also_among_many_arrays(tmp_path, monkeypatch):
    parts.change(monkeypatch, most_scans_of_an_array=2)
    for number in range(4):
        (tmp_path / f"{number}.json").write_text(json.dumps([f"{number} {row:04d}" for row in range(400)]))
    asked: list[int] = []
    really = json_array.read_row

    def noting(fd: int, file: Any, offset: int, num_bytes: int) -> bytes:
        asked.append(offset)
        return really(fd, file, offset, num_bytes)

    with array_of(tmp_path, 100) as (reader, blocks):
        forwards = [elements_of(reader, blocks, number) for number in range(blocks.num_blocks)]
        assert sum(map(len, forwards)) == 1600
        parts.change(monkeypatch, read_a_row_of_an_array=noting)
        last = blocks.num_blocks - 10
        assert elements_of(reader, blocks, last) == forwards[last]
        assert min(asked) >= 2000, "not from the front"
        backwards = [elements_of(reader, blocks, number) for number in reversed(range(blocks.num_blocks))]
    assert backwards[::-1] == forwards
