"""Files of JSON lines and arrays: which are meant, what is refused, and how compressed ones are read to the end."""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, JsonArraySource, JsonlSource, Shuffle, SourceError
from asyncdata.sources.stream import StreamOrder
from tests.support.reading_rows import AS_IT_LIES, read_until_fault, refusal_of, rows_of, samples_of
from tests.support.streams import frames, jsonl, members, texts_of, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROW = b'{"id": 1}\n'
CODERS: dict[str, Callable[[list[bytes]], bytes]] = {"gz": members, "zst": frames}
CODES = {"gz": "AD121", "zst": "AD122"}


@pytest.fixture(params=CODERS)
def suffix(request) -> str:
    if request.param == "zst":
        pytest.importorskip("zstandard")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of rows and one that is something else; one below it, one whose name looks like a glob, a link."""
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.jsonl", "notes.txt", "sub/deep/d.jsonl", "[a].txt"):
        write(tmp_path / name, jsonl([{"name": name}]))
    (tmp_path / "z.link").symlink_to(tmp_path / "a.jsonl")
    return tmp_path


def many(first: int, stop: int) -> bytes:
    return jsonl({"id": number, "pad": "x" * (number * 37 % 90)} for number in range(first, stop))


def ids(source: Any, **knobs: Any) -> list[int]:
    return [row["id"] for row in rows_of(source, **knobs)]


# Which files


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("notes.txt", ["notes.txt"]),
        (["c.jsonl", "a.jsonl", "b.jsonl"], ["c.jsonl", "a.jsonl", "b.jsonl"]),
        ("*.jsonl", ["a.jsonl", "b.jsonl", "c.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "c.jsonl", "sub/deep/d.jsonl"]),
        (".", ["a.jsonl", "b.jsonl", "c.jsonl"]),
        (["sub/deep", "[bc].jsonl"], ["sub/deep/d.jsonl", "b.jsonl", "c.jsonl"]),
        ("[a].txt", ["[a].txt"]),
        ("z.link", ["z.link"]),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_paths_globs_and_folders_are_files_in_their_order(folder, monkeypatch, paths, expected):
    monkeypatch.chdir(folder)
    found = samples_of(JsonlSource(paths))

    assert [os.path.relpath(sample.source.path, folder) for sample in found] == expected
    assert all(os.path.isabs(sample.source.path) for sample in found)


def test_a_pathlib_path_is_a_path_alone_and_in_a_list_and_an_empty_file_is_no_fault(folder):
    path, empty = folder / "a.jsonl", write(folder / "empty.jsonl", b"")

    assert rows_of(JsonlSource(path)) == rows_of(JsonlSource([empty, path])) == [{"name": "a.jsonl"}]


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"\n\n", b"\r\n", b"   "])
def test_a_mark_or_white_space_before_the_first_row_is_accepted(tmp_path, head):
    assert ids(JsonlSource(write(tmp_path / "a.jsonl", head + ROW))) == [1]


def test_a_folder_is_its_plain_files_or_else_its_compressed_ones_and_for_arrays_its_json(tmp_path):
    def names(source: Any) -> list[str]:
        return [os.path.basename(sample.source.path) for sample in samples_of(source)]

    for name in ("b.jsonl.gz", "a.jsonl.gz", "c.txt.gz"):
        write(tmp_path / name, members([ROW]))
    assert names(JsonlSource(str(tmp_path))) == ["a.jsonl.gz", "b.jsonl.gz"]
    write(tmp_path / "a.jsonl", ROW)
    assert names(JsonlSource(str(tmp_path))) == ["a.jsonl"]
    for name in ("b.json", "a.json"):
        write(tmp_path / name, b"[{}]")
    assert names(JsonArraySource(str(tmp_path))) == ["a.json", "b.json"]


def test_compressed_and_plain_files_and_arrays_may_be_one_list_and_their_rows_have_places(tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", many(0, 3)),
        write(tmp_path / "b.jsonl.gz", members([b"\xef\xbb\xbf" + many(3, 6).replace(b"\n", b"\r\n \n")])),
        write(tmp_path / "c.json", json.dumps([{"id": 6}, {"id": 7}]).encode()),
        write(tmp_path / "d.jsonl", b""),
        write(tmp_path / "e.json.gz", members([b' [{"id": 8}]'])),
    ]
    found = samples_of(JsonlSource([str(path) for path in paths]))

    assert [sample.extra["id"] for sample in found] == list(range(9))
    assert [sample.source.row_number for sample in found] == [0, 1, 2, 0, 2, 4, 0, 1, 0]
    assert [found[row].source.path for row in (3, 8)] == [str(paths[1]), str(paths[4])]
    in_lines, in_array = found[4].source, found[7].source
    assert (in_lines.line_number(), in_lines.byte_offset) == (3, 3 + len(many(3, 4)) + 3)
    assert (in_array.line_number(), in_array.byte_offset) == (None, 12)


def test_a_source_is_a_value_and_refuses_unknown_settings():
    assert JsonlSource("a") == JsonlSource("a") != JsonlSource("b")
    assert JsonlSource("*").max_row_bytes == 64 * 1024 * 1024
    with pytest.raises(ConfigError, match="there is no setting .glob."):
        JsonlSource("a", glob=True)


# What is refused


def test_every_fault_of_a_path_is_named_at_once(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "good", ROW)
    monkeypatch.chdir(tmp_path)
    names = ["missing", "no*", "folder", "broken", "pipe", "d*.jsonl", "loop", "good", "/dev/zero"]

    lines = refusal_of(JsonlSource(names)).replace(f"{tmp_path}/", "").replace(str(tmp_path), "here").splitlines()

    assert sorted(lines) == [
        "AD304 cannot read dir.jsonl: Is a directory",
        "AD304 cannot read loop: Too many levels of symbolic links",
        "AD304 cannot read missing: No such file or directory",
        "AD306 /dev/zero is no regular file; it could not be read again on resume",
        "AD306 pipe is no regular file; it could not be read again on resume",
        "AD306 the folder folder holds no *.jsonl; name the files, or a glob",
        "AD307 broken -> gone (missing): a broken link",
        "AD308 'no*' matches nothing in here",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_for_whom(tmp_path):
    path = write(tmp_path / "secret.jsonl", ROW)
    path.chmod(0)

    assert refusal_of(JsonlSource(path)) == f"AD305 cannot read {path} as uid {os.getuid()}: Permission denied"


ARRAY = "AD120 {path} is a JSON array, not JSONL; name it *.json, or write one object a line: jq -c '.[]' {path}"
UTF16 = "AD103 {path} looks like UTF-16 (begins with %s); convert it: iconv -f UTF-16 -t UTF-8"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"PAR1\x15\x04", "AD123 {path} is Parquet, not JSONL", id="Parquet"),
        pytest.param(b"\xff\xfe{\0}\0", UTF16 % "ff fe", id="UTF-16 LE"),
        pytest.param(b"\xfe\xff\0{\0}", UTF16 % "fe ff", id="UTF-16 BE"),
        pytest.param(b'[{"id": 1}]', ARRAY, id="an array"),
        pytest.param(b'\xef\xbb\xbf\r\n [\n{"id": 1}\n]', ARRAY, id="an array after a mark"),
        pytest.param(b"", "AD201 no rows in 1 files, all empty: {path}", id="nothing"),
    ],
)
def test_another_format_is_named_with_the_way_out_also_where_it_is_compressed(tmp_path, data, expected):
    path, packed = write(tmp_path / "rows.jsonl", data), write(tmp_path / "rows.jsonl.gz", members([data]))

    assert refusal_of(JsonlSource(path)) == expected.format(path=path)
    if data:
        assert refusal_of(JsonlSource(packed)).startswith(f"{expected[:5]} {packed} ")


def test_an_empty_file_whose_name_says_that_it_is_compressed_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl.{suffix}", b"")

    assert refusal_of(JsonlSource(path)).startswith(f"AD121 {path} is empty, but a compressed file never is")


def test_lines_are_no_array(tmp_path):
    path = write(tmp_path / "a.json", b'{"id": 1}\n')

    assert refusal_of(JsonArraySource(path)).startswith(
        f"AD120 {path} is not a JSON array: it begins with b'{{\"id\": 1}}\\n'; read"
    )
    assert refusal_of(JsonArraySource(write(path, b""))).startswith("AD201 no rows in 1 files, all empty: ")


@pytest.mark.parametrize("again", ["a.jsonl", "./sub/../a.jsonl", "link.jsonl", "*.jsonl"])
def test_a_file_listed_twice_is_refused_however_it_is_written(tmp_path, again):
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")

    with pytest.raises(ConfigError, match=r"AD309 .* is listed twice; its rows would come twice an epoch"):
        DataLoader(JsonlSource([str(tmp_path / "a.jsonl"), str(tmp_path / again)]), **AS_IT_LIES)


def test_without_the_package_for_zstd_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)

    assert refusal_of(JsonlSource(path)).endswith(f": pip install zstandard, or decompress it first: zstd -d {path}")


# Compressed files


@pytest.mark.parametrize("num_parts", [1, 7, 300])
def test_all_members_and_frames_are_one_text(tmp_path, suffix, num_parts):
    """Rows may lie across them."""
    text = many(0, 300)
    parts = [text[n * len(text) // num_parts : (n + 1) * len(text) // num_parts] for n in range(num_parts)]

    assert ids(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix](parts))) == list(range(300))


def test_a_compressed_file_is_known_by_its_first_bytes_and_not_by_its_name(tmp_path, suffix):
    path = write(tmp_path / "rows.jsonl", CODERS[suffix]([many(0, 3)]))
    plain = write(tmp_path / f"rows.jsonl.{suffix}", many(0, 3))

    assert ids(JsonlSource(path)) == ids(JsonlSource(plain)) == [0, 1, 2]
    assert ids(JsonlSource(plain), shuffle="full", cache={"folder": ""}), "it is indexed"


def test_arrays_may_be_compressed_and_named_either_way(tmp_path, suffix):
    coded = write(tmp_path / f"a.json.{suffix}", CODERS[suffix]([b'[{"id": 0},', b'\n{"id": 1}]']))
    plain = write(tmp_path / "b.json", b'[{"id": 0}, {"id": 1}]')

    for path in (coded, plain):
        assert ids(JsonlSource(str(path))) == ids(JsonArraySource(str(path))) == [0, 1]
    assert ids(JsonlSource(str(write(tmp_path / "lines.json", ROW)))) == [1]


def test_what_stands_between_or_after_members_and_frames_is_passed_over(tmp_path):
    """Tapes pad with zeros, and zstd's seekable format has frames that are to be skipped."""
    padded = members([many(0, 3)]) + bytes(70_000) + members([many(3, 5)]) + bytes(9)
    with gzip.open(tmp_path / "named.jsonl.gz", "wb") as file:  # with a name and a time in its header
        file.write(many(0, 3))

    assert ids(write(tmp_path / "a.jsonl.gz", padded)) == list(range(5))
    assert ids(tmp_path / "named.jsonl.gz") == [0, 1, 2]
    pytest.importorskip("zstandard")
    skipped = b"\x5e\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert ids(write(tmp_path / "a.jsonl.zst", skipped + frames([many(0, 3)]) + skipped)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json"])
