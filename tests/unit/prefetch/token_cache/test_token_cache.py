"""The token cache's parts: which blocks it knows, what is evicted, what its commands show, and who may read it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ConfigError, JsonlSource, Shuffle
from asyncdata.cli.main import main
from asyncdata.core.cache_messages import EvictTokens, SegmentListing
from asyncdata.core.messages import Block
from asyncdata.loader import service
from tests.support.cached import Delivered, loader, segments, wait_until_stored
from tests.support.loading import NEVER_S, SHUFFLE, write_rows
from tests.support.sources import KINDS, make_rows

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.catalog import Catalog, numbers_of
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


@pytest.fixture
def cache(path: Path, tmp_path: Path) -> Path:
    """A cache that has all rows."""
    folder = tmp_path / "tokens"
    Delivered(loader(path, folder), settle=True)
    return folder


# Which blocks


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.is_stream])
def test_the_numbers_of_blocks_lead_back_to_them(tmp_path, kind):
    for package in KINDS[kind].needs:
        pytest.importorskip(package)
    files = described_source(KINDS[kind].write(tmp_path, make_rows(300))).open(2048)
    try:
        blocks = files.blocks(range(files.num_blocks))
        by_number = {number: files.blocks([number])[0] for number in range(files.num_blocks)}

        numbers = numbers_of(files, blocks).tolist()
        assert [by_number[number] for number in numbers] == blocks
        between = [
            Block(block.file_id, block.start + 1, block.stop) for block in blocks if block.stop > block.start + 1
        ]
        assert set(numbers_of(files, between).tolist()) <= {-1}
        beyond = [Block(file_id, 1 << 40, 1 << 41) for file_id in range(len(files.files))]
        assert set(numbers_of(files, beyond).tolist()) == {-1}
        assert len(files.cached_files()) == len(files.files)
    finally:
        files.close()


def described_source(source: Any) -> Any:
    from asyncdata.sources.resolve import described

    return described(source)


def listing(name: str, entries: list[int], numbers: list[int], block_bytes: int) -> SegmentListing:
    return SegmentListing(
        name,
        10,
        np.array(entries, np.int32).tobytes(),
        np.zeros(len(numbers), np.int32).tobytes(),
        (np.array(numbers, np.int64) * block_bytes).tobytes(),
        np.ones(len(numbers), np.bool_).tobytes(),
    )


steps = st.lists(
    st.tuples(st.just("take"), st.integers(0, 9), st.lists(st.integers(0, 29), unique=True, max_size=8))
    | st.tuples(st.just("add"), st.integers(0, 9), st.lists(st.integers(0, 29), unique=True, max_size=8))
    | st.tuples(st.just("forget"), st.integers(0, 9), st.just([]))
    | st.tuples(st.just("block"), st.integers(0, 29), st.just([])),
    max_size=20,
)


@pytest.fixture(scope="module")
def thirty_blocks(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("catalog") / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 334)
    files = JsonlSource(str(path)).open(101)
    assert files.num_blocks == 30
    return files


@pytest.mark.thorough
@given(steps)
def test_the_catalog_does_as_a_dict_would(thirty_blocks, steps):
    files, catalog, model, seen = thirty_blocks, Catalog(thirty_blocks, 30), {}, set()
    for step, number, numbers in steps:
        name = f"segment {number}"
        if step in ("take", "add") and name not in seen:
            entries = [2 * place for place in range(len(numbers))] if step == "take" else list(range(len(numbers)))
            if step == "take":
                catalog.take(listing(name, entries, numbers, 101))
            else:
                catalog.add(name, 10, np.array(numbers, np.int64))
            model |= {block: (name, entry) for block, entry in zip(numbers, entries, strict=True)}
            seen.add(name)
        elif step == "forget":
            catalog.forget([name])
            model = {block: place for block, place in model.items() if place[0] != name}
        elif step == "block":
            catalog.forget_block(files.blocks([number])[0])
            model.pop(number, None)

    found = catalog.find(files.blocks(range(30)))
    assert {item.block: (item.segment, item.entry) for item in found} == model
    assert catalog.num_blocks_cached == len(model)


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


def test_one_folder_has_one_writer_until_it_is_closed(tmp_path):
    about = about_of({"tokenizer": "1"}, "a:B", {})
    first, second = CacheFolder(str(tmp_path), about), CacheFolder(str(tmp_path), about)

    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()
    second.close()


def test_a_writer_removes_what_a_killed_one_left(tmp_path):
    about = about_of({"tokenizer": "1"}, "a:B", {})
    killed = CacheFolder(str(tmp_path), about)
    assert killed.lock()
    (Path(killed.path) / killed.make_room(1) / "0").write_text("a reply")
    os.close(killed._lock_fd)  # noqa: SLF001 - as its death does

    folder = CacheFolder(str(tmp_path), about)
    assert folder.lock()
    assert os.listdir(folder.path).count(killed.run) == 0
    folder.close()


# Open files


def test_segments_beyond_the_limit_are_closed_and_opened_again(cache, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_OPEN_SEGMENTS", 1)
    first, second, *_ = segments(cache)
    known = reader.Segments(str(first.parent), reader.Segment)
    segment, expected = known.get(first.name), known.get(first.name).entry(0)
    known.get(second.name)

    assert known.get(first.name) is segment
    assert segment.entry(0) == expected
    known.close()


def test_a_segment_that_another_file_has_replaced_is_not_read_again(cache, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_OPEN_SEGMENTS", 1)
    first, second, *_ = segments(cache)
    known = reader.Segments(str(first.parent), reader.Segment)
    known.get(first.name)
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


def test_the_least_recently_used_segment_of_all_caches_is_evicted_first(tmp_path, segment_of):
    old, new = segment_of("mine", "old", 100, 1), segment_of("mine", "new", 100, 9)
    other = segment_of("other", "a", 100, 5)

    done = evicted(tmp_path, 150, 300, [])

    assert [path.exists() for path in (old, new, other)] == [False, True, False]
    assert (done.is_full, done.names, done.num_bytes) == (False, ["old.arrow"], 200)


def test_what_this_run_reads_stays(tmp_path, segment_of):
    mine, other = segment_of("mine", "a", 100, 1), segment_of("other", "a", 100, 5)

    done = evicted(tmp_path, 50, 200, ["a.arrow"])

    assert (mine.exists(), other.exists(), done.is_full) == (True, False, False)


def test_nothing_is_removed_where_that_does_not_do(tmp_path, segment_of):
    mine, other = segment_of("mine", "a", 100, 1), segment_of("other", "a", 10, 5)

    done = evicted(tmp_path, 50, 100, ["a.arrow"])

    assert (mine.exists(), other.exists(), done.is_full, done.names) == (True, True, True, [])


def test_what_fits_is_left_alone(tmp_path, segment_of):
    mine = segment_of("mine", "a", 100, 1)

    assert evicted(tmp_path, 50, 150, []).num_bytes == 0
    assert mine.exists()


def test_what_links_lead_to_is_not_evicted(tmp_path, segment_of):
    mine = segment_of("mine", "a", 100, 1)
    outside = tmp_path / "outside.arrow"
    outside.write_bytes(bytes(100))
    (tmp_path / "mine" / "b.arrow").symlink_to(outside)
    (tmp_path / "linked").symlink_to(tmp_path / "mine")

    assert evicted(tmp_path, 100, 100, []).num_bytes == 100
    assert (mine.exists(), outside.exists()) == (False, True)


def test_a_run_without_room_writes_as_much_as_fits_and_continues(path, tmp_path):
    expected = Delivered(loader(path, None, epochs=2), 2)
    folder = tmp_path / "small"
    with structlog.testing.capture_logs() as events:
        found = Delivered(loader(path, folder, epochs=2, max_tokens_bytes=40_000), 2, settle=True)

    assert found.samples == expected.samples
    assert 10_000 < sum(file.stat().st_size for file in segments(folder)) <= 40_000
    assert [event["event"] for event in events].count("token_cache.full") == 1
    assert 0 < Delivered(loader(path, folder)).cached[0] < NUM_ROWS


@pytest.mark.thorough
def test_another_data_set_takes_the_room_of_one_that_is_not_used(path, cache, tmp_path):
    size = sum(file.stat().st_size for file in segments(cache))
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS + 3)

    Delivered(loader(other, cache, max_tokens_bytes=size + 10_000), settle=True)

    assert sum(file.stat().st_size for file in segments(cache)) <= size + 10_000
    assert Delivered(loader(other, cache)).cached == [NUM_ROWS + 3]
    assert Delivered(loader(path, cache)).cached[0] < NUM_ROWS


# What is not kept


@pytest.mark.thorough
def test_samples_without_room_are_left_out_and_logged_once(tmp_path):
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.is_stream])
def test_every_kind_of_source_is_cached(tmp_path, kind):
    for package in KINDS[kind].needs:
        pytest.importorskip(package)
    source = KINDS[kind].write(tmp_path, make_rows(200))
    knobs = {"shuffle": Shuffle(block_bytes=4096, window_blocks=4)}
    expected = Delivered(loader(source, None, **knobs))

    first = Delivered(loader(source, tmp_path / "cache", **knobs), settle=True)
    second = Delivered(loader(source, tmp_path / "cache", **knobs))

    assert [first.samples, second.samples] == [expected.samples] * 2
    assert first.cached == [0]
    assert second.cached[0] == 200


# Closing


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_complete_when_the_loader_is_closed_is_stored(tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(service, "_FINISH_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(service.Service.close, "__defaults__", (2 * NEVER_S,))
    path = write_rows(tmp_path / "rows.jsonl", 50)
    knobs = {"shuffle": Shuffle(block_bytes=1024, window_blocks=100), "num_workers": num_workers}

    Delivered(loader(path, tmp_path / "cache", **knobs))

    assert Delivered(loader(path, tmp_path / "cache", **knobs)).cached == [50]


def test_statistics_say_what_came_from_the_cache_and_how_large_it_is(path, cache):
    with loader(path, cache) as data:
        for _ in data:
            pass
        wait_until_stored(data)
        now = data.statistics()

    assert now.cached_rows_total == NUM_ROWS
    assert now.token_cache_bytes == sum(file.stat().st_size for file in segments(cache))
    assert now.to_dict()["asyncdata_cached_rows_total"] == NUM_ROWS


# What people see of it, and who else reads it


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(["cache", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_ls_says_what_there_is(path, cache, capsys):
    (found,) = run(capsys, "ls", "--dir", cache)

    assert found["num_rows"] == NUM_ROWS
    assert found["num_samples"] == len(Delivered(loader(path, None)).samples)
    assert found["num_bytes"] == sum(file.stat().st_size for file in segments(cache))
    assert (found["is_in_use"], found["faults"]) == (False, [])
    assert found["about"]["function"]["tokenize_fn"].startswith("tests.support.cached:everything")
    assert main(["cache", "ls", "--dir", str(cache)]) == 0
    assert found["key"][:12] in capsys.readouterr().out
    assert run(capsys, "ls", "--dir", cache / "nowhere") == []


def test_verify_finds_the_damaged_segment(cache, capsys):
    assert list(run(capsys, "verify", "--dir", cache).values()) == [[]]
    damaged = segments(cache)[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)

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


def test_a_size_limit_must_be_positive(path, tmp_path):
    with pytest.raises(ConfigError, match="Cache: max_tokens_bytes"):
        loader(path, tmp_path / "cache", max_tokens_bytes=0)


def test_a_damaged_segment_is_logged_removed_and_written_again(path, cache):
    damaged = segments(cache)[0]
    data = bytearray(damaged.read_bytes())
    data[-20] ^= 1
    damaged.write_bytes(data)
    with structlog.testing.capture_logs() as events:
        found = Delivered(loader(path, cache, shuffle=SHUFFLE), settle=True)

    (event,) = [event for event in events if event["event"] == "token_cache.refused"]
    assert event["path"] == str(damaged)
    assert found.cached[0] < NUM_ROWS
    assert not damaged.exists()
    assert Delivered(loader(path, cache)).cached == [NUM_ROWS]


def test_a_block_that_is_known_to_be_the_same_is_preferred_to_one_that_must_be_compared(thirty_blocks):
    for names in (("sure", "unsure"), ("unsure", "sure")):
        catalog = Catalog(thirty_blocks, 30)
        for name in names:
            found = listing(name, [0, 1], [3, 4], 101)
            catalog.take(found if name == "sure" else with_doubt(found))

        assert {item.segment for item in catalog.find(thirty_blocks.blocks(range(30)))} == {"sure"}


def with_doubt(found: SegmentListing) -> SegmentListing:
    return msgspec.structs.replace(found, are_sure=bytes(len(found.are_sure)))
