"""Which rows a replay serves, and in which order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import PassRate
from asyncdata.delivery.outcomes.memory import OutcomeMemory, RowReport
from asyncdata.delivery.outcomes.replay import chosen_ids, in_order

SOMETIMES = PassRate(0.1, 0.6)


def ids_of(rows: dict[int, float], where: PassRate = SOMETIMES, *, seed: int = 42, name: str = "hard", number: int = 0):
    memory = OutcomeMemory()
    memory.report([RowReport(row, 0, [(0, mean)]) for row, mean in rows.items()], 1)
    return in_order(chosen_ids(memory.rows.table(), where), seed=seed, name=name, number=number).tolist()


scored = st.dictionaries(st.integers(0, 1 << 63), st.sampled_from([0.0, 0.1, 0.5, 0.6, 1.0]), max_size=20)


@given(rows=scored)
def test_the_rows_are_those_between_the_limits_each_once(rows):
    found = ids_of(rows)

    assert sorted(found) == sorted(row for row, mean in rows.items() if 0.1 <= np.float32(mean) < 0.6)
    assert ids_of(dict(reversed(rows.items()))) == found, "the order of the reports does not matter"


@given(rows=scored, more=scored)
def test_a_row_that_joins_them_moves_no_other(rows, more):
    before, after = ids_of(rows), ids_of({**more, **rows})

    assert [row for row in after if row in rows] == before


def test_each_pass_name_and_seed_has_an_order_of_its_own_which_never_changes():
    rows = dict.fromkeys(range(8), 0.5)

    assert ids_of(rows) == [2, 4, 1, 6, 3, 0, 5, 7]
    orders = [ids_of(rows), ids_of(rows, number=1), ids_of(rows, name="harder"), ids_of(rows, seed=43)]
    assert len({tuple(order) for order in orders}) == 4
