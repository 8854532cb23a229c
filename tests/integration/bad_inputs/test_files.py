"""The catalogue of bad inputs, rows 25 to 41: what may be wrong with a file, and what may happen to it meanwhile."""

import errno
import gzip
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader, IterableSource, JsonArraySource, ParquetSource, Shuffle
from asyncdata.errors import ConfigError, PrefetchTimeoutError, SnapshotError, SourceChangedError, SourceError
from tests.support.faults import until
from tests.support.loaders import GOOD, assert_is_ours, deliver, is_next_window_there, state_after
from tests.support.loaders import make as loader_of
from tests.support.loading import NEVER_S, ids, order_of, row_id, write, write_rows
from tests.support.parts import read_quarantine
from tests.support.sources import frames, members

LINES = b"\n".join(GOOD) + b"\n"
NUM_ROWS = 200


def error_of(loader: DataLoader, kind: type[Exception], code: str) -> tuple[list[int], Exception]:
    """What comes before an error, and the error, which comes at every later call."""
    seen: list[int] = []
    with pytest.raises(kind) as caught:
        while True:
            seen += ids(loader.get_next_batch(1))
    assert_is_ours(caught.value, code)
    with pytest.raises(kind, match=code):
        loader.get_next_batch(1)
    return seen, caught.value


def test_25_an_array_in_place_of_lines_is_refused_by_a_jsonl_and_read_by_a_json(tmp_path):
    array = b"[" + b",\n".join(GOOD) + b"]"
    refused = deliver(write(tmp_path / "rows.jsonl", array))
    read = deliver(write(tmp_path / "rows.json", array))
    assert str(refused.error).startswith(f"AD120 {tmp_path / 'rows.jsonl'} is a JSON array, not JSONL; name it *.json")
    assert (read.labels, read.error) == ([0, 1, 2, 3], None)


@pytest.mark.parametrize("harm", ["cut off", "a flipped bit", "garbage"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_26_27_what_is_cut_off_damaged_or_added_is_an_error_after_the_rows_before(tmp_path, suffix, harm):
    if suffix == "zst":
        pytest.importorskip("zstandard")
    coded = {"gz": members, "zst": frames}[suffix]([LINES])
    flipped = bytes(value ^ (place == len(coded) - 4) for place, value in enumerate(coded))
    spoiled = {"cut off": coded[:-9], "a flipped bit": flipped, "garbage": b"garbage"}
    path = write(tmp_path / f"rows.jsonl.{suffix}", coded + spoiled[harm])

    found = deliver(path)

    code, part, tool = {"gz": ("AD121", "member", "gzip"), "zst": ("AD122", "frame", "zstd")}[suffix]
    assert str(found.error).startswith(f"{code} {path}: the {tool} {part} that begins at byte {len(coded)} ")
    how = f"ends early, at byte {os.path.getsize(path)}" if harm == "cut off" else "is damaged ("
    assert how in str(found.error)
    assert f"try it with: {tool} -t" in str(found.error)
    assert found.labels[:4] == [0, 1, 2, 3]
    assert found.labels[4:] == [0, 1, 2, 3][: len(found.labels) - 4]


def test_28_first_bytes_go_before_names_and_that_is_said(tmp_path):
    plain, packed = write(tmp_path / "a.jsonl.gz", LINES), write(tmp_path / "b.jsonl", gzip.compress(LINES))
    parquet = write(tmp_path / "c.jsonl", b"PAR1" + b"\0" * 100)
    as_it_is, read, refused = deliver(plain), deliver(packed), deliver(parquet)
    assert (as_it_is.labels, read.labels) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert [(e["path"], e["named"], e["coding"]) for e in as_it_is.of("source.misnamed")] == [(plain, "gzip", "plain")]
    assert str(refused.error) == f"AD123 {parquet} is Parquet, not JSONL"


def test_29_a_parquet_page_that_is_not_what_its_checksum_says_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, text = tmp_path / "a.parquet", "what stands here is not to be found in the statistics, as it is too long " * 9
    layout = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(pa.table({"id": [0, 1], "text": [text, text]}), path, **layout)
    path.write_bytes(path.read_bytes().replace(b"found", b"bound", 1))
    outcome = deliver(path, row_id)
    assert str(outcome.error).startswith(f"AD304 cannot read {path}: row group 0 cannot be decoded: ")


@pytest.mark.thorough
def test_30_a_file_that_grows_is_read_to_where_it_ended_at_the_start(tmp_path):
    """In later epochs too, as D may not change in a run: the new part is for the next run."""
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    expected = order_of(path, 2)
    with loader_of(path, num_workers=1) as loader:
        loader.get_next_batch(1)
        with path.open("a") as file:
            file.write('{"id": 1000}\n' * 50)
        assert ids(loader.get_next_batch(2 * NUM_ROWS - 1)) == expected[1:]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_workers", "is_read_ahead"), [(1, False), (0, True), (1, True)])
def test_31_a_file_that_shrinks_kills_no_process_and_what_was_read_is_delivered(tmp_path, num_workers, is_read_ahead):
    """The next epoch's window is read while this one's rows are delivered."""
    path = write_rows(tmp_path / "rows.jsonl", 4000)
    with loader_of(path, num_workers=num_workers, buffer_size=10, shuffle=False) as loader:
        loader.get_next_batch(1)
        until(lambda: not is_read_ahead or is_next_window_there(loader))
        os.truncate(path, 100)
        seen, error = error_of(loader, SourceChangedError, "AD302")
    assert f"{path} shrank" in str(error)
    assert seen == (3 * list(range(4000)))[1 : len(seen) + 1], "D, which has an epoch after this one"
    assert not is_read_ahead or len(seen) == 2 * 4000 - 1, "this epoch and the next"


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"x", b"y"))
    other.replace(path)