def test_a_row_that_is_too_long_has_its_length_and_no_bytes(tmp_path, name):
    rows = [{"id": 0}, {"id": 1, "pad": "x" * 2_000_000}, {"id": 2}]
    data = members([jsonl(rows)]) if name.endswith("gz") else json.dumps(rows).encode()
    source = JsonlSource(str(write(tmp_path / name, data)), max_row_bytes=100)

    stream = source.open(1024)
    found = list(stream.read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, bool))

    assert [text for part in found for text in texts_of(part, 100)] == [b'{"id": 0}', None, b'{"id": 2}']
    assert [n for part in found for n in part.lengths.tolist()] == [9, len(json.dumps(rows[1])), 9]
    assert ids(source, bad_rows="skip") == [0, 2]


def test_nothing_is_read_beyond_the_size_of_the_start(tmp_path, suffix):
    for name, coder in (("a.jsonl", b"".join), (f"a.jsonl.{suffix}", CODERS[suffix])):
        path = write(tmp_path / name, coder([many(0, 3)]))
        with DataLoader(path, **AS_IT_LIES) as loader:
            with path.open("ab") as file:
                file.write(coder([many(3, 5)]))
            assert [sample.extra["id"] for batch in loader for sample in batch] == [0, 1, 2]


@pytest.mark.thorough
def test_text_that_expands_a_thousandfold_comes_in_pieces_and_stops_when_it_is_not_needed(tmp_path):
    """A decoder that is given all of it at once would hold all of it."""
    path = write(tmp_path / "a.jsonl.gz", members([(json.dumps({"id": 1}).encode() + b" " * 999 + b"\n") * 20_000]))
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 9:
            raise InterruptedError

    sizes: list[int] = []
    with pytest.raises(InterruptedError):
        given = JsonlSource(path).open(1024).read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, check)
        sizes.extend(len(rows.data) for rows in given)

    assert max(sizes) < 1_000_000
    assert sum(sizes) > 1_000_000


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gz", "zst", "array"])
def test_reading_resumes_from_every_state_and_decodes_from_the_last_place_before_it(tmp_path, kind):
    parts = [many(first, first + 1000) for first in range(0, 20_000, 1000)]
    coded = [b",".join(part.splitlines()) + b"," for part in parts] if kind == "array" else []
    coded = coded or [CODERS[kind]([part]) for part in parts]
    data = b"[" + b"".join(coded)[:-1] + b"]" if kind == "array" else b"".join(coded)
    paths = [str(write(tmp_path / f"{n}.json.{kind}", data)) for n in range(2)]
    order = StreamOrder(Shuffle(enabled=False), 0, 2)

    def read(state: Any = None) -> list[tuple[Any, Any, list[bytes | None]]]:
        found = JsonlSource(paths).open(1024).read(order, 0, state, bool)
        return [(rows.file_id, rows.state, texts_of(rows)) for rows in found]

    whole = read()
    texts = [text for _, _, found in whole for text in found]
    assert [json.loads(text or b"")["id"] for text in texts] == [*range(20_000)] * 2
    starts = [(sum(map(len, coded[:n])), sum(map(len, parts[:n]))) for n in range(len(parts))]
    assert len({tuple(state["entry"]) for _, state, _ in whole}) > 3
    count = 0
    for _, state, found in whole:
        assert [text for _, _, rest in read(json.loads(json.dumps(state))) for text in rest] == texts[count:]
        place = [state["offset"]] * 2 if kind == "array" else max(s for s in starts if s[1] <= state["offset"])
        assert list(state["entry"]) == list(place)
        count += len(found)


