"""Files that are no data, hidden, no files at all, or read by others: refused or told by name, never left out."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import socket
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from asyncdata import BadRows, Cache, DataLoader, JsonArraySource, JsonlSource, ParquetSource, PromptTokenizeFn
from asyncdata.errors import AsyncDataError, ConfigError, SnapshotError, SourceError
from asyncdata.integrations.slime import torch_data
from asyncdata.telemetry.reader import read
from tests.support.examples import each_value
from tests.support.loaders import GOOD, make, prompts, resumed, with_bad
from tests.support.loading import NEVER_S, ids, order_of, write, write_rows
from tests.support.parts import mix_of_file
from tests.support.servers import HubServer
from tests.support.sources import jsonl
from tests.support.stores import s3

ROWS = jsonl({"id": i} for i in range(40))
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 146946961\n"


def zipped(name: str = "rows.jsonl") -> bytes:
    with zipfile.ZipFile(found := io.BytesIO(), "w") as archive:
        archive.writestr(name, ROWS)
    return found.getvalue()


def tarred() -> bytes:
    with tarfile.open(fileobj=(found := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("rows.jsonl")
        info.size = len(ROWS)
        archive.addfile(info, io.BytesIO(ROWS))
    return found.getvalue()


def arrow(kind: str) -> bytes:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": [1, 2]})
    with getattr(pa.ipc, f"new_{kind}")(found := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return found.getvalue()


CSV = b"id,text\n" + b"".join(b"%d,a text\n" % i for i in range(20))
NO_DATA: dict[str, tuple[Callable[[], bytes], str]] = {
    "lfs.jsonl": (lambda: LFS, "a Git LFS pointer, not the data: git lfs pull"),
    "annex.jsonl": (lambda: b"/annex/objects/SHA256E-s9--ab.jsonl\n", "a pointer of git-annex"),
    "page.jsonl": (lambda: b"\n<!DOCTYPE html>\n<html>\n", "HTML or XML, such as the page of an error"),
    "denied.json": (lambda: b"<?xml version='1.0'?>\n<Error/>", "HTML or XML, such as the page of an error"),
    "xz.jsonl": (lambda: lzma.compress(ROWS), "compressed with xz"),
    "bz2.jsonl": (lambda: bz2.compress(ROWS), "compressed with bz2"),
    "rows.zip": (zipped, "a zip archive: unzip it"),
    "rows.xlsx": (lambda: zipped("xl/workbook.xml"), "an Excel workbook: read it with Python, by IterableSource"),
    "tar.gz": (lambda: gzip.compress(tarred()), "a tar archive"),
    "rows.arrow": (lambda: arrow("file"), "Arrow: read it with HuggingFaceSource"),
    "stream.arrow": (lambda: arrow("stream"), "Arrow: read it with HuggingFaceSource"),
    "rows.pkl": (lambda: pickle.dumps([{"id": 1}]), "a pickle, which may run any code: .* IterableSource"),
    "old.pkl": (lambda: pickle.dumps([{"id": 1}], 0), "a pickle, which may run any code: .* IterableSource"),
    "twice.jsonl.gz": (lambda: gzip.compress(gzip.compress(ROWS)), "compressed twice"),
    "rows.csv": (lambda: CSV, r"CSV: read it with HuggingFaceSource\('csv'.*, or .* by IterableSource"),
    "csv.jsonl": (lambda: CSV, "AD109"),
    "spaced.jsonl": (lambda: b"{'id': 1}\n\n" * 8, "AD109"),
}


@pytest.mark.parametrize(("name", "bad_rows"), each_value(list(NO_DATA), ["raise", "skip"]))
def test_one_shard_of_three_that_is_no_data_is_refused_by_name(tmp_path, name, bad_rows):
    made, said = NO_DATA[name]
    spoiled = write(tmp_path / name, made())
    shards = [write_rows(tmp_path / f"{part}.jsonl", 30) for part in "ab"]
    said = f"AD109 {spoiled}: none of its first" if said == "AD109" else f"AD123 {spoiled} is {said}"
    with pytest.raises(SourceError, match=f"^{said}"):
        make([str(shards[0]), spoiled, str(shards[1])], bad_rows=bad_rows)


@pytest.mark.parametrize("source", [JsonArraySource, ParquetSource])
def test_a_pointer_in_place_of_other_data_is_named_too(tmp_path, source):
    with pytest.raises(SourceError, match="AD123 .*rows is a Git LFS pointer"):
        make(source(write(tmp_path / "rows", LFS)))


def delivered(source: Any, number: int = 40, **knobs: Any) -> tuple[list[int], list[Any]]:
    with capture_logs() as events, make(source, shuffle=False, **knobs) as loader:
        return ids(loader.get_next_batch(number)), events


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("last", [b"", b"[7]"], ids=["an end", "no end"])
def test_a_small_file_without_a_row_is_told_of_once(tmp_path, compress, last):
    small = write(tmp_path / "a.txt", compress(b"\n" + b"no row\n" * 6 + last))
    rows, events = delivered([small, write(tmp_path / "b.jsonl", ROWS)], bad_rows="skip")
    assert rows == list(range(40))
    told = [(event["path"], event["num_rows"]) for event in events if event["event"] == "source.undecoded"]
    assert told == [(small, 6 + bool(last))]


@pytest.mark.parametrize(
    "head",
    [
        b"x\n" * 60,
        b"x" * 5000 + b"\n",
        b'{"pad": "' + b"x" * 5000 + b'", "id": 0}\n',
        b"\n" * 5000,
        b"\xef\xbb\xbf",
        b"",
    ],
    ids=["bad rows", "a long one", "a long row", "blank lines", "a mark", "nothing"],
)
def test_a_file_with_rows_in_its_first_block_is_read_whatever_comes_first(tmp_path, head):
    rows, events = delivered(write(tmp_path / "rows.jsonl", head + ROWS), bad_rows="skip")
    assert rows == ([0] if b"pad" in head else []) + list(range(40))[: 40 - (b"pad" in head)]
    assert not [event for event in events if event["event"] == "source.undecoded"]


@pytest.mark.parametrize("name", [".part.jsonl", "._a.jsonl", ".x.parquet"])
def test_a_folder_leaves_hidden_files_out_and_a_path_or_a_hidden_folder_is_read(tmp_path, name):
    folder = tmp_path / ".cache" / "x"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(ROWS)
    (folder / name).write_bytes(jsonl([{"id": 77}]))
    assert delivered(str(folder), epochs=1)[0] == list(range(40))
    assert delivered(JsonlSource(str(folder / name)), 1)[0] == [77]
    assert delivered(JsonlSource(str(folder / ".*[lt]")), 1)[0] == [77]


def test_in_a_store_hidden_objects_are_read_only_if_they_are_named():
    pytest.importorskip("moto")
    for number, name in enumerate((".x/a.jsonl", ".x/.part.jsonl", ".x/b/.c/d.jsonl")):
        root = s3().put(f"hidden/{name}", jsonl([{"id": number}] * 3)).removesuffix(name)

    def read(path: str) -> set[int]:
        return set(delivered(JsonlSource(root + path, storage_options=s3().options), 9)[0])

    assert read(".x") == read(".x/*.jsonl") == read(".x/**/*.jsonl") == read(".x/**") == {0}
    assert (read(".x/.part.jsonl"), read(".x/.*.jsonl"), read(".*/b/.c/*.jsonl")) == ({1}, {1}, {2})


SPLITS = {
    "the hub's": (["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"], None),
    "numbered": (["train-0.jsonl", "train-1.jsonl", "validation-0.jsonl", "x.jsonl"], "train-*.jsonl"),
    "words": (["my_dev.jsonl", "my_train_1.jsonl"], "my_train_1.jsonl"),
    "folders": (["train/a.jsonl", "test/a.jsonl"], "train/*.jsonl"),
    "a folder beside": (["train.jsonl", "valid/a.jsonl"], "train.jsonl"),
    "named splits": (["train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"], None),
    "zipped": (["train.jsonl.gz", "test.jsonl.gz"], "train.jsonl.gz"),
}
ONE_SPLIT = {
    "no words": ["contest-1.jsonl", "latest.jsonl", "trained.jsonl"],
    "one": ["train-0.jsonl", "train-1.jsonl", "other.jsonl"],
    "two words": ["train-test.jsonl", "train.jsonl"],
    "sources of one": ["math_train-00000-of-00001.jsonl", "code_train-00000-of-00001.jsonl"],
    "another folder": ["a.jsonl", "b.jsonl", "train/a.jsonl", "test/a.jsonl"],
    "hidden": ["train.jsonl", ".test.jsonl"],
    "no data": ["train.jsonl", "test.txt", "test/a.py"],
}


def content(name: str) -> bytes:
    rows = jsonl([{"id": 1}] * 9)
    return gzip.compress(rows) if name.endswith(".gz") else rows


def in_folder(folder: Path, names: list[str]) -> tuple[str, dict[str, Any]]:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content(name))
    return str(folder), {}


def in_s3(folder: Path, names: list[str]) -> tuple[str, dict[str, Any]]:
    pytest.importorskip("moto")
    for name in names:
        address = s3().put(f"{folder.name}/{name}", content(name))
    return address.removesuffix(f"/{name}"), {"storage_options": s3().options}


PLACES = pytest.mark.parametrize("place", [in_folder, in_s3])


@PLACES
@pytest.mark.parametrize("names", SPLITS)
def test_a_folder_of_two_splits_is_refused_until_one_is_named(tmp_path, place, names):
    files, glob = SPLITS[names]
    folder, options = place(tmp_path, files)
    glob = glob or files[0]
    with pytest.raises(SourceError, match=r"^AD312 the folder .* holds the splits ") as refused:
        make(JsonlSource(folder + "/", **options))
    assert f"paths='{folder}/{glob}'" in str(refused.value)
    make(JsonlSource(f"{folder}/{glob}", **options)).close()
    make(JsonlSource(f"{folder}/**/*.jsonl*", **options)).close()


@PLACES
@pytest.mark.parametrize("names", ONE_SPLIT)
def test_other_names_are_no_splits(tmp_path, place, names):
    folder, options = place(tmp_path, ONE_SPLIT[names])
    with make(JsonlSource(folder, **options)) as loader:
        assert ids(loader.get_next_batch(5)) == [1] * 5


def test_a_repository_of_the_hub_is_a_folder_too(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer() as hub:
        sha = hub.commit("me/data", {"data/train-0.jsonl": ROWS, "data/test-0.jsonl": ROWS, "data/.part.jsonl": b"x"})
        options = {"storage_options": {"endpoint": hub.url}}
        with pytest.raises(SourceError, match=rf"AD312 .*paths='hf://datasets/me/data@{sha}/data/train-0.jsonl'"):
            make(JsonlSource("hf://datasets/me/data/data", **options))


def test_a_split_that_appears_while_data_grow_is_left_out_and_told_of_once(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "train-0.jsonl", 20)
    with capture_logs() as events, make(JsonlSource(str(folder), grows=True), buffer_size=1) as loader:
        loader.get_next_batch(10)
        (folder / "test-0.jsonl").write_bytes(jsonl([{"id": 1000}] * 30))
        (folder / "train-1.jsonl").write_bytes(jsonl({"id": 20 + i} for i in range(5)))
        rows = ids(loader.get_next_batch(10 + 25 + 25))
        state = json.loads(json.dumps(loader.state_dict()))
        following = ids(loader.get_next_batch(25))
    assert sorted(rows[10:35]) == sorted(rows[35:]) == list(range(25))
    told = [event for event in events if event["event"] == "source.split_left_out"]
    assert [(each["folder"], each["split"], each["num_files"]) for each in told] == [(str(folder), "test", 1)]

    with pytest.raises(SourceError, match=r"AD312 .*paths='.*/train-\*.jsonl'"):
        make(JsonlSource(str(folder), grows=True))
    assert resumed(JsonlSource(str(folder / "train-*.jsonl"), grows=True), state, 25, buffer_size=1) == following


NUM_ROWS = 60


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path must be short
        try:
            sock.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def use(rows: Path, call: Callable[[Any, Path], Any], **knobs: Any) -> Any:
    with make(rows, **knobs) as loader:
        return call(loader, rows.parent)


def all_ids(rows: Path, **knobs: Any) -> list[int]:
    return use(rows, lambda loader, _: ids(loader.get_next_batch(NUM_ROWS)), **knobs)


def quarantined(rows: Path) -> None:
    make(rows, bad_rows=BadRows(policy="quarantine", path=str(rows.parent / "bad.jsonl"))).close()


def tokenizer(rows: Path) -> None:
    PromptTokenizeFn(str(rows.parent)).resolve()


def by_index(rows: Path) -> list[int]:
    return sorted(all_ids(rows, shuffle="full", cache=Cache(folder=str(rows.parent / "cache"))))


def slimes_state(rows: Path) -> None:
    torch_data.read(str(rows.parent / "state.pt"))


class Case(NamedTuple):
    """A file that something else is in place of.

    :ivar name: of the file; a pattern, where it is made by ``before``.
    :ivar call: what reads or writes it, given the rows.
    :ivar error: what that is; None: it may be done without.
    """

    name: str
    call: Callable[[Path], Any]
    error: type[Exception] | None = None
    code: str = ""
    before: Callable[[Path], Any] = lambda rows: None


def mixture(name: str) -> Case:
    return Case(name, lambda rows: mix_of_file(rows.parent / name), ConfigError, "AD470")


CASES = {
    "a snapshot to read": Case(
        "snapshot", lambda rows: use(rows, lambda loader, folder: loader.restore(folder / "snapshot")), SnapshotError
    ),
    "a snapshot to write": Case(
        "snapshot", lambda rows: use(rows, lambda loader, folder: loader.save(folder / "snapshot")), SnapshotError
    ),
    "quarantine": Case("bad.jsonl", quarantined, ConfigError, "AD605"),
    **{f"a mixture in {suffix}": mixture(f"mix.{suffix}") for suffix in ("toml", "yaml", "json")},
    "a row index": Case("cache/**/*.index", by_index, before=by_index),
    "its rows": Case("cache/**/*.places", by_index, before=by_index),
    "telemetry to write": Case(
        "run/rank-00000-0000.jsonl",
        lambda rows: all_ids(rows, telemetry=str(rows.parent / "run")),
        before=lambda rows: (rows.parent / "run").mkdir(),
    ),
    "a tokenizer": Case("tokenizer.json", tokenizer, ConfigError),
    "a tokenizer's settings": Case("tokenizer_config.json", tokenizer, ConfigError),
    "slime's state": Case("state.pt", slimes_state, SnapshotError, "AD602", lambda rows: pytest.importorskip("torch")),
}


def ended(call: Callable[[Path], Any], rows: Path) -> Any:
    """What a call returns or raises; it must end."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call(rows))
        except (AsyncDataError, OSError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NEVER_S)
    assert found, "it still waits"
    return found[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(CASES)
        for kind in (os.mkfifo, (Path.mkdir, device, a_socket)[number % 3])
    ],
)
def test_what_is_no_file_is_an_error_at_once_or_done_without(tmp_path, name, kind):
    case, rows = CASES[name], write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    case.before(rows)
    paths = list(tmp_path.glob(case.name)) or [tmp_path / case.name]
    for path in paths:
        path.unlink(missing_ok=True)
        kind(path)

    found = ended(case.call, rows)

    if case.error is not None:
        assert isinstance(found, case.error), found
        assert case.code in str(found)
    else:
        assert isinstance(found, AsyncDataError) or sorted(found) == list(range(NUM_ROWS))
    if name == "telemetry to write":
        assert found == order_of(rows)
        assert isinstance(ended(lambda _: read(tmp_path / "run"), rows), AsyncDataError | OSError)


