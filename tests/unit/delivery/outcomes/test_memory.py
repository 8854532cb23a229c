"""The memory: each score counts once, what changed is a record that gives it again; which rows a replay serves."""

from __future__ import annotations

import base64
import os
import tempfile
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdata import ConfigError, PassRate, SnapshotError
from asyncdata.delivery.outcomes.file import OutcomeFile
from asyncdata.delivery.outcomes.memory import BASE, OutcomeMemory, Record, RowReport
from asyncdata.delivery.outcomes.replay import chosen_ids, in_order
from asyncdata.delivery.outcomes.rows import RowTable, row_ids
from tests.support.examples import in_ci

SOLVED = PassRate(drop_above=0.9)


def scored(row: int, *scores: float, epoch: int = 0, first: int = 0) -> RowReport:
    return RowReport(row, epoch, list(enumerate(scores, first)))


def means(memory: OutcomeMemory) -> dict[int, float]:
    table = memory.rows.table()
    return dict(zip(table.ids.tolist(), table.last_mean.tolist(), strict=True))


def test_a_score_that_is_reported_again_is_counted_once():
    memory = OutcomeMemory()

    assert memory.report([scored(7, 1.0, 0.0)], 4) == 2
    assert memory.report([scored(7, 0.5, 0.5, 0.5)], 4) == 1, "only the third attempt is new"
    assert memory.report([scored(7, 1.0, 1.0, 1.0, 1.0)], 4) == 1
    assert memory.report([scored(7, 0.0, 0.0, 0.0, 0.0)], 4) == 0, "all attempts are there"
    assert means(memory) == {7: (1.0 + 0.0 + 0.5 + 1.0) / 4}
    assert (memory.num_scores, memory.num_repeated) == (4, 2 + 3 + 4)
    assert memory.report([scored(7, 1.0, epoch=2)], 4) == 1
    assert memory.report([scored(7, 0.0, epoch=1)], 4) == 0, "its row has scores of a later epoch"
    assert (memory.num_late, means(memory)) == (1, {7: 1.0})


def test_of_a_row_all_of_whose_attempts_are_reported_only_that_is_remembered():
    complete, is_open = OutcomeMemory(), OutcomeMemory()
    complete.report([scored(7, *[1.0] * 70)], 70)
    is_open.report([scored(7, *[1.0] * 69)], 70)

    assert len(is_open.base().payload) >= len(complete.base().payload) + 9, "69 bits"


def test_only_the_decisions_that_are_asked_for_are_kept():
    memory = OutcomeMemory()
    memory.report([scored(1, 1.0)], 1)
    for epoch in range(5):
        memory.decide(epoch, SOLVED)

    memory.forget_decisions(1, 4)
    assert sorted(memory.excluded) == [1, 2, 3]


def test_a_row_takes_34_bytes():
    memory = OutcomeMemory()
    memory.report([scored(row, 0.5) for row in range(20_000)], 1)

    assert memory.rows.num_bytes / len(memory.rows) < 36


def test_the_whole_memory_as_one_record_gives_it_again():
    memory, other = OutcomeMemory(), OutcomeMemory()
    memory.report([scored(1, 1.0), scored(2, 0.5, first=90), scored(3)], 100)
    memory.decide(1, SOLVED)
    other.apply(memory.base())

    assert other.base() == memory.base()
    assert other.num_scores == memory.num_scores
    assert other.report([scored(2, 0.5, first=90)], 100) == 0, "the reported attempts are known"