def edited(path: Path) -> None:
    with path.open("r+b") as file:  # in place: a reader never sees it shorter
        data = file.read()
        file.seek(0)
        file.write(data.replace(b"x", b"y"))


@pytest.mark.parametrize(("change", "is_seen_at_once"), [(replaced, False), (edited, True)])
def test_32_an_edited_file_is_noticed_where_it_is_read_next_a_replaced_one_later(tmp_path, change, is_seen_at_once):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    expected = order_of(path, 8)
    with loader_of(path, buffer_size=1) as loader:
        loader.state_dict()  # its content is known
        loader.get_next_batch(1)
        change(path)
        seen, error = error_of(loader, SourceChangedError, "AD303")
    assert str(error).startswith(f"AD303 {path} was replaced or edited while it was read. Start a new run, or put")
    assert seen == expected[1 : len(seen) + 1]
    assert len(seen) + 1 < NUM_ROWS if is_seen_at_once else (len(seen) + 1) % NUM_ROWS == 0


def test_33_a_file_that_is_deleted_is_read_to_its_end_and_missed_at_the_next_epoch(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    expected = order_of(path, 8)
    with loader_of(path, buffer_size=1) as loader:
        loader.get_next_batch(1)
        path.unlink()
        seen, error = error_of(loader, SourceChangedError, "AD304")
    assert str(error).startswith(f"AD304 {path} cannot be read: No such file or directory; check the path")
    assert str(error).endswith("It was there at the start.")
    assert (len(seen) + 1) % NUM_ROWS == 0
    assert seen == expected[1 : len(seen) + 1]


def test_34_files_that_may_not_be_read_are_all_named_at_once(tmp_path, monkeypatch):
    secret = [write(tmp_path / f"{name}.jsonl", LINES) for name in "ab"]
    good = write(tmp_path / "c.jsonl", LINES)
    really = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:  # root may read everything
        if path in secret:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    found = deliver([secret[0], good, secret[1]])
    lines = [f"AD305 cannot read {path} as uid {os.getuid()}: Permission denied" for path in secret]
    assert str(found.error).splitlines() == lines


@pytest.mark.parametrize("shuffle", [True, "full"])
def test_a_footer_that_says_less_than_no_rows_is_refused(tmp_path, shuffle):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(20)}), path)
    whole, refused = path.read_bytes(), []
    size = int.from_bytes(whole[-8:-4], "little")
    twenty, less_than_none = b"\x28", b"\x29"  # as Parquet writes them
    for place in range(len(whole) - size - 8, len(whole) - 8):
        if whole[place : place + 1] == twenty:
            path.write_bytes(whole[:place] + less_than_none + whole[place + 1 :])
            refused.append(str(deliver(str(path), shuffle=shuffle).error))
    assert f"AD124 {path}: its footer cannot be read: a row group has -21 to -21 rows" in refused


