"""The folder of the token cache: whose it is, who writes, what is evicted, and what its commands show."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from asyncdata import Cache, Shuffle
from asyncdata.cli.main import main
from asyncdata.core.cache_messages import CacheJob
from asyncdata.errors import ConfigError
from asyncdata.loader import service
from tests.support.cached import Delivered, assert_same, damage, loader, num_bytes, row_id, segments, wait_until_stored
from tests.support.loading import NEVER_S, write_rows

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import cache as token_cache
from asyncdata.prefetch.token_cache import worker
from asyncdata.prefetch.token_cache.folder import CacheFolder, about_of, key_of, make_room

NUM_ROWS = 120


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def cache(path: Path, tmp_path: Path) -> Path:
    """A cache that has all rows."""
    folder = tmp_path / "tokens"
    Delivered(loader(path, folder), settle=True)
    return folder


# Whose it is; that its files are private is held in ``test_private_files``


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


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"function": {"tokenizer": "2"}}, False),
        ({"reader": "a:C"}, False),
        ({"settings": {"columns": ["y"]}}, False),
        ({"limit": 6}, False),
        ({"settings": {"columns": ["x"], "footers": ["1"]}}, True),  # where rows are is the segments' business
    ],
    ids=str,
)
def test_a_key_is_what_samples_follow_from(changes, is_same):
    facts = {"function": {"tokenizer": "1"}, "reader": "a:B", "settings": {"columns": ["x"]}, "limit": 5}

    assert (key_of(about_of(**facts)) == key_of(about_of(**facts | changes))) == is_same


def test_one_folder_has_one_writer_until_that_is_killed(tmp_path):
    about = about_of({"tokenizer": "1"}, "a:B", {})
    killed, folder = CacheFolder(str(tmp_path), about), CacheFolder(str(tmp_path), about)
    assert killed.lock()
    assert not folder.lock()
    os.close(killed._lock_fd)  # noqa: SLF001 - as its death does

    assert folder.lock()
    folder.close()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_what_is_complete_when_the_loader_is_closed_is_stored(path, tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(service, "_FINISH_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(service.Service.close, "__defaults__", (2 * NEVER_S,))
    knobs = {"shuffle": Shuffle(block_bytes=1024, window_blocks=100), "num_workers": num_workers}

    Delivered(loader(path, tmp_path / "cache", **knobs))

    assert Delivered(loader(path, tmp_path / "cache", **knobs)).cached == [NUM_ROWS]


# Open files


def test_segments_beyond_the_limit_are_closed_and_opened_again(path, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_MAX_OPEN_SEGMENTS", 1)
    monkeypatch.setattr(worker, "_MAX_SEGMENT_BYTES", 4096)
    cache, before = tmp_path / "tokens", len(os.listdir("/proc/self/fd"))
    Delivered(loader(path, cache), settle=True)

    assert len(segments(cache)) > 1
    assert Delivered(loader(path, cache)).cached == [NUM_ROWS]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


# Eviction


def segment_of(folder: Path, key: str, name: str, num_bytes: int, used_s: int) -> Path:
    """Files where a segment would be, last used at a time."""
    path = folder / key / f"{name}.arrow"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(num_bytes - 10))
    path.with_suffix(".index").write_bytes(bytes(10))
    os.utime(path, (used_s, used_s))
    return path


OLD, NEW, OTHER = ("mine", "old", 100, 1), ("mine", "new", 100, 9), ("other", "a", 100, 5)


@pytest.mark.parametrize(
    ("files", "num_bytes", "max_bytes", "since_s", "left", "room"),
    [
        pytest.param([OLD, NEW, OTHER], 150, 300, 10, [NEW], 200, id="the least recently used of all caches"),
        pytest.param([OLD, OTHER], 50, 200, 5, [OTHER], 100, id="and none that was used since the run began"),
        pytest.param([OLD, OTHER], 150, 200, 3, [OLD, OTHER], 0, id="and none where that is not enough"),
        pytest.param([OLD], 50, 150, 10, [OLD], 50, id="and none that fits"),
    ],
)
def test_what_is_evicted_is(tmp_path, files, num_bytes, max_bytes, since_s, left, room):
    made = {file: segment_of(tmp_path, *file) for file in files}
    job = CacheJob(str(tmp_path / "mine"), [], max_bytes, since_s * 10**9)

    found, num_removed = make_room(job, num_bytes, 1)

    assert [file for file in files if made[file].exists()] == left
    assert [file for file in files if made[file].with_suffix(".index").exists()] == left
    assert (found, num_removed) == (room, 100 * (len(files) - len(left)))


def test_scans_that_are_stored_at_the_same_time_share_the_room(tmp_path):
    segment_of(tmp_path, *OLD)

    assert make_room(CacheJob(str(tmp_path / "mine"), [], 500, 0), 50, 4) == (100, 0)


def test_what_links_lead_to_is_not_evicted(tmp_path):
    mine = segment_of(tmp_path, "mine", "a", 100, 1)
    outside = tmp_path / "outside.arrow"
    outside.write_bytes(bytes(100))
    (tmp_path / "mine" / "b.arrow").symlink_to(outside)
    (tmp_path / "linked").symlink_to(tmp_path / "mine")

    assert make_room(CacheJob(str(tmp_path / "mine"), [], 100, 10**18), 100, 1) == (100, 100)
    assert (mine.exists(), outside.exists()) == (False, True)


@pytest.mark.thorough
def test_another_data_set_takes_the_room_of_one_that_is_not_used(path, cache, tmp_path):
    size = num_bytes(cache)
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS + 3)

    Delivered(loader(other, cache, max_tokens_bytes=size + 10_000), settle=True)

    assert num_bytes(cache) <= size + 10_000
    assert Delivered(loader(other, cache)).cached == [NUM_ROWS + 3]
    assert Delivered(loader(path, cache)).cached[0] < NUM_ROWS


# What is left out


def test_windows_are_left_out_where_the_disk_is_too_slow(path, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_MAX_WRITE_S", -1.0)
    monkeypatch.setattr(token_cache, "_WINDOWS_LEFT_OUT", 1000)
    with structlog.testing.capture_logs() as events:
        found = Delivered(loader(path, tmp_path / "cache"))

    assert found.samples == Delivered(loader(path, None)).samples
    assert [event["event"] for event in events].count("token_cache.behind") <= 1


# What people see of it, and who else reads it


def test_statistics_say_what_came_from_the_cache_and_how_large_it_is(path, cache):
    with loader(path, cache) as data:
        for _ in data:
            pass
        wait_until_stored(data)
        now = data.statistics()

    assert now.cached_rows_total == NUM_ROWS
    assert now.token_cache_bytes == num_bytes(cache)
    assert now.to_dict()["asyncdata_cached_rows_total"] == NUM_ROWS


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(["cache", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_says_what_there_is_and_verify_finds_what_is_damaged(path, cache, capsys):
    (found,) = run(capsys, "ls", "--dir", cache)
    assert found["num_rows"] == NUM_ROWS
    assert found["num_samples"] == len(Delivered(loader(path, None)).samples)
    assert found["num_bytes"] == num_bytes(cache)
    assert len(found["segments"]) == len(segments(cache))
    assert (found["is_in_use"], found["faults"]) == (False, [])
    assert found["about"]["function"]["tokenize_fn"].startswith("tests.support.cached:everything")
    assert main(["cache", "ls", "--dir", str(cache)]) == 0
    assert found["key"][:12] in capsys.readouterr().out
    assert run(capsys, "ls", "--dir", cache / "nowhere") == []

    assert list(run(capsys, "verify", "--dir", cache).values()) == [[]]
    damaged = segments(cache)[-1]
    damage(damaged)
    (faults,) = run(capsys, "verify", "--dir", cache, status=1).values()
    assert [fault["path"] for fault in faults] == [str(damaged)]
    assert main(["cache", "verify", "--dir", str(cache)]) == 1
    assert damaged.name in capsys.readouterr().out


@pytest.mark.thorough
def test_rm_removes_what_is_named_and_nothing_that_is_written_to(path, cache, capsys):
    with loader(path, cache):
        assert "AD614" in run(capsys, "rm", "--all", "--dir", cache, status=1)["error"]["message"]
    Delivered(loader(path, cache, tokenize_fn=row_id), settle=True)
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
    assert sorted(row["tokens"] for row in found) == sorted(sample[2] for sample in expected)
