"""Files of JSON lines and arrays: which are meant, what is refused, and how compressed ones are read to the end."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from asyncdata import JsonArraySource, JsonlSource, Shuffle
from tests.support.loaders import refusal_of, rows_of, samples_of
from tests.support.parts import StreamOrder
from tests.support.sources import frames, jsonl, members, write

ROW = b'{"id": 1}\n'
CODERS: dict[str, Callable[[list[bytes]], bytes]] = {"gz": members, "zst": frames}


@pytest.fixture(params=CODERS)
def suffix(request) -> str:
    if request.param == "zst":
        pytest.importorskip("zstandard")
    return request.param


def many(first: int, stop: int) -> bytes:
    return jsonl({"id": number, "pad": "x" * (number * 37 % 90)} for number in range(first, stop))


def ids(source: Any, **knobs: Any) -> list[int]:
    return [row["id"] for row in rows_of(source, **knobs)]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("notes.txt", ["notes.txt"]), (["c.jsonl", "a.jsonl", "b.jsonl"], ["c.jsonl", "a.jsonl", "b.jsonl"]),
        ("*.jsonl", ["a.jsonl", "b.jsonl", "c.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "c.jsonl", "sub/deep/d.jsonl"]), (".", ["a.jsonl", "b.jsonl", "c.jsonl"]),
        (["sub/deep", "[bc].jsonl"], ["sub/deep/d.jsonl", "b.jsonl", "c.jsonl"]), ("[a].txt", ["[a].txt"]),
        ("~/b.jsonl", ["b.jsonl"]), ("z.link", ["z.link"]),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)  # fmt: skip
def test_paths_globs_and_folders_are_files_in_their_order(tmp_path, monkeypatch, paths, expected):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.jsonl", "notes.txt", "sub/deep/d.jsonl", "[a].txt"):
        write(tmp_path / name, jsonl([{"name": name}]))
    (tmp_path / "z.link").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = samples_of(JsonlSource(paths))

    assert [os.path.relpath(sample.source.path, tmp_path) for sample in found] == expected
    assert all(os.path.isabs(sample.source.path) for sample in found)


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


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"PAR1\x15\x04", "AD123"), (b"\xff\xfe{\0}\0", "AD103"), (b'\xef\xbb\xbf\r\n [\n{"id": 1}\n]', "AD120")],
)
def test_another_format_is_named_also_where_it_is_compressed_or_begins_with_a_mark(tmp_path, data, code):
    for name, written in (("a.jsonl", data), ("b.jsonl.gz", members([data]))):
        path = write(tmp_path / name, written)
        assert refusal_of(JsonlSource(path)).startswith(f"{code} {path} ")


def test_an_empty_file_whose_name_says_that_it_is_compressed_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl.{suffix}", b"")

    assert refusal_of(JsonlSource(path)).startswith(f"AD121 {path} is empty, but a compressed file never is")


def test_without_the_package_for_zstd_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)

    assert refusal_of(JsonlSource(path)).endswith(f": pip install zstandard, or decompress it first: zstd -d {path}")


def test_all_members_and_frames_are_one_text(tmp_path, suffix):
    """Rows may lie across them."""
    text, num_parts = many(0, 300), 7
    parts = [text[n * len(text) // num_parts : (n + 1) * len(text) // num_parts] for n in range(num_parts)]

    assert ids(write(tmp_path / f"a.jsonl.{suffix}", CODERS[suffix](parts))) == list(range(300))


def test_what_stands_between_or_after_members_and_frames_is_passed_over(tmp_path):
    """Tapes pad with zeros, and zstd's seekable format has frames that are to be skipped."""
    padded = members([many(0, 3)]) + bytes(70_000) + members([many(3, 5)]) + bytes(9)
    assert ids(write(tmp_path / "a.jsonl.gz", padded)) == list(range(5))
    pytest.importorskip("zstandard")
    skipped = b"\x5e\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert ids(write(tmp_path / "a.jsonl.zst", skipped + frames([many(0, 3)]) + skipped)) == [0, 1, 2]


@pytest.mark.thorough
def test_text_that_expands_a_thousandfold_comes_in_pieces_and_stops_when_it_is_not_needed(tmp_path):
    """A decoder that is given all of it at once would hold all of it."""
    path = write(tmp_path / "a.jsonl.gz", members([(json.dumps({"id": 1}).encode() + b" " * 999 + b"\n") * 20_000]))
    check, sizes = Mock(side_effect=[*[None] * 8, InterruptedError]), list[int]()
    with pytest.raises(InterruptedError):
        given = JsonlSource(path).open(1024).read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, check)
        sizes.extend(len(rows.data) for rows in given)

    assert max(sizes) < 1_000_000
    assert sum(sizes) > 1_000_000