def test_35_36_37_what_is_no_file_is_refused_as_what_it_is(tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.jsonl").symlink_to("/nowhere/b.jsonl")
    for name, text in (
        ("empty", f"AD306 the folder {tmp_path}/empty holds no *.jsonl; name the files, or a glob"),
        ("pipe", f"AD306 {tmp_path}/pipe is no regular file; it could not be read again"),
        ("/dev/null", "AD306 /dev/null is no regular file"),
        ("a.jsonl", f"AD307 {tmp_path}/a.jsonl -> /nowhere/b.jsonl (missing): a broken link"),
        ("x*.jsonl", f"AD308 '{tmp_path}/x*.jsonl' matches nothing in {os.getcwd()}"),
    ):
        assert str(deliver(str(tmp_path / name)).error).startswith(text)


def test_38_a_file_may_not_be_listed_twice(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES)
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "sub").mkdir()
    for other in (path, str(tmp_path / "link.jsonl"), str(tmp_path / "sub/../a.jsonl")):
        found = deliver([path, other])
        assert isinstance(found.error, ConfigError)
        assert str(found.error).startswith(f"AD309 {other} is listed twice; its rows would come twice an epoch. List")


SIGNED = "https://store.example/a.jsonl?X-Amz-Credential=AKIAX%2Fus&X-Amz-Signature=0123abcd"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("nosuch://bucket/a.jsonl", "AD310 no store is known for nosuch://bucket: neither obstore nor fsspec knows"),
        ("oss://bucket/*.jsonl", "AD342 oss:// "),
        ("hdfs://host/a.jsonl", "AD342 hdfs:// "),
    ],
)
def test_39_a_store_that_is_not_known_or_whose_package_is_missing_is_named(address, text):
    found = deliver(address)
    assert isinstance(found.error, ConfigError)
    assert str(found.error).startswith(text)
    assert ("Mount the store, copy the files, or name a class for it" in str(found.error)) is (text[:5] == "AD310")


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (PermissionError(f"403 Forbidden for url: {SIGNED}"), "AD304", "403 Forbidden for url"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "AD304", "Connection reset by peer"),
        (RuntimeError("429 Too Many; Authorization: Bearer hf_abcdefghijklmnopqrst"), "AD129", "429 Too Many"),
    ],
    ids=["403", "reset", "429"],
)
def test_39_what_a_stream_says_of_its_store_is_said_after_its_rows_without_a_secret(raised, code, text):
    """Trying again is up to what streams: `datasets`, fsspec, or your own code."""

    def rows(epoch: int) -> Iterator[dict[str, Any]]:
        yield from ({"id": number} for number in range(10))
        raise raised

    with loader_of(IterableSource(rows, version=1), shuffle=False, epochs=1) as loader:
        seen, error = error_of(loader, SourceError, code)
    assert seen == list(range(10))
    assert text in str(error)
    assert not any(secret in f"{error} {error.__cause__}" for secret in ("0123abcd", "AKIAX", "hf_abc"))


def test_40_a_source_that_hangs_is_named_as_what_is_waited_for():
    gate, began = threading.Event(), threading.Event()

    def make(epoch: int) -> Iterator[dict[str, Any]]:
        began.set()
        gate.wait()
        yield {"id": 1}

    with loader_of(IterableSource(make), timeout_s=0.2) as loader:
        assert began.wait(NEVER_S)
        with pytest.raises(PrefetchTimeoutError, match="stage: read: the source has been giving") as caught:
            loader.get_next_batch(1)
        gate.set()
        assert_is_ours(caught.value, "AD510")
        assert ids(loader.get_next_batch(1, timeout_s=240)) == [1]


