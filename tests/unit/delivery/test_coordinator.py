"""A delivery that its caller did not receive is taken back, if nothing was delivered since; nothing comes twice.

What is delivered is held through loaders: by ``test_loader_machine.py``, and with cancelled and interrupted calls by
``tests/faults``, where it is by chance what comes between.
"""

from __future__ import annotations

import pytest

from tests.support.chunks import chunk_of, made_by_hand
from tests.support.parts import Coordinator, DeliveryRules, Request


def coordinator_of(**knobs):
    """With a chunk of twenty rows, whose tokens are their numbers."""
    on_room = knobs.pop("on_room", bool)
    made = Coordinator(DeliveryRules(capacity=20, max_ready_bytes=1 << 30, **knobs), on_room=on_room)
    made.fill(made.channel, made.reserve(made.channel, 20, 1), chunk_of(*range(20)))
    return made


def ids(samples):
    return [int(sample.tokens[0]) for sample in samples]


def take(coordinator, number):
    return ids(coordinator.poll(Request(number)))


@pytest.mark.parametrize("commit_on_ack", [False, True])
def test_a_delivery_whose_caller_is_gone_is_rolled_back_if_nothing_was_delivered_since(commit_on_ack):
    coordinator = coordinator_of(commit_on_ack=commit_on_ack)
    take(coordinator, 2)
    coordinator.add_groups([made_by_hand(100)])
    before, request = coordinator.ledger, Request(3)

    assert ids(coordinator.poll(request)) == [100, 2, 3]
    coordinator.withdraw(request)

    assert coordinator.ledger == before
    assert ids(coordinator.poll(late := Request(3))) == [100, 2, 3]
    assert take(coordinator, 2) == [4, 5]
    coordinator.withdraw(late)
    assert take(coordinator, 1) == [6], "or it would be delivered after the rows that follow it"


def test_samples_of_the_fast_path_are_rolled_back_if_nothing_was_delivered_since():
    coordinator = coordinator_of()
    take(coordinator, 2)

    def fail(samples):
        coordinator.failed.append((None, samples))
        coordinator.settle()

    before = coordinator.ledger
    fail(coordinator.take_ready(3))
    assert coordinator.ledger == before
    assert take(coordinator, 1) == [2]

    samples = coordinator.take_ready(2)
    assert coordinator.take_ready(2) is not None
    fail(samples)
    assert take(coordinator, 1) == [7]

    samples = coordinator.take_ready(2)
    coordinator.add_groups([made_by_hand(100)])
    fail(samples)
    assert take(coordinator, 2) == [100, 10]


def test_the_fast_path_is_not_used_where_a_request_is_needed():
    plain, on_ack = coordinator_of(), coordinator_of(commit_on_ack=True)
    for coordinator in (plain, on_ack):
        take(coordinator, 1)

    assert on_ack.take_ready(1) is None, "a lease has to be written"
    assert plain.take_ready(19) is None, "the run is not so long"
    assert plain.take_ready(1, last_epoch=-1) is None, "it is of a later epoch"
    plain.add_groups([made_by_hand(100), made_by_hand(101)])
    assert plain.take_ready(1) is None, "the buffer comes first"
    take(plain, 1)
    assert plain.take_ready(1) is None, "and there is more in it"


def test_an_interrupt_where_the_fast_path_makes_room_leaves_nothing_delivered():
    """Ctrl-C may come at any line; here it comes as late as it can."""

    def interrupted():
        raise KeyboardInterrupt

    coordinator = coordinator_of(on_room=interrupted)
    assert coordinator.reserve(coordinator.channel, 1, 1) is None, "there is no room: it is wanted"
    with pytest.raises(KeyboardInterrupt):
        coordinator.poll(Request(1))
    before = coordinator.ledger
    with pytest.raises(KeyboardInterrupt):
        coordinator.take_ready(2)
    assert coordinator.ledger == before


def served_for_packs(coordinator, number):
    """A request whose samples are there, and are not delivered yet."""
    request = Request(number, is_for_packs=True)
    assert coordinator.poll(request) is not None
    return request


def test_samples_to_be_packed_are_delivered_with_the_progress_of_packing_and_not_after_anything_else_was():
    coordinator = coordinator_of()
    take(coordinator, 2)
    before, request = coordinator.ledger, served_for_packs(coordinator, 3)
    assert coordinator.ledger == before
    assert coordinator.commit(request, "five")
    assert (coordinator.ledger.packs, coordinator.ledger.position) == ("five", request.after.position)

    before, request = coordinator.ledger, served_for_packs(coordinator, 3)
    assert coordinator.commit(request, "eight")
    coordinator.failed.append((request, None))
    assert coordinator.ledger == before

    late, other = served_for_packs(coordinator, 3), served_for_packs(coordinator, 2)
    assert coordinator.commit(other, "two")
    assert not coordinator.commit(late, "three")
    assert coordinator.ledger.packs == "two"
    assert take(coordinator, 1) == [7]
