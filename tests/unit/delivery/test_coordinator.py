"""The coordinator: the buffer first, then the stream; one commit for both; requests are served in their order."""

from __future__ import annotations

import numpy as np
import pytest

from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.delivery.ledger import Request
from asyncdata.errors import AsyncDataError, EndOfData, FilterError, LoaderClosedError, NoSamplesError
from tests.support.still_loader import StillLoader, made_by_hand
from tests.support.tokenize_fns import all_dropped, every_third_dropped, fails_on_13, row_id


@pytest.fixture
def loader_of(jsonl_file):
    """A function that makes a loader of so many rows, with all read ahead that there is room for.

    The rows come in the order of the file.
    """
    loaders = []

    def make(num_rows=20, function=row_id, **rules):
        path = jsonl_file(({"id": number} for number in range(num_rows)), f"{len(loaders)}/rows.jsonl")
        loader = StillLoader(path, function, **rules)
        loader.start()
        loader.work_off()
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


def ids(samples):
    return [int(sample.tokens[0]) for sample in samples]


def waiting(loader, num_groups):
    """A request that was polled, and the times that it was woken."""
    request, wakes = Request(num_groups), []
    request.wake = lambda: wakes.append(True)
    assert loader.coordinator.poll(request) is None
    return request, wakes


# The stream


def test_a_group_shares_its_tokens_and_nothing_that_a_trainer_may_change(loader_of):
    loader = loader_of(3, lambda row: {"input_ids": [row["id"]], "metadata": {"seen": []}}, samples_per_group=3)

    ((first, second, third),) = loader.groups(1)
    first.metadata["seen"].append(1)
    first.response = "mine"

    assert np.shares_memory(first.tokens, third.tokens)
    assert (second.metadata, second.response) == ({"seen": []}, "")


def test_as_much_is_read_ahead_as_there_is_room_for_or_as_a_request_needs(loader_of):
    loader = loader_of(50, capacity=8)
    channel = loader.coordinator.channel
    assert (channel.num_produced, channel.num_rows_in_flight) == (8, 0)

    loader.take(4)
    loader.work_off()
    assert channel.num_produced == 12

    assert loader.ids(30) == list(range(4, 34)), "more than is ever read ahead"
    loader.work_off()
    assert channel.num_produced - 34 <= 8


@pytest.mark.parametrize(
    ("function", "rules"),
    [(all_dropped, {}), (fails_on_13, {}), (lambda row: 1 / 0, {"bad_row_stops": False, "max_bad_rows": 5})],
    ids=["an epoch without a sample", "a bad row that stops it", "one bad row too many"],
)
def test_nothing_is_read_beyond_what_stops_the_stream(loader_of, function, rules):
    """Or a wrong key would read a terabyte before anybody is told."""
    loader = loader_of(100 if function is all_dropped else 2000, function, capacity=4, **rules)

    with pytest.raises(AsyncDataError):
        loader.take(20)
    loader.work_off()

    assert sum(loader.executor.num_rows_asked) < 120


def test_a_file_of_blank_lines_is_read_once_and_no_more(jsonl_file):
    with StillLoader(jsonl_file([b""] * 100)) as loader:
        with pytest.raises(NoSamplesError, match=r"^AD401 epoch 0: 0 rows read, 0 kept: there was no row$"):
            loader.take(1)
        loader.work_off(limit=100)


def test_the_end_of_data_carries_the_short_last_batch_which_is_not_rolled_back(loader_of):
    loader = loader_of(5, epochs=2, samples_per_group=2)
    loader.take(7)
    loader.work_off()
    request = Request(4)

    with pytest.raises(EndOfData) as caught:
        loader.coordinator.poll(request)
    loader.coordinator.withdraw(request)

    assert str(caught.value) == "AD402 end of data after 2 epochs; 3 of 4 groups were left"
    assert [ids(group) for group in caught.value.groups] == [[2, 2], [3, 3], [4, 4]]
    assert [sample.index for sample in caught.value.samples] == [14, 15, 16, 17, 18, 19]
    assert loader.coordinator.ledger.counters.num_groups == 10, "they count as delivered"


def test_a_row_that_cannot_be_quarantined_is_not_passed(loader_of):
    errors = [OSError("disk full")]

    def quarantine(_):
        if errors:
            raise errors.pop()

    loader = loader_of(20, fails_on_13, bad_rows=BadRowPolicy(is_raised=False, pass_over=quarantine))
    loader.take(13)
    with pytest.raises(OSError, match="disk full"):
        loader.take(2)
    assert loader.coordinator.ledger.counters.num_bad_rows == 0

    assert loader.ids(2) == [14, 15]
    assert loader.coordinator.ledger.counters.num_bad_rows == 1


