"""What a snapshot for a rollout holds, case by case; ``test_rollout_ledger_model`` does the rest."""

from __future__ import annotations

import pytest

from asyncdata import SnapshotError
from asyncdata.integrations.slime.rollout_ledger import MAX_MARKS, Entry, Numbering, RolloutLedger


def entry(index: int | None, text: str = "") -> Entry:
    return Entry([object()], [{"text": text}], index)


def at(ledger: RolloutLedger, num_groups: int) -> RolloutLedger:
    """``num_groups`` more groups of two samples are delivered."""
    number = ledger.numbering
    return ledger.delivered(number.after(num_groups, 2, 0, number.sample_offset + num_groups))


def begun(ledger: RolloutLedger, rollout_id: int) -> RolloutLedger:
    assert ledger.begins(rollout_id)
    return ledger.marked(rollout_id, {"taken": ledger.numbering.sample_offset}, {"seen": rollout_id})


def test_groups_and_samples_are_numbered_across_epochs():
    number = Numbering().after(3, 8, 0, 3).after(2, 8, 1, 1)

    assert number == Numbering(epoch_id=1, sample_offset=1, sample_group_index=5, sample_index=40)


def test_a_rollout_is_saved_as_it_is_when_none_has_begun_after_it():
    ledger = at(begun(RolloutLedger(), 0), 4)

    assert ledger.start_after(0) is None


def test_before_any_rollout_the_present_moment_is_saved():
    assert RolloutLedger().start_after(-1) is None
    assert RolloutLedger().start_after(7) is None
    assert RolloutLedger().start_after(None) is None


def test_what_a_rollout_that_has_begun_too_early_was_given_is_not_in_the_snapshot_of_the_one_before():
    kept = entry(1, "as rollout 0 gave it back")
    ledger = at(begun(RolloutLedger(), 0), 4).with_buffer([kept])
    ledger = at(begun(ledger, 1).with_buffer([]), 4)
    ledger = ledger.with_buffer([entry(1, "as rollout 1 gave it back"), entry(5)])

    moment = ledger.start_after(0)

    assert moment is not None
    assert moment.entries == (kept,)
    assert moment.numbering == Numbering(sample_offset=4, sample_group_index=4, sample_index=8)
    assert moment.dataset == {"taken": 4}
    assert moment.metadata == {"seen": 1}
    assert ledger.start_after(1) is None


def test_a_group_of_the_rollout_that_comes_back_after_the_next_one_has_begun_is_in_its_snapshot():
    ledger = begun(at(begun(RolloutLedger(), 0), 4), 1)
    late, of_rollout_1 = entry(3, "late"), entry(4)
    ledger = at(ledger, 2).with_buffer([late, of_rollout_1])

    moment = ledger.start_after(0)

    assert moment is not None
    assert moment.entries == (late,)


def test_a_group_that_goes_out_and_comes_back_once_more_is_in_the_snapshot_once_and_as_it_was_first():
    first = entry(3, "first")
    ledger = begun(at(begun(RolloutLedger(), 0), 4), 1).with_buffer([first])
    ledger = ledger.with_buffer([]).with_buffer([entry(3, "second")])

    moment = ledger.start_after(0)

    assert moment is not None
    assert moment.entries == (first,)


def test_two_copies_of_a_group_that_are_both_out_both_come_back():
    copies = [entry(2, "one"), entry(2, "other")]
    ledger = begun(at(begun(RolloutLedger(), 0), 4), 1).with_buffer(copies[:1]).with_buffer(copies)

    moment = ledger.start_after(0)

    assert moment is not None
    assert list(moment.entries) == copies


def test_a_group_without_a_number_belongs_to_the_rollout_that_gives_it_back():
    ledger = begun(at(begun(RolloutLedger(), 0), 4), 1).with_buffer([entry(None)])

    moment = ledger.start_after(0)

    assert moment is not None
    assert moment.entries == ()


def test_an_evaluation_between_two_rollouts_does_not_begin_the_older_one_again():
    ledger = begun(begun(RolloutLedger(), 0), 1)

    assert not ledger.begins(0)
    assert not ledger.begins(1)
    assert not ledger.begins(None)
    assert ledger.begins(2)


def test_a_rollout_may_be_saved_twice():
    ledger = begun(at(begun(RolloutLedger(), 0), 4), 1)
    once = ledger.saved(0)

    assert once.start_after(0) is ledger.start_after(0)
    assert at(once.saved(0), 2).start_after(0) is ledger.start_after(0)


def test_a_rollout_that_is_too_long_ago_is_refused():
    ledger = begun(begun(RolloutLedger(), 0), 1).saved(1)
    with pytest.raises(SnapshotError, match=r"AD601 rollout 0 cannot be saved any more: rollout 1 was saved"):
        ledger.start_after(0)

    ledger = RolloutLedger()
    for rollout_id in range(10):
        ledger = begun(ledger, rollout_id)
    assert len(ledger.marks) == MAX_MARKS
    assert ledger.start_after(9 - MAX_MARKS) is ledger.marks[0].moment
    with pytest.raises(SnapshotError, match="cannot be saved any more"):
        ledger.start_after(8 - MAX_MARKS)


def test_a_group_that_went_out_twice_is_waited_for_twice():
    copies = [entry(2, "one"), entry(2, "other")]
    ledger = begun(at(RolloutLedger(), 4).with_buffer(copies), 1).with_buffer([])
    assert ledger.marks[0].again == {2: 2}
    ledger = ledger.with_buffer([entry(2), entry(2)])

    moment = ledger.start_after(0)

    assert moment is not None
    assert list(moment.entries) == copies
    assert ledger.saved(None) is ledger


def test_what_a_filter_drops_is_counted_by_reason():
    ledger = RolloutLedger().dropping("buffer_filter", 2).dropping("other", 0).dropping("buffer_filter", 1)

    assert ledger.drops == {"buffer_filter": 3}


def test_another_order_of_the_buffer_is_neither_a_going_nor_a_coming():
    groups = [entry(0), entry(1)]
    ledger = begun(at(RolloutLedger(), 4).with_buffer(groups), 1).with_buffer(groups[::-1])

    assert list(ledger.entries) == groups[::-1]
    assert ledger.marks[0].again == {}
