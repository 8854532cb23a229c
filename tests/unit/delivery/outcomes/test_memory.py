"""Outcomes: each score counts once, a state gives it again, and policies leave rows out by them."""

import statistics
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata import Outcomes, OutcomeTable, PassRate
from asyncdata.errors import ConfigError, SnapshotError
from tests.support.examples import in_ci
from tests.support.parts import OutcomeMemory, RowReport, RowTable, policy_of, row_ids


def scored(row, *scores, epoch=0):
    return RowReport(row, epoch, list(enumerate(scores)))


def test_a_row_takes_34_bytes_and_its_id_is_its_file_and_its_offset():
    memory = OutcomeMemory()
    memory.report([scored(row, 0.5) for row in range(20_000)], 1)
    assert sum(array.nbytes for array in memory.rows.arrays()) == 34 * len(memory.rows)
    assert row_ids([0, 1], [5, (1 << 44) - 1]).tolist() == [5, (1 << 45) - 1]
    for files, offsets in (([1 << 20], [0]), ([0], [1 << 44])):
        with pytest.raises(ConfigError, match="AD480"):
            row_ids(files, offsets)


def test_what_is_no_memory_and_rows_out_of_order_are_refused():
    memory, other = OutcomeMemory(), OutcomeMemory()
    memory.report([scored(1, 1.0), scored(2, 1.0)], 1)
    ids, rows = memory.rows.arrays()
    memory.rows = RowTable(ids[::-1].copy(), rows)
    for saved, reason in (
        (b"\x94\xc4\x01a\xc4\x00\x80\x80", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (memory.saved(), "ascending"),
    ):
        with pytest.raises(SnapshotError, match=f"AD602 .*{reason}"):
            other.restore(saved)


@pytest.mark.parametrize(("before", "after", "wanted"), [(3, 1, [0.5]), (1, 3, [0.5, None, None]), (2, 0, [])])
def test_another_policy_has_of_a_memory_the_epochs_that_both_remember(before, after, wanted):
    memory, found = OutcomeMemory(num_earlier=before), OutcomeMemory(num_earlier=after)
    for epoch, score in enumerate([1.0, 0.75, 0.5, 0.25] if before > 1 else [0.5, 0.25]):
        memory.report([scored(1, score, epoch=epoch)], 1)
    found.restore(memory.saved())
    assert [None if np.isnan(mean) else mean for mean in [mean for (mean,) in found.rows.table().earlier]] == wanted
    assert found.rows.table().last_mean.tolist() == [0.25]


# Whatever is reported, decided, saved and restored: the memory is what a dict of all scores says

ATTEMPTS = 70  # more than a word of 64
EPOCHS = 3
POLICY, OF_EPOCHS = (PassRate(0.2, 0.8, after=2, revisit_every=3, epochs=epochs) for epochs in (1, EPOCHS))

some_scores = st.lists(
    st.tuples(st.integers(0, ATTEMPTS - 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=6
)
all_scores = st.just([(attempt, 1.0) for attempt in range(ATTEMPTS)])
reports = st.tuples(st.integers(0, 5), st.integers(0, 4), some_scores | some_scores | all_scores)
reported = st.tuples(st.just("report"), st.lists(reports.map(lambda fields: RowReport(*fields)), max_size=4))
steps = st.one_of(
    reported, reported, st.tuples(st.just("decide"), st.integers(0, 6)), st.tuples(st.just("resume"), st.none())
)


def counted(scores, report):
    """Every score that counts, by row, epoch and attempt; return how many of a report's are new."""
    epochs = scores.setdefault(report.row_id, {})
    if epochs and report.epoch < max(epochs):
        return 0

    before = sum(map(len, epochs.values()))
    for attempt, score in report.scores:
        epochs.setdefault(report.epoch, {}).setdefault(attempt, score)
    return sum(map(len, epochs.values())) - before


def means_of(epochs):
    """Of the last epochs of a row, the latest first."""
    return [statistics.fmean(epochs[epoch].values()) for epoch in sorted(epochs, reverse=True)]


def excluded_of(scores, epoch, policy):
    found = set()
    for row, epochs in scores.items():
        is_known = sum(map(len, epochs.values())) >= 2 and epoch - max(epochs) < 3
        last = means_of(epochs)[: policy.epochs]
        if is_known and len(last) == policy.epochs and (max(last) < 0.2 or min(last) >= 0.8):
            found.add(row)
    return found


@in_ci(max_examples=60)
@given(steps=st.lists(steps, max_size=25), policy=st.sampled_from([POLICY, OF_EPOCHS]))
def test_the_memory_is_what_a_dict_of_all_scores_says(steps, policy):
    num_earlier = policy.epochs - 1
    memory, scores, decided = OutcomeMemory(num_earlier=num_earlier), {}, {}
    for name, value in steps:
        if name == "report":
            assert memory.report(value, ATTEMPTS) == sum(counted(scores, report) for report in value)
        elif name == "decide":
            wanted = decided[value] = excluded_of(scores, value, policy)
            assert set(memory.decide(value, policy).tolist()) == wanted
        else:
            saved, memory = memory.saved(), OutcomeMemory(num_earlier=num_earlier)
            memory.restore(saved)

        *columns, earlier = memory.rows.table()
        found = {row: told for row, *told in zip(*(column.tolist() for column in [*columns, *earlier]), strict=True)}
        assert list(found) == sorted(scores)
        for row, epochs in scores.items():
            all_of_row = [score for epoch in epochs.values() for score in epoch.values()]
            last = max(epochs)
            means = pytest.approx(statistics.fmean(all_of_row)), pytest.approx(means_of(epochs)[0])
            before = [*means_of(epochs)[1:], *[float("nan")] * num_earlier][:num_earlier]
            assert found[row] == [len(all_of_row), *means, last, *(pytest.approx(mean, nan_ok=True) for mean in before)]
        assert memory.num_scores == sum(told[0] for told in found.values())
        assert {epoch: set(ids.tolist()) for epoch, ids in memory.excluded.items()} == decided


@in_ci(max_examples=40)
@given(
    scores=st.lists(st.decimals(-1000, 1000, places=6), min_size=1, max_size=100),
    num_equal=st.integers(1, 300),
    limit=st.decimals(-1000, 1000, places=6),
    at_once=st.booleans(),
)
@example(scores=[Decimal("0.9")], num_equal=10, limit=Decimal("0.9"), at_once=False)
@example(scores=[Decimal("-0.1"), Decimal("-0.2"), Decimal("0.3")], num_equal=1, limit=Decimal(0), at_once=False)
@example(scores=[Decimal("0.899999")], num_equal=300, limit=Decimal("0.9"), at_once=True)
def test_a_mean_of_decimals_is_compared_as_decimals_are(scores, num_equal, limit, at_once):
    scores = scores * num_equal if len(scores) == 1 else scores
    memory = OutcomeMemory()
    pairs = [(attempt, float(score)) for attempt, score in enumerate(scores)]
    for reported in [pairs] if at_once else [[pair] for pair in pairs]:
        memory.report([RowReport(1, 0, reported)], len(pairs))
    table = memory.rows.table()
    for at in (limit, scores[0], Fraction(sum(scores)) / len(scores)):
        mean = Fraction(sum(scores)) / len(scores)
        assert PassRate(drop_above=float(at))(table, 1).tolist() == [mean >= at]
        assert PassRate(drop_below=float(at))(table, 1).tolist() == [mean < at]


def table(*rows):
    """Of (num_scores, mean, last_mean, last_epoch)."""
    counts, means, last_means, epochs = (np.array(column) for column in zip(*rows, strict=True))
    return OutcomeTable(np.arange(len(rows), dtype=np.uint64), counts, means, last_means, epochs)


def left_out(policy, outcomes, epoch=1):
    return np.flatnonzero(policy(outcomes, epoch)).tolist()


MEANS = table(*((8, mean, mean, 0) for mean in (0.0, 0.1, 0.5, 0.9, 1.0)))
MIXED = table((16, 0.5, 1.0, 1), (16, 1.0, 0.5, 1))


@pytest.mark.parametrize(
    ("policy", "outcomes", "wanted"),
    [
        (PassRate(drop_above=0.9), MEANS, [3, 4]), (PassRate(drop_below=0.1), MEANS, [0]),
        (PassRate(0.1, 0.9), MEANS, [0, 3, 4]), (PassRate(drop_above=0.9, after=8), MEANS, [3, 4]),
        (PassRate(drop_above=0.9, after=9), MEANS, []),
        pytest.param(PassRate(drop_above=0.9), MIXED, [0], id="the mean of the last epoch"),
        pytest.param(PassRate(drop_above=0.9, over="all"), MIXED, [1], id="the mean of all scores"),
    ],
)  # fmt: skip
def test_a_pass_rate_keeps_the_rows_between_its_limits(policy, outcomes, wanted):
    assert left_out(policy, outcomes) == wanted


def test_a_row_is_left_out_that_was_on_one_side_of_the_limits_in_each_of_the_last_epochs():
    nan = float("nan")
    rows = table(*((3, 1.0, loss, 2) for loss in (0.1, 0.1, 0.1, 4.0, 4.0, 0.1)))
    earlier = np.array([[0.1, 0.1], [0.1, 2.0], [0.1, nan], [5.0, 4.0], [5.0, 0.1], [4.0, 5.0]])
    outcomes = rows._replace(earlier=tuple(earlier.T))
    found = {epochs: left_out(PassRate(0.2, 4.0, epochs=epochs), outcomes, 3) for epochs in (1, 2, 3)}
    assert found == {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 4], 3: [0, 3]}
    low, high = PassRate(0.2, 4.0, epochs=3).sides(outcomes, 3)
    assert (np.flatnonzero(low).tolist(), np.flatnonzero(high).tolist()) == ([0], [3])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PassRate, {}, "PassRate: without limits it leaves no row out"),
        (PassRate, {"drop_below": 0.9, "drop_above": 0.1}, "PassRate"),
        (PassRate, {"drop_below": 0.5, "drop_above": 0.5}, "PassRate"),
        (PassRate, {"drop_above": float("nan")}, "PassRate"), (PassRate, {"after": 0}, "PassRate"),
        (PassRate, {"revisit_every": 0}, "PassRate"), (PassRate, {"over": "some"}, "PassRate"),
        (PassRate, {"epochs": 65}, "PassRate"),
        (PassRate, {"drop_above": 1, "epochs": 2, "over": "all"}, "PassRate: epochs=2 .* leave one out"),
        (Outcomes, {"path": ""}, "path"), (Outcomes, {"path": "a\0b"}, "path"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def as_numbers(outcomes, epoch):
    return outcomes.num_scores


def fails(outcomes, epoch):
    raise KeyError("mean")


NO_FUNCTION = 3


@pytest.mark.parametrize(
    ("name", "code"), [("as_numbers", "AD481"), ("fails", "AD481"), ("NO_FUNCTION", "AD420"), ("absent", "AD420")]
)
def test_a_function_that_is_no_policy_is_refused_by_its_name(name, code):
    with pytest.raises(ConfigError, match=f"{code}.*{name}"):
        policy_of(Outcomes(policy=f"{__name__}:{name}"))(MEANS, 1)
