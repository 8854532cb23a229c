"""Fingerprints: what counts as the same data, how little is read to tell, and how a difference is put into words."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncdata import SourceChangedError, SourceError
from asyncdata.checkpoint.changes import content_changes, describe_change, find_changes, setting_of
from asyncdata.core.digest import canonical, digest
from asyncdata.core.messages import FileRef
from asyncdata.sources.fingerprint import MAX_LISTED_FILES, FileStamp, data_fingerprint, file_digest, stamp

KIB = 1024
MIB = 1 << 20


def content(num_bytes: int) -> bytes:
    """Bytes without a period, the same for ever."""
    pieces = [blake2b(number.to_bytes(8, "little")).digest() for number in range(num_bytes // 64 + 1)]
    return b"".join(pieces)[:num_bytes]


def write(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def refs(*paths: str) -> list[FileRef]:
    return [FileRef(path, os.path.getsize(path)) for path in paths]


# Digests


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), "cae66941d9efbd404e4d88758ea67670"),
        (("",), "c804ce198ec337e3dc762bdd1a09aece"),
        (("ab", "c"), "4826ed043ab3cdec576d8541fa5d5a80"),
        ((b"\x00\xff", "\u00fc", "\ud800"), "f9b13b0823fadedc781f6e58b7201eca"),
    ],
    ids=["nothing", "an empty text", "two texts", "bytes and texts"],
)
def test_a_digest_is_the_same_for_ever(parts, expected):
    assert digest(*parts) == expected


def test_a_digest_knows_where_its_parts_end():
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4
    assert digest("\u00fc") == digest("\u00fc".encode())


def test_the_canonical_encoding_does_not_depend_on_the_order_of_keys():
    assert canonical({"b": (1, 2.5), "a": {"d": None, "c": True}}) == b'{"a":{"c":true,"d":null},"b":[1,2.5]}'
    for value in ({1: "key"}, {"a": object()}):
        with pytest.raises(TypeError):
            canonical(value)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "6232f77a0ca4190671a5f480aa477763"),
        (1, "03ca9f97ef9b63007d28b414b8561b7e"),
        (192 * KIB, "1a65e621cb44baeeb6d74c2961dcd712"),
        (192 * KIB + 1, "7251fb6e6df2ae49e2089cf4735a27a9"),
        (3 * MIB + 7, "0e964e900b53b496865a711554de7fcc"),
    ],
)
def test_a_file_digest_is_the_same_for_ever_whatever_is_added_and_however_it_is_read(
    tmp_path, monkeypatch, num_bytes, expected
):
    path, pread = write(tmp_path / "a", content(num_bytes)), os.pread
    assert file_digest(path, num_bytes) == expected

    write(tmp_path / "a", content(num_bytes) + b"a new row\n")
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 1000), offset))
    assert file_digest(path, num_bytes) == expected


@pytest.mark.parametrize(
    ("num_bytes", "places"),
    [
        (1, [0]),
        (4096, [0, 1000, 2048, 4095]),
        (192 * KIB, [0, 64 * KIB, 96 * KIB, 192 * KIB - 1]),
        (8 * MIB, [0, 64 * KIB - 1, 64 * KIB, 64 * KIB + 15 * (8 * MIB - 128 * KIB) // 16 + 4095, -64 * KIB, -1]),
    ],
)
def test_every_byte_of_a_small_file_and_of_both_ends_and_the_blocks_between_of_a_large_one_counts(
    tmp_path, num_bytes, places
):
    data = bytearray(content(num_bytes))
    digests = {file_digest(write(tmp_path / "a", data), num_bytes)}
    for place in places:
        data[place] ^= 1
        digests.add(file_digest(write(tmp_path / "a", data), num_bytes))

    assert len(digests) == 1 + len(places)


def test_of_a_huge_file_192_kib_are_read_and_its_size_counts(tmp_path, monkeypatch):
    path, reads, pread = tmp_path / "a", [], os.pread
    with path.open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: reads.append((offset, n)) or pread(fd, n, offset))
    found = file_digest(str(path), 1 << 40)

    assert sum(n for _, n in reads) == 192 * KIB
    assert [offset for offset, _ in reads] == sorted(offset for offset, _ in reads)
    assert (reads[0], reads[-1]) == ((0, 64 * KIB), ((1 << 40) - 64 * KIB, 64 * KIB))
    assert len(reads) == 18
    assert file_digest(str(path), 1 << 39) != found


@pytest.mark.parametrize(("found", "expected"), [(0, 1), (999, 1000), (MIB - 1, MIB), (10, MIB)])
def test_a_file_that_shrank_is_named_with_both_sizes(tmp_path, found, expected):
    path = write(tmp_path / "a", content(found))

    with pytest.raises(SourceChangedError, match=f"AD302 {path} .* expected {expected} bytes, found {found}; "):
        file_digest(path, expected)


def test_a_file_that_cannot_be_read_is_named_and_no_descriptor_leaks(tmp_path, monkeypatch):
    for look in (stamp, lambda path: file_digest(path, 10)):
        with pytest.raises(SourceError, match=f"AD304 {tmp_path}/none cannot be read: No such file"):
            look(f"{tmp_path}/none")
    path = write(tmp_path / "a", content(10))
    gc.collect()  # what earlier tests left may hold descriptors
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))

    with pytest.raises(SourceError, match=f"AD305 {path} cannot be read: Input/output error; check"):
        file_digest(path, 10)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_stamp_is_that_of_one_file_in_one_state(tmp_path):
    path = write(tmp_path / "a", b"12345")
    found, seen = os.stat(path), [stamp(path)]

    assert seen == [stamp(path)] == [FileStamp(path, 5, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)]
    os.utime(path, ns=(0, seen[0].mtime_ns))
    seen.append(stamp(path))  # somebody may have set the time back
    os.utime(path, ns=(0, 1))
    seen.append(stamp(path))
    os.rename(write(tmp_path / "b", b"12345"), path)
    os.utime(path, ns=(0, 1))
    seen.append(stamp(path))
    assert len(set(seen)) == 4


# Fingerprints of data


def test_a_copied_folder_holds_the_same_data(tmp_path):
    paths = [write(tmp_path / "here" / name, content(size)) for name, size in (("b.jsonl", 300), ("a.jsonl", MIB))]
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    copies = [str(tmp_path / "there" / "deeper" / os.path.basename(path)) for path in paths]

    assert data_fingerprint(refs(*paths)) == data_fingerprint([stamp(path) for path in copies])
    assert data_fingerprint(refs(*paths)) == {
        "num_files": 2,
        "num_bytes": 300 + MIB,
        "digest": "c90d038a67a98cae58d3016fe6b1c554",
        "files": [["b.jsonl", 300, file_digest(paths[0], 300)], ["a.jsonl", MIB, file_digest(paths[1], MIB)]],
    }


def test_names_and_their_order_and_content_count(tmp_path):
    a, b = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    c, other = write(tmp_path / "c", b"one"), write(tmp_path / "other" / "a", b"One")
    lists = ([a, b], [b, a], [c, b], [a], [a, a], [other, b], [])

    assert len({data_fingerprint(refs(*paths))["digest"] for paths in lists}) == len(lists)


def test_very_many_files_are_known_by_their_combined_digests_with_and_without_their_names(tmp_path):
    path, renamed = write(tmp_path / "a", b"row\n"), write(tmp_path / "b", b"row\n")
    other = write(tmp_path / "c", b"wor\n")
    number = MAX_LISTED_FILES + 1
    least = data_fingerprint(refs(path) * MAX_LISTED_FILES)
    before, after, changed = (data_fingerprint(refs(one) * number) for one in (path, renamed, other))

    assert (len(least["files"]), "content" in least) == (MAX_LISTED_FILES, False)
    assert {name: before[name] for name in ("num_files", "num_bytes", "files")} == {
        "num_files": number,
        "num_bytes": 4004,
        "files": [],
    }
    assert before["digest"] != after["digest"]
    assert content_changes(before, after) == []
    assert content_changes(before, changed) == [
        "1001 files of 4004 bytes -> 1001 files of 4004 bytes, of other content"
    ]
    del before["content"]
    assert "does not know" in content_changes(before, after)[0]


def test_a_name_that_is_no_utf8_can_be_written_down(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(path).write_bytes(b"row\n")
    fingerprint = data_fingerprint(refs(path))

    assert fingerprint["files"][0][0] == "caf\\xe9.jsonl"
    assert json.loads(json.dumps(fingerprint)) == fingerprint


# Differences between a snapshot and the present, and their words


def test_unchanged_settings_are_not_named():
    order, prints = {"seed": 1, "shuffle": {"b": (1, 2), "a": None}}, {"tokenizer": "t", "data": {"digest": "d"}}
    saved = {"shuffle": {"a": None, "b": [1, 2]}, "seed": 1}

    assert find_changes(saved, prints, order, prints | {"data": {"digest": "d", "n": 1}}) == {}


def test_each_change_is_named_with_both_values():
    saved = {"seed": 1, "shuffle": True, "block_bytes": 65536, "gone": 1}
    order = {"seed": 2, "shuffle": True, "block_bytes": 32768, "new": "x"}
    changes = find_changes(saved, {"tokenizer": "t", "template": "p"}, order, {"tokenizer": "u", "template": "p"})

    assert changes == {
        "tokenizer": ("t", "u"),
        "seed": (1, 2),
        "order.block_bytes": (65536, 32768),
        "order.gone": (1, None),
        "order.new": (None, "x"),
    }
    assert [setting_of(change) for change in changes] == ["tokenizer", "order", "order", "order", "seed"]
    assert describe_change("order.block_bytes", 65536, 32768).startswith(
        "order.block_bytes: saved 65536, present 32768: "
    )
    assert 'saved (unset), present "x"' in describe_change("order.new", None, "x")


@pytest.mark.parametrize("absent", [{}, {"tokenize_fn": None}])
def test_a_fingerprint_that_one_side_does_not_know_differs_from_none(absent):
    assert (
        find_changes({}, absent, {}, {"tokenize_fn": "f"}) == find_changes({}, {"tokenize_fn": "f"}, {}, absent) == {}
    )


def test_a_count_of_the_data_is_named_only_where_nothing_else_explains_it():
    def names(saved: dict[str, int], order: dict[str, int], *, data: str = "same") -> list[str]:
        return list(find_changes(saved, {"data": {"digest": "same"}}, order, {"data": {"digest": data}}))

    assert names({"num_blocks": 5}, {"num_blocks": 6}, data="other") == ["data"]
    assert names({"num_blocks": 5, "block_bytes": 1}, {"num_blocks": 6, "block_bytes": 2}) == ["order.block_bytes"]
    assert names({"num_blocks": 5, "seed": 1}, {"num_blocks": 6, "seed": 2}) == ["order.num_blocks", "seed"]
    assert setting_of("order.num_blocks") == "data"


@pytest.mark.parametrize(
    "odd", [float("nan"), "\ud800", 2**100, [b"bytes"], {1: 2, "a": 3}, np.zeros(2), object()], ids=map(str, range(7))
)
def test_any_value_of_a_crafted_snapshot_can_be_compared_and_shown(odd):
    assert list(find_changes({"a": odd}, {"data": odd}, {"a": 1}, {"data": "d"})) == ["data", "order.a"]
    assert describe_change("order.a", odd, 1)


def test_values_too_deep_to_compare_are_refused_not_taken_for_alike():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    assert list(find_changes({"a": deep}, {}, {"a": [deep]}, {})) == ["order.a"]


File = tuple[str, int, str]
ONE, TWO = [("t", 1, "x"), ("t", 2, "y")], [("a", 1, "x"), ("b", 1, "x")]


@pytest.mark.parametrize(
    ("saved", "present", "words"),
    [
        ([("a", 10, "x"), ("b", 5, "y")], [("a", 12, "z"), ("b", 5, "y")], "a size 10 -> 12 bytes"),
        ([("a", 10, "x")], [("a", 10, "z")], "a has other content (size 10 as before)"),
        (TWO, [("b", 1, "x"), ("c", 1, "x")], "a is missing; c is new"),
        (TWO, TWO[::-1], "the files come in another order (a, b -> b, a)"),
        (ONE, [("t", 1, "x"), ("t", 3, "z"), ("u", 1, "x")], "2 -> 3 files; t (file 2) size 2 -> 3 bytes"),
        (ONE, [("t", 1, "x"), ("u", 2, "y")], "file 2 was t and is u"),
        (
            [(f"{number:03}", 1, "x") for number in range(200)],
            [(f"{number:03}", 2, "y") for number in range(200)],
            "; ".join([*(f"{number:03} size 1 -> 2 bytes" for number in range(10)), "and 190 more"]),
        ),
    ],
    ids=["a size", "content", "names", "order", "the same name", "a place", "ten are named"],
)
def test_the_files_that_differ_are_named(saved: list[File], present: list[File], words: str) -> None:
    def fingerprint(files: list[File]) -> dict[str, Any]:
        num_bytes = sum(size for _, size, _ in files)
        return {"num_files": len(files), "num_bytes": num_bytes, "digest": digest(str(files)), "files": files}

    assert describe_change("data", fingerprint(saved), fingerprint(present)).split(": ")[1] == words


@pytest.mark.parametrize("saved", ["abc", {"digest": "d", "files": "damaged"}, {"revision": "main"}])
def test_a_fingerprint_of_another_kind_is_shown_as_it_is_and_cut(saved):
    assert describe_change("data", saved, "xyz").startswith(f'data: saved {json.dumps(saved)}, present "xyz": ')
    assert len(describe_change("tokenizer", "a" * 1000, "b" * 1000)) < 400
