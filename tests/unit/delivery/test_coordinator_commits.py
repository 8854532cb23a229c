"""What the coordinator commits: rollbacks, acknowledgements and restarts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from asyncdata import EndOfData, Position
from asyncdata.delivery.ledger import lease_key
from asyncdata.delivery.requests import Request
from tests.support.coordinators import ids, waiting
from tests.support.still_loader import StillLoader, made_by_hand
from tests.support.tokenize_fns import every_third_dropped

# What was not received


@pytest.mark.parametrize("commit_on_ack", [False, True])
def test_a_delivery_whose_caller_is_gone_is_rolled_back(loader_of: Any, commit_on_ack: bool) -> None:
    loader = loader_of(20, commit_on_ack=commit_on_ack)
    loader.take(2)
    loader.coordinator.add_groups([made_by_hand(100)])
    loader.work_off()
    before, request = loader.snapshot(), Request(3)

    assert ids(loader.coordinator.poll(request)) == [100, 2, 3]
    loader.coordinator.withdraw(request)

    assert loader.snapshot() == before
    assert loader.ids(3) == [100, 2, 3]


def test_groups_in_the_end_of_data_error_are_not_rolled_back(loader_of: Any) -> None:
    loader = loader_of(3, epochs=1)
    loader.work_off()
    request = Request(5)

    with pytest.raises(EndOfData):
        loader.coordinator.poll(request)
    loader.coordinator.withdraw(request)

    assert loader.coordinator.ledger.counters.num_groups == 3


def test_a_delivery_is_not_rolled_back_after_another_one(loader_of: Any) -> None:
    """It would be delivered after the rows that follow it."""
    loader = loader_of(20)
    loader.work_off()
    request = Request(3)
    loader.coordinator.poll(request)

    loader.take(2)
    loader.coordinator.withdraw(request)

    assert loader.ids(1) == [5]


def test_samples_of_the_fast_path_are_rolled_back(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    loader.take(2)
    before = loader.snapshot()

    samples = loader.coordinator.take_ready(3)
    loader.coordinator.failed.append((None, samples))
    loader.coordinator.settle()

    assert loader.snapshot() == before
    assert loader.ids(3) == [2, 3, 4]


def test_samples_of_the_fast_path_are_not_rolled_back_after_other_samples(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    loader.take(1)

    samples = loader.coordinator.take_ready(2)
    assert loader.coordinator.take_ready(2) is not None
    loader.coordinator.failed.append((None, samples))
    loader.coordinator.settle()
    assert loader.ids(1) == [5]

    samples = loader.coordinator.take_ready(2)
    loader.coordinator.add_groups([made_by_hand(100)])
    loader.coordinator.failed.append((None, samples))
    loader.coordinator.settle()
    assert loader.ids(2) == [100, 8]


def served_for_packs(loader: StillLoader, num_groups: int) -> Request:
    """A request whose samples are there, and are not delivered yet."""
    request = Request(num_groups, is_for_packs=True)
    assert loader.coordinator.poll(request) is not None
    return request


def test_samples_to_be_packed_are_delivered_with_the_progress_of_packing_and_not_before(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    loader.take(2)
    state = loader.snapshot()

    request = served_for_packs(loader, 3)
    assert loader.snapshot() == state
    assert loader.coordinator.commit(request, "packed")

    assert loader.coordinator.ledger.packs == "packed"
    assert loader.coordinator.ledger.position == request.after.position
    assert loader.ids(2) == [5, 6]


def test_a_rolled_back_delivery_takes_the_progress_of_packing_back_with_it(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    assert loader.coordinator.commit(served_for_packs(loader, 2), "two")
    state, request = loader.snapshot(), served_for_packs(loader, 3)
    assert loader.coordinator.commit(request, "five")

    loader.coordinator.failed.append((request, None))

    assert loader.coordinator.ledger.packs == "two"
    assert loader.snapshot() == state
    assert loader.ids(2) == [2, 3]


def test_samples_to_be_packed_are_not_delivered_after_anything_else_was(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    late, other = served_for_packs(loader, 3), served_for_packs(loader, 2)
    assert loader.coordinator.commit(other, "two")

    assert not loader.coordinator.commit(late, "three")
    assert loader.coordinator.ledger.packs == "two"

    late = served_for_packs(loader, 3)
    loader.restore(loader.snapshot())
    loader.work_off()
    assert not loader.coordinator.commit(late, "three")
    assert loader.ids(1) == [2]


def test_the_progress_of_packing_stays_while_samples_are_taken_in_other_ways(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.work_off()
    assert loader.coordinator.commit(served_for_packs(loader, 2), "two")

    assert loader.coordinator.take_ready(2) is not None
    assert loader.coordinator.poll(Request(2)) is not None

    assert loader.coordinator.ledger.packs == "two"


def test_an_interrupt_within_the_commit_leaves_nothing_delivered(loader_of: Any) -> None:
    """Ctrl-C may come at any line; here it comes as late as it can."""
    loader = loader_of(50, capacity=16, window_blocks=64)
    loader.work_off()
    loader.take(1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    on_room, loader.on_room = loader.on_room, interrupted
    loader.coordinator._wanted_room = 1  # noqa: SLF001
    with pytest.raises(KeyboardInterrupt):
        loader.coordinator.take_ready(2)
    loader.on_room = on_room

    assert loader.ids(2) == [1, 2]


# Acknowledging


def restarted(loader: StillLoader) -> StillLoader:
    loader.restore(json.loads(json.dumps(loader.snapshot())))
    return loader


def test_on_delivery_nothing_is_served_again(loader_of: Any) -> None:
    loader = loader_of(20)
    loader.take(5)

    assert restarted(loader).ids(2) == [5, 6]


def test_what_was_not_acknowledged_is_served_again_in_its_order(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True)
    first, second = loader.take(3), loader.take(3)

    loader.coordinator.acknowledge([lease_key([sample]) for sample in (first[1], second[0], second[2])])

    again = restarted(loader).take(5)
    assert ids(again) == [0, 2, 4, 6, 7]
    assert [sample.index for sample in again] == [0, 2, 4, 6, 7], "and with its own number"


def test_what_was_acknowledged_is_not_served_again(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True)
    loader.take(3)
    loader.take(3)

    loader.coordinator.acknowledge(None)

    assert loader.coordinator.ledger.leases == ()
    assert restarted(loader).ids(2) == [6, 7]


def test_groups_of_the_buffer_that_were_not_acknowledged_come_back_first(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True)
    loader.coordinator.add_groups([made_by_hand(100, response="so far"), made_by_hand(101)])
    first = loader.take(3)
    loader.coordinator.add_groups([made_by_hand(102)])

    loader.coordinator.acknowledge([lease_key([first[1]])])

    again = restarted(loader).take(4)
    assert ids(again) == [100, 102, 0, 1]
    assert again[0].response == "so far"


def test_a_group_given_back_is_owed_by_the_buffer_alone(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True)
    groups = loader.groups(3)

    loader.coordinator.add_groups([groups[1]])

    assert restarted(loader).ids(4) == [1, 0, 2, 3]


def test_a_copy_of_a_group_acknowledges_the_group(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True, samples_per_group=2)
    groups = loader.groups(3)

    loader.coordinator.acknowledge([lease_key(copy.deepcopy(groups[1]))])

    assert [ids(group) for group in restarted(loader).groups(3)] == [[0, 0], [2, 2], [3, 3]]


def test_copies_of_a_group_are_all_served_again(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True)
    (group,) = loader.groups(1)
    loader.coordinator.add_groups([copy.deepcopy(group), copy.deepcopy(group)])
    loader.take(2)

    assert restarted(loader).ids(3) == [0, 0, 1]


def test_a_group_made_by_hand_can_be_acknowledged(loader_of: Any) -> None:
    loader = loader_of(20, commit_on_ack=True, samples_per_group=2)
    loader.coordinator.add_groups([made_by_hand(100, size=2), made_by_hand(101, size=2)])
    first, _ = loader.groups(2)

    loader.coordinator.acknowledge([lease_key(first)])

    assert [ids(group) for group in restarted(loader).groups(2)] == [[101, 101], [0, 0]]


def test_counters_are_those_of_the_restart_point(loader_of: Any) -> None:
    loader = loader_of(20, every_third_dropped, commit_on_ack=True)
    uninterrupted = loader_of(20, every_third_dropped)
    first, second = loader.take(3), loader.take(4)
    loader.coordinator.acknowledge([lease_key([sample]) for sample in (*second, first[0])])

    restarted(loader).take(2)

    uninterrupted.take(7)
    assert loader.coordinator.ledger.counters == uninterrupted.coordinator.ledger.counters
    assert loader.ids(3) == uninterrupted.ids(3)


# A restart


def test_a_restart_drops_the_read_ahead_and_serves_waiting_requests(loader_of: Any) -> None:
    loader = loader_of(20, capacity=30)
    state = loader.snapshot()
    loader.take(15)
    request, wakes = waiting(loader, 10)

    loader.restore(state)
    assert wakes
    assert loader.coordinator.poll(request) is None
    wakes.clear()
    while not wakes:
        loader.work_on()

    assert ids(loader.coordinator.poll(request)) == list(range(10))


def test_a_waiting_request_calls_the_filter_again_after_a_restart(loader_of: Any) -> None:
    """What it had chosen is not in the buffer any more."""
    loader = loader_of(20)
    state = loader.snapshot()
    loader.coordinator.add_groups([made_by_hand(100)])
    request, _ = waiting(loader, 3)

    loader.restore(state)
    loader.coordinator.poll(request)
    loader.work_off()

    assert ids(loader.coordinator.poll(request)) == [0, 1, 2]


def test_an_old_channel_takes_no_more_entries(loader_of: Any) -> None:
    loader = loader_of(20)
    old = loader.coordinator.channel

    loader.coordinator.restart(lambda ledger: ledger)

    assert loader.coordinator.channel is not old
    assert loader.coordinator.reserve(old, 5, 1) is None
    assert loader.coordinator.reserve(loader.coordinator.channel, 5, 1) is not None


def test_a_restart_within_an_epoch_knows_that_it_had_samples(loader_of: Any) -> None:
    """The rest of the epoch may yield nothing."""
    loader = loader_of(4, lambda row: [row["id"]] if row["id"] < 2 else "too late", capacity=1)
    loader.take(2)
    assert loader.coordinator.ledger.position == Position(0, 0, 2)

    assert restarted(loader).ids(3) == [0, 1, 0]
