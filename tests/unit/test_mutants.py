"""The table that ends a mutation run: what was not noticed has survived, whatever else it is called."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.mutants import SCORES, chosen, percent, read, table

PRINTED = """\
    asyncdata.delivery.ledger.x_lease_key__mutmut_1: killed
    asyncdata.delivery.ledger.x_lease_key__mutmut_2: survived
    asyncdata.delivery.ledger.x_lease_key__mutmut_3: timeout
    asyncdata.delivery.ledger.x_lease_key__mutmut_4: no tests
    asyncdata.delivery.rollout_buffer.x_choose__mutmut_1: segfault
    asyncdata.order.order.x__feistel__mutmut_1: not checked
""".splitlines()


def test_a_mutant_is_noticed_by_a_failure_a_hang_or_a_crash_and_by_nothing_else() -> None:
    rows = [line.split() for line in table(read(PRINTED)).splitlines()[1:]]

    assert rows == [
        ["delivery.ledger", "4", "1", "2", "1", "50.0", "%"],
        ["delivery.rollout_buffer", "1", "1", "0", "0", "100.0", "%"],
        ["all", "5", "2", "2", "1", "60.0", "%"],
    ]


def test_mutants_that_were_not_tried_do_not_count() -> None:
    begun = ["asyncdata.order.order.x__feistel__mutmut_2: killed", *PRINTED]

    assert "order.order" not in read(PRINTED)
    assert percent(Counter(read(begun)["order.order"].values())) == 100


def test_a_sample_is_the_same_for_the_same_seed_and_0_is_all() -> None:
    names = [f"asyncdata.order.order.x__feistel__mutmut_{number}" for number in range(50)]

    assert chosen(names, 10, 3) == chosen(names[::-1], 10, 3) != chosen(names, 10, 4)
    assert sorted(chosen(names, 0, 3)) == sorted(chosen(names, 90, 3)) == sorted(names)


def test_a_room_that_is_recorded_is_there() -> None:
    rooms = {path.name for path in (Path(__file__).parents[2] / "asyncdata").iterdir() if path.is_dir()}

    assert set(json.loads(SCORES.read_text())) <= rooms


def test_no_mutants_are_no_success() -> None:
    assert percent(Counter()) == 0
