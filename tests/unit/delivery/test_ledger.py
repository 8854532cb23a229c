"""The ledger: where a restart continues, and which groups are still to be delivered again."""

from __future__ import annotations

import copy

import pytest

from asyncdata import Position, Sample
from asyncdata.delivery.ledger import Counters, Lease, Ledger, Returned, lease_key
from tests.support.still_loader import made_by_hand


def place(row: int) -> Position:
    return Position(0, 0, row)


def lease(before: int, *rows: int, **others: Returned) -> Lease:
    """A request that was served from row ``before`` on; groups of the stream are named by their rows."""
    opened = [(row, place(row)) for row in rows] + [(lease_key(item.group), item) for item in others.values()]
    return Lease(place(before), Counters(num_groups=before), tuple(opened))


def given_back(group_index: int) -> Returned:
    return Returned([Sample(group_index=group_index)], [{"group_index": group_index}])


def test_a_restart_continues_before_the_oldest_request_that_is_not_fully_acknowledged() -> None:
    ledger = Ledger(position=place(9), leases=(lease(0, 0, 1, 2), lease(3, 3, 4, 5), lease(6, 6, 7, 8)))

    ledger = ledger.acknowledged([0, 1, 2, 4, 8])

    position, counters, acked = ledger.restart_point()
    assert position == place(3)
    assert counters.num_groups == 3
    assert acked == {place(4), place(8)}


@pytest.mark.parametrize("epoch", [2, 5])
def test_another_epoch_begins_at_its_first_row_with_counts_of_its_own_and_all_counts_of_the_run(epoch: int) -> None:
    counters = Counters(
        num_groups=5, num_samples=10, num_tokens=70, drops={"short": 2}, epoch_groups=4, epoch_drops={"short": 1}
    )
    ledger = Ledger(position=Position(3, 2, 1), counters=counters, acked=frozenset({Position(3, 2, 4)}))

    position, after, acked = ledger.at_epoch(epoch).restart_point()

    assert position == Position(epoch)
    assert after == Counters(num_groups=5, num_samples=10, num_tokens=70, drops={"short": 2})
    assert acked == frozenset(), "rows of the epoch that was left are served again when it comes again"


def test_another_epoch_keeps_the_buffer_and_what_is_known_of_rows_and_of_the_channel() -> None:
    ledger = Ledger(buffer=(given_back(1),), journal=frozenset({(0, 64)}), head=4, offset=3, taken=9)

    after = ledger.at_epoch(1)

    assert (after.buffer, after.journal) == (ledger.buffer, ledger.journal)
    assert (after.head, after.offset, after.taken) == (4, 3, 9)


def test_another_epoch_owes_the_groups_that_came_from_the_buffer_and_no_others() -> None:
    first, second = given_back(1), given_back(2)
    ledger = Ledger(position=place(9), leases=(lease(0, 5, first=first), lease(6, 7, second=second)))

    ledger = ledger.at_epoch(1)

    assert ledger.leased_groups() == [first, second]
    assert ledger.acknowledged([5, 7]).leased_groups() == [first, second], "D makes those again"
    assert ledger.restart_point() == (Position(1), Counters(), frozenset())
    assert ledger.acknowledged([1]).leased_groups() == [second]
    assert ledger.acknowledged([1, 2]).leases == ()
    assert Ledger(leases=(lease(0, 5),)).at_epoch(1).leases == ()


def test_a_ledger_is_a_value() -> None:
    """Whatever is made of it, it stays as it was: putting it back is the rollback."""
    ledger = Ledger(position=place(2), leases=(lease(0, 0, 1),))

    ledger.acknowledged([0])
    ledger.acknowledged(None)
    ledger.with_returned([given_back(1)])

    assert ledger.leases[0].open == ((0, place(0)), (1, place(1)))
    assert ledger.buffer == ()
    with pytest.raises(AttributeError):
        ledger.position = place(3)


def test_copies_of_a_group_have_the_key_of_its_index() -> None:
    group = [Sample(group_index=7, index=14), Sample(group_index=7, index=15)]

    assert lease_key(group) == lease_key(copy.deepcopy(group)) == lease_key(group[1:]) == 7


def test_a_group_without_an_index_has_the_key_of_its_samples_in_any_list() -> None:
    group, other = made_by_hand(1, size=2), made_by_hand(1, size=2)

    assert lease_key(group) == lease_key(list(group)) < 0
    assert lease_key(group) != lease_key(other)
