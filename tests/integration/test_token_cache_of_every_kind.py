"""The token cache changes the time and nothing else: of blocks, of orders of single rows, and of streams."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import structlog

from asyncdata import DataLoader, RowShuffle, Shuffle
from tests.support import cached
from tests.support.cached import WINDOWS, Delivered, assert_same, loader, segments
from tests.support.loading import SHUFFLE, write_rows
from tests.support.ranks import settled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import row_cache

pytestmark = pytest.mark.thorough

STREAMS = ("gzip", "array", "two files")
NUM_ROWS = {"blocks": 400, "rows": 300, **dict.fromkeys(STREAMS, 300)}
SHUFFLES: dict[str, Any] = {"blocks": SHUFFLE, "rows": "full", **dict.fromkeys(STREAMS, WINDOWS)}
ORDERS = [
    ("blocks", SHUFFLE),
    *(
        ("rows", order)
        for order in (
            "full",
            RowShuffle(only_kept=True),
            RowShuffle(method="slime"),
            RowShuffle(method="none"),
            RowShuffle(part="train", train_ratio=0.7),
            RowShuffle(first=30, stop=200),
        )
    ),
    *itertools.product(STREAMS, (WINDOWS, Shuffle(enabled=False, block_bytes=1024, window_blocks=8))),
]


class Data(NamedTuple):
    """Data of one kind, and the folder of its cache."""

    kind: str
    path: Any
    cache: Path

    @property
    def num_rows(self) -> int:
        return NUM_ROWS[self.kind]

    def open(self, cache: Path | None, path: Any = None, **knobs: Any) -> DataLoader:
        return loader(self.path if path is None else path, cache, **({"shuffle": SHUFFLES[self.kind]} | knobs))

    def plain(self, num_epochs: int = 1, **knobs: Any) -> Delivered:
        return Delivered(self.open(None, epochs=num_epochs, **knobs), num_epochs)

    def fill(self, **knobs: Any) -> Delivered:
        return Delivered(self.open(self.cache, **knobs), settle=True)

    def read(self, **knobs: Any) -> Delivered:
        return Delivered(self.open(self.cache, **knobs))


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Of the kind that the parameter says."""
    kind = request.param
    if kind != "blocks":
        monkeypatch.setattr(row_cache, "_MAX_ROWS", 32)
    if kind in STREAMS:
        monkeypatch.setattr(row_cache, "_PAGE_ROWS", 64)
        path = cached.write_stream(kind, tmp_path, NUM_ROWS[kind])
    else:
        path = cached.write_lines(tmp_path, NUM_ROWS[kind])
    return Data(kind, path, tmp_path / "cache" / "tokens")


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("data", names, indirect=True)


class Slow(tuple[Any, ...]):
    """Values that CI leaves out."""

    __slots__ = ()


def some_of(values: Iterable[tuple[Any, ...]], every: int) -> list[tuple[Any, ...]]:
    """The values, all but one in so many of them slow."""
    return [value if number % every == 0 else Slow(value) for number, value in enumerate(values)]


def with_each(kinds: Any, names: str, of_kind: dict[str, list[Any]]) -> pytest.MarkDecorator:
    """Each kind with each of its own values; those of a :class:`Slow` are slow."""
    values = [
        pytest.param(kind, *value, marks=pytest.mark.slow) if isinstance(value, Slow) else (kind, *value)
        for kind in kinds
        for value in of_kind["streams" if kind in STREAMS else kind]
    ]
    return pytest.mark.parametrize(f"data, {names}", values, indirect=["data"])


