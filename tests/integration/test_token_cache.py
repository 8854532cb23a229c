"""The token cache changes the time and nothing else, of whatever kind the data is and whatever becomes of the cache.

Each test compares a loader that has a cache with one that has none. What the folder of a cache holds is in
``test_token_cache_folder``.
"""

from __future__ import annotations

import itertools
import os
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import structlog

from asyncdata import DataLoader, HardPacking, JsonlSource, RowShuffle, Shuffle
from asyncdata.errors import BadRowError
from asyncdata.xtuner import XTunerPacking as XTuner
from tests.support import cached
from tests.support.cached import Delivered, assert_same, facts, loader, segments
from tests.support.loading import write_rows
from tests.support.ranks import settled
from tests.support.sources import KINDS, make_rows

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import worker

NUM_ROWS = 400
NUM_CANARIES = 8
"""Rows that are tokenized at every start, whatever is cached."""
IN_ORDER = Shuffle(enabled=False, block_bytes=1024, window_blocks=8)


class Data(NamedTuple):
    """Data, and the folder of its cache."""

    path: Any
    cache: Path

    def open(self, cache: Path | None, path: Any = None, **knobs: Any) -> DataLoader:
        return loader(self.path if path is None else path, cache, **knobs)

    def plain(self, num_epochs: int = 1, **knobs: Any) -> Delivered:
        return Delivered(self.open(None, epochs=num_epochs, **knobs), num_epochs)

    def fill(self, **knobs: Any) -> Delivered:
        """With the cache, until all is stored."""
        return Delivered(self.open(self.cache, **knobs), settle=True)

    def read(self, **knobs: Any) -> Delivered:
        return Delivered(self.open(self.cache, **knobs))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """In small segments."""
    monkeypatch.setattr(worker, "_MAX_SEGMENT_BYTES", 16 << 10)
    return Data(cached.write_lines(tmp_path, NUM_ROWS), tmp_path / "cache" / "tokens")


