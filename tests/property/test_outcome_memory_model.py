"""Whatever is reported, decided, saved, killed and restored: the memory is what a dict of all scores says."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdata import PassRate
from asyncdata.delivery.outcomes.file import OutcomeFile
from asyncdata.delivery.outcomes.memory import OutcomeMemory, RowReport

pytestmark = pytest.mark.thorough

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
