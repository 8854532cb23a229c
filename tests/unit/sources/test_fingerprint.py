"""Fingerprints: what counts as the same data, how little is read to tell, and how a difference is put into words."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from asyncdata.core.identity import digest
from asyncdata.errors import SourceChangedError, SourceError
from asyncdata.sources.files import stamp
from tests.support import parts

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


def refs(*paths: str) -> list[parts.FileRef]:
    return [parts.FileRef(path, os.path.getsize(path)) for path in paths]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), "cae66941d9efbd404e4d88758ea67670"),
        (("",), "c804ce198ec337e3dc762bdd1a09aece"),
        (("ab", "c"), "4826ed043ab3cdec576d8541fa5d5a80"),
        ((b"\x00\xff", "\u00fc", "\ud800"), "f9b13b0823fadedc781f6e58b7201eca"),
    ],
)
def test_a_digest_is_the_same_for_ever(texts, expected):
    assert digest(*texts) == expected
    assert digest("ab", "c") != digest("a", "bc")


def test_the_canonical_encoding_does_not_depend_on_the_order_of_keys():
    assert parts.canonical({"b": (1, 2.5), "a": {"d": None, "c": True}}) == b'{"a":{"c":true,"d":null},"b":[1,2.5]}'
    for value in ({1: "key"}, {"a": object()}):
        with pytest.raises(TypeError):
            parts.canonical(value)


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
def test_a_file_digest_is_the_same_for_ever_however_it_grows_and_is_read(tmp_path, monkeypatch, num_bytes, expected):
    path, pread = write(tmp_path / "a", content(num_bytes)), os.pread
    assert parts.file_digest(path, num_bytes) == expected

    write(tmp_path / "a", content(num_bytes) + b"a new row\n")
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 1000), offset))
    assert parts.file_digest(path, num_bytes) == expected


@pytest.mark.parametrize(
    ("num_bytes", "places"),
    [
        (1, [0]), (4096, [0, 1000, 2048, 4095]), (192 * KIB, [0, 64 * KIB, 96 * KIB, 192 * KIB - 1]),
        (8 * MIB, [0, 64 * KIB - 1, 64 * KIB, 64 * KIB + 15 * (8 * MIB - 128 * KIB) // 16 + 4095, -64 * KIB, -1]),
    ],
)  # fmt: skip
def test_every_byte_of_a_small_file_and_of_the_blocks_of_a_large_one_counts(tmp_path, num_bytes, places):
    data = bytearray(content(num_bytes))
    digests = {parts.file_digest(write(tmp_path / "a", data), num_bytes)}
    for place in places:
        data[place] ^= 1
        digests.add(parts.file_digest(write(tmp_path / "a", data), num_bytes))

    assert len(digests) == 1 + len(places)


def test_of_a_huge_file_192_kib_are_read_and_its_size_counts(tmp_path, monkeypatch):
    path, reads, pread = tmp_path / "a", [], os.pread
    with path.open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: reads.append((offset, n)) or pread(fd, n, offset))
    found = parts.file_digest(str(path), 1 << 40)

    assert sum(n for _, n in reads) == 192 * KIB
    assert reads == sorted(reads)
    assert (reads[0], reads[-1], len(reads)) == ((0, 64 * KIB), ((1 << 40) - 64 * KIB, 64 * KIB), 18)
    assert parts.file_digest(str(path), 1 << 39) != found


@pytest.mark.parametrize(("found", "expected"), [(0, 1), (MIB - 1, MIB)])
def test_a_file_that_shrank_is_named_with_both_sizes(tmp_path, found, expected):
    path = write(tmp_path / "a", content(found))

    with pytest.raises(SourceChangedError, match=f"AD302 {path} .* expected {expected} bytes, found {found}; "):
        parts.file_digest(path, expected)


def test_a_file_that_cannot_be_read_is_named_and_no_descriptor_leaks(tmp_path, monkeypatch):
    for look in (stamp, lambda path: parts.file_digest(path, 10)):
        with pytest.raises(SourceError, match=f"AD304 {tmp_path}/none cannot be read: No such file"):
            look(f"{tmp_path}/none")
    path = write(tmp_path / "a", content(10))
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    monkeypatch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))

    with pytest.raises(SourceError, match=f"AD305 {path} cannot be read: Input/output error; check"):
        parts.file_digest(path, 10)
    assert len(closed) == 1


def test_a_copied_folder_holds_the_same_data_and_names_order_and_content_count(tmp_path):
    paths = [write(tmp_path / "here" / name, content(size)) for name, size in (("b.jsonl", 300), ("a.jsonl", MIB))]
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "deeper")
    copies = [str(tmp_path / "there" / "deeper" / os.path.basename(path)) for path in paths]
    renamed, other = write(tmp_path / "c", content(300)), write(tmp_path / "other" / "b.jsonl", bytes(300))

    assert parts.data_fingerprint(refs(*paths)) == parts.data_fingerprint([stamp(path) for path in copies])
    of_b, of_a = map(parts.file_digest, paths, (300, MIB))
    assert parts.data_fingerprint(refs(*paths)) == {
        "num_files": 2, "num_bytes": 300 + MIB, "digest": "c90d038a67a98cae58d3016fe6b1c554",
        "files": [["b.jsonl", 300, of_b], ["a.jsonl", MIB, of_a]],
    }  # fmt: skip
    lists = (paths, paths[::-1], [renamed, paths[1]], [other, paths[1]], paths[:1], paths[:1] * 2, [])
    assert len({parts.data_fingerprint(refs(*one))["digest"] for one in lists}) == len(lists)


def test_very_many_files_are_known_by_their_combined_digests_with_and_without_their_names(tmp_path):
    path, renamed = write(tmp_path / "a", b"row\n"), write(tmp_path / "b", b"row\n")
    other = write(tmp_path / "c", b"wor\n")
    number = parts.MAX_LISTED_FILES + 1
    least = parts.data_fingerprint(refs(path) * parts.MAX_LISTED_FILES)
    before, after, changed = (parts.data_fingerprint(refs(one) * number) for one in (path, renamed, other))

    assert (len(least["files"]), "content" in least) == (parts.MAX_LISTED_FILES, False)
    assert (before["num_files"], before["num_bytes"], before["files"]) == (number, 4004, [])
    assert before["digest"] != after["digest"]
    assert parts.content_changes(before, after) == []
    words = "1001 files of 4004 bytes -> 1001 files of 4004 bytes, of other content"
    assert parts.content_changes(before, changed) == [words]
    del before["content"]
    assert "does not know" in parts.content_changes(before, after)[0]


def test_a_name_that_is_no_utf8_can_be_written_down(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(path).write_bytes(b"row\n")
    fingerprint = parts.data_fingerprint(refs(path))

    assert (fingerprint["files"][0][0], json.loads(json.dumps(fingerprint))) == ("caf\\xe9.jsonl", fingerprint)


def test_each_change_is_named_with_both_values():
    saved = {"seed": 1, "shuffle": True, "block_bytes": 65536, "gone": 1}
    order = {"seed": 2, "shuffle": True, "block_bytes": 32768, "new": "x"}
    changes = parts.find_changes(saved, {"tokenizer": "t", "template": "p"}, order, {"tokenizer": "u", "template": "p"})

    assert changes == {
        "tokenizer": ("t", "u"), "seed": (1, 2), "order.block_bytes": (65536, 32768), "order.gone": (1, None),
        "order.new": (None, "x"),
    }  # fmt: skip
    assert (
        parts.find_changes(order | {"nested": [1, 2]}, {}, order | {"nested": (1, 2)}, {"data": {"digest": "d"}}) == {}
    )
    assert [parts.setting_of(change) for change in changes] == ["tokenizer", "order", "order", "order", "seed"]
    words = parts.describe_change("order.block_bytes", 65536, 32768)
    assert words.startswith("order.block_bytes: saved 65536, present 32768: ")
    assert 'saved (unset), present "x"' in parts.describe_change("order.new", None, "x")


@pytest.mark.parametrize("absent", [{}, {"tokenize_fn": None}])
def test_a_fingerprint_that_one_side_does_not_know_differs_from_none(absent):
    known = {"tokenize_fn": "f"}
    assert parts.find_changes({}, absent, {}, known) == parts.find_changes({}, known, {}, absent) == {}


@pytest.mark.parametrize(
    ("saved", "order", "data", "names"),
    [
        ({"num_blocks": 5}, {"num_blocks": 6}, "other", ["data"]),
        ({"num_blocks": 5, "block_bytes": 1}, {"num_blocks": 6, "block_bytes": 2}, "same", ["order.block_bytes"]),
        ({"num_blocks": 5, "seed": 1}, {"num_blocks": 6, "seed": 2}, "same", ["order.num_blocks", "seed"]),
    ],
)
def test_a_count_of_the_data_is_named_only_where_nothing_else_explains_it(saved, order, data, names):
    assert list(parts.find_changes(saved, {"data": {"digest": "same"}}, order, {"data": {"digest": data}})) == names
    assert parts.setting_of("order.num_blocks") == "data"


@pytest.mark.parametrize(
    "odd", [float("nan"), "\ud800", 2**100, [b"bytes"], {1: 2, "a": 3}, np.zeros(2), object()], ids=map(str, range(7))
)
def test_any_value_of_a_crafted_snapshot_can_be_compared_and_shown(odd):
    assert list(parts.find_changes({"a": odd}, {"data": odd}, {"a": 1}, {"data": "d"})) == ["data", "order.a"]
    assert parts.describe_change("order.a", odd, 1)


def test_a_value_that_is_too_deep_to_compare_is_not_taken_for_the_same():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert list(parts.find_changes({"a": deep}, {}, {"a": [deep]}, {})) == ["order.a"]


File = tuple[str, int, str]
MANY = {size: [(f"{number:03}", size, str(size)) for number in range(200)] for size in (1, 2)}
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
        (MANY[1], MANY[2], "; ".join([*(f"{number:03} size 1 -> 2 bytes" for number in range(10)), "and 190 more"])),
    ],
)
def test_the_files_that_differ_are_named(saved: list[File], present: list[File], words: str) -> None:
    def fingerprint(files: list[File]) -> dict[str, Any]:
        num_bytes = sum(size for _, size, _ in files)
        return {"num_files": len(files), "num_bytes": num_bytes, "digest": digest(str(files)), "files": files}

    assert parts.describe_change("data", fingerprint(saved), fingerprint(present)).split(": ")[1] == words


@pytest.mark.parametrize("saved", ["abc", {"digest": "d", "files": "damaged"}, {"revision": "main"}])
def test_a_fingerprint_of_another_kind_is_shown_as_it_is_and_cut(saved):
    assert parts.describe_change("data", saved, "xyz").startswith(f'data: saved {json.dumps(saved)}, present "xyz": ')
    assert len(parts.describe_change("tokenizer", "a" * 1000, "b" * 1000)) < 400


# Whether a file is the one of the start: each thing that ``stat`` says of it, and its content


# What differs -> whether the file is the same: with content that was not looked at, with the same sample of a large
# file, and with the same content of a small one.
VERDICTS = {
    "": (True, True, True),
    "ctime_ns": (True, True, True),  # chmod, link, rename
    "inode": (True, True, True),  # made up by the file system
    "inode ctime_ns": (False, True, True),  # a copy that kept its time
    "mtime_ns": (False, False, True),
    "mtime_ns ctime_ns": (False, False, True),  # touched, or edited
    "inode mtime_ns": (False, False, True),
    "inode mtime_ns ctime_ns": (False, False, True),  # a copy
    "num_bytes": (True, True, True),
    "num_bytes mtime_ns ctime_ns": (True, True, True),  # appended to
    "num_bytes inode": (False, True, True),
    "num_bytes inode mtime_ns ctime_ns": (False, True, True),  # written anew, with more rows
}


def file_of(num_bytes: int, digest: str) -> parts.FileRef:
    return parts.FileRef("/a", num_bytes, inode=5, mtime_ns=1000, ctime_ns=2000, digest=digest)


def now_of(file: parts.FileRef, what: str) -> parts.FileRef:
    return replaced(file, digest="", **{name: getattr(file, name) + 7 for name in what.split()})


never: Any = partial(pytest.fail, "the content is read, and need not be")


@pytest.mark.parametrize("what", VERDICTS, ids=lambda what: what or "nothing")
def test_the_kind_of_difference_decides_whether_a_file_is_the_same_and_other_content_never_is(what):
    _, large, small = files = [file_of(parts.WHOLE_BYTES + n, digest) for n, digest in ((0, ""), (1, "d"), (0, "d"))]

    verdicts = [parts.is_same(file, now_of(file, what), lambda file=file: file.digest or never()) for file in files]

    assert tuple(verdicts) == VERDICTS[what]
    if what:
        assert not any(parts.is_same(file, now_of(file, what), lambda: "e") for file in (large, small))
    else:
        assert parts.is_same(large, now_of(large, what), never), "nothing has happened to it"


ROWS = b'{"id": 1}\n' * 10


def replace(path: Path, data: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


def at(path: Path, seconds: int) -> None:
    """Set its time, after that of the start."""
    os.utime(path, ns=(0, MOMENT + seconds * 10**9))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"id": 2}\n')


MOMENT = 1_700_000_000 * 10**9
EDITED = ROWS.replace(b"1", b"2")
# How each is done, and the code of its error; empty: it is the same file, whose new rows belong to a later run.
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, ""),
    "its mode": (lambda path: path.chmod(0o640), ""),
    "its time": (lambda path: at(path, 5), ""),
    "more rows": (append, ""),
    "its copy": (lambda path: (replace(path, ROWS), at(path, 5)), ""),
    "edited": (lambda path: (path.write_bytes(EDITED), at(path, 5)), "AD303"),
    "edited, and its time set back": (lambda path: (path.write_bytes(EDITED), at(path, 0)), "AD303"),
    "replaced": (lambda path: (replace(path, EDITED), at(path, 5)), "AD303"),
    "replaced, and its time set back": (lambda path: (replace(path, EDITED), at(path, 0)), "AD303"),
    "edited, with more rows": (lambda path: path.write_bytes(EDITED * 2), "AD303"),
    "cut": (lambda path: os.truncate(path, 90), "AD302"),
    "replaced by a shorter one": (lambda path: (replace(path, ROWS[:90]), at(path, 5)), "AD302"),
    "deleted": (lambda path: path.unlink(), "AD304"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    at(path, 0)
    return path


@pytest.fixture
def others(tmp_path: Path) -> list[Path]:
    """As many files as are looked at whole when a run starts."""
    found = [tmp_path / f"{number}.jsonl" for number in range(32)]
    for number, one in enumerate(found):
        one.write_bytes(b'{"other": %d}\n' % number * 10)
    return found


def blocks_of(*paths: Path) -> parts.FileBlocks:
    return parts.FileBlocks([stamp(str(path)) for path in paths], 64, 1000)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_a_file_that_is_not_what_it_was_is_named_before_an_epoch(path, others, change, is_one_of_many):
    files = blocks_of(*others[:20], path, *others[20:]) if is_one_of_many else blocks_of(path)
    assert all(ref.digest for ref in files.refs) is not is_one_of_many
    files.fingerprint()  # of the content, which a snapshot has
    make, code = CHANGES[change]
    make(path)

    if not code:
        files.check_unchanged()
        return

    with pytest.raises(SourceChangedError, match=f"^{code} {path} ") as caught:
        files.check_unchanged()
    ends = {"AD302": "shrank from 100 to 90 bytes while it was read", "AD304": "It was there at the start."}
    assert ends.get(code, "was replaced or edited while it was read") in str(caught.value)


def test_what_happens_before_the_fingerprint_is_looked_at_by_stat_alone(path, others):
    files = blocks_of(path, *others)
    assert all(ref.digest for ref in blocks_of(*others).refs)
    path.chmod(0o640)

    files.check_unchanged()
    assert files.fingerprint() is files.fingerprint()
    path.write_bytes(EDITED)
    with pytest.raises(SourceChangedError, match=f"^AD303 {path} "):
        files.check_unchanged()
    touched = blocks_of(path, *others)
    at(path, 9)
    assert touched.fingerprint() is not touched.fingerprint(), "of what it is now: nothing to hold it against"


def test_a_file_that_is_closed_to_make_room_is_looked_at_before(path, others, monkeypatch):
    parts.change(monkeypatch, most_open_files=32)
    refs = parts.Files([stamp(str(each)) for each in (path, *others)], 99).refs
    reader = parts.LineReader(parts.Job(files=refs, tokenize=None, max_row_bytes=999, block_bytes=10, slack_bytes=0))
    reader.read_block(parts.Block(0, 0, 10), 99)
    path.write_bytes(EDITED)

    with pytest.raises(parts.FileChangedError, match=r"^AD303 .*rows\.jsonl"):
        for number in range(1, 33):
            reader.read_block(parts.Block(number, 0, 10), 99)
    reader.close()
