"""JsonlSource: which files are meant, and what is wrong with them before a row is read."""

from __future__ import annotations

import gzip
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from asyncdata import ConfigError, JsonlSource, SourceError
from asyncdata.sources.base import Source

if TYPE_CHECKING:
    from pathlib import Path

ROW = b'{"id": 1}\n'
BLOCK_BYTES = 1024


def write(path: Path, data: bytes = ROW) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(paths: object, root: Path) -> list[str]:
    """The files that are read, relative to ``root``, in their order."""
    return [os.path.relpath(file.path, root) for file in JsonlSource(paths).open(BLOCK_BYTES).files]


def refusal(paths: object) -> str:
    with pytest.raises(SourceError) as caught:
        JsonlSource(paths).open(BLOCK_BYTES)

    return str(caught.value)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A folder with three files of rows, and one that is something else."""
    for name in ("b.jsonl", "a.jsonl", "c.jsonl", "notes.txt"):
        write(tmp_path / name)
    return tmp_path


# Which files.


def test_it_is_a_source():
    assert isinstance(JsonlSource("rows.jsonl"), Source)


def test_a_path_is_that_file_whatever_its_name(three):
    assert names(str(three / "notes.txt"), three) == ["notes.txt"]


def test_a_pathlib_path_is_a_path_alone_and_in_a_list(three):
    assert names(three / "a.jsonl", three) == names([three / "a.jsonl"], three) == ["a.jsonl"]


def test_a_list_keeps_its_order(three):
    given = [str(three / name) for name in ("c.jsonl", "a.jsonl", "b.jsonl")]

    assert names(given, three) == ["c.jsonl", "a.jsonl", "b.jsonl"]


def test_a_globs_files_are_sorted_by_name(three):
    assert names(str(three / "*.jsonl"), three) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_glob_may_look_into_subfolders(three):
    write(three / "sub" / "deep" / "d.jsonl")

    assert names(str(three / "**" / "*.jsonl"), three) == ["a.jsonl", "b.jsonl", "c.jsonl", "sub/deep/d.jsonl"]


def test_a_folder_is_its_jsonl_files_sorted_by_name_and_not_its_subfolders(three):
    write(three / "sub" / "d.jsonl")

    assert names(str(three), three) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_list_may_mix_files_folders_and_globs(three):
    write(three / "sub" / "d.jsonl")

    assert names([str(three / "sub"), str(three / "[bc].jsonl")], three) == ["sub/d.jsonl", "b.jsonl", "c.jsonl"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    write(tmp_path / "a.jsonl")
    write(tmp_path / "[a].jsonl")

    assert names(str(tmp_path / "[a].jsonl"), tmp_path) == ["[a].jsonl"]


def test_a_link_to_a_file_is_read_under_its_own_name(three):
    (three / "z.jsonl").symlink_to(three / "a.jsonl")

    assert names(three / "z.jsonl", three) == ["z.jsonl"]


def test_a_relative_path_is_made_absolute_at_the_start(three, monkeypatch):
    monkeypatch.chdir(three)

    files = JsonlSource("a.jsonl").open(BLOCK_BYTES).files

    assert [file.path for file in files] == [str(three / "a.jsonl")]


def test_sizes_are_those_of_the_start(three):
    (file,) = JsonlSource(three / "a.jsonl").open(BLOCK_BYTES).files
    (three / "a.jsonl").write_bytes(ROW * 9)

    assert file.num_bytes == len(ROW)


def test_an_empty_file_among_others_is_no_fault(three):
    write(three / "b.jsonl", b"")
    files = JsonlSource(str(three)).open(BLOCK_BYTES)

    assert [file.num_bytes for file in files.files] == [len(ROW), 0, len(ROW)]
    assert files.num_blocks == 2


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"\n\n", b"\r\n", b"   "])
def test_a_mark_or_white_space_before_the_first_row_is_accepted(tmp_path, head):
    path = write(tmp_path / "a.jsonl", head + ROW)

    assert names(path, tmp_path) == ["a.jsonl"]


# What is refused.


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "missing.jsonl"

    assert refusal(path) == f"AD304 cannot read {path}: No such file or directory"


def test_a_glob_that_matches_nothing_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert refusal("*.jsonl") == f"AD308 '*.jsonl' matches nothing in {tmp_path}"


def test_a_folder_without_rows_is_named(tmp_path):
    write(tmp_path / "notes.txt")

    assert refusal(tmp_path) == f"AD306 the folder {tmp_path} holds no *.jsonl; name the files, or a glob"


def test_a_broken_link_says_where_it_points(tmp_path):
    path = tmp_path / "link.jsonl"
    path.symlink_to(tmp_path / "gone.jsonl")

    assert refusal(path) == f"AD307 {path} -> {tmp_path / 'gone.jsonl'} (missing): a broken link"


def test_a_link_to_itself_is_named(tmp_path):
    path = tmp_path / "loop.jsonl"
    path.symlink_to(path)

    assert refusal(path).startswith(f"AD304 cannot read {path}: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_for_whom(tmp_path):
    path = write(tmp_path / "secret.jsonl")
    path.chmod(0)

    assert refusal(path) == f"AD305 cannot read {path} as uid {os.getuid()}: Permission denied"


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "pipe.jsonl"
    os.mkfifo(path)

    assert refusal(path) == f"AD306 {path} is no regular file; it could not be read again on resume"


def test_a_device_is_refused():
    assert refusal("/dev/zero") == "AD306 /dev/zero is no regular file; it could not be read again on resume"


def test_a_folder_that_a_glob_matches_is_refused(tmp_path):
    (tmp_path / "a.jsonl").mkdir()

    assert refusal(str(tmp_path / "*.jsonl")) == f"AD304 cannot read {tmp_path / 'a.jsonl'}: Is a directory"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"PAR1\x15\x04", "AD123 {path} is Parquet, not JSONL"),
        (
            ROW.decode().encode("utf-16"),
            "AD103 {path} looks like UTF-16 (begins with ff fe); convert it: iconv -f UTF-16 -t UTF-8",
        ),
        (
            b"\xfe\xff" + ROW.decode().encode("utf-16-be"),
            "AD103 {path} looks like UTF-16 (begins with fe ff); convert it: iconv -f UTF-16 -t UTF-8",
        ),
        (
            b'[{"id": 1}]',
            "AD120 {path} is a JSON array, not JSONL; name it *.json, or write one object a line: jq -c '.[]' {path}",
        ),
        (
            b'\xef\xbb\xbf\r\n [\n{"id": 1}\n]',
            "AD120 {path} is a JSON array, not JSONL; name it *.json, or write one object a line: jq -c '.[]' {path}",
        ),
    ],
    ids=["Parquet", "UTF-16 LE", "UTF-16 BE", "array", "array after a mark"],
)
def test_another_format_is_named_with_the_way_out(tmp_path, data, expected):
    path = write(tmp_path / "rows.jsonl", data)

    assert refusal(path) == expected.format(path=path)


def test_files_that_are_all_empty_are_refused(tmp_path):
    paths = [write(tmp_path / name, b"") for name in ("a.jsonl", "b.jsonl")]

    assert refusal(tmp_path) == f"AD201 no rows in 2 files, all empty: {paths[0]}, {paths[1]}"


def test_every_fault_is_named_at_once(tmp_path):
    packed = write(tmp_path / "packed.jsonl", gzip.compress(b"PAR1"))
    array = write(tmp_path / "array.jsonl", b"[1]")
    (tmp_path / "folder").mkdir()
    given = [tmp_path / "missing", write(tmp_path / "good"), packed, tmp_path / "folder", array, tmp_path / "no*"]

    lines = refusal(given).splitlines()

    assert sorted(line[:5] for line in lines) == ["AD120", "AD123", "AD304", "AD306", "AD308"]
    assert not any("good" in line for line in lines)


@pytest.mark.parametrize("again", ["a.jsonl", "./sub/../a.jsonl", "link.jsonl", "*.jsonl"])
def test_a_file_listed_twice_is_refused_however_it_is_written(tmp_path, again):
    write(tmp_path / "a.jsonl")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")

    with pytest.raises(ConfigError, match=r"AD309 .* is listed twice; its rows would come twice an epoch"):
        JsonlSource([str(tmp_path / "a.jsonl"), str(tmp_path / again)]).open(BLOCK_BYTES)


# The description.


def test_the_longest_row_is_handed_on(three):
    assert JsonlSource("*").max_row_bytes == 64 * 1024 * 1024
    assert JsonlSource(three / "a.jsonl", max_row_bytes=99).open(BLOCK_BYTES).max_row_bytes == 99


def test_a_source_is_a_value_and_refuses_unknown_settings():
    assert JsonlSource("a") == JsonlSource("a") != JsonlSource("b")
    with pytest.raises(ConfigError, match="there is no setting .glob."):
        JsonlSource("a", glob=True)
    with pytest.raises(msgspec.ValidationError, match="unknown field `x`"):
        msgspec.convert({"paths": "a", "x": 1}, JsonlSource)
