"""Canaries: fixed rows that are tokenized at every start, and what happens when their tokens differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import SnapshotMismatchError, SourceError, WorkerError
from asyncdata.core.messages import Failed, Scan
from asyncdata.delivery.requests import Request
from tests.support.still_loader import DIED, StillLoader
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def loader_of(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., StillLoader]]:
    """A function that makes a loader over one and the same file, and does not start it."""
    path = jsonl_file({"id": number} for number in range(100))
    loaders = []

    def make(function: Any = row_id, **settings: Any) -> StillLoader:
        loaders.append(StillLoader(path, function, **{"window_blocks": 64, **settings}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def digests_of(loader: StillLoader) -> list[str]:
    loader.start()
    loader.work_off()
    return loader.producer.canaries.digests


def one_more(row: dict[str, Any]) -> list[int]:
    return [row["id"] + 1]


def other_from_50(row: dict[str, Any]) -> list[int]:
    return [row["id"] + (row["id"] >= 50)]


def test_eight_rows_are_digested_and_their_digests_are_pinned_for_ever(loader_of: Any) -> None:
    """They are in snapshots: with another digest every one of those would be refused."""
    digests = digests_of(loader_of())

    assert len(digests) == len(set(digests)) == 8
    assert all(len(digest) == 16 for digest in digests)
    assert digests[:3] == ["4e842f2f50cc089e", "9483a4cbbd3a6648", "9d444357aed1e872"]


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 1, "capacity": 1, "row_s": 0.1}, {"shuffle": True, "seed": 5}, {"samples_per_group": 4}],
    ids=str,
)
def test_canaries_change_only_with_the_tokens(loader_of: Any, settings: dict[str, Any]) -> None:
    assert digests_of(loader_of(**settings)) == digests_of(loader_of())


def test_other_tokens_are_other_digests(loader_of: Any) -> None:
    same, other = digests_of(loader_of()), digests_of(loader_of(other_from_50))

    assert same[:4] == other[:4]
    assert not set(same[5:]) & set(other[5:])


def test_a_row_that_yields_no_sample_has_the_digest_of_no_tokens(loader_of: Any) -> None:
    digests, dropped = digests_of(loader_of()), digests_of(loader_of(every_third_dropped))
    none = digests_of(loader_of(lambda row: [] if row["id"] % 3 == 0 else [row["id"]]))

    assert dropped == none
    assert dropped != digests
    assert set(dropped) & set(digests)


def test_as_many_blocks_are_read_as_a_slot_holds(loader_of: Any) -> None:
    assert len(digests_of(loader_of(window_blocks=3))) == 3
    assert len(digests_of(loader_of(block_bytes=10_000))) == 1


def test_the_first_batch_does_not_wait_for_them_and_they_are_made_once(loader_of: Any) -> None:
    loader = loader_of()
    loader.start()
    assert loader.ids(3) == [0, 1, 2]
    assert loader.producer.canaries.digests == []
    loader.work_off()
    digests, num_requests = loader.producer.canaries.digests, len(loader.executor.num_rows_asked)
    assert len(digests) == 8

    loader.take(47)
    loader.work_off()
    assert loader.producer.canaries.digests == digests
    assert 8 not in loader.executor.num_rows_asked[num_requests:]

    loader.start(digests)
    assert loader.producer.canaries.is_blocking is False, "a snapshot loaded into the loader that took it"


# Against a snapshot


def test_nothing_is_delivered_before_they_are_found_to_be_the_same(loader_of: Any) -> None:
    digests = digests_of(loader_of())
    loader = loader_of()

    loader.start(digests)
    assert loader.coordinator.poll(Request(1)) is None
    assert [type(item.request) for item in loader.executor.asked] == [Scan]
    loader.work_off()

    assert loader.producer.canaries.is_blocking is False
    assert loader.coordinator.channel.num_produced == 64


def test_other_tokens_refuse_the_snapshot_and_say_how_many_rows_differ(loader_of: Any) -> None:
    digests = digests_of(loader_of())
    loader = loader_of(one_more)

    loader.start(digests)
    with pytest.raises(SnapshotMismatchError) as caught:
        loader.take(1)

    assert "AD603 the tokenize function gives other tokens" in str(caught.value)
    assert "8 of 8 fixed rows differ" in str(caught.value)
    assert "allow_changed" in str(caught.value)
    assert caught.value.differences == {"canaries": (digests, digests_of(loader_of(one_more)))}


@pytest.mark.parametrize(
    ("function", "known", "message"),
    [(other_from_50, slice(8), "[34] of 8 fixed rows differ"), (row_id, slice(5), "some of 5 fixed rows differ")],
    ids=["some other tokens", "another number of rows"],
)
def test_any_difference_refuses_the_snapshot(loader_of: Any, function: Any, known: slice, message: str) -> None:
    loader = loader_of(function)
    loader.start(digests_of(loader_of())[known])

    with pytest.raises(SnapshotMismatchError, match=message):
        loader.take(1)


def test_a_refused_snapshot_delivers_nothing_at_any_later_call(loader_of: Any) -> None:
    loader = loader_of(one_more)
    loader.start(["0" * 16] * 8)

    for _ in range(3):
        with pytest.raises(SnapshotMismatchError):
            loader.take(1)
        loader.work_off()
    assert loader.coordinator.channel.num_produced == 0


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_a_restart_drops_requests_for_canaries_and_frees_their_slot(loader_of: Any, num_answers: int) -> None:
    digests = digests_of(loader_of())
    loader = loader_of()

    for _ in range(6):
        loader.coordinator.restart(lambda ledger: ledger)
        loader.start(digests)
        loader.producer.canaries.digests = []
        for _ in range(min(num_answers, len(loader.executor.asked))):
            loader.executor.answer(len(loader.executor.asked) - 1)

    loader.coordinator.restart(lambda ledger: ledger)
    loader.start()
    assert loader.ids(100) == list(range(100))


def test_canaries_wait_for_a_free_slot(loader_of: Any) -> None:
    digests = digests_of(loader_of())
    loader = loader_of()
    slots = [loader.executor.slots.hold() for _ in range(3)]

    loader.start(digests)
    assert loader.executor.asked == []
    loader.executor.slots.release(slots[1])
    loader.executor.slots.release(slots[0])

    assert loader.ids(2) == [0, 1]


def asked_for_canaries(loader: StillLoader) -> list[int]:
    """The numbers of the requests that read them."""
    asked = enumerate(loader.executor.asked)
    return [number for number, item in asked if isinstance(item.request, Scan) and len(item.request.blocks) == 8]


def test_canaries_that_bring_down_workers_stop_nothing_and_are_not_asked_for_for_ever(loader_of: Any) -> None:
    loader = loader_of()
    loader.start()
    found, num_lost = [], 0
    for _ in range(20):
        found += loader.ids(3)
        for number in asked_for_canaries(loader):
            loader.executor.lose(number)
            num_lost += 1
    loader.work_off()

    assert found == list(range(60))
    assert num_lost == 1
    assert loader.producer.canaries.digests == []


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [(DIED, WorkerError, "its worker died"), (Failed("SourceError", "AD304 gone"), SourceError, "AD304 gone")],
)
@pytest.mark.parametrize("num_answers", [0, 1])
def test_canaries_that_fail_are_the_error_with_a_snapshot_to_compare(
    loader_of: Any, num_answers: int, reply: Any, kind: type[Exception], message: str
) -> None:
    loader = loader_of()
    loader.start(["0" * 16] * 8)
    for _ in range(num_answers):
        loader.executor.answer()
    loader.executor.reply(reply)

    with pytest.raises(kind, match=message):
        loader.take(1)


def test_a_source_without_rows_has_no_canaries(jsonl_file: Callable[..., Path]) -> None:
    with StillLoader(jsonl_file([b"", b" "])) as loader:
        loader.producer.canaries.make()
        loader.work_off()

        assert loader.producer.canaries.digests == []
        assert [loader.executor.slots.hold() for _ in range(3)].count(None) <= 2