@pytest.mark.parametrize(("data", "shuffle"), ORDERS, indirect=["data"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_later_run_reads_every_row_from_the_cache_and_delivers_the_same(data, shuffle, num_workers):
    check_later_run(data, shuffle, num_workers)


@of(*NUM_ROWS)
def test_a_later_run_of_workers_reads_every_row_from_the_cache_and_delivers_the_same(data):
    check_later_run(data, SHUFFLES[data.kind], num_workers=2)


def check_later_run(data: Data, shuffle: Any, num_workers: int) -> None:
    expected = data.plain(shuffle=shuffle)

    first = data.fill(num_workers=num_workers, shuffle=shuffle)
    second = data.read(num_workers=num_workers, shuffle=shuffle)

    assert_same(first, expected)
    assert_same(second, expected)
    assert first.cached == [0]
    if data.kind == "rows":
        assert second.cached[0] >= len(expected.samples) > 100, "the order may leave out rows"
    else:
        assert second.cached == [data.num_rows]


OTHERS = {
    "blocks": [(7, SHUFFLE), (42, Shuffle(block_bytes=1024, window_blocks=9))],
    "rows": [(7, "full"), (42, RowShuffle(method="slime"))],
    "streams": [(7, Shuffle(block_bytes=1024, window_blocks=3))],
}


@with_each(NUM_ROWS, "seed, shuffle", OTHERS)
def test_another_order_reads_the_same_cache(data, seed, shuffle):
    data.fill()

    found = data.read(seed=seed, shuffle=shuffle)

    assert_same(found, data.plain(seed=seed, shuffle=shuffle))
    assert found.cached == [data.num_rows]


@with_each(NUM_ROWS, "num_epochs, least", {"blocks": [(4, 2.5)], "rows": [(3, 1.8)], "streams": [(3, 1.5)]})
def test_later_epochs_of_a_run_read_the_cache(data, num_epochs, least):
    found = Delivered(data.open(data.cache, epochs=num_epochs, buffer_size=8), num_epochs, settle=True)

    assert_same(found, data.plain(num_epochs))
    assert sum(found.cached) > least * data.num_rows, "some rows of an epoch are read before the last one is stored"
    if data.kind == "blocks":
        assert found.cached[0] <= 16, "what is read ahead of the second epoch"


@of("blocks", "rows")
def test_files_may_be_added_and_come_in_another_order(data, tmp_path):
    data.fill()
    both = [str(write_rows(tmp_path / "other.jsonl", 70)), str(data.path)]

    found = data.fill(path=both)

    assert_same(found, data.plain(path=both))
    assert found.cached == [data.num_rows]
    assert data.read(path=both).cached == [data.num_rows + 70]


@of(*NUM_ROWS)
def test_files_that_were_only_touched_are_read_from_the_cache(data):
    expected = data.fill()
    for name in data.path if isinstance(data.path, list) else [data.path]:
        os.utime(name, (1, 1))

    found = data.read()

    assert_same(found, expected)
    most = data.num_rows - 60 if data.kind == "blocks" else data.num_rows - 1  # blocks wholly in the slot
    assert most < found.cached[0] <= data.num_rows


@of("blocks", "rows")
@pytest.mark.parametrize("digest", ["positions", "tokens"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_comes_out_of_the_cache_has_the_digest_of_what_was_tokenized(data, num_workers, digest):
    def run(where: Path | None) -> tuple[dict[str, Any], int]:
        with data.open(where, num_workers=num_workers, digest=digest) as opened:
            for _ in opened:
                pass
            if where is not None:
                cached.wait_until_stored(opened)
            found: dict[str, Any] = opened.state_dict()["counters"]["digest"]
            return found, opened.statistics().cached_rows_total

    expected, _ = run(None)

    assert [run(data.cache), run(data.cache)] == [(expected, 0), (expected, data.num_rows)]


# Half a cache, and a damaged one


@with_each(
    NUM_ROWS,
    "keep, of_how_many",
    {
        "blocks": some_of([(keep, 7) for keep in range(7)], 3),
        "rows": some_of([(keep, 4) for keep in range(4)], 3),
        "streams": some_of([(keep, 3) for keep in range(3)], 2),
    },
)
def test_whatever_part_of_the_cache_is_left_the_order_is_the_same(data, keep, of_how_many):
    expected = data.plain()
    data.fill()
    assert len(segments(data.cache)) > 1
    for number, segment in enumerate(segments(data.cache)):
        if number % of_how_many != keep:
            segment.unlink()

    found = data.fill()

    assert_same(found, expected)
    assert (0 if data.kind == "blocks" else 1) <= found.cached[0] < data.num_rows
    again = data.read()
    assert_same(again, expected)
    assert again.cached == [data.num_rows], "what was missing was written anew"


NUMBERS = {
    "rows": [(0, 0), (1, 2), (37, 2), (183, 0), (250, 0), Slow((0, 2)), Slow((1, 0)), Slow((37, 0)), Slow((250, 2))],
    "streams": [(0, 0), (37, 2), (250, 0), Slow((0, 2)), Slow((37, 0)), Slow((250, 2))],
}


@with_each(("rows", *STREAMS), "num_delivered, num_workers", NUMBERS)
def test_a_snapshot_in_the_middle_of_a_half_cached_epoch_resumes_exactly(data, num_delivered, num_workers):
    expected = data.plain(2).samples
    data.fill()
    for segment in segments(data.cache)[::2]:
        segment.unlink()
    states = []
    for tokens in (None, data.cache):
        with data.open(tokens, epochs=2, num_workers=num_workers) as opened:
            before = [cached.facts(one) for one in opened.get_next_batch(num_delivered)] if num_delivered else []
            states.append(settled(opened.state_dict()))
    assert states[0] == states[1]

    with data.open(data.cache, epochs=2, num_workers=num_workers) as opened:
        opened.load_state_dict(states[1])
        after = [cached.facts(one) for batch in itertools.chain(opened, opened) for one in batch]

    assert before + after == expected


PLACES = {
    "rows": some_of(zip(range(0, 100, 9)), 4),
    "streams": some_of(zip(range(0, 100, 19)), 3),
}


@with_each(("rows", *STREAMS), "place", PLACES)
def test_wherever_a_byte_of_a_segment_is_changed_the_same_is_delivered(data, place):
    expected = data.fill()
    damaged = segments(data.cache)[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) * place // 100] ^= 4
    damaged.write_bytes(content)

    with structlog.testing.capture_logs() as events:
        found = data.fill()

    assert_same(found, expected)
    assert [event["path"] for event in events if event["event"] == "token_cache.refused"] == [str(damaged)]
    assert not damaged.exists()
    data.fill()  # rows that were read from it before it was known to be damaged
    assert data.read().cached == [data.num_rows]