def test_a_filter_is_asked_once_per_request_and_one_that_fails_consumes_nothing(loader_of):
    faults, asked = [[[]], RuntimeError("boom")], []

    def fails_twice(buffer, num_groups):
        asked.append(num_groups)
        buffer_before, fault = list(buffer), faults.pop() if faults else None
        buffer.clear()
        if isinstance(fault, Exception):
            raise fault
        return buffer_before if fault is None else fault

    loader = loader_of(20, buffer_filter=fails_twice, capacity=1)
    loader.coordinator.add_groups([made_by_hand(100)])

    for code in ("AD431", "AD430"):
        with pytest.raises(FilterError, match=code):
            loader.take(2)
    assert loader.ids(10) == [100, *range(9)]
    assert asked == [2, 2, 10], "however often a request is polled"


# Who waits


def test_requests_are_served_in_the_order_they_came(loader_of):
    loader = loader_of(40, capacity=1)
    first, first_wakes = waiting(loader, 20)
    second, second_wakes = waiting(loader, 1)
    loader.work_off()

    assert (first_wakes, second_wakes) == ([True], [])
    assert loader.coordinator.take_ready(1) is None, "the next sample is there, and is another's"
    assert loader.coordinator.poll(second) is None
    assert ids(loader.coordinator.poll(first)) == list(range(20))
    loader.work_off()
    assert second_wakes
    assert ids(loader.coordinator.poll(second)) == [20]


def test_a_withdrawn_request_wakes_the_next_one_and_takes_nothing_from_earlier_ones(loader_of):
    """The first wants more than is read ahead: that it waits is why more is read."""
    loader = loader_of(20, capacity=2)
    requests = [waiting(loader, number) for number in (10, 1, 3)]

    loader.coordinator.withdraw(requests[1][0])
    loader.work_off()
    first, wakes = requests[0]
    assert wakes
    assert ids(loader.coordinator.poll(first)) == list(range(10))
    loader.coordinator.withdraw(first)

    last, wakes = requests[2]
    loader.work_off()
    assert wakes
    assert ids(loader.coordinator.poll(last)) == [0, 1, 2]


def test_a_request_is_not_woken_before_it_can_be_served_or_the_data_is_at_its_end(loader_of):
    loader = loader_of(12, capacity=4, epochs=1)
    for size in (8, 5):
        request, wakes = waiting(loader, size)
        while not wakes:
            loader.work_on()
        if size == 8:
            assert ids(loader.coordinator.poll(request)) == list(range(8))
    with pytest.raises(EndOfData):
        loader.coordinator.poll(request)


def test_closing_wakes_every_request_with_the_reason(loader_of):
    loader = loader_of(20, capacity=1)
    requests = [waiting(loader, 5), waiting(loader, 5)]

    loader.coordinator.close("closed by close()")
    loader.coordinator.close("another reason")

    assert all(wakes for _, wakes in requests)
    for request in (requests[0][0], requests[1][0], Request(1)):
        with pytest.raises(LoaderClosedError, match=r"^closed by close\(\)$"):
            loader.coordinator.poll(request)
    with pytest.raises(LoaderClosedError):
        loader.coordinator.add_groups([made_by_hand(1)])
    assert loader.coordinator.take_ready(1) is None


# The fast path


def test_the_fast_path_gives_the_samples_that_a_request_gets(loader_of):
    short, long = (loader_of(40, every_third_dropped, seed=3, shuffle=True, window_blocks=64) for _ in range(2))
    found = set()

    for size in (1, 2, 1, 3, 2, 1, 4, 2, 9, 1):
        samples = short.coordinator.take_ready(size)
        found.add(samples is not None)
        samples = short.take(size) if samples is None else samples
        expected = long.take(size)
        assert [(sample.index, ids([sample]), sample.position) for sample in samples] == [
            (sample.index, ids([sample]), sample.position) for sample in expected
        ]
        assert short.snapshot() == long.snapshot()
    assert found == {True, False}


def test_the_fast_path_is_not_used_where_a_request_is_needed(loader_of):
    plain, on_ack = loader_of(20), loader_of(20, commit_on_ack=True)
    for loader in (plain, on_ack):
        loader.take(1)

    assert on_ack.coordinator.take_ready(1) is None, "a lease has to be written"
    assert plain.coordinator.take_ready(19) is None, "the run is not so long"
    assert plain.coordinator.take_ready(1, last_epoch=-1) is None, "it is of a later epoch"
    plain.coordinator.add_groups([made_by_hand(100), made_by_hand(101)])
    assert plain.coordinator.take_ready(1) is None, "the buffer comes first"
    plain.take(1)
    assert plain.coordinator.take_ready(1) is None, "and there is more in it"


