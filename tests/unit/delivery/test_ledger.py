"""The ledger: where a restart continues, and which groups are still to be delivered again."""

from __future__ import annotations

import copy

import pytest

from asyncdata import Position, Sample
from tests.support.chunks import made_by_hand
from tests.support.parts import Counters, Lease, Ledger, Returned, lease_key


def place(row):
    return Position(0, 0, row)


def lease(before, *rows, **others):
    """A request that was served from row ``before`` on; groups of the stream are named by their rows."""
    opened = [(row, place(row)) for row in rows] + [(lease_key(item.group), item) for item in others.values()]
    return Lease(place(before), Counters(num_groups=before), tuple(opened))


def given_back(group_index):
    return Returned([Sample(group_index=group_index)], [{"group_index": group_index}])


def test_a_restart_continues_before_the_oldest_request_that_is_not_fully_acknowledged():
    ledger = Ledger(position=place(9), leases=(lease(0, 0, 1, 2), lease(3, 3, 4, 5), lease(6, 6, 7, 8)))

    position, counters, acked = ledger.acknowledged([0, 1, 2, 4, 8]).restart_point()

    assert (position, counters.num_groups, acked) == (place(3), 3, {place(4), place(8)})


@pytest.mark.parametrize("epoch", [2, 5])
def test_another_epoch_begins_at_its_first_row_and_keeps_what_is_not_of_an_epoch(epoch):
    of_run = {"num_groups": 5, "num_samples": 10, "num_tokens": 70, "drops": {"short": 2}}
    counters = Counters(**of_run, epoch_groups=4, epoch_drops={"short": 1})
    kept = {"buffer": (given_back(1),), "journal": frozenset({(0, 64)}), "head": 4, "offset": 3, "taken": 9}
    ledger = Ledger(position=Position(3, 2, 1), counters=counters, acked=frozenset({Position(3, 2, 4)}), **kept)

    after = ledger.at_epoch(epoch)

    # Acknowledged rows of the epoch that was left are served again when it comes again.
    assert after.restart_point() == (Position(epoch), Counters(**of_run), frozenset())
    assert {name: getattr(after, name) for name in kept} == kept


def test_another_epoch_owes_the_groups_that_came_from_the_buffer_and_no_others():
    first, second = given_back(1), given_back(2)
    ledger = Ledger(position=place(9), leases=(lease(0, 5, first=first), lease(6, 7, second=second))).at_epoch(1)

    assert ledger.leased_groups() == [first, second]
    assert ledger.acknowledged([5, 7]).leased_groups() == [first, second], "D makes those again"
    assert ledger.restart_point() == (Position(1), Counters(), frozenset())
    assert ledger.acknowledged([1]).leased_groups() == [second]
    assert ledger.acknowledged([1, 2]).leases == ()
    assert Ledger(leases=(lease(0, 5),)).at_epoch(1).leases == ()


def test_a_group_has_the_key_of_its_index_or_without_one_of_its_samples_in_any_list():
    group = [Sample(group_index=7, index=14), Sample(group_index=7, index=15)]
    unnamed, other = made_by_hand(1, size=2), made_by_hand(1, size=2)

    assert lease_key(group) == lease_key(copy.deepcopy(group)) == lease_key(group[1:]) == 7
    assert lease_key(unnamed) == lease_key(list(unnamed)) < 0
    assert lease_key(unnamed) != lease_key(other)
