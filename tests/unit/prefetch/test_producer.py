"""The producer: reads ahead, sends chunks that do not change D, handles every reply of a worker; and its canaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRowError,
    Position,
    SnapshotError,
    SnapshotMismatchError,
    SourceChangedError,
    SourceError,
    WorkerError,
)
from asyncdata.core import errors
from asyncdata.core.messages import Failed, Ready, Scan, Tokenize
from asyncdata.delivery.requests import Request
from tests.support.still_loader import DIED, HUNG, StillLoader, WorkerKilled
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def loader_of(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., StillLoader]]:
    """A function that makes a loader of so many rows, of ten bytes or so, three to a block of 32."""
    loaders = []

    def make(num_rows: int = 40, function: Any = row_id, **settings: Any) -> StillLoader:
        path = jsonl_file(({"id": number} for number in range(num_rows)), f"{len(loaders)}/rows.jsonl")
        loader = StillLoader(path, function, **{"block_bytes": 32, **settings})
        loader.start()
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


def killed_by(*numbers: int) -> Any:
    def tokenize(row: dict[str, Any]) -> list[int]:
        if row["id"] in numbers:
            raise WorkerKilled
        return [row["id"]]

    return tokenize


def asked(loader: StillLoader, kind: type) -> list[int]:
    """The numbers of the requests of this kind that wait for an answer."""
    return [number for number, item in enumerate(loader.executor.asked) if isinstance(item.request, kind)]


def scan_until_tokenizing(loader: StillLoader) -> None:
    while not asked(loader, Tokenize):
        loader.work_on()


def test_the_first_chunks_are_small_so_that_the_first_batch_is_soon_there(loader_of: Any) -> None:
    loader = loader_of(4000, capacity=100_000, window_blocks=10_000)

    loader.take(500)

    assert loader.executor.num_rows_asked[:3] == [32] * 3
    assert max(loader.executor.num_rows_asked) > 100


def test_every_worker_has_work_and_one_more_chunk_waiting(loader_of: Any) -> None:
    loader = loader_of(4000, capacity=100_000, window_blocks=10_000, num_workers=3)

    scan_until_tokenizing(loader)
    while asked(loader, Scan):
        loader.executor.answer(asked(loader, Scan)[0])

    assert len(asked(loader, Tokenize)) == 6


def test_the_next_epochs_first_window_is_read_while_the_last_one_of_this_is_tokenized(loader_of: Any) -> None:
    """An epoch is one window here, so there is no edge of a window that is not one of an epoch."""
    loader = loader_of(400, window_blocks=10_000, capacity=64)
    scan_until_tokenizing(loader)
    first, second = loader.executor.asked[asked(loader, Tokenize)[0]], loader.executor.asked[asked(loader, Scan)[0]]

    assert first.request.slot != second.request.slot
    while asked(loader, Scan):
        loader.executor.answer(asked(loader, Scan)[0])
    assert loader.ids(399) == list(range(399))
    assert not asked(loader, Scan), "it has been there all the time"
    assert loader.ids(2) == [399, 0]


def test_windows_without_a_row_are_passed(jsonl_file: Any) -> None:
    """Rows are longer than blocks, and longer than whole windows."""
    path = jsonl_file({"id": number, "pad": "x" * 50} for number in range(10))

    with StillLoader(path, block_bytes=8, window_blocks=2, slack_bytes=4) as loader:
        assert loader.ids(25) == [*range(10), *range(10), *range(5)]


@pytest.mark.parametrize("epochs", [1, 2])
def test_nothing_is_read_beyond_the_last_epoch(loader_of: Any, epochs: int) -> None:
    loader = loader_of(20, epochs=epochs, capacity=1000)

    loader.work_off()

    assert loader.coordinator.channel.num_produced == 20 * epochs
    assert loader.coordinator.channel.ended_epoch == epochs - 1


def test_the_row_that_holds_up_all_others_is_known(loader_of: Any) -> None:
    loader = loader_of(400, capacity=1000, window_blocks=1000)
    scan_until_tokenizing(loader)
    first, second = asked(loader, Tokenize)[:2]
    loader.executor.answer(second)

    oldest = loader.coordinator.channel.oldest_in_flight

    assert oldest.location().byte_offset == 0
    loader.executor.answer(first)
    assert loader.coordinator.channel.oldest_in_flight.location().byte_offset > 0


@pytest.mark.parametrize("seed", range(6))
def test_under_every_schedule_of_deaths_restores_and_other_calls_what_is_delivered_is_d(seed: int) -> None:
    """More of them run with the tests of faults."""
    pytest.importorskip("trio")
    from tests.faults.support.simulated_trainers import simulate

    assert simulate(seed).num_samples > 0


def test_a_position_after_the_last_row_of_a_window_continues_with_the_next(loader_of: Any) -> None:
    loader = loader_of(40, window_blocks=4, epochs=2)
    state = loader.snapshot()
    samples = loader.take(40)
    num_rows = sum(sample.position.window == 0 for sample in samples)
    state["counters"]["epoch_groups"] = num_rows

    loader.restore({**state, "position": (0, 0, num_rows)})
    assert loader.ids(2) == [num_rows, num_rows + 1]

    last = loader.order.num_windows - 1
    num_last = sum(sample.position.window == last for sample in samples)
    loader.restore({**state, "position": (0, last, num_last)})
    assert loader.ids(2) == [0, 1], "of the next epoch"


def test_a_position_that_cannot_exist_is_refused(loader_of: Any) -> None:
    loader = loader_of(40, window_blocks=4, epochs=2)
    state = loader.snapshot()
    num_rows = sum(sample.position.window == 0 for sample in loader.take(40))

    loader.restore({**state, "position": (0, 0, num_rows + 1)})
    with pytest.raises(SnapshotError, match=f"AD602 .* row {num_rows + 1} of window 0 of epoch 0, .* {num_rows} rows"):
        loader.ids(1)


def test_requests_of_before_are_forgotten_and_their_slots_are_not_used_before_they_end(loader_of: Any) -> None:
    loader = loader_of(200, window_blocks=2, num_workers=4)
    state, channels = loader.snapshot(), []
    for _ in range(7):
        for _ in range(5):
            loader.executor.answer(len(loader.executor.asked) - 1)
        channels.append((loader.coordinator.channel, loader.coordinator.channel.num_produced))
        loader.restore(state)

    assert loader.ids(150) == list(range(150))
    assert all(channel.num_produced == before for channel, before in channels)


@pytest.mark.parametrize("names_the_row", [False, True])
@pytest.mark.parametrize("poison", [(0,), (39,), (17,), (16, 17), (0, 1, 2, 38, 39), tuple(range(40))[::3]], ids=str)
def test_only_the_rows_that_bring_down_workers_are_bad(loader_of: Any, poison: Any, names_the_row: bool) -> None:
    loader = loader_of(40, killed_by(*poison), names_the_row=names_the_row, bad_row_stops=False, epochs=1, capacity=100)

    good = [number for number in range(40) if number not in poison]
    assert loader.ids(len(good)) == good
    with pytest.raises(errors.EndOfData):
        loader.take(1)

    assert {error.code for error in loader.quarantined} == {"AD423"}
    assert [error.line - 1 for error in loader.quarantined] == list(poison)
    assert loader.coordinator.ledger.journal == {(0, error.byte_offset) for error in loader.quarantined}


def test_a_row_that_brings_down_workers_is_found_by_halving(loader_of: Any) -> None:
    loader = loader_of(32, killed_by(21), capacity=1000, window_blocks=100, bad_row_stops=False, epochs=1)

    loader.work_off()

    sizes = [size for size in loader.executor.num_rows_asked if size != 8]  # eight rows are canaries, or a quarter
    assert sorted(sizes, reverse=True) == [32, 16, 16, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("row", "parts"),
    [(None, [(16, 1), (16, 1)]), (21, [(10, 2), (21, 2)]), (0, [(31, 2)]), (31, [(31, 2)])],
    ids=["unknown: a half needs only one more death", "in the middle", "the first", "the last"],
)
def test_the_other_rows_of_a_lost_chunk_are_sent_again(loader_of: Any, row: int | None, parts: list[Any]) -> None:
    loader = loader_of(32, capacity=1000, window_blocks=100, bad_row_stops=False, epochs=1)
    scan_until_tokenizing(loader)

    loader.executor.lose(asked(loader, Tokenize)[0], DIED._replace(row=row))

    sent = [item for item in loader.executor.asked if isinstance(item.request, Tokenize)]
    assert sorted((item.num_rows, item.max_losses) for item in sent) == parts
    assert loader.ids(31) == [number for number in range(32) if number != row][:31]
    if row == 0:
        assert loader.coordinator.ledger.position == Position(1, 0, 0)


def test_workers_killed_from_outside_cost_no_row(loader_of: Any) -> None:
    """Whatever is asked is lost once more, and the halves are not."""
    loader = loader_of(64, capacity=1000)
    for _ in range(30):
        number = next(
            (n for n, item in enumerate(loader.executor.asked) if item.num_rows > 1 and item.max_losses > 1), None
        )
        if number is None:
            loader.work_on()
        else:
            loader.executor.lose(number)

    assert loader.ids(100) == [*range(64), *range(36)]


@pytest.mark.parametrize(("crash", "code"), [(DIED, "AD423"), (HUNG, "AD422")])
def test_a_lone_row_is_blamed_by_what_it_did(loader_of: Any, crash: Any, code: str) -> None:
    loader = loader_of(5, capacity=1)
    scan_until_tokenizing(loader)

    loader.executor.lose(asked(loader, Tokenize)[0], crash)

    with pytest.raises(BadRowError) as caught:
        loader.take(1)
    assert (caught.value.code, caught.value.line, caught.value.reason) == (code, 1, crash.reason)
    assert caught.value.excerpt == '{"id": 0}'


def test_a_read_that_every_worker_was_lost_over_is_an_error(loader_of: Any) -> None:
    loader = loader_of()

    loader.executor.lose(asked(loader, Scan)[0])

    with pytest.raises(WorkerError, match="AD423 .*its worker died"):
        loader.take(1)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Failed("SourceChangedError", "AD302 it shrank"), SourceChangedError, r"^AD302 it shrank$"),
        (Failed("SourceError", "AD304 gone", "trace"), SourceError, r"^AD304 gone\ntrace$"),
        (Failed("NoSuchError", "boom"), WorkerError, "^boom$"),
        (Ready(1), WorkerError, "answered with Ready; it is out of step"),
    ],
)
@pytest.mark.parametrize("request_kind", [Scan, Tokenize])
def test_a_request_that_fails_as_a_whole_is_the_users_error(
    loader_of: Any, request_kind: type, reply: Any, kind: type[Exception], message: str
) -> None:
    loader = loader_of()
    while not asked(loader, request_kind):
        loader.work_on()

    loader.executor.reply(reply, asked(loader, request_kind)[0])

    for _ in range(2):
        with pytest.raises(kind, match=message):
            loader.take(1)


def test_a_chunk_that_fails_comes_at_its_turn(loader_of: Any) -> None:
    loader = loader_of(400, capacity=1000, window_blocks=1000)
    scan_until_tokenizing(loader)
    num_rows = loader.executor.num_rows_asked[0]

    loader.executor.reply(Failed("SourceError", "AD304 gone"), asked(loader, Tokenize)[1])

    assert loader.ids(num_rows) == list(range(num_rows))
    with pytest.raises(SourceError, match="AD304"):
        loader.take(1)


def test_a_window_that_cannot_be_read_comes_at_its_turn(loader_of: Any) -> None:
    """It is read ahead: its fault must not overtake the rows before it."""
    loader = loader_of(40, window_blocks=4, capacity=4)
    scan_until_tokenizing(loader)
    num_rows_before = loader.producer._windows[0].num_rows  # noqa: SLF001

    loader.executor.reply(Failed("SourceError", "AD304 gone"), asked(loader, Scan)[0])

    assert loader.ids(num_rows_before) == list(range(num_rows_before))
    with pytest.raises(SourceError, match="AD304"):
        loader.take(1)


def test_rows_in_the_journal_are_given_up_without_another_try(loader_of: Any) -> None:
    poison = (0, 3, 4, 39)
    loader = loader_of(40, killed_by(*poison), bad_row_stops=False)
    good = [number for number in range(40) if number not in poison]
    assert loader.ids(36) == good
    state = loader.snapshot()
    assert len(state["journal"]) == 3, "the last row comes after the last sample"

    again = loader_of(40, row_id, bad_row_stops=False)
    again.restore({**state, "position": (0, 0, 0), "counters": {}})

    assert again.ids(37) == [*good, 39]
    assert again.coordinator.ledger.counters.drops == {"journal": 3}
    assert again.coordinator.ledger.counters.num_bad_rows == 0


def test_a_journal_of_other_files_and_other_windows_does_no_harm(loader_of: Any) -> None:
    loader = loader_of(40, window_blocks=2)
    state = loader.snapshot()
    offset_of_30 = 10 * 10 + 20 * 11

    loader.restore({**state, "journal": [(0, offset_of_30), (0, 5), (9, 0)]})

    assert loader.ids(79) == [n for n in range(40) if n != 30] + [n for n in range(40) if n != 30] + [0]


# Canaries: fixed rows that are tokenized at every start, and what happens when their tokens differ


@pytest.fixture
def with_canaries(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., StillLoader]]:
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


def test_eight_rows_are_digested_and_their_digests_are_pinned_for_ever(with_canaries: Any) -> None:
    """They are in snapshots: with another digest every one of those would be refused."""
    digests = digests_of(with_canaries())

    assert len(digests) == len(set(digests)) == 8
    assert all(len(digest) == 16 for digest in digests)
    assert digests[:3] == ["4e842f2f50cc089e", "9483a4cbbd3a6648", "9d444357aed1e872"]


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 1, "capacity": 1, "row_s": 0.1}, {"shuffle": True, "seed": 5}, {"samples_per_group": 4}],
    ids=str,
)
def test_canaries_change_only_with_the_tokens(with_canaries: Any, settings: dict[str, Any]) -> None:
    assert digests_of(with_canaries(**settings)) == digests_of(with_canaries())


def test_other_tokens_are_other_digests(with_canaries: Any) -> None:
    same, other = digests_of(with_canaries()), digests_of(with_canaries(other_from_50))

    assert same[:4] == other[:4]
    assert not set(same[5:]) & set(other[5:])


def test_a_row_that_yields_no_sample_has_the_digest_of_no_tokens(with_canaries: Any) -> None:
    digests, dropped = digests_of(with_canaries()), digests_of(with_canaries(every_third_dropped))
    none = digests_of(with_canaries(lambda row: [] if row["id"] % 3 == 0 else [row["id"]]))

    assert dropped == none
    assert dropped != digests
    assert set(dropped) & set(digests)


def test_as_many_blocks_are_read_as_a_slot_holds(with_canaries: Any) -> None:
    assert len(digests_of(with_canaries(window_blocks=3))) == 3
    assert len(digests_of(with_canaries(block_bytes=10_000))) == 1


def test_the_first_batch_does_not_wait_for_them_and_they_are_made_once(with_canaries: Any) -> None:
    loader = with_canaries()
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


def test_nothing_is_delivered_before_they_are_found_to_be_the_same(with_canaries: Any) -> None:
    digests = digests_of(with_canaries())
    loader = with_canaries()

    loader.start(digests)
    assert loader.coordinator.poll(Request(1)) is None
    assert [type(item.request) for item in loader.executor.asked] == [Scan]
    loader.work_off()

    assert loader.producer.canaries.is_blocking is False
    assert loader.coordinator.channel.num_produced == 64


def test_other_tokens_refuse_the_snapshot_and_say_how_many_rows_differ(with_canaries: Any) -> None:
    digests = digests_of(with_canaries())
    loader = with_canaries(one_more)

    loader.start(digests)
    with pytest.raises(SnapshotMismatchError) as caught:
        loader.take(1)

    assert "AD603 the tokenize function gives other tokens" in str(caught.value)
    assert "8 of 8 fixed rows differ" in str(caught.value)
    assert "allow_changed" in str(caught.value)
    assert caught.value.differences == {"canaries": (digests, digests_of(with_canaries(one_more)))}


@pytest.mark.parametrize(
    ("function", "known", "message"),
    [(other_from_50, slice(8), "[34] of 8 fixed rows differ"), (row_id, slice(5), "some of 5 fixed rows differ")],
    ids=["some other tokens", "another number of rows"],
)
def test_any_difference_refuses_the_snapshot(with_canaries: Any, function: Any, known: slice, message: str) -> None:
    loader = with_canaries(function)
    loader.start(digests_of(with_canaries())[known])

    with pytest.raises(SnapshotMismatchError, match=message):
        loader.take(1)


def test_a_refused_snapshot_delivers_nothing_at_any_later_call(with_canaries: Any) -> None:
    loader = with_canaries(one_more)
    loader.start(["0" * 16] * 8)

    for _ in range(3):
        with pytest.raises(SnapshotMismatchError):
            loader.take(1)
        loader.work_off()
    assert loader.coordinator.channel.num_produced == 0


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_a_restart_drops_requests_for_canaries_and_frees_their_slot(with_canaries: Any, num_answers: int) -> None:
    digests = digests_of(with_canaries())
    loader = with_canaries()

    for _ in range(6):
        loader.coordinator.restart(lambda ledger: ledger)
        loader.start(digests)
        loader.producer.canaries.digests = []
        for _ in range(min(num_answers, len(loader.executor.asked))):
            loader.executor.answer(len(loader.executor.asked) - 1)

    loader.coordinator.restart(lambda ledger: ledger)
    loader.start()
    assert loader.ids(100) == list(range(100))


def test_canaries_wait_for_a_free_slot(with_canaries: Any) -> None:
    digests = digests_of(with_canaries())
    loader = with_canaries()
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


def test_canaries_that_bring_down_workers_stop_nothing_and_are_not_asked_for_for_ever(with_canaries: Any) -> None:
    loader = with_canaries()
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
    with_canaries: Any, num_answers: int, reply: Any, kind: type[Exception], message: str
) -> None:
    loader = with_canaries()
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
