"""The memory: each score counts once, and what changed is a record that gives the same memory again."""

from __future__ import annotations

import base64

import pytest

from asyncdata import ConfigError, PassRate, SnapshotError
from asyncdata.delivery.outcomes.memory import BASE, OutcomeMemory, Record, RowReport
from asyncdata.delivery.outcomes.rows import RowTable, row_ids

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


def test_a_score_of_an_earlier_epoch_than_the_rows_last_one_is_late_and_not_counted():
    memory = OutcomeMemory()
    memory.report([scored(7, 0.0, epoch=2)], 1)

    assert memory.report([scored(7, 1.0, epoch=1)], 1) == 0
    assert memory.num_late == 1
    assert means(memory) == {7: 0.0}


def test_an_epoch_begins_its_mean_anew_and_all_scores_stay_in_the_sum():
    memory = OutcomeMemory()
    memory.report([scored(7, 0.0, 0.0)], 2)
    memory.report([scored(7, 1.0, 1.0, epoch=3)], 2)

    table = memory.rows.table()
    assert (table.num_scores[0], table.mean[0], table.last_mean[0], table.last_epoch[0]) == (4, 0.5, 1.0, 3)


def test_a_decision_stays_when_more_is_reported():
    memory = OutcomeMemory()
    memory.report([scored(1, 1.0), scored(2, 0.0)], 1)

    assert memory.decide(1, SOLVED).tolist() == [1]
    memory.report([scored(2, 1.0, epoch=1)], 1)
    assert memory.decide(1, SOLVED).tolist() == [1]
    assert memory.decide(2, SOLVED).tolist() == [1, 2]


def test_only_the_decisions_that_are_asked_for_are_kept():
    memory = OutcomeMemory()
    memory.report([scored(1, 1.0)], 1)
    for epoch in range(5):
        memory.decide(epoch, SOLVED)

    memory.forget_decisions(1, 4)
    assert sorted(memory.excluded) == [1, 2, 3]


def test_rows_are_found_whatever_their_number_is():
    memory = OutcomeMemory()
    rows = [(n * 2654435761) % (1 << 40) for n in range(5000)]  # more than are added before they are sorted in
    memory.report([scored(row, 0.5) for row in rows], 1)
    memory.report([scored(row, 0.25, epoch=1) for row in rows], 1)

    assert means(memory) == dict.fromkeys(rows, 0.25)
    assert memory.rows.table().ids.tolist() == sorted(rows)


def test_a_row_takes_34_bytes():
    memory = OutcomeMemory()
    memory.report([scored(row, 0.5) for row in range(100_000)], 1)

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


@pytest.mark.parametrize("score", [0.1, 0.3, 0.6, 0.7, 0.9, 1.1, -0.7, 1e-7, 123456.7])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("over", ["last", "all"])
def test_equal_scores_are_neither_below_nor_above_themselves(score, at_once, over):
    memory, number = OutcomeMemory(), 50
    for epoch in range(3):
        reports = [[scored(1, *[score] * number, epoch=epoch)]]
        if not at_once:
            reports = [[scored(1, score, epoch=epoch, first=first)] for first in range(number)]
        for report in reports:
            memory.report(report, number)
            table = memory.rows.table()
            assert PassRate(drop_above=score, over=over)(table, 9).all()
            assert not PassRate(drop_below=score, over=over)(table, 9).any()


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