def test_the_fast_path_makes_room_in_the_channel_and_an_interrupt_there_leaves_nothing_delivered(loader_of):
    """Ctrl-C may come at any line; here it comes as late as it can."""
    loader = loader_of(50, capacity=16, window_blocks=64)
    loader.take(1)
    loader.work_off()
    num_produced = loader.coordinator.channel.num_produced

    def interrupted():
        raise KeyboardInterrupt

    on_room, loader.on_room = loader.on_room, interrupted
    with pytest.raises(KeyboardInterrupt):
        loader.coordinator.take_ready(2)
    loader.on_room = on_room

    assert ids(loader.coordinator.take_ready(2)) == [1, 2]
    loader.work_off()
    assert loader.coordinator.channel.num_produced > num_produced


# What was not received


@pytest.mark.parametrize("commit_on_ack", [False, True])
def test_a_delivery_whose_caller_is_gone_is_rolled_back_if_nothing_was_delivered_since(loader_of, commit_on_ack):
    loader = loader_of(20, commit_on_ack=commit_on_ack)
    loader.take(2)
    loader.coordinator.add_groups([made_by_hand(100)])
    loader.work_off()
    before, request = loader.snapshot(), Request(3)

    assert ids(loader.coordinator.poll(request)) == [100, 2, 3]
    loader.coordinator.withdraw(request)

    assert loader.snapshot() == before
    assert ids(loader.coordinator.poll(late := Request(3))) == [100, 2, 3]
    assert loader.ids(2) == [4, 5]
    loader.coordinator.withdraw(late)
    assert loader.ids(1) == [6], "or it would be delivered after the rows that follow it"


def test_samples_of_the_fast_path_are_rolled_back_if_nothing_was_delivered_since(loader_of):
    loader = loader_of(20)
    loader.take(2)

    def fail(samples):
        loader.coordinator.failed.append((None, samples))
        loader.coordinator.settle()

    before = loader.snapshot()
    fail(loader.coordinator.take_ready(3))
    assert loader.snapshot() == before
    assert loader.ids(1) == [2]

    samples = loader.coordinator.take_ready(2)
    assert loader.coordinator.take_ready(2) is not None
    fail(samples)
    assert loader.ids(1) == [7]

    samples = loader.coordinator.take_ready(2)
    loader.coordinator.add_groups([made_by_hand(100)])
    fail(samples)
    assert loader.ids(2) == [100, 10]


def served_for_packs(loader, num_groups):
    """A request whose samples are there, and are not delivered yet."""
    request = Request(num_groups, is_for_packs=True)
    assert loader.coordinator.poll(request) is not None
    return request


def test_samples_to_be_packed_are_delivered_and_rolled_back_with_the_progress_of_packing(loader_of):
    loader = loader_of(20)
    loader.take(2)
    state = loader.snapshot()

    request = served_for_packs(loader, 3)
    assert loader.snapshot() == state
    assert loader.coordinator.commit(request, "five")
    assert loader.coordinator.ledger.packs == "five"
    assert loader.coordinator.ledger.position == request.after.position

    state, request = loader.snapshot(), served_for_packs(loader, 3)
    assert loader.coordinator.commit(request, "eight")
    loader.coordinator.failed.append((request, None))

    assert loader.coordinator.ledger.packs == "five"
    assert loader.snapshot() == state
    assert loader.ids(2) == [5, 6]


def test_samples_to_be_packed_are_not_delivered_after_anything_else_was(loader_of):
    loader = loader_of(20)
    late, other = served_for_packs(loader, 3), served_for_packs(loader, 2)
    assert loader.coordinator.commit(other, "two")

    assert not loader.coordinator.commit(late, "three")
    assert loader.coordinator.ledger.packs == "two"

    late = served_for_packs(loader, 3)
    loader.restore(loader.snapshot())
    loader.work_off()
    assert not loader.coordinator.commit(late, "three")
    assert loader.ids(1) == [2]


# A restart


def test_a_restart_drops_the_read_ahead_and_serves_waiting_requests_and_asks_the_filter_again(loader_of):
    """What a request had chosen is not in the buffer any more."""
    loader = loader_of(40, capacity=10)
    state = loader.snapshot()
    loader.take(15)
    loader.coordinator.add_groups([made_by_hand(100)])
    request, wakes = waiting(loader, 30)

    loader.restore(state)
    assert wakes
    assert loader.coordinator.poll(request) is None
    wakes.clear()
    while not wakes:
        loader.work_on()

    assert ids(loader.coordinator.poll(request)) == list(range(30))


def test_an_old_channel_takes_no_more_entries(loader_of):
    loader = loader_of(20)
    old = loader.coordinator.channel

    loader.coordinator.restart(lambda ledger: ledger)

    assert loader.coordinator.channel is not old
    assert loader.coordinator.reserve(old, 5, 1) is None
    assert loader.coordinator.reserve(loader.coordinator.channel, 5, 1) is not None