# Damaged files


@pytest.mark.parametrize("num_lost", [1, 9, 60])
def test_a_truncated_file_is_named_after_all_rows_before_its_end(tmp_path, suffix, num_lost):
    whole = CODERS[suffix]([many(0, 500)])
    data = whole + CODERS[suffix]([many(500, 700)])[:-num_lost]
    path = write(tmp_path / f"a.jsonl.{suffix}", data)

    found, error = read_until_fault(path)

    assert len(found) >= 500
    assert [row["id"] for row in found] == list(range(len(found)))
    assert str(error).startswith(f"{CODES[suffix]} {path}: the ")
    assert f"that begins at byte {len(whole)} ends early, at byte {len(data)}" in str(error)


def test_a_line_that_is_cut_off_with_its_file_is_no_row(tmp_path):
    """Nothing tells a half of a row from a whole one, where it happens to be JSON."""
    data = zlib.compressobj(wbits=31)
    coded = data.compress(b'{"id": 0}\n{"id": 1}') + data.flush(zlib.Z_SYNC_FLUSH)

    found, error = read_until_fault(write(tmp_path / "a.jsonl.gz", coded))

    assert found == [{"id": 0}]
    assert str(error).startswith("AD121 ")


@pytest.mark.parametrize("harm", ["a flipped bit", "garbage"])
def test_what_is_damaged_or_added_is_found_by_the_formats_own_check(tmp_path, suffix, harm):
    first = CODERS[suffix]([many(0, 500)])
    data = bytearray(first + CODERS[suffix]([many(500, 1000)]))
    if harm == "garbage":
        data[len(first) :] = b"garbage garbage"
    data[-6 if suffix == "gz" else -2] ^= 1  # of the checksum itself: all rows come
    path = write(tmp_path / f"a.jsonl.{suffix}", bytes(data))

    found, error = read_until_fault(path)

    assert [row["id"] for row in found[:500]] == list(range(500))
    assert f"that begins at byte {len(first)} is damaged (" in str(error)
    assert str(error).startswith(f"{CODES[suffix]} {path}: ")


def test_an_array_is_read_as_json_reads_it_and_a_bad_element_is_a_bad_row(tmp_path):
    elements = [b'{"a":  "]}\\"", "b": [1,\n {"c": "\\\\"}]}', b"{}", b"-1e5", b'{"x": [[], [{}]]}', b'{"b" 2} {}']
    path = write(tmp_path / "a.json", b"\xef\xbb\xbf \r\n[" + b" ,\n\t".join(elements) + b"\n] \n")

    assert rows_of(path, bad_rows="skip") == [json.loads(elements[row]) for row in (0, 1, 3)]
    with pytest.raises(SourceError, match="AD401"):
        rows_of(write(tmp_path / "b.json", b" [ ] "))


def test_real_arrays_are_read_as_json_reads_them(test_data):
    path = test_data / "babilong" / "qa1_4k.json"

    assert rows_of(str(path)) == json.loads(path.read_text(encoding="utf-8"))
