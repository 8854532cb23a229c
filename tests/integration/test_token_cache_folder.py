"""The folder of the token cache: whose it is, who writes, what is evicted, and what its commands show."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog

from asyncdata import Cache, ConfigError, IterableSource, Shuffle
from asyncdata.cli.main import main
from asyncdata.core.cache_messages import EvictTokens
from asyncdata.loader import service
from tests.support.cached import Delivered, assert_same, loader, segments, wait_until_stored
from tests.support.loading import NEVER_S, write_rows

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.eviction import evict_segments
from asyncdata.prefetch.token_cache.folder import CacheFolder, about_of, key_of
from asyncdata.prefetch.token_cache.segment import reader
from asyncdata.prefetch.token_cache.segment.layout import DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = 120


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture(params=["blocks", pytest.param("rows", marks=pytest.mark.thorough)])
def order(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Segments of blocks, and of single rows."""
    return {"blocks": {}, "rows": {"shuffle": "full"}}[request.param]


@pytest.fixture
def cache(path: Path, tmp_path: Path) -> Path:
    """A cache that has all rows."""
    folder = tmp_path / "tokens"
    Delivered(loader(path, folder), settle=True)
    return folder


# Whose it is


def test_a_cache_is_its_owners_alone(cache):
    (folder,) = cache.iterdir()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert not list(folder.glob(".run-*")), "what was written on the way is gone"


def test_a_link_in_the_place_of_a_cache_is_refused(path, cache, tmp_path):
    (folder,) = cache.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="AD611"):
        loader(path, cache)


def test_a_segment_that_is_a_link_is_not_read(path, cache, tmp_path):
    for number, segment in enumerate(segments(cache)):
        segment.rename(tmp_path / f"{number}.arrow")
        segment.symlink_to(tmp_path / f"{number}.arrow")

    found = Delivered(loader(path, cache))

    assert found.cached == [0]
    assert_same(found, Delivered(loader(path, None)))


def test_a_folder_that_cannot_be_made_and_a_limit_that_is_none_are_refused(path, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"AD612 .*set Cache"):
        loader(path, tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="Cache: max_tokens_bytes"):
        loader(path, tmp_path / "cache", max_tokens_bytes=0)


@pytest.mark.parametrize("missing", ["pyarrow", "xxhash"])
def test_without_its_packages_the_error_names_the_extra(path, tmp_path, monkeypatch, missing):
    from importlib import util

    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == missing else real(name))

    with pytest.raises(ConfigError, match=rf"Cache\(tokens=\.\.\.\) needs {missing}: pip install {missing}"):
        loader(path, tmp_path / "cache")


def test_true_means_the_folder_beside_the_row_index(path, tmp_path):
    beside = Cache(folder=str(tmp_path / "here"), tokens=True)
    Delivered(loader(path, True, cache=beside), settle=True)
    assert segments(tmp_path / "here" / "tokens")

    Delivered(loader(path, True), settle=True)
    assert segments(tmp_path / "cache" / "asyncdata" / "tokens")


# Who writes


def test_a_key_is_what_samples_follow_from():
    def key(**changes: Any) -> str:
        facts = {"function": {"tokenizer": "1"}, "reader": "a:B", "settings": {"columns": ["x"]}, "limit": 5} | changes
        return key_of(about_of(**facts))

    others = [
        key(function={"tokenizer": "2"}),
        key(reader="a:C"),
        key(settings={"columns": ["y"]}),
        key(limit=6),
    ]
    assert len({key(), *others}) == 5
    assert key(settings={"columns": ["x"], "footers": ["1"]}) == key(), "where rows are is the segments' business"