@pytest.fixture
def without_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "rows.jsonl", with_bad(b"{"))


def run(data, folder, **knobs):
    """One epoch, with a bad row that is put aside, and a snapshot."""
    settings = {"num_workers": 0, "timeout_s": 240, "cache": {"folder": str(folder / "cache")}, **knobs}
    settings["bad_rows"] = {"policy": "quarantine", "path": str(folder / "quarantine.jsonl")}
    with DataLoader(data, tokenize_fn=prompts(), **settings) as loader:
        loader.get_next_batch(2 * len(GOOD))
        loader.save(folder / "run.snapshot")


@pytest.mark.usefixtures("without_umask")
@pytest.mark.parametrize("shuffle", ["full", True])
def test_no_file_of_a_run_can_be_read_by_others(data, tmp_path, shuffle):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    run(data, folder, shuffle=shuffle)
    files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    assert {"run.snapshot", "quarantine.jsonl"} <= {os.path.basename(path) for path in files}
    assert len(files) >= (3 if shuffle == "full" else 2)
    assert [path for path in files if stat.S_IMODE(os.stat(path).st_mode) != 0o600] == []
    leaves = [place for place, folders, names in os.walk(folder) if names]
    assert [path for path in leaves if stat.S_IMODE(os.stat(path).st_mode) != 0o700] == []


@pytest.mark.parametrize(("name", "error"), [("quarantine.jsonl", ConfigError), ("run.snapshot", SnapshotError)])
def test_a_link_in_the_place_of_a_file_is_not_followed(data, tmp_path, name, error):
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("not ours", encoding="ascii")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(error, match="AD60[15] "):
        run(data, folder)
    assert elsewhere.read_text(encoding="ascii") == "not ours"