@pytest.mark.parametrize("num_before", [0, 7, 10])
def test_41_a_stream_that_has_another_row_at_a_snapshots_place_is_refused(num_before):
    """Also by a loader that has read that place before the snapshot was loaded."""

    def source(first: int) -> IterableSource:
        return IterableSource(lambda epoch: ({"id": number} for number in range(first, first + 20)), version=1)

    windows = Shuffle(enabled=False, block_bytes=32, window_blocks=1)  # of a few rows each
    state = state_after(source(0), 7, shuffle=windows)
    with loader_of(source(100), shuffle=windows, epochs=2) as loader:
        if num_before:
            loader.get_next_batch(num_before)
        loader.load_state_dict(state)
        _, error = error_of(loader, SourceChangedError, "AD303")
    assert "another row" in str(error)


@pytest.mark.parametrize("kind", [str, lambda path: [path], ParquetSource, JsonArraySource])
def test_data_at_a_path_with_a_nul_are_named(kind):
    with pytest.raises(SourceError, match=r"^AD304 cannot read 'a\\x00b': it has a NUL in it"):
        loader_of(kind("a\0b"))


ODD_NAME = "a\x1b[2J\r\u202eb.jsonl"
ODD_NAME_SHOWN = r"a\x1b[2J\r\u202eb.jsonl"


def test_names_with_characters_that_a_terminal_obeys_are_escaped_wherever_they_are_told(tmp_path):
    path = write(tmp_path / ODD_NAME, b"{\n")
    assert str(deliver(path).error).startswith(f"AD101 {tmp_path}/{ODD_NAME_SHOWN}:1 (byte 0): ")
    with loader_of(write_rows(tmp_path / "rows.jsonl", 3)) as loader:
        with pytest.raises(SnapshotError, match="AD602") as caught:
            loader.restore(path)
    assert f"{tmp_path}/{ODD_NAME_SHOWN}" in str(caught.value)
    misnamed = write(tmp_path / f"{ODD_NAME}.gz", LINES)
    assert [event["path"] for event in deliver(misnamed).events] == [f"{tmp_path}/{ODD_NAME_SHOWN}.gz"]


@pytest.mark.parametrize("name", [b"\xe9y.jsonl", b"\xe9/rows.jsonl", b"\xe9.jsonl.gz", b"\xe9.json", b"\xe9.parquet"])
@pytest.mark.parametrize("given", ["a file", "a folder"])
def test_a_path_that_is_no_utf8_is_named(tmp_path, name, given):
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(LINES)
    source = str(path if given == "a file" else path.parent)
    kind = ParquetSource if path.suffix == ".parquet" else JsonArraySource if path.suffix == ".json" else str
    with pytest.raises(SourceError, match=r"^AD304 cannot read .*\\udce9.*: its path is not UTF-8, .*; rename it"):
        loader_of(kind(source))


def test_whatever_else_is_at_a_path_with_a_nul_is_named(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 20)
    for knob, setting in (("bad_rows", "path"), ("cache", "folder")):
        with pytest.raises(ConfigError, match=rf"^(BadRows|Cache): {setting}='a\\x00b' has a NUL in it"):
            loader_of(path, **{knob: {setting: "a\0b"}})
    with loader_of(path) as loader:
        loader.get_next_batch(1)
        with pytest.raises(SnapshotError, match=r"^AD601 '.*a\\x00b' was not written: it has a NUL in it"):
            loader.save("a\0b")
        with pytest.raises(SnapshotError, match=r"^AD602 '.*a\\x00b' cannot be read: it has a NUL in it"):
            loader.restore("a\0b")
    with pytest.raises(ConfigError, match=r"^AD605 cannot read the quarantine 'a\\x00b': embedded null byte"):
        read_quarantine("a\0b")
