"""The producer: reads ahead, sends chunks that do not change D, handles every reply of a worker; and its canaries."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trio")

import asyncdata as ad
from asyncdata.core import errors
from asyncdata.core.messages import Failed, Ready, Scan, Tokenize
from asyncdata.delivery.ledger import Request
from tests.faults.support.simulated_sources import WAYS, Outcome, simulate_way
from tests.support.still_loader import DIED, HUNG, StillLoader, WorkerKilled
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GONE = Failed("SourceError", "AD304 gone")


@pytest.fixture
def loader_of(jsonl_file: Callable[..., Any]) -> Iterator[Callable[..., StillLoader]]:
    """A function that makes a loader of so many rows, of ten bytes or so, three to a block of 32."""
    with ExitStack() as stack:

        def make(num_rows: int = 40, function: Any = row_id, *, starts: bool = True, **settings: Any) -> StillLoader:
            path = jsonl_file(({"id": number} for number in range(num_rows)), f"{num_rows}.jsonl")
            loader = StillLoader(path, function, **{"block_bytes": 32, **settings})
            stack.callback(loader.close)
            if starts:
                loader.start()
            return loader

        yield make


def killed_by(*numbers: int) -> Any:
    def tokenize(row: dict[str, Any]) -> list[int]:
        if row["id"] in numbers:
            raise WorkerKilled
        return [row["id"]]

    return tokenize


def asked(loader: StillLoader, kind: type) -> list[int]:
    """The numbers of the requests of this kind that wait for an answer."""
    return [number for number, item in enumerate(loader.executor.asked) if isinstance(item.request, kind)]


def work_until_asked(loader: StillLoader, kind: type = Tokenize) -> None:
    while not asked(loader, kind):
        loader.work_on()


def answer_scans(loader: StillLoader) -> None:
    while asked(loader, Scan):
        loader.executor.answer(asked(loader, Scan)[0])


def test_every_worker_has_work_and_one_more_chunk_waiting(loader_of):
    loader = loader_of(4000, capacity=100_000, window_blocks=10_000, num_workers=3)

    work_until_asked(loader)
    answer_scans(loader)

    assert len(asked(loader, Tokenize)) == 6


def test_the_next_epochs_first_window_is_read_while_the_last_one_of_this_is_tokenized(loader_of):
    """An epoch is one window here, so there is no edge of a window that is not one of an epoch."""
    loader = loader_of(400, window_blocks=10_000, capacity=64)
    work_until_asked(loader)
    first, second = loader.executor.asked[asked(loader, Tokenize)[0]], loader.executor.asked[asked(loader, Scan)[0]]

    assert first.request.slot != second.request.slot
    answer_scans(loader)
    assert loader.ids(399) == list(range(399))
    assert not asked(loader, Scan), "it has been there all the time"
    assert loader.ids(2) == [399, 0]


def test_windows_without_a_row_are_passed(jsonl_file):
    """Rows are longer than blocks, and longer than whole windows."""
    path = jsonl_file({"id": number, "pad": "x" * 50} for number in range(10))

    with StillLoader(path, block_bytes=8, window_blocks=2, slack_bytes=4) as loader:
        assert loader.ids(25) == [*range(10), *range(10), *range(5)]


@pytest.mark.parametrize("epochs", [1, 2])
def test_nothing_is_read_beyond_the_last_epoch(loader_of, epochs):
    loader = loader_of(20, epochs=epochs, capacity=1000)

    loader.work_off()

    assert loader.coordinator.channel.num_produced == 20 * epochs
    assert loader.coordinator.channel.ended_epoch == epochs - 1


def test_the_row_that_holds_up_all_others_is_known(loader_of):
    loader = loader_of(400, capacity=1000, window_blocks=1000)
    work_until_asked(loader)
    first, second = asked(loader, Tokenize)[:2]
    loader.executor.answer(second)

    assert loader.coordinator.channel.oldest_in_flight.location(0).byte_offset == 0
    loader.executor.answer(first)
    assert loader.coordinator.channel.oldest_in_flight.location(0).byte_offset > 0


SCHEDULES = [*(("blocks", seed) for seed in range(6)), *((name, 0) for name in WAYS if name != "blocks")]


@pytest.mark.parametrize(("way", "seed"), SCHEDULES)
def test_under_every_schedule_of_deaths_restores_and_other_calls_what_is_delivered_is_d(way, seed):
    """Whatever windows are made of. More schedules run with the tests of faults."""
    for module in WAYS[way].needs:
        pytest.importorskip(module)

    simulate_way(way, seed, outcome := Outcome())
    assert outcome.num_samples > 0


def test_a_position_after_the_last_row_of_a_window_continues_with_the_next_and_none_beyond_it_is_taken(loader_of):
    loader = loader_of(40, window_blocks=4, epochs=2)
    state = loader.snapshot()
    windows = [sample.position.window for sample in loader.take(40)]
    num_rows, last = windows.count(0), loader.order.num_windows - 1
    state["counters"]["epoch_groups"] = num_rows

    loader.restore({**state, "position": (0, 0, num_rows)})
    assert loader.ids(2) == [num_rows, num_rows + 1]

    loader.restore({**state, "position": (0, last, windows.count(last))})
    assert loader.ids(2) == [0, 1], "of the next epoch"

    loader.restore({**state, "position": (0, 0, num_rows + 1)})
    with pytest.raises(
        ad.errors.SnapshotError, match=f"AD602 .* row {num_rows + 1} of window 0 of epoch 0, .* {num_rows} rows"
    ):
        loader.ids(1)


@pytest.mark.parametrize("names_the_row", [False, True])
@pytest.mark.parametrize("poison", [(0,), (39,), (17,), (16, 17), (0, 1, 2, 38, 39), tuple(range(40))[::3]], ids=str)
def test_only_the_rows_that_bring_down_workers_are_bad(loader_of, poison, names_the_row):
    loader = loader_of(40, killed_by(*poison), names_the_row=names_the_row, bad_row_stops=False, epochs=1, capacity=100)

    good = [number for number in range(40) if number not in poison]
    assert loader.ids(len(good)) == good
    with pytest.raises(errors.EndOfData):
        loader.take(1)

    assert {error.code for error in loader.quarantined} == {"AD423"}
    assert [error.line - 1 for error in loader.quarantined] == list(poison)
    assert loader.coordinator.ledger.journal == {(0, error.byte_offset) for error in loader.quarantined}


@pytest.mark.parametrize(
    ("row", "parts"),
    [(None, [(16, 1), (16, 1)]), (21, [(10, 2), (21, 2)]), (0, [(31, 2)]), (31, [(31, 2)])],
    ids=["unknown: a half needs only one more death", "in the middle", "the first", "the last"],
)
def test_the_other_rows_of_a_lost_chunk_are_sent_again(loader_of, row, parts):
    loader = loader_of(32, capacity=1000, window_blocks=100, bad_row_stops=False, epochs=1)
    work_until_asked(loader)

    loader.executor.lose(asked(loader, Tokenize)[0], DIED._replace(row=row))

    sent = [loader.executor.asked[number] for number in asked(loader, Tokenize)]
    assert sorted((item.num_rows, item.max_losses) for item in sent) == parts
    assert loader.ids(31) == [number for number in range(32) if number != row][:31]
    if row == 0:
        assert loader.coordinator.ledger.position == ad.Position(1, 0, 0)


@pytest.mark.parametrize(("crash", "code"), [(DIED, "AD423"), (HUNG, "AD422")])
def test_a_lone_row_is_blamed_by_what_it_did(loader_of, crash, code):
    loader = loader_of(5, capacity=1)
    work_until_asked(loader)

    loader.executor.lose(asked(loader, Tokenize)[0], crash)

    with pytest.raises(ad.errors.BadRowError) as caught:
        loader.take(1)
    assert (caught.value.code, caught.value.line, caught.value.reason) == (code, 1, crash.reason)
    assert caught.value.excerpt == '{"id": 0}'


EVERY_REQUEST = [
    (Failed("SourceChangedError", "AD302 it shrank"), ad.errors.SourceChangedError, r"^AD302 it shrank$"),
    (Failed("SourceError", "AD304 gone", "trace"), ad.errors.SourceError, r"^AD304 gone\ntrace$"),
    (Failed("NoSuchError", "boom"), ad.errors.WorkerError, "^boom$"),
    (Ready(1), ad.errors.WorkerError, "answered with Ready; it is out of step"),
]


@pytest.mark.parametrize(
    ("kind", "reply", "error", "message"),
    [
        *((kind, *case) for kind in (Scan, Tokenize) for case in EVERY_REQUEST),
        (Scan, DIED, ad.errors.WorkerError, "AD423 .*its worker died"),
    ],
)
def test_a_request_that_fails_as_a_whole_is_the_users_error(loader_of, kind, reply, error, message):
    loader = loader_of()
    work_until_asked(loader, kind)

    loader.executor.reply(reply, asked(loader, kind)[0])

    for _ in range(2):
        with pytest.raises(error, match=message):
            loader.take(1)


@pytest.mark.parametrize(("kind", "number"), [(Tokenize, 1), (Scan, 0)], ids=["a chunk", "a window, read ahead"])
def test_what_fails_comes_at_its_turn(loader_of, kind, number):
    loader = loader_of(400, capacity=1000, window_blocks=1000) if kind is Tokenize else loader_of(capacity=4)
    work_until_asked(loader)
    num_before = loader.executor.num_rows_asked[0]
    if kind is Scan:
        num_before = loader.producer._windows[0].num_rows  # noqa: SLF001

    loader.executor.reply(GONE, asked(loader, kind)[number])

    assert loader.ids(num_before) == list(range(num_before))
    with pytest.raises(ad.errors.SourceError, match="AD304"):
        loader.take(1)


def test_rows_in_the_journal_are_given_up_without_another_try(loader_of):
    poison = (0, 3, 4, 39)
    loader = loader_of(40, killed_by(*poison), bad_row_stops=False)
    good = [number for number in range(40) if number not in poison]
    assert loader.ids(36) == good
    state = loader.snapshot()
    assert len(state["journal"]) == 3, "the last row comes after the last sample"

    again = loader_of(40, row_id, bad_row_stops=False)
    again.restore({**state, "position": (0, 0, 0), "counters": {"digest": {}}})

    assert again.ids(37) == [*good, 39]
    assert again.coordinator.ledger.counters.drops == {"journal": 3}
    assert again.coordinator.ledger.counters.num_bad_rows == 0


def test_a_journal_of_other_files_and_other_windows_does_no_harm(loader_of):
    loader = loader_of(40, window_blocks=2)
    state = loader.snapshot()
    offset_of_30 = 10 * 10 + 20 * 11

    loader.restore({**state, "journal": [(0, offset_of_30), (0, 5), (9, 0)]})

    assert loader.ids(79) == [n for n in range(40) if n != 30] * 2 + [0]


# Canaries: fixed rows that are tokenized at every start, and what happens when their tokens differ


@pytest.fixture
def with_canaries(loader_of: Any) -> Callable[..., StillLoader]:
    """A function that makes a loader over one and the same file, and does not start it."""
    return lambda function=row_id, **settings: loader_of(
        100, function, starts=False, **{"block_bytes": 64, "window_blocks": 64, **settings}
    )


def digests_of(loader: StillLoader) -> list[str]:
    loader.start()
    loader.work_off()
    return loader.producer.canaries.digests


def one_more(row: dict[str, Any]) -> list[int]:
    return [row["id"] + 1]


def other_from_50(row: dict[str, Any]) -> list[int]:
    return [row["id"] + (row["id"] >= 50)]


def empty_instead_of_dropped(row: dict[str, Any]) -> list[int]:
    return [] if row["id"] % 3 == 0 else [row["id"]]


def test_eight_rows_are_digested_by_their_tokens_alone_and_their_digests_are_pinned_for_ever(with_canaries):
    """They are in snapshots: with another digest every one of those would be refused."""
    digests = digests_of(with_canaries())
    assert len(digests) == len(set(digests)) == 8
    assert all(len(digest) == 16 for digest in digests)
    assert digests[:3] == ["4e842f2f50cc089e", "9483a4cbbd3a6648", "9d444357aed1e872"]
    for settings in ({"num_workers": 1, "capacity": 1, "row_s": 0.1}, {"shuffle": True}, {"samples_per_group": 4}):
        assert digests_of(with_canaries(**settings)) == digests

    other = digests_of(with_canaries(other_from_50))
    assert digests[:4] == other[:4]
    assert not set(digests[5:]) & set(other[5:])
    dropped = digests_of(with_canaries(every_third_dropped))
    assert dropped == digests_of(with_canaries(empty_instead_of_dropped)) != digests
    assert set(dropped) & set(digests)


def test_as_many_blocks_are_read_as_a_slot_holds(with_canaries):
    assert len(digests_of(with_canaries(window_blocks=3))) == 3
    assert len(digests_of(with_canaries(block_bytes=10_000))) == 1


def test_the_first_batch_does_not_wait_for_them_and_they_are_made_once(with_canaries):
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


def test_nothing_is_delivered_before_they_are_found_to_be_the_same(with_canaries):
    digests = digests_of(with_canaries())
    loader = with_canaries()

    loader.start(digests)
    assert loader.coordinator.poll(Request(1)) is None
    assert [type(item.request) for item in loader.executor.asked] == [Scan]
    loader.work_off()

    assert loader.producer.canaries.is_blocking is False
    assert loader.coordinator.channel.num_produced == 64


@pytest.mark.parametrize(
    ("function", "number", "message"),
    [
        (one_more, 8, "AD603 the tokenize function gives other tokens .*8 of 8 fixed rows differ.*allow_changed"),
        (other_from_50, 8, "[34] of 8 fixed rows differ"),
        (row_id, 5, "some of 5 fixed rows differ"),
    ],
)
def test_other_tokens_refuse_the_snapshot_and_nothing_is_delivered_at_any_later_call(
    with_canaries, function, number, message
):
    digests = digests_of(with_canaries())[:number]
    loader = with_canaries(function)
    loader.start(digests)

    for _ in range(3):
        with pytest.raises(ad.errors.SnapshotMismatchError, match=message) as caught:
            loader.take(1)
        loader.work_off()
    assert loader.coordinator.channel.num_produced == 0
    assert caught.value.differences == {"canaries": (digests, digests_of(with_canaries(function)))}


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_a_restart_drops_requests_for_canaries_and_frees_their_slot(with_canaries, num_answers):
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
    loader.work_off()
    assert loader.producer.canaries.digests == digests, "they are made after the last restart"


def test_canaries_wait_for_a_free_slot(with_canaries):
    digests = digests_of(with_canaries())
    loader = with_canaries()
    slots = [loader.executor.slots.hold() for _ in range(3)]

    loader.start(digests)
    assert loader.executor.asked == []
    loader.executor.slots.release(slots[1])
    loader.executor.slots.release(slots[0])

    assert loader.ids(2) == [0, 1]


def test_canaries_that_bring_down_workers_stop_nothing_and_are_not_asked_for_for_ever(with_canaries):
    loader = with_canaries()
    loader.start()
    found, num_lost = [], 0
    for _ in range(20):
        found += loader.ids(3)
        for number in asked(loader, Scan):
            if len(loader.executor.asked[number].request.blocks) == 8:
                loader.executor.lose(number)
                num_lost += 1
    loader.work_off()

    assert found == list(range(60))
    assert num_lost == 1
    assert loader.producer.canaries.digests == []


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [(DIED, ad.errors.WorkerError, "its worker died"), (GONE, ad.errors.SourceError, "AD304 gone")],
)
@pytest.mark.parametrize("num_answers", [0, 1])
def test_canaries_that_fail_are_the_error_with_a_snapshot_to_compare(with_canaries, num_answers, reply, error, message):
    loader = with_canaries()
    loader.start(["0" * 16] * 8)
    for _ in range(num_answers):
        loader.executor.answer()
    loader.executor.reply(reply)

    with pytest.raises(error, match=message):
        loader.take(1)


def test_a_source_without_rows_has_no_canaries(jsonl_file):
    with StillLoader(jsonl_file([b"", b" "])) as loader:
        loader.producer.canaries.make()
        loader.work_off()

        assert loader.producer.canaries.digests == []
        assert [loader.executor.slots.hold() for _ in range(3)].count(None) <= 2
