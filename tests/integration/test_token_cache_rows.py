"""The token cache of orders of single rows: it changes the time and nothing else."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from asyncdata import BadRowError, DataLoader, HardPacking, RowShuffle, XTunerPacking
from asyncdata.cli.main import main
from asyncdata.core.messages import Index, Tokenize
from asyncdata.prefetch.row_index.row_index import RowIndex
from asyncdata.workers.inline import InlineExecutor
from tests.support import cached
from tests.support.cached import Delivered, assert_same, loader, segments, write_lines
from tests.support.loading import write_rows
from tests.support.ranks import settled
from tests.support.sources import KINDS, make_rows

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import row_cache

pytestmark = pytest.mark.thorough

NUM_ROWS = 300


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_MAX_ROWS", 32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lines(tmp_path, NUM_ROWS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tokens"


def of(path: Any, cache: Path | None, order: Any = "full", **knobs: Any) -> DataLoader:
    return loader(path, cache, **({"shuffle": order} | knobs))


def plain(path: Any, order: Any = "full", num_epochs: int = 1, **knobs: Any) -> Delivered:
    return Delivered(of(path, None, order, epochs=num_epochs, **knobs), num_epochs)


def fill(path: Any, cache: Path, order: Any = "full", **knobs: Any) -> Delivered:
    return Delivered(of(path, cache, order, **knobs), settle=True)


def tokenized_rows(monkeypatch: pytest.MonkeyPatch, function: Any) -> tuple[Any, int]:
    """What ``function`` returns, and how many rows were tokenized for chunks meanwhile."""
    real, seen = InlineExecutor.submit, list[Any]()

    def submit(executor: InlineExecutor, request: Any, *more: Any) -> None:
        seen.append(request)
        real(executor, request, *more)

    monkeypatch.setattr(InlineExecutor, "submit", submit)
    found = function()
    monkeypatch.setattr(InlineExecutor, "submit", real)
    assert not any(isinstance(request, Index) for request in seen), "the index is stored"
    requests = [request for request in seen if isinstance(request, Tokenize) and request.slot < 0]
    return found, sum(len(request.starts) // 4 - request.num_cached for request in requests)


def test_a_row_in_the_cache_is_not_tokenized(path, cache, monkeypatch):
    fill(path, cache)

    found, num_tokenized = tokenized_rows(monkeypatch, lambda: Delivered(of(path, cache)))

    assert found.cached == [NUM_ROWS]
    assert num_tokenized == 0


def test_a_change_that_no_sample_of_the_file_shows_is_seen_in_the_row(tmp_path, cache):
    path = write_rows(tmp_path / "large.jsonl", 6000)
    fill(path, cache)
    data = bytearray(path.read_bytes())
    place = data.index(b'"id": 1', 75_000) + 6  # between the places that the fingerprint reads
    data[place : place + 1] = b"9"
    with open(path, "r+b") as file:
        file.write(data)

    found = Delivered(of(path, cache))

    assert_same(found, plain(path))
    assert found.cached == [5999], "only the row that was changed is tokenized again"


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.is_stream])
def test_every_kind_of_source_is_cached(tmp_path, kind):
    for package in KINDS[kind].needs:
        pytest.importorskip(package)
    source = KINDS[kind].write(tmp_path, make_rows(200))
    expected = plain(source)

    first = fill(source, tmp_path / "cache")
    second = Delivered(of(source, tmp_path / "cache"))

    assert [first.samples, second.samples] == [expected.samples] * 2
    assert (first.cached, second.cached) == ([0], [200])


# Plans

PLANS = {"xtuner": XTunerPacking(max_length=600, seed=5), "hard": HardPacking(max_length=600)}


def packs(path: Any, cache: Path | None, plan: str, **knobs: Any) -> Any:
    """What the packs hold, the snapshot in the middle, and the rows that came from the cache."""
    knobs = {"tokenize_fn": cached.row_id_and_pad, "packing": PLANS[plan], "batch_size": 2} | knobs
    if plan == "hard":
        knobs |= {"shuffle": "full", "plan_packs": True}
    else:
        knobs["shuffle"] = True
    with loader(path, cache, **knobs) as data:
        found, state = [], None
        for number, batch in enumerate(data):
            found += [[(str(one.sample.position), one.tokens.tolist()) for one in pack] for pack in batch]
            if number == 2:
                state = data.state_dict()
        if cache is not None:
            cached.wait_until_stored(data)
        return found, state, data.statistics().cached_rows_total


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_planned_packs_are_the_same_with_the_cache(path, cache, plan, num_workers):
    expected, state, _ = packs(path, None, plan)

    for num_cached in (0, NUM_ROWS):
        found, its_state, rows_read = packs(path, cache, plan, num_workers=num_workers)
        assert found == expected
        assert settled(its_state) == settled(state)
        assert rows_read >= num_cached * 0.9, "but for rows that no pack has"


def test_the_plan_of_a_later_run_is_ready_at_once_and_nothing_is_tokenized(path, cache, monkeypatch):
    packs(path, cache, "xtuner")

    (found, _, num_cached), num_tokenized = tokenized_rows(monkeypatch, lambda: packs(path, cache, "xtuner"))

    assert len(found) > 10
    assert num_cached > 0
    assert num_tokenized == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_reads_the_rows_of_its_own_packs(path, cache, num_ranks):
    knobs = {"batch_size": num_ranks, "drop_last": True}
    for _ in range(2):
        for rank in range(num_ranks):
            ranks = {"world_size": num_ranks, "rank": rank}
            expected, state, _ = packs(path, None, "xtuner", ranks=ranks, **knobs)
            found, its_state, _ = packs(path, cache, "xtuner", ranks=ranks, **knobs)
            assert found == expected
            assert settled(its_state) == settled(state)


# Half a cache, and a damaged one


def test_a_segment_that_is_cut_off_is_refused(path, cache):
    expected = fill(path, cache)
    for segment in segments(cache)[:2]:
        os.truncate(segment, segment.stat().st_size // 2)

    assert_same(fill(path, cache), expected)
    assert Delivered(of(path, cache)).cached == [NUM_ROWS]


def test_segments_that_go_while_they_are_read_are_tokenized(path, cache):
    expected = plain(path, num_epochs=3)
    fill(path, cache)
    found: list[Any] = []
    with of(path, cache, epochs=3, num_workers=2, buffer_size=16) as data:
        for _ in range(3):
            for batch in data:
                found += map(cached.facts, batch)
                for segment in segments(cache)[::3]:
                    segment.unlink(missing_ok=True)

    assert found == expected.samples


def test_more_segments_than_a_worker_keeps_the_entries_of_are_read(path, cache, monkeypatch):
    from asyncdata.prefetch.token_cache.segment import row_segment

    expected = fill(path, cache)
    monkeypatch.setattr(row_segment, "_MAX_TABLES", 1)

    found = Delivered(of(path, cache))

    assert_same(found, expected)
    assert found.cached == [NUM_ROWS]


def test_the_commands_show_and_verify_segments_of_rows(path, cache, capsys):
    fill(path, cache)
    command = ["--dir", str(cache), "--json"]

    assert main(["cache", "ls", *command]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], len(found["segments"])) == (NUM_ROWS, len(segments(cache)))
    assert main(["cache", "verify", *command]) == 0
    damaged = segments(cache)[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 1
    damaged.write_bytes(data)
    capsys.readouterr()
    assert main(["cache", "verify", *command]) == 1
    assert damaged.name in capsys.readouterr().out


def test_a_bad_row_is_an_error_again(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"id": %d, "pad": ""}\n' % i for i in range(40)) + b"{no\n")

    for _ in range(2):
        with pytest.raises(BadRowError, match=r"rows\.jsonl:41"):
            fill(path, cache)
    found = fill(path, cache, bad_rows="skip")
    assert found.counts == plain(path, bad_rows="skip").counts
    again = Delivered(of(path, cache, bad_rows="skip"))
    assert again.samples == found.samples
    assert again.cached == [40]


def test_a_run_without_room_writes_as_much_as_fits_and_continues(path, cache):
    expected = plain(path, num_epochs=2)
    with structlog.testing.capture_logs() as events:
        found = Delivered(of(path, cache, epochs=2, max_tokens_bytes=40_000), 2, settle=True)

    assert found.samples == expected.samples
    assert sum(file.stat().st_size for file in segments(cache)) <= 40_000
    assert [event["event"] for event in events].count("token_cache.full") == 1
    assert 0 < Delivered(of(path, cache)).cached[0] < NUM_ROWS


def test_two_runs_share_a_cache_and_one_of_them_writes(path, cache):
    expected = plain(path)
    with of(path, cache) as first, of(path, cache) as second:
        for data in (second, first):
            assert [cached.facts(one) for batch in data for one in batch] == expected.samples
        cached.wait_until_stored(first)

    assert Delivered(of(path, cache)).cached == [NUM_ROWS]


def test_a_growing_index_needs_no_cache(path, cache, monkeypatch):
    """Rows that are delivered before the index is complete are tokenized, and not stored."""
    asked = list[bool]()
    real = RowIndex.complete
    monkeypatch.setattr(RowIndex, "complete", lambda index: (asked.append(True), real(index))[1])

    found = fill(path, cache, RowShuffle(method="none"))

    assert asked
    assert_same(found, plain(path, RowShuffle(method="none")))