def test_one_folder_has_one_writer_which_removes_what_a_killed_one_left(tmp_path):
    about = about_of({"tokenizer": "1"}, "a:B", {})
    killed, folder = CacheFolder(str(tmp_path), about), CacheFolder(str(tmp_path), about)
    assert killed.lock()
    assert not folder.lock()
    (Path(killed.path) / killed.make_room(1) / "0").write_text("a reply")
    os.close(killed._lock_fd)  # noqa: SLF001 - as its death does

    assert folder.lock()
    assert killed.run not in os.listdir(folder.path)
    folder.close()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_what_is_complete_when_the_loader_is_closed_is_stored(path, tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(service, "_FINISH_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(service.Service.close, "__defaults__", (2 * NEVER_S,))
    knobs = {"shuffle": Shuffle(block_bytes=1024, window_blocks=100), "num_workers": num_workers}

    Delivered(loader(path, tmp_path / "cache", **knobs))

    assert Delivered(loader(path, tmp_path / "cache", **knobs)).cached == [NUM_ROWS]


# Open files


def test_segments_beyond_the_limit_are_closed_opened_again_and_not_taken_for_others(cache, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_OPEN_SEGMENTS", 1)
    first, second, *_ = segments(cache)
    known = reader.Segments(str(first.parent), reader.Segment)
    segment, expected = known.get(first.name), known.get(first.name).entry(0)
    known.get(second.name)
    assert known.get(first.name) is segment
    assert segment.entry(0) == expected

    known.get(second.name)
    os.rename(shutil.copy(second, first.parent / "other"), first)
    with pytest.raises(DamagedError, match="another file"):
        known.get(first.name)
    assert known.get(first.name).num_bytes == second.stat().st_size, "then it is read as a new one"
    known.close()


# Eviction


@pytest.fixture
def segment_of(tmp_path: Path) -> Callable[[str, str, int, int], Path]:
    """A function that makes a file where a segment would be, last used at a time."""

    def make(key: str, name: str, num_bytes: int, used_s: int) -> Path:
        path = tmp_path / key / f"{name}.arrow"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(num_bytes))
        os.utime(path, (used_s, used_s))
        return path

    return make


def evicted(tmp_path: Path, num_bytes: int, max_bytes: int, keep: list[str]) -> Any:
    """Which caches are left in ``tmp_path`` when ``mine`` needs room."""
    (tmp_path / "mine" / "keep").write_bytes(msgspec.msgpack.encode(keep))
    return evict_segments(EvictTokens(num_bytes, max_bytes, "keep"), str(tmp_path / "mine"))


OLD, NEW, OTHER = ("mine", "old", 100, 1), ("mine", "new", 100, 9), ("other", "a", 100, 5)


@pytest.mark.parametrize(
    ("files", "num_bytes", "max_bytes", "keep", "left", "names"),
    [
        pytest.param([OLD, NEW, OTHER], 150, 300, [], [NEW], ["old.arrow"], id="the least recently used of all caches"),
        pytest.param([OLD, OTHER], 50, 200, ["old.arrow"], [OLD], [], id="and none that this run reads"),
        pytest.param([OLD, OTHER], 150, 200, ["old.arrow"], None, [], id="and none where that does not do"),
        pytest.param([OLD], 50, 150, [], [OLD], [], id="and none that fits"),
    ],
)
def test_what_is_evicted_is(tmp_path, segment_of, files, num_bytes, max_bytes, keep, left, names):
    made = {file: segment_of(*file) for file in files}

    done = evicted(tmp_path, num_bytes, max_bytes, keep)

    assert [file for file in files if made[file].exists()] == (files if left is None else left)
    assert (done.is_full, done.names) == (left is None, names)
    assert done.num_bytes == sum(file[2] for file in files if not made[file].exists())


def test_what_links_lead_to_is_not_evicted(tmp_path, segment_of):
    mine = segment_of("mine", "a", 100, 1)
    outside = tmp_path / "outside.arrow"
    outside.write_bytes(bytes(100))
    (tmp_path / "mine" / "b.arrow").symlink_to(outside)
    (tmp_path / "linked").symlink_to(tmp_path / "mine")

    assert evicted(tmp_path, 100, 100, []).num_bytes == 100
    assert (mine.exists(), outside.exists()) == (False, True)


@pytest.mark.thorough
def test_another_data_set_takes_the_room_of_one_that_is_not_used(path, cache, tmp_path):
    size = sum(file.stat().st_size for file in segments(cache))
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS + 3)

    Delivered(loader(other, cache, max_tokens_bytes=size + 10_000), settle=True)

    assert sum(file.stat().st_size for file in segments(cache)) <= size + 10_000
    assert Delivered(loader(other, cache)).cached == [NUM_ROWS + 3]
    assert Delivered(loader(path, cache)).cached[0] < NUM_ROWS


# What is left out


@pytest.mark.thorough
def test_samples_without_room_in_a_slot_are_left_out_and_logged_once(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 60, {i: {"pad": "ü" * 30_000} for i in (7, 31)})
    expected = Delivered(loader(path, None))
    with structlog.testing.capture_logs() as events:
        Delivered(loader(path, tmp_path / "cache"), settle=True)

    found = Delivered(loader(path, tmp_path / "cache"))
    assert found.samples == expected.samples
    assert 30 < found.cached[0] < 60
    assert [event["event"] for event in events].count("token_cache.left_out") == 1


def test_windows_are_left_out_where_the_disk_is_too_slow(path, tmp_path, monkeypatch):
    from asyncdata.prefetch.token_cache import writer

    monkeypatch.setattr(writer, "_MAX_WAITING_BYTES", 0)
    with structlog.testing.capture_logs() as events:
        found = Delivered(loader(path, tmp_path / "cache"), settle=True)

    assert found.samples == Delivered(loader(path, None)).samples
    assert [event["event"] for event in events].count("token_cache.behind") == 1
    assert not segments(tmp_path / "cache")


# What people see of it, and who else reads it


def test_statistics_say_what_came_from_the_cache_and_how_large_it_is(path, cache):
    with loader(path, cache) as data:
        for _ in data:
            pass
        wait_until_stored(data)
        now = data.statistics()

    assert now.cached_rows_total == NUM_ROWS
    assert now.token_cache_bytes == sum(file.stat().st_size for file in segments(cache))
    assert now.to_dict()["asyncdata_cached_rows_total"] == NUM_ROWS


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(["cache", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_says_what_there_is_and_verify_finds_what_is_damaged(path, tmp_path, order, capsys):
    cache = tmp_path / "tokens"
    Delivered(loader(path, cache, **order), settle=True)
    (found,) = run(capsys, "ls", "--dir", cache)
    assert found["num_rows"] == NUM_ROWS
    assert found["num_samples"] == len(Delivered(loader(path, None)).samples)
    assert found["num_bytes"] == sum(file.stat().st_size for file in segments(cache))
    assert len(found["segments"]) == len(segments(cache))
    assert (found["is_in_use"], found["faults"]) == (False, [])
    assert found["about"]["function"]["tokenize_fn"].startswith("tests.support.cached:everything")
    assert main(["cache", "ls", "--dir", str(cache)]) == 0
    assert found["key"][:12] in capsys.readouterr().out
    assert run(capsys, "ls", "--dir", cache / "nowhere") == []

    assert list(run(capsys, "verify", "--dir", cache).values()) == [[]]
    damaged = segments(cache)[-1]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (faults,) = run(capsys, "verify", "--dir", cache, status=1).values()
    assert [fault["path"] for fault in faults] == [str(damaged)]
    assert main(["cache", "verify", "--dir", str(cache)]) == 1
    assert damaged.name in capsys.readouterr().out


@pytest.mark.thorough
def test_rm_removes_what_is_named_and_nothing_that_is_written_to(path, cache, capsys):
    with loader(path, cache):
        assert "AD614" in run(capsys, "rm", "--all", "--dir", cache, status=1)["error"]["message"]
    Delivered(loader(path, cache, shuffle=Shuffle(block_bytes=2048)), settle=True)
    first, second = (found["key"] for found in run(capsys, "ls", "--dir", cache))

    assert run(capsys, "rm", first[:8], "--dir", cache)["removed"] == [first]
    assert [found["key"] for found in run(capsys, "ls", "--dir", cache)] == [second]
    assert "0 token caches" in run(capsys, "rm", "zz", "--dir", cache, status=1)["error"]["message"]
    run(capsys, "rm", "--dir", cache, status=1)
    run(capsys, "rm", "--all", "--dir", cache)
    assert run(capsys, "ls", "--dir", cache) == []


def test_datasets_reads_a_segment(path, cache):
    datasets = pytest.importorskip("datasets")

    found = [row for file in segments(cache) for row in datasets.Dataset.from_file(str(file))]

    expected = Delivered(loader(path, None)).samples
    assert sorted(row["tokens"] for row in found) == sorted(sample[4] for sample in expected)


def test_a_stream_without_files_is_refused_with_the_way_out(tmp_path):
    examples = IterableSource(lambda epoch: iter([{"id": 1, "pad": ""}]), version=1)

    with pytest.raises(ConfigError, match=r"AD613 .*convert the data to files"):
        loader(examples, tmp_path / "cache")
