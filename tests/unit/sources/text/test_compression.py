"""Compressed files: known by their first bytes, read to the last one, and named when they are cut off or damaged."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import JsonArraySource, JsonlSource, Shuffle, SourceChangedError, SourceError
from asyncdata.sources.base import FileBlocks
from asyncdata.sources.stream import StreamOrder
from asyncdata.sources.text.json_array_stream import split_array
from asyncdata.sources.text.line_stream import split_lines
from asyncdata.sources.text.text_stream import TextStream
from tests.support.streams import frames, jsonl, members, texts_of, write

if TYPE_CHECKING:
    from collections.abc import Callable

CODERS: dict[str, Callable[[list[bytes]], bytes]] = {"gz": members, "zst": frames}
CODES = {"gz": "AD121", "zst": "AD122"}
IN_ORDER = Shuffle(enabled=False)


@pytest.fixture(params=CODERS)
def suffix(request) -> str:
    if request.param == "zst":
        pytest.importorskip("zstandard")
    return request.param


def rows_from(first: int, stop: int) -> bytes:
    return jsonl({"id": number, "pad": "x" * (number * 37 % 90)} for number in range(first, stop))


def opened(paths: Any, **settings: Any) -> TextStream:
    stream = JsonlSource(paths, **settings).open(1024)
    assert isinstance(stream, TextStream)
    return stream


def read(stream: TextStream, state: Any = None, check: Callable[[], object] = bool) -> list[tuple[int, int, Any]]:
    """File, number and text of every row, as far as one can read."""
    order = StreamOrder(IN_ORDER, 0, len(stream.files))
    return [
        (found.file_id, number, text)
        for found in stream.read(order, 0, state, check)
        for number, text in zip(found.numbers.tolist(), texts_of(found, stream.max_row_bytes), strict=True)
    ]


def ids(stream: TextStream, state: Any = None) -> list[int]:
    return [json.loads(text)["id"] for _, _, text in read(stream, state)]


def read_until_fault(stream: TextStream) -> tuple[list[int], SourceError]:
    found: list[int] = []
    with pytest.raises(SourceError) as caught:
        for rows in stream.read(StreamOrder(IN_ORDER, 0, len(stream.files)), 0, None, bool):
            found += [json.loads(text or b"")["id"] for text in texts_of(rows)]
    return found, caught.value


# What is read


@pytest.mark.parametrize("num_parts", [1, 2, 7, 300])
def test_all_members_and_frames_are_one_text(tmp_path, suffix, num_parts):
    """Rows may lie across them."""
    text = rows_from(0, 300)
    parts = [text[n * len(text) // num_parts : (n + 1) * len(text) // num_parts] for n in range(num_parts)]

    assert ids(opened(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix](parts)))) == list(range(300))


@pytest.mark.thorough
def test_a_file_of_many_pieces_is_read_whole(tmp_path, suffix):
    text = rows_from(0, 30_000)

    assert ids(opened(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix]([text, text])))) == [*range(30_000)] * 2


@pytest.mark.thorough
def test_text_that_expands_a_thousandfold_comes_in_pieces(tmp_path):
    """A decoder that is given all of it at once would hold all of it."""
    path = write(tmp_path / "a.jsonl.gz", members([(json.dumps({"id": 1}).encode() + b" " * 999 + b"\n") * 20_000]))
    order = StreamOrder(IN_ORDER, 0, 1)

    sizes = [len(rows.data) for rows in opened(path).read(order, 0, None, bool)]

    assert sum(sizes) > 20_000_000
    assert max(sizes) < 1_000_000


def test_a_compressed_file_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path, suffix):
    path = write(tmp_path / "rows.jsonl", CODERS[suffix]([rows_from(0, 3)]))
    plain = write(tmp_path / f"rows.jsonl.{suffix}", rows_from(0, 3))

    assert ids(opened(path)) == [0, 1, 2]
    assert isinstance(JsonlSource(plain).open(1024), FileBlocks)


def test_compressed_and_plain_files_and_arrays_may_be_one_list(tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", rows_from(0, 3)),
        write(tmp_path / "b.jsonl.gz", members([rows_from(3, 6)])),
        write(tmp_path / "c.json", json.dumps([{"id": 6}, {"id": 7}]).encode()),
        write(tmp_path / "d.jsonl", b""),
        write(tmp_path / "e.json.gz", members([b' [{"id": 8}]'])),
    ]
    stream = opened([str(path) for path in paths])

    assert ids(stream) == list(range(9))
    assert [number for _, number, _ in read(stream)] == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    assert stream.location(1, 2, 9).path == str(paths[1])
    in_lines, in_array = stream.location(1, 2, 9, 18), stream.location(2, 1, 9, 11)
    assert (in_lines.row_number, in_lines.line_number(), in_lines.byte_offset) == (2, 3, 18)
    assert (in_array.row_number, in_array.line_number(), in_array.byte_offset) == (1, None, 11)


def test_a_folder_without_plain_files_is_its_compressed_ones(tmp_path):
    for name in ("b.jsonl.gz", "a.jsonl.gz", "c.txt.gz"):
        write(tmp_path / name, members([rows_from(0, 1)]))

    assert [file.path for file in opened(str(tmp_path)).files] == [
        str(tmp_path / "a.jsonl.gz"),
        str(tmp_path / "b.jsonl.gz"),
    ]

    write(tmp_path / "a.jsonl", rows_from(0, 1))
    assert [file.path for file in JsonlSource(str(tmp_path)).open(1024).files] == [str(tmp_path / "a.jsonl")]


def test_a_row_is_numbered_by_its_line(tmp_path, suffix):
    """Counted from 0, blank ones too: it is line number + 1 of what ``zcat`` prints."""
    text = b'\xef\xbb\xbf{"id": 0}\r\n\n  \n{"id": 1}\n\n{"id": 2}'

    stream = opened(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix]([text])))

    assert read(stream) == [(0, 0, b'{"id": 0}\r'), (0, 3, b'{"id": 1}'), (0, 5, b'{"id": 2}')]
    assert sum(rows.num_blank for rows in stream.read(StreamOrder(IN_ORDER, 0, 1), 0, None, bool)) == 3


def test_a_row_that_is_too_long_has_its_length_and_no_bytes(tmp_path, suffix):
    text = jsonl([{"id": 0}, {"id": 1, "pad": "x" * 2_000_000}, {"id": 2}])

    stream = opened(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix]([text])), max_row_bytes=100)

    assert [(number, text) for _, number, text in read(stream)] == [(0, b'{"id": 0}'), (1, None), (2, b'{"id": 2}')]


def test_zeros_after_the_last_member_are_padding(tmp_path):
    path = write(
        tmp_path / "a.jsonl.gz", members([rows_from(0, 3)]) + bytes(70_000) + members([rows_from(3, 5)]) + bytes(9)
    )

    assert ids(opened(path)) == list(range(5))


def test_frames_that_are_to_be_skipped_are(tmp_path):
    """As the seekable format has at its end."""
    skipped = b"\x5e\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    path = write(tmp_path / "a.jsonl.zst", skipped + frames([rows_from(0, 3)]) + skipped)

    assert ids(opened(path)) == [0, 1, 2]


def test_nothing_is_read_beyond_the_size_of_the_start(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", members([rows_from(0, 3)]))
    stream = opened(path)
    with path.open("ab") as file:
        file.write(members([rows_from(3, 5)]))

    assert ids(stream) == [0, 1, 2]


@pytest.mark.thorough
def test_reading_stops_when_the_rows_are_not_needed_even_before_the_first_one(tmp_path):
    text = rows_from(0, 30_000)
    stream = opened(write(tmp_path / "a.jsonl.gz", members([text])))
    far = {"file": 0, "entry": [0, 0], "offset": len(text), "row": 30_000}
    num_calls = 0

    def check() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        read(stream, far, check)
    assert num_calls == 3


# From the middle


def states_of(stream: TextStream) -> list[tuple[int, dict[str, Any]]]:
    """How many rows come before each state that is given."""
    found, count = [], 0
    for rows in stream.read(StreamOrder(IN_ORDER, 0, len(stream.files)), 0, None, bool):
        assert rows.state is not None
        found.append((count, json.loads(json.dumps(rows.state))))
        count += len(rows.lengths)
    return found


@pytest.mark.thorough
def test_reading_resumes_from_every_state_with_the_next_row(tmp_path, suffix):
    text = rows_from(0, 30_000)
    parts = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    paths = [
        str(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix](parts))),
        str(write(tmp_path / f"b.jsonl.{suffix}", CODERS[suffix]([rows_from(30_000, 30_500)]))),
    ]
    stream = opened(paths)
    expected = read(stream)

    states = states_of(stream)

    assert len(states) > 4
    for count, state in states:
        assert read(opened(paths), state) == expected[count:]


@pytest.mark.thorough
def test_decoding_begins_at_the_last_member_or_frame_before_the_row(tmp_path, suffix):
    parts = [rows_from(first, first + 1000) for first in range(0, 30_000, 1000)]
    coded = [CODERS[suffix]([part]) for part in parts]

    states = states_of(opened(write(tmp_path / f"a.jsonl.{suffix}", b"".join(coded))))

    starts = [(sum(map(len, coded[:n])), sum(map(len, parts[:n]))) for n in range(len(parts))]
    assert len({tuple(state["entry"]) for _, state in states}) > 3
    for _, state in states:
        assert tuple(state["entry"]) == max(start for start in starts if start[1] <= state["offset"])


# What is wrong


@pytest.mark.parametrize("num_lost", [1, 5, 9, 60])
def test_a_truncated_file_is_named_after_all_rows_before_its_end(tmp_path, suffix, num_lost):
    whole = CODERS[suffix]([rows_from(0, 500)])
    data = whole + CODERS[suffix]([rows_from(500, 700)])[:-num_lost]
    path = write(tmp_path / f"a.jsonl.{suffix}", data)

    found, error = read_until_fault(opened(path))

    assert len(found) >= 500
    assert found == list(range(len(found)))
    assert str(error).startswith(f"{CODES[suffix]} {path}: the ")
    assert f"that begins at byte {len(whole)} ends early, at byte {len(data)}" in str(error)


def test_a_line_that_is_cut_off_with_its_file_is_no_row(tmp_path):
    """Nothing tells a half of a row from a whole one, where it happens to be JSON."""
    data = zlib.compressobj(wbits=31)
    coded = data.compress(b'{"id": 0}\n{"id": 1}') + data.flush(zlib.Z_SYNC_FLUSH)

    found, error = read_until_fault(opened(write(tmp_path / "a.jsonl.gz", coded)))

    assert found == [0]
    assert str(error).startswith("AD121 ")


def test_a_flipped_bit_is_found_by_the_formats_own_check(tmp_path, suffix):
    first = CODERS[suffix]([rows_from(0, 500)])
    data = bytearray(first + CODERS[suffix]([rows_from(500, 1000)]))
    data[-6 if suffix == "gz" else -2] ^= 1  # of the checksum itself: all rows come
    path = write(tmp_path / f"a.jsonl.{suffix}", bytes(data))

    found, error = read_until_fault(opened(path))

    assert found[:500] == list(range(500))
    assert f"that begins at byte {len(first)} is damaged (" in str(error)
    assert str(error).startswith(f"{CODES[suffix]} {path}: ")


def test_garbage_after_the_last_member_or_frame_is_named(tmp_path, suffix):
    coded = CODERS[suffix]([rows_from(0, 500)])
    path = write(tmp_path / f"a.jsonl.{suffix}", coded + b"garbage garbage")

    found, error = read_until_fault(opened(path))

    assert found == list(range(500))
    assert f"that begins at byte {len(coded)} is damaged" in str(error)


@pytest.mark.thorough
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", members([rows_from(n * 9000, n * 9000 + 9000) for n in range(3)]))
    stream = opened(path)
    rows = stream.read(StreamOrder(IN_ORDER, 0, 1), 0, None, bool)
    next(rows)

    with path.open("r+b") as file:
        file.truncate(70_000)

    with pytest.raises(SourceChangedError, match=rf"^AD302 {path} shrank: it had \d+ bytes at the start, and ends at"):
        list(rows)


def test_an_empty_file_whose_name_says_that_it_is_compressed_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl.{suffix}", b"")

    with pytest.raises(SourceError, match=rf"AD121 {path} is empty, but a compressed file never is"):
        JsonlSource(path).open(1024)


def test_a_compressed_file_of_another_format_is_refused_at_the_start(tmp_path, suffix):
    for data, code in ((b"PAR1\x15\x04", "AD123"), ("x".encode("utf-16"), "AD103"), (b"[1]", "AD120")):
        path = write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix]([data]))
        with pytest.raises(SourceError, match=f"^{code} {path} "):
            JsonlSource(path).open(1024)


def test_without_the_package_for_zstd_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)

    with pytest.raises(SourceError, match=r"AD123 .* is zstd .*: pip install zstandard, or decompress it"):
        JsonlSource(path).open(1024)


def test_a_file_of_another_content_is_not_the_file_it_was(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", members([rows_from(0, 3)]))
    stream = opened(path)
    before = stream.fingerprint()
    stream.check_unchanged()

    path.unlink()
    write(path, members([rows_from(1, 4)]))

    assert opened(path).fingerprint()["digest"] != before["digest"]
    with pytest.raises(SourceChangedError, match="AD303"):
        stream.check_unchanged()


def test_arrays_may_be_compressed_too(tmp_path, suffix):
    path = write(tmp_path / f"a.json.{suffix}", CODERS[suffix]([b'[{"id": 0},', b'\n{"id": 1}]']))

    assert ids(opened(path)) == ids(JsonArraySource(str(path)).open(1024)) == [0, 1]


def test_a_gzip_file_with_a_name_and_a_time_in_its_header_is_read(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(rows_from(0, 3))

    assert ids(opened(path)) == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lines", "array"])
@given(
    texts=st.lists(st.sampled_from([b'{"a": 1}', b"[]", b"7", b'"' + b"x" * 30 + b'"']), min_size=1, max_size=9),
    gap=st.sampled_from([b"\n", b"\n\n", b" \r\n"]),
    has_mark=st.booleans(),
    cut=st.integers(1, 12),
)
def test_every_row_says_where_it_begins_in_the_text(kind, texts, gap, has_mark, cut):
    mark = b"\xef\xbb\xbf" if has_mark else b""
    whole = mark + (gap.join(texts) if kind == "lines" else b"[" + (b"," + gap).join(texts) + b"]")
    pieces = [whole[start : start + cut] for start in range(0, len(whole), cut)]
    parts = list(split_lines(pieces, 0, 0, 20) if kind == "lines" else split_array(pieces, 0, 0, 20, "x"))

    offsets = [int(offset) for part in parts for offset in part.offsets]
    assert [whole[offset : offset + len(text)] for offset, text in zip(offsets, texts, strict=True)] == texts
