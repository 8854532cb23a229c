"""The coordinator: the buffer first, then the stream; one commit for both; requests are served in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import (
    BadRowError,
    EndOfData,
    FilterError,
    InvalidGroupError,
    LoaderClosedError,
    NoSamplesError,
    Position,
    SourceChangedError,
    TooManyBadRowsError,
)
from asyncdata.delivery.passed_rows import PassedRows
from asyncdata.delivery.requests import Request
from tests.support.still_loader import StillLoader, made_by_hand
from tests.support.tokenize_fns import all_dropped, every_third_dropped, fails_on_13

if TYPE_CHECKING:
    from asyncdata import Group
from tests.support.coordinators import ids, waiting

# The stream


def test_a_request_gets_exactly_what_it_asks_for_and_the_next_what_follows(loader_of: Any) -> None:
    loader = loader_of(20)

    assert [loader.ids(size) for size in (1, 5, 2, 12)] == [[0], [1, 2, 3, 4, 5], [6, 7], list(range(8, 20))]


def test_samples_and_groups_are_numbered_across_requests_and_epochs(loader_of: Any) -> None:
    loader = loader_of(5, samples_per_group=2)

    samples = [sample for size in (1, 4, 3) for sample in loader.take(size)]

    assert [sample.index for sample in samples] == list(range(16))
    assert [sample.group_index for sample in samples] == [number // 2 for number in range(16)]
    assert ids(samples) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0, 1, 1, 2, 2]
    assert [sample.position.epoch for sample in samples] == [0] * 10 + [1] * 6


def test_a_group_shares_its_tokens_and_nothing_that_a_trainer_may_change(loader_of: Any) -> None:
    loader = loader_of(3, lambda row: {"input_ids": [row["id"]], "metadata": {"seen": []}}, samples_per_group=3)

    ((first, second, third),) = loader.groups(1)
    first.metadata["seen"].append(1)
    first.response = "mine"

    assert np.shares_memory(first.tokens, third.tokens)
    assert (second.metadata, second.response) == ({"seen": []}, "")


def test_a_request_may_take_many_epochs(loader_of: Any) -> None:
    loader = loader_of(3)

    assert loader.ids(11) == [0, 1, 2] * 3 + [0, 1]
    assert loader.coordinator.ledger.position.epoch == 3


def test_a_request_larger_than_the_read_ahead_is_served(loader_of: Any) -> None:
    loader = loader_of(20, capacity=2)

    assert loader.ids(15) == list(range(15))
    loader.work_off()
    assert loader.coordinator.channel.num_produced - 15 <= 2


def test_nothing_is_read_ahead_beyond_the_capacity(loader_of: Any) -> None:
    loader = loader_of(50, capacity=8)

    loader.work_off()

    channel = loader.coordinator.channel
    assert (channel.num_produced, channel.num_rows_in_flight) == (8, 0)


def test_a_delivery_that_makes_room_resumes_the_read_ahead(loader_of: Any) -> None:
    loader = loader_of(50, capacity=8)
    loader.work_off()

    loader.take(4)
    loader.work_off()

    assert loader.coordinator.channel.num_produced == 12


def test_dropped_rows_are_replaced_by_later_rows(loader_of: Any) -> None:
    loader = loader_of(10, every_third_dropped)

    assert loader.ids(8) == [1, 2, 4, 5, 7, 8, 1, 2]
    assert loader.coordinator.ledger.counters.drops == {"tokenize_fn": 5}


# Epochs that end


def test_a_request_for_one_epoch_gets_what_is_left_of_it(loader_of: Any) -> None:
    loader = loader_of(5)

    assert [loader.ids(3, last_epoch=0) for _ in range(3)] == [[0, 1, 2], [3, 4], []]
    assert loader.ids(3, last_epoch=1) == [0, 1, 2]


def test_the_end_of_data_carries_the_short_last_batch(loader_of: Any) -> None:
    loader = loader_of(5, epochs=2, samples_per_group=2)
    loader.take(7)

    with pytest.raises(EndOfData) as caught:
        loader.take(4)

    assert str(caught.value) == "AD402 end of data after 2 epochs; 3 of 4 groups were left"
    assert [ids(group) for group in caught.value.groups] == [[2, 2], [3, 3], [4, 4]]
    assert [sample.index for sample in caught.value.samples] == [14, 15, 16, 17, 18, 19]
    assert loader.coordinator.ledger.counters.num_groups == 10, "they count as delivered"


def test_the_end_of_data_is_raised_at_every_call(loader_of: Any) -> None:
    loader = loader_of(3, epochs=1)
    loader.take(3)

    for _ in range(2):
        with pytest.raises(EndOfData, match="0 of 1 groups were left") as caught:
            loader.take(1)
        assert caught.value.groups == []


def test_a_loop_over_the_last_epoch_ends_without_an_error(loader_of: Any) -> None:
    loader = loader_of(3, epochs=1)

    assert [loader.ids(2, last_epoch=0) for _ in range(3)] == [[0, 1], [2], []]
    with pytest.raises(EndOfData):
        loader.take(2, last_epoch=1)


def test_a_short_last_batch_is_dropped_and_counted_on_request(loader_of: Any) -> None:
    loader = loader_of(5, epochs=1, drop_last=True)
    assert loader.ids(3) == [0, 1, 2]

    with pytest.raises(EndOfData, match="0 of 3 groups were left") as caught:
        loader.take(3)

    assert caught.value.groups == []
    assert loader.coordinator.ledger.counters.drops == {"drop_last": 2}


def test_a_dropped_batch_ends_its_epoch_and_keeps_the_numbering(loader_of: Any) -> None:
    loader = loader_of(5, drop_last=True)

    assert [loader.ids(3, last_epoch=0) for _ in range(3)] == [[0, 1, 2], [], []]
    (first, *_) = loader.take(3)
    assert (ids([first]), first.index) == ([0], 5)


def test_groups_given_back_are_not_dropped_with_a_short_batch(loader_of: Any) -> None:
    loader = loader_of(5, epochs=1, drop_last=True)
    loader.take(4)
    loader.coordinator.add_groups([made_by_hand(100)])

    with pytest.raises(EndOfData):
        loader.take(3)

    assert len(loader.coordinator.ledger.buffer) == 1
    assert loader.ids(1) == [100]


def test_after_the_end_of_data_groups_given_back_are_still_served(loader_of: Any) -> None:
    loader = loader_of(2, epochs=1)
    loader.take(2)
    loader.coordinator.add_groups([made_by_hand(100), made_by_hand(101)])

    assert loader.ids(1) == [100]
    with pytest.raises(EndOfData) as caught:
        loader.take(2)
    assert ids(caught.value.samples) == [101]


def test_an_epoch_without_a_sample_is_an_error_that_says_why(loader_of: Any) -> None:
    loader = loader_of(4, all_dropped)

    for _ in range(2):
        with pytest.raises(NoSamplesError) as caught:
            loader.take(1)
        assert str(caught.value) == "AD401 epoch 0: 4 rows read, 0 kept: 4 by nothing is good enough"


def test_nothing_is_read_beyond_an_epoch_without_a_sample(loader_of: Any) -> None:
    loader = loader_of(4, all_dropped)

    loader.work_off()

    assert sum(loader.executor.num_rows_asked) <= 4 + 8, "the epoch, and the canaries"


def test_a_file_of_blank_lines_is_read_once_and_no_more(jsonl_file: Any) -> None:
    with StillLoader(jsonl_file([b""] * 100)) as loader:
        with pytest.raises(NoSamplesError, match=r"^AD401 epoch 0: 0 rows read, 0 kept: there was no row$"):
            loader.take(1)
        loader.work_off(limit=100)


# Bad rows


def test_a_bad_row_is_raised_at_its_turn_with_its_place_and_at_every_call(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_13)

    assert loader.ids(13) == list(range(13))
    for _ in range(2):
        with pytest.raises(BadRowError) as caught:
            loader.take(1)
        assert (caught.value.code, caught.value.line, caught.value.byte_offset) == ("AD421", 14, 10 * 10 + 3 * 11)
        assert "KeyError('thirteen')" in caught.value.reason
        assert caught.value.path.endswith("rows.jsonl")


def test_a_request_that_meets_a_bad_row_takes_nothing(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_13)
    loader.coordinator.add_groups([made_by_hand(100)])

    with pytest.raises(BadRowError):
        loader.take(20)

    assert loader.ids(3) == [100, 0, 1], "the samples before it can still be had, and so can the group"


def test_nothing_is_read_beyond_a_bad_row_that_stops_the_stream(loader_of: Any) -> None:
    loader = loader_of(2000, fails_on_13, capacity=4)

    loader.work_off()
    with pytest.raises(BadRowError):
        loader.take(20)
    loader.work_off()

    assert sum(loader.executor.num_rows_asked) < 100


def test_bad_rows_are_passed_over_counted_and_quarantined(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_13, bad_row_stops=False)

    assert loader.ids(16) == [*range(13), 14, 15, 16]
    assert [error.line for error in loader.quarantined] == [14]
    counters = loader.coordinator.ledger.counters
    assert (counters.num_bad_rows, counters.drops) == (1, {"bad row AD421": 1})


def test_a_bad_row_is_quarantined_once_although_it_is_polled_many_times(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_13, bad_row_stops=False, capacity=2)

    loader.take(10)
    assert loader.quarantined == []
    loader.take(9)

    assert len(loader.quarantined) == 1


def test_a_row_that_cannot_be_quarantined_is_not_passed(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_13, bad_row_stops=False)
    loader.take(13)
    errors = [OSError("disk full")]

    def quarantine(error: BadRowError) -> None:
        if errors:
            raise errors.pop()
        loader.quarantined.append(error)

    loader.coordinator._passed_rows = PassedRows(loader.coordinator.rules.policy(quarantine))  # noqa: SLF001
    with pytest.raises(OSError, match="disk full"):
        loader.take(2)
    assert loader.coordinator.ledger.counters.num_bad_rows == 0

    assert loader.ids(2) == [14, 15]
    assert len(loader.quarantined) == 1


def fails_on_odd(row: dict[str, Any]) -> list[int]:
    if row["id"] % 2:
        raise ValueError("odd")
    return [row["id"]]


def test_more_bad_rows_than_allowed_are_an_error_at_every_call(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_odd, bad_row_stops=False, max_bad_rows=2)

    assert loader.ids(3) == [0, 2, 4]
    for _ in range(2):
        with pytest.raises(TooManyBadRowsError, match=r"BadRows\(max=2\)"):
            loader.take(1)
    assert loader.coordinator.ledger.counters.num_bad_rows == 2


def test_nothing_is_read_beyond_the_bad_row_too_many(loader_of: Any) -> None:
    """Or a wrong key, and a request that no good row ever serves, would read a terabyte before anybody is told."""
    loader = loader_of(3000, lambda row: 1 / 0, bad_row_stops=False, max_bad_rows=5, capacity=4)

    with pytest.raises(TooManyBadRowsError):
        loader.take(1)
    loader.work_off()

    assert sum(loader.executor.num_rows_asked) < 100


def test_the_budget_of_bad_rows_is_that_of_the_whole_run(loader_of: Any) -> None:
    loader = loader_of(20, fails_on_odd, bad_row_stops=False, max_bad_rows=3)
    loader.take(3)
    state = loader.snapshot()

    loader.restore(state)
    assert loader.ids(1) == [6]
    with pytest.raises(TooManyBadRowsError):
        loader.take(1)


def test_what_stops_the_stream_comes_after_all_that_is_before_it(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    loader.coordinator.fail(loader.coordinator.channel, failure(SourceChangedError("AD302 it shrank")))

    assert len(loader.take(5)) == 5
    with pytest.raises(SourceChangedError, match="AD302"):
        loader.take(1000)


def failure(error: Any) -> Any:
    from asyncdata.delivery.channel import Failure

    return Failure(error)


# The buffer


def test_groups_given_back_come_first_and_once(loader_of: Any) -> None:
    loader = loader_of(20, samples_per_group=2)
    first, second, _ = loader.groups(3)
    for sample in first:
        sample.response = "so far"

    loader.coordinator.add_groups([second, first])

    groups = loader.groups(4)
    assert groups[:2] == [second, first]
    assert [sample.response for sample in groups[1]] == ["so far"] * 2
    assert [ids(group) for group in groups[2:]] == [[3, 3], [4, 4]]
    assert loader.coordinator.ledger.buffer == ()
    assert [ids(group) for group in loader.groups(1)] == [[5, 5]]


def test_groups_keep_their_numbers_and_the_stream_continues_with_its_own(loader_of: Any) -> None:
    loader = loader_of(20)
    groups = loader.groups(3)

    loader.coordinator.add_groups([groups[1]])

    assert [sample.group_index for sample in loader.take(3)] == [1, 3, 4]


def test_a_request_that_the_buffer_can_serve_waits_for_nothing(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.coordinator.add_groups([made_by_hand(100), made_by_hand(101)])

    assert ids(loader.coordinator.poll(Request(2))) == [100, 101]


def test_add_groups_takes_all_or_none(loader_of: Any) -> None:
    loader = loader_of(20)

    with pytest.raises(InvalidGroupError, match="AD432 group 1"):
        loader.coordinator.add_groups([made_by_hand(100), ["no sample"]])

    assert loader.coordinator.ledger.buffer == ()
    assert loader.coordinator.add_groups([made_by_hand(100)]) == 1


def test_a_filter_decides_what_is_served_and_the_stream_fills_up(loader_of: Any) -> None:
    def the_best(buffer: list[Group], num_groups: int) -> list[Group]:
        return [group for group in buffer if group[0].reward == 1.0]

    loader = loader_of(20, buffer_filter=the_best)
    loader.coordinator.add_groups([made_by_hand(100, reward=0.0), made_by_hand(101, reward=1.0)])

    assert loader.ids(3) == [101, 0, 1]
    assert len(loader.coordinator.ledger.buffer) == 1


def test_a_filter_that_fails_consumes_nothing(loader_of: Any) -> None:
    faults: list[Any] = [[[]], RuntimeError("boom")]

    def fails_twice(buffer: list[Group], num_groups: int) -> Any:
        buffer_before, fault = list(buffer), faults.pop() if faults else None
        buffer.clear()
        if isinstance(fault, Exception):
            raise fault
        return buffer_before if fault is None else fault

    loader = loader_of(20, buffer_filter=fails_twice)
    loader.coordinator.add_groups([made_by_hand(100)])

    with pytest.raises(FilterError, match="AD431"):
        loader.take(2)
    with pytest.raises(FilterError, match="AD430"):
        loader.take(2)
    assert loader.ids(2) == [100, 0]


def test_a_filter_is_asked_once_per_request_however_often_it_is_polled(loader_of: Any) -> None:
    asked = []

    def counted(buffer: list[Group], num_groups: int) -> list[Group]:
        asked.append(num_groups)
        return buffer[:num_groups]

    loader = loader_of(20, buffer_filter=counted, capacity=1)
    loader.coordinator.add_groups([made_by_hand(100)])

    assert loader.ids(10) == [100, *range(9)]
    assert asked == [10]


def test_what_a_waiting_request_chose_stays_in_the_snapshot_until_it_is_served(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.coordinator.add_groups([made_by_hand(100)])
    waiting(loader, 5)

    assert len(loader.snapshot()["buffer"]) == 1


# Who waits


def test_requests_are_served_in_the_order_they_came(loader_of: Any) -> None:
    loader = loader_of(20)
    first, first_wakes = waiting(loader, 5)
    second, second_wakes = waiting(loader, 1)
    loader.work_off()

    assert first_wakes
    assert not second_wakes
    assert loader.coordinator.poll(second) is None, "its sample is there, and is another's"
    assert ids(loader.coordinator.poll(first)) == [0, 1, 2, 3, 4]
    assert second_wakes
    assert ids(loader.coordinator.poll(second)) == [5]


def test_a_request_queues_after_the_requests_that_wait(loader_of: Any) -> None:
    loader = loader_of(40, capacity=16, window_blocks=64)
    loader.work_off()
    loader.take(1)
    first, _ = waiting(loader, 20)

    assert loader.coordinator.take_ready(1) is None, "the next sample is there, and is another's"
    second, _ = waiting(loader, 1)
    loader.work_off()

    assert ids(loader.coordinator.poll(first)) == list(range(1, 21))
    loader.work_off()
    assert ids(loader.coordinator.poll(second)) == [21]


def test_a_withdrawn_request_wakes_the_next_one(loader_of: Any) -> None:
    loader = loader_of(20)
    first, _ = waiting(loader, 5)
    second, wakes = waiting(loader, 2)
    loader.work_off()

    loader.coordinator.withdraw(first)

    assert wakes
    assert ids(loader.coordinator.poll(second)) == [0, 1]


def test_a_withdrawn_request_takes_nothing_from_earlier_requests(loader_of: Any) -> None:
    """The first wants more than is read ahead: that it waits is why more is read."""
    loader = loader_of(20, capacity=2)
    first, wakes = waiting(loader, 10)
    second, _ = waiting(loader, 1)

    loader.coordinator.withdraw(second)
    loader.work_off()

    assert wakes
    assert ids(loader.coordinator.poll(first)) == list(range(10))


def test_a_request_is_not_woken_before_it_can_be_served(loader_of: Any) -> None:
    loader = loader_of(30, capacity=4)
    request, wakes = waiting(loader, 4)

    while not wakes:
        loader.work_on()

    assert ids(loader.coordinator.poll(request)) == [0, 1, 2, 3]


def test_a_waiting_request_is_woken_at_the_end_of_the_data(loader_of: Any) -> None:
    loader = loader_of(3, epochs=1)
    request, wakes = waiting(loader, 5)

    loader.work_off()

    assert wakes
    with pytest.raises(EndOfData):
        loader.coordinator.poll(request)


def test_closing_wakes_every_request_with_the_reason(loader_of: Any) -> None:
    loader = loader_of(20)
    requests = [waiting(loader, 5), waiting(loader, 5)]

    loader.coordinator.close("closed by close()")
    loader.coordinator.close("another reason")

    for request, wakes in requests:
        assert wakes
        with pytest.raises(LoaderClosedError, match=r"^closed by close\(\)$"):
            loader.coordinator.poll(request)
    with pytest.raises(LoaderClosedError):
        loader.coordinator.poll(Request(1))
    with pytest.raises(LoaderClosedError):
        loader.coordinator.add_groups([made_by_hand(1)])
    assert loader.coordinator.take_ready(1) is None


# The short way


def test_the_middle_of_a_run_is_taken_without_a_request(loader_of: Any) -> None:
    loader = loader_of(20, samples_per_group=2)
    assert loader.coordinator.take_ready(1) is None, "nothing was delivered before"
    loader.work_off()
    loader.take(2)

    samples = loader.coordinator.take_ready(3)

    assert ids(samples) == [2, 2, 3, 3, 4, 4]
    assert [sample.index for sample in samples] == [4, 5, 6, 7, 8, 9]
    ledger = loader.coordinator.ledger
    last = samples[-1].position
    assert ledger.position == Position(0, last.window, last.row + 1)
    assert (ledger.counters.num_groups, ledger.counters.num_samples, ledger.counters.num_tokens) == (5, 10, 5)
    assert [sample.index for sample in loader.take(1)] == [10, 11]


def test_the_fast_path_gives_the_samples_that_a_request_gets(loader_of: Any) -> None:
    short, long = (loader_of(40, every_third_dropped, seed=3, shuffle=True, window_blocks=64) for _ in range(2))
    for loader in (short, long):
        loader.work_off()
    found = []

    for size in (1, 2, 1, 3, 2, 1, 4, 2, 9, 1):
        samples = short.coordinator.take_ready(size)
        found.append(samples is not None)
        samples = short.take(size) if samples is None else samples
        expected = long.take(size)
        assert [(sample.index, ids([sample]), sample.position) for sample in samples] == [
            (sample.index, ids([sample]), sample.position) for sample in expected
        ]
        assert short.snapshot() == long.snapshot()
    assert True in found
    assert False in found


def test_the_fast_path_is_not_used_where_a_request_is_needed(loader_of: Any) -> None:
    plain, on_ack = loader_of(20), loader_of(20, commit_on_ack=True)
    for loader in (plain, on_ack):
        loader.work_off()
        loader.take(1)

    assert on_ack.coordinator.take_ready(1) is None, "a lease has to be written"
    assert plain.coordinator.take_ready(19) is None, "the run is not so long"
    assert plain.coordinator.take_ready(1, last_epoch=-1) is None, "it is of a later epoch"
    plain.coordinator.add_groups([made_by_hand(100), made_by_hand(101)])
    assert plain.coordinator.take_ready(1) is None, "the buffer comes first"
    plain.take(1)
    assert plain.coordinator.take_ready(1) is None, "and there is more in it"


def test_the_fast_path_makes_room_in_the_channel(loader_of: Any) -> None:
    loader = loader_of(50, capacity=16, window_blocks=64)
    loader.work_off()
    loader.take(1)
    loader.work_off()
    num_produced = loader.coordinator.channel.num_produced

    assert loader.coordinator.take_ready(2) is not None
    loader.work_off()

    assert loader.coordinator.channel.num_produced > num_produced