def more(*values: Any) -> list[Any]:
    """Values of the thorough selection."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=thorough) for value in values]


thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    "knobs",
    [{}, *more({"shuffle": IN_ORDER}, *({"num_workers": 2, "digest": digest} for digest in ("positions", "tokens")))],
    ids=str,
)
def test_a_later_run_reads_every_row_from_the_cache_and_delivers_the_same(data, knobs):
    expected = data.plain(**knobs)

    first = data.fill(**knobs)
    cached.CALLS.clear()
    second = data.read(**knobs)

    assert_same(first, expected)
    assert_same(second, expected)
    assert first.cached == [0]
    assert cached.CALLS.total() <= NUM_CANARIES, "no other row is tokenized"
    assert second.cached == [NUM_ROWS]


def another_file(data: Data) -> dict[str, Any]:
    return {"path": [str(write_rows(data.path.with_name("other.jsonl"), 70)), str(data.path)]}


def touched(data: Data) -> dict[str, Any]:
    os.utime(data.path, (1, 1))
    return {}


def other_content(data: Data) -> dict[str, Any]:
    rows = [*[b'{"id": %d, "pad": ""}\n' % i for i in range(50)], b'{"id": 9999, "pad": ""}\n']
    data.path.write_bytes(b"".join(rows))
    return {}


def other(**knobs: Any) -> Any:
    return lambda _: knobs


WIDER = Shuffle(block_bytes=1024, window_blocks=9)


CHANGES: list[tuple[Any, tuple[int, int], int]] = [
    (another_file, (400, 400), 470),
    (touched, (341, 400), 400),  # blocks whose text is read as a whole
    (other_content, (0, 0), 51),
    # What samples and blocks follow from is part of the key.
    (other(tokenize_fn=cached.row_id), (0, 0), 400),
    (lambda data: {"path": JsonlSource(str(data.path), max_row_bytes=10_000)}, (0, 0), 400),
    (other(shuffle=Shuffle(block_bytes=2048, window_blocks=4)), (0, 0), 400),
    (other(seed=7), (400, 400), 400),
    (other(seed=42, shuffle=WIDER), (400, 400), 400),
]


@pytest.mark.parametrize(("change", "cached_rows", "num_rows"), CHANGES)
def test_a_run_that_differs_reads_from_the_cache_what_is_still_so_and_stores_the_rest(
    data, change, cached_rows, num_rows
):
    data.fill()
    knobs = change(data)

    found = data.fill(**knobs)

    assert_same(found, data.plain(**knobs))
    assert cached_rows[0] <= found.cached[0] <= cached_rows[1]
    assert data.read(**knobs).cached == [num_rows]


def test_later_epochs_of_a_run_read_the_cache(data):
    found = Delivered(data.open(data.cache, epochs=3, buffer_size=8), 3, settle=True)

    assert_same(found, data.plain(3))
    assert sum(found.cached) > 1.5 * NUM_ROWS, "what is read ahead of an epoch is not stored yet"
    assert found.cached[0] <= 16, "what is read ahead of the second epoch"


@thorough
@pytest.mark.parametrize(
    "kind", [name for name, kind in KINDS.items() if not kind.is_stream and name != "a JSON array"]
)
def test_every_kind_of_source_is_cached(tmp_path, kind):
    for package in KINDS[kind].needs:
        pytest.importorskip(package)
    source = KINDS[kind].write(tmp_path, make_rows(200))
    data, shuffle = Data(source, tmp_path / "cache"), Shuffle(block_bytes=4096, window_blocks=4)
    expected = data.plain(shuffle=shuffle)

    first, second = data.fill(shuffle=shuffle), data.read(shuffle=shuffle)

    assert [first.samples, second.samples] == [expected.samples] * 2
    assert (first.cached, second.cached) == ([0], [200])


@thorough
def test_a_window_of_very_many_rows_is_stored_by_requests_that_a_socket_takes_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(60_000)))
    knobs = {"tokenize_fn": cached.row_id, "num_workers": 1, "shuffle": True, "batch_size": 10_000}

    for num_cached in (0, 60_000):
        with loader(path, tmp_path / "cache", **knobs) as data:
            found = sum(len(batch) for batch in data)
            cached.wait_until_stored(data)
            assert (found, data.statistics().cached_rows_total) == (60_000, num_cached)
            assert data.statistics().worker_restarts_total == 0


# Where samples lie


@thorough
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_kept_here_and_in_a_forked_child_stays_what_it_is_when_the_slots_are_used_again(data, num_workers):
    expected = data.plain(4).samples
    data.fill()
    with data.open(data.cache, epochs=4, num_workers=num_workers, buffer_size=8) as opened:
        held = opened.get_next_batch(100)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # its end: the parent is through
            os._exit([facts(sample) for sample in held] != expected[:100])

        rest = [facts(sample) for sample in opened.get_next_batch(len(expected) - 100)]
        assert [facts(sample) for sample in held] == expected[:100]
    os.close(reading)
    os.close(writing)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rest == expected[100:]


# When it must not be read


@thorough
def test_a_change_that_no_sample_of_the_file_shows_is_seen_in_the_block(tmp_path):
    data, shuffle = (
        Data(write_rows(tmp_path / "large.jsonl", 6000), tmp_path / "cache"),
        Shuffle(block_bytes=4096, window_blocks=8),
    )
    data.fill(shuffle=shuffle)
    content = bytearray(data.path.read_bytes())
    place = content.index(b'"id": 1', 75_000) + 6  # between the places that the fingerprint reads
    content[place : place + 1] = b"9"
    with open(data.path, "r+b") as file:
        file.write(content)

    found = data.read(shuffle=shuffle)

    assert_same(found, data.plain(shuffle=shuffle))
    assert 0 < 6000 - found.cached[0] <= 500, "only what was changed is tokenized again"


def test_another_version_of_the_function_is_tokenized_and_one_without_a_version_is_not_cached(data, monkeypatch):
    data.fill()
    monkeypatch.setattr(cached.everything, "version", 2)
    assert data.fill().cached == [0]
    shutil.rmtree(data.cache)

    monkeypatch.delattr(cached.everything, "version")
    with structlog.testing.capture_logs() as events:
        found = data.read()

    assert_same(found, data.plain())
    assert not data.cache.exists()
    (event,) = [event for event in events if event["event"] == "token_cache.off"]
    assert "version" in event["reason"]


# Rows that are not cached


def test_a_bad_row_is_an_error_again_with_all_that_was_said_of_it(data):
    lines = data.path.read_bytes().splitlines(keepends=True)
    lines[200] = b'{"id": 200, "pad": \n'
    data.path.write_bytes(b"".join(lines))

    def error_of(cache: Path | None) -> str:
        with pytest.raises(BadRowError) as caught:
            Delivered(data.open(cache))
        return str(caught.value)

    expected = data.plain(bad_rows="skip")
    first, second = data.fill(bad_rows="skip"), data.read(bad_rows="skip")

    assert_same(first, expected)
    assert second.samples == expected.samples
    assert 0 < NUM_ROWS - second.cached[0] < 40, "but for its block all is cached"
    assert error_of(data.cache) == error_of(None)


def test_a_stream_is_not_cached_and_that_is_logged(data):
    path = cached.compressed(data.path.with_suffix(".gz"), [data.path.read_bytes()])
    with structlog.testing.capture_logs() as events, data.open(data.cache, path) as opened:
        assert sum(len(batch) for batch in opened)
        assert opened.statistics().cached_rows_total == 0

    assert [event["event"] for event in events if "token_cache" in event["event"]] == ["token_cache.off"]


# Orders of single rows, and plans

ORDERS_OF_ROWS = [
    "full",
    *more(RowShuffle(method="slime"), RowShuffle(part="train", train_ratio=0.7), RowShuffle(only_kept=True, stop=200)),
]


@pytest.mark.parametrize("shuffle", ORDERS_OF_ROWS, ids=str)
@pytest.mark.parametrize("num_workers", [0, *more(2)])
def test_an_order_of_single_rows_reads_blocks_that_another_order_has_stored(data, shuffle, num_workers):
    expected = data.plain(2, shuffle=shuffle)
    data.fill()
    cached.CALLS.clear()

    found = Delivered(data.open(data.cache, shuffle=shuffle, epochs=2, num_workers=num_workers), 2)

    assert_same(found, expected)
    assert sum(found.cached) >= len(expected.samples) > 100
    assert cached.CALLS.total() <= NUM_CANARIES, "no other row is tokenized"


def test_rows_that_cannot_be_read_from_their_blocks_are_tokenized(data):
    expected = data.plain(shuffle="full")
    data.fill()
    cached.damage(segments(data.cache)[0])
    segments(data.cache)[-1].unlink()

    with structlog.testing.capture_logs() as events:
        found = data.read(shuffle="full")

    assert_same(found, expected)
    assert 0 < found.cached[0] < NUM_ROWS
    assert [event["event"] for event in events].count("token_cache.refused") == 1


PLANS: dict[str, dict[str, Any]] = {
    "xtuner": {"packing": XTuner(max_length=600, seed=5), "shuffle": True},
    "hard": {"packing": HardPacking(max_length=600), "shuffle": "full", "plan_packs": True},
}


def packs(data: Data, cache: Path | None, plan: str, **knobs: Any) -> Any:
    """What the packs hold, the snapshot in the middle, and the rows that came from the cache."""
    knobs = {"tokenize_fn": cached.row_id_and_pad, "batch_size": 2, **PLANS[plan], **knobs}
    with loader(data.path, cache, **knobs) as opened:
        found, state = [], None
        for number, batch in enumerate(opened):
            found += [[(str(one.sample.position), one.tokens.tolist()) for one in pack] for pack in batch]
            if number == 2:
                state = settled(opened.state_dict())
        return (found, state), opened.statistics().cached_rows_total


@thorough
@pytest.mark.parametrize(
    ("plan", "knobs", "share"),
    [
        ("xtuner", {}, 0.9),  # but for rows that no pack has
        ("hard", {"num_workers": 2}, 0.9),
        ("xtuner", {"batch_size": 3, "drop_last": True, "ranks": {"world_size": 3, "rank": 1}}, 0.25),
    ],
)
def test_planned_packs_are_the_same_with_the_cache_and_nothing_is_tokenized_for_them(data, plan, knobs, share):
    for least in (0, share * NUM_ROWS):
        cached.CALLS.clear()
        found, num_cached = packs(data, data.cache, plan, **knobs)
        assert num_cached >= least
    assert cached.CALLS.total() <= NUM_CANARIES
    assert found == packs(data, None, plan, **knobs)[0]


# Half a cache, and a damaged one


@pytest.mark.parametrize(("num_delivered", "num_workers"), [(183, 0), *more((0, 2), (1, 2), (300, 2))])
def test_a_snapshot_in_the_middle_of_a_half_cached_epoch_resumes_exactly(data, num_delivered, num_workers):
    expected = data.plain(2).samples
    data.fill()
    for segment in segments(data.cache)[::2]:
        segment.unlink()
    states = []
    for tokens in (None, data.cache):
        with data.open(tokens, epochs=2, num_workers=num_workers) as opened:
            before = [facts(one) for one in opened.get_next_batch(num_delivered)] if num_delivered else []
            states.append(settled(opened.state_dict()))
    assert states[0] == states[1], "a snapshot knows nothing of the cache"

    with data.open(data.cache, epochs=2, num_workers=num_workers) as opened:
        opened.load_state_dict(states[1])
        after = [facts(one) for batch in itertools.chain(opened, opened) for one in batch]
    assert before + after == expected

    found, again = data.fill(), data.read()
    assert found.samples == again.samples == expected[: len(found.samples)]
    assert again.cached == [NUM_ROWS], "what was missing was written anew"


@pytest.mark.parametrize("number", [0, -1])
def test_samples_that_are_damaged_are_tokenized_and_written_again(data, number):
    expected = data.fill()
    damaged = segments(data.cache)[0]
    cached.damage(damaged, number)

    with structlog.testing.capture_logs() as events:
        found = data.fill()

    assert_same(found, expected)
    assert [event["path"] for event in events if event["event"] == "token_cache.refused"] == [str(damaged)]
    assert not damaged.exists()
    data.fill()  # rows that were read from it before it was known to be damaged
    assert data.read().cached == [NUM_ROWS]


@thorough
def test_segments_that_are_cut_off_or_go_while_they_are_read_are_tokenized(data):
    expected = data.plain(3)
    data.fill()
    for segment in segments(data.cache)[:2]:
        os.truncate(segment, segment.stat().st_size // 2)
    found: list[Any] = []
    with data.open(data.cache, epochs=3, num_workers=2, buffer_size=16) as opened:
        for _ in range(3):
            for batch in opened:
                found += map(facts, batch)
                for segment in segments(data.cache)[::3]:
                    segment.unlink(missing_ok=True)

    assert found == expected.samples


# Room, and other runs


def test_a_run_without_room_writes_as_much_as_fits_and_continues(data):
    expected = data.plain(2)
    with structlog.testing.capture_logs() as events:
        found = Delivered(data.open(data.cache, epochs=2, max_tokens_bytes=40_000), 2, settle=True)

    assert found.samples == expected.samples
    assert 10_000 < cached.num_bytes(data.cache) <= 40_000
    assert [event["event"] for event in events].count("token_cache.full") == 1
    assert 0 < data.read().cached[0] < NUM_ROWS


def test_two_runs_share_a_cache_and_one_of_them_writes(data):
    expected = data.plain(3).samples
    num_first = len(data.plain().samples)
    with data.open(data.cache, epochs=2) as writer, data.open(data.cache, epochs=3, buffer_size=8) as reader:
        for opened in (reader, writer):
            assert [facts(one) for batch in opened for one in batch] == expected[:num_first]
        cached.wait_until_stored(writer)
        assert [facts(one) for batch in itertools.chain(reader, reader) for one in batch] == expected[num_first:]
        num_cached = reader.statistics().cached_rows_total

    assert num_cached > NUM_ROWS / 2, "the last epoch at the latest takes up what the other run wrote"


def test_who_comes_second_writes_when_the_first_is_gone(data):
    with data.open(data.cache, buffer_size=1) as first:
        first.get_next_batch(1)
        assert data.read().cached[0] < 60

    assert data.fill().cached[0] < 60, "the second one has written nothing"
    assert data.read().cached == [NUM_ROWS]