def test_records_that_no_file_takes_are_replaced_by_the_memory():
    memory, other = OutcomeMemory(keeps_records=True), OutcomeMemory()
    for number in range(60_000):
        memory.report([scored(number % 10, 1.0, epoch=number // 10)], 1)

    assert sum(len(record.payload) for record in memory.pending) < 1_200_000
    for record in memory.pending:
        other.apply(record)
    assert other.base() == memory.base()


OLD_RECORDS = [
    (b"E", "AQAAAAAAAAAHAAAAAAAAAM3MLEAAAAAAAAACAAAAAAAAAAMAAAAAAAAAAABAPwAAAAAAAAAAAAAAEAAAQAAAAAAAAAAAAIA/AAAAAAEA"),
    (b"X", "kgHECXgBWwAAAKEAoQ=="),
    (b"E", "AgAAAAAAAAABAAAAAAAAAAAAAD8BAAAAAAA="),
]
OLD_BASE = (
    "lsQYAQAAAAAAAAACAAAAAAAAAAAAAAAAEAAAxDYDAAAAzcwsQM3MLEAAAAAAAwADAAAAAACgPwAAAD8BAAAAAQABAAAAAACAPwAAgD8AAAAAAQCDAcQB"
    "BwLEAQHPAAAQAAAAAADECQAAAAAAAAAAQIEBxAl4AVsAAAChAKGAgA=="
)
"""Written when sums were float32: row 1 has 0.9 three times, row 2 has 0.25, 0.5 and then 0.5, row 2**44 has 1."""


def test_records_and_memories_with_float32_sums_still_load():
    memory, whole = OutcomeMemory(), OutcomeMemory()
    for kind, payload in OLD_RECORDS:
        memory.apply(Record(kind, base64.b64decode(payload)))
    whole.apply(Record(BASE, base64.b64decode(OLD_BASE)))

    assert memory.base() == whole.base()
    assert means(memory) == pytest.approx({1: 0.9, 2: 0.5, 1 << 44: 1.0})
    assert memory.excluded[1].tolist() == [1, 1 << 44]
    assert memory.report([scored(1, 0.9, 0.9, epoch=1)], 2) == 2
    assert memory.decide(2, SOLVED).tolist() == [1, 1 << 44]


@pytest.mark.parametrize(
    "record",
    [
        Record(b"?", b""),
        Record(b"E", b"12345"),
        Record(b"X", b"\xc1"),
        Record(BASE, b"\x94\xc4\x01a\xc4\x00\x80\x80"),
    ],
)
def test_a_record_that_is_none_is_refused(record):
    with pytest.raises(SnapshotError, match="record"):
        OutcomeMemory().apply(record)


def test_rows_out_of_order_are_refused():
    memory = OutcomeMemory()
    memory.report([scored(1, 1.0), scored(2, 1.0)], 1)
    ids, rows = memory.rows.arrays()
    memory.rows = RowTable(ids[::-1].copy(), rows)

    with pytest.raises(SnapshotError, match="ascending"):
        OutcomeMemory().apply(memory.base())


def test_the_id_of_a_row_is_its_file_and_its_offset():
    assert row_ids([0, 1], [5, (1 << 44) - 1]).tolist() == [5, (1 << 45) - 1]
    for files, offsets in (([1 << 20], [0]), ([0], [1 << 44])):
        with pytest.raises(ConfigError, match="AD480"):
            row_ids(files, offsets)


# Whatever is reported, decided, saved, killed and restored: the memory is what a dict of all scores says

ATTEMPTS = 70  # more than a word of 64
POLICY = PassRate(drop_below=0.2, drop_above=0.8, after=2, revisit_every=3)


class Model(NamedTuple):
    """Every score that counts, by row, epoch and attempt; and what was decided."""

    scores: dict[int, dict[int, dict[int, float]]]
    decided: dict[int, set[int]]

    def report(self, row: int, epoch: int, scores: list[tuple[int, float]]) -> int:
        """How many of them are new."""
        epochs = self.scores.setdefault(row, {}) if scores else self.scores.get(row, {})
        if epochs and epoch < max(epochs):
            return 0

        before = sum(map(len, epochs.values()))
        for attempt, score in scores:
            epochs.setdefault(epoch, {}).setdefault(attempt, score)
        return sum(map(len, epochs.values())) - before

    def excludes(self, epoch: int) -> set[int]:
        found = set()
        for row, epochs in self.scores.items():
            last = epochs[max(epochs)]
            mean = sum(last.values()) / len(last)
            is_known = sum(map(len, epochs.values())) >= 2 and epoch - max(epochs) < 3
            if is_known and not 0.2 <= mean < 0.8:
                found.add(row)
        return found


class Saved(NamedTuple):
    num_bytes: int
    digest: str
    model: Model


class Outcomes(RuleBasedStateMachine):
    """One run after the other over the same file."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self.folder.name, "outcomes"))
        self.memory, self.file = OutcomeMemory(keeps_records=True), OutcomeFile(self.path)
        self.model = Model({}, {})
        self.states = [Saved(0, "", deepcopy(self.model))]

    @rule(
        reports=st.lists(
            st.tuples(
                st.integers(0, 5),
                st.integers(0, 4),
                st.lists(st.tuples(st.integers(0, ATTEMPTS - 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=6),
            ),
            max_size=4,
        )
    )
    def report(self, reports: list[Any]) -> None:
        new = self.memory.report([RowReport(*report) for report in reports], ATTEMPTS)
        assert new == sum(self.model.report(*report) for report in reports)

    @rule(row=st.integers(0, 5), epoch=st.integers(0, 4), again=st.booleans())
    def report_all_attempts(self, row: int, epoch: int, again: bool) -> None:
        scores = [(attempt, 1.0) for attempt in range(ATTEMPTS)]
        for _ in range(1 + again):
            assert self.memory.report([RowReport(row, epoch, scores)], ATTEMPTS) == self.model.report(
                row, epoch, scores
            )

    @rule(epoch=st.integers(0, 6))
    def decide(self, epoch: int) -> None:
        wanted = self.model.decided.setdefault(epoch, self.model.excludes(epoch))
        assert set(self.memory.decide(epoch, POLICY).tolist()) == wanted

    @rule()
    def save(self) -> None:
        self.file.append(self.memory.pending)
        self.memory.written(list(self.memory.pending))
        self.states.append(Saved(self.file.num_bytes, self.file.digest, deepcopy(self.model)))

    @precondition(lambda self: self.file.num_bytes)
    @rule()
    def replace(self) -> None:
        """The file has grown: states of before find it beside the new one."""
        self.save()
        self.file.replace(self.memory.base())
        self.states = [self.states[-1], Saved(self.file.num_bytes, self.file.digest, deepcopy(self.model))]

    @rule(data=st.data(), tail=st.binary(max_size=20))
    def die_and_resume(self, data: Any, tail: bytes) -> None:
        """The file may end in half a record; a state of any earlier moment may be the one that is restored."""
        self.file.close()
        if os.path.exists(self.path):
            with open(self.path, "ab") as file:
                file.write(tail)
        number = data.draw(st.integers(0, len(self.states) - 1))
        saved = self.states[number]
        self.states = self.states[: number + 1]
        self.memory, self.file = OutcomeMemory(keeps_records=True), OutcomeFile(self.path)
        found = self.file.find(saved.num_bytes, saved.digest)
        for record in found.records:
            self.memory.apply(record)
        self.file.continue_after(found.path, found.data)
        self.model = deepcopy(saved.model)

    @invariant()
    def they_agree(self) -> None:
        table = self.memory.rows.table()
        assert table.ids.tolist() == sorted(row for row, epochs in self.model.scores.items() if epochs)
        for row, num_scores, mean, last_mean, last_epoch in zip(*(column.tolist() for column in table), strict=True):
            epochs = self.model.scores[row]
            scores = [score for epoch in epochs.values() for score in epoch.values()]
            last = list(epochs[max(epochs)].values())
            assert (num_scores, last_epoch) == (len(scores), max(epochs))
            assert np.isclose([mean, last_mean], [sum(scores) / len(scores), sum(last) / len(last)]).all()
        assert {epoch: set(ids.tolist()) for epoch, ids in self.memory.excluded.items()} == self.model.decided

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.file.close()
            self.folder.cleanup()


TestOutcomes = Outcomes.TestCase
TestOutcomes.settings = settings(in_ci(40), stateful_step_count=25)


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


# Which rows a replay serves, and in which order

SOMETIMES = PassRate(0.1, 0.6)


def ids_of(rows: dict[int, float], where: PassRate = SOMETIMES, *, seed: int = 42, name: str = "hard", number: int = 0):
    memory = OutcomeMemory()
    memory.report([RowReport(row, 0, [(0, mean)]) for row, mean in rows.items()], 1)
    return in_order(chosen_ids(memory.rows.table(), where), seed=seed, name=name, number=number).tolist()


scored_rows = st.dictionaries(st.integers(0, 1 << 63), st.sampled_from([0.0, 0.1, 0.5, 0.6, 1.0]), max_size=20)


@in_ci(max_examples=40)
@given(rows=scored_rows)
def test_the_rows_are_those_between_the_limits_each_once(rows):
    found = ids_of(rows)

    assert sorted(found) == sorted(row for row, mean in rows.items() if 0.1 <= np.float32(mean) < 0.6)
    assert ids_of(dict(reversed(rows.items()))) == found, "the order of the reports does not matter"


@in_ci(max_examples=40)
@given(rows=scored_rows, more=scored_rows)
def test_a_row_that_joins_them_moves_no_other(rows, more):
    before, after = ids_of(rows), ids_of({**more, **rows})

    assert [row for row in after if row in rows] == before


def test_each_pass_name_and_seed_has_an_order_of_its_own_which_never_changes():
    rows = dict.fromkeys(range(8), 0.5)

    assert ids_of(rows) == [2, 4, 1, 6, 3, 0, 5, 7]
    orders = [ids_of(rows), ids_of(rows, number=1), ids_of(rows, name="harder"), ids_of(rows, seed=43)]
    assert len({tuple(order) for order in orders}) == 4
