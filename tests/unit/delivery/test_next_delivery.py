"""One delivery: which samples it takes, where it ends, what it counts, and what it refuses. It changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import NoSamplesError, Position
from asyncdata.delivery.channel import Channel, Failure, Run
from asyncdata.delivery.ledger import Counters, Ledger
from asyncdata.delivery.next_delivery import Delivery, advanced, deliver
from tests.support.chunks import BadRow, Noted, chunk_of

if TYPE_CHECKING:
    from asyncdata.delivery.chunk import Chunk


def deliver_from(
    contents: list[Chunk | Failure], num_groups: int, ledger: Ledger | None = None, **rules: Any
) -> Delivery | None:
    """A delivery from these chunks, of which nothing was taken before."""
    ledger = ledger or Ledger()
    acked = rules.pop("acked", frozenset())
    channel = Channel(capacity=1 << 20, max_bytes=1 << 30, acked=acked, epoch_groups=ledger.counters.epoch_groups)
    for content in contents:
        channel.fill(channel.enter(0), content)
    return deliver(channel.items(ledger.head), ledger, num_groups, **rules)


def taken(delivery: Delivery) -> list[int]:
    return [int(found.chunk.tokens_of(i)[0]) for found in delivery.ranges for i in range(found.start, found.stop)]


# What is taken


def test_nothing_is_changed() -> None:
    ledger = Ledger(counters=Counters(drops={"short": 1}))
    chunks = [chunk_of(0, "short", 1)]

    first, second = deliver_from(chunks, 2, ledger), deliver_from(chunks, 2, ledger)

    assert taken(first) == taken(second) == [0, 1]
    assert first.ledger.counters == second.ledger.counters
    assert ledger.counters == Counters(drops={"short": 1})


# What is counted


def test_a_noted_row_is_counted_when_the_delivery_reaches_it_and_is_not_dropped() -> None:
    chunks = [chunk_of(0, Noted(1), "short", 2, Noted(3), Noted(4))]

    found = [deliver_from(chunks, number).ledger.counters for number in range(1, 6)]

    assert [counters.notes.get("seen", 0) for counters in found] == [0, 1, 1, 2, 3]
    assert found[-1].drops == found[-1].epoch_drops == {"short": 1}


def test_notes_are_counted_once_over_many_deliveries_and_epochs() -> None:
    channel = Channel(capacity=100, max_bytes=100)
    for epoch in range(2):
        first = chunk_of(Noted(0), 1, Noted(2), first=Position(epoch, 0, 0))
        last = chunk_of(Noted(3), 4, first=Position(epoch, 0, 3), ends_epoch=True)
        for chunk in (first, last):
            channel.fill(channel.enter(3), chunk)
    ledger, counts = Ledger(counters=Counters(notes={"seen": 10, "other": 1})), []

    for _ in range(5):
        ledger = deliver(channel.items(ledger.head), ledger, 2).ledger
        counts.append(ledger.counters.notes["seen"])

    assert counts == [11, 13, 14, 15, 16]
    assert ledger.counters.notes["other"] == 1


# Where an epoch ends


def test_beyond_the_last_epoch_there_is_nothing() -> None:
    ledger = Ledger(position=Position(1, 0, 0))

    assert deliver_from([], 2, ledger, last_epoch=0) == Delivery([], 0, ledger, [], is_last=True)
    assert deliver_from([], 0, ledger, last_epoch=0) == Delivery([], 0, ledger, [], is_last=False)


def test_an_epoch_that_yields_nothing_says_what_dropped_its_rows() -> None:
    chunks = [
        chunk_of("too_long", "too_long", "no prompt"),
        chunk_of(BadRow("AD101"), first=Position(0, 0, 3), ends_epoch=True),
    ]

    with pytest.raises(NoSamplesError) as caught:
        deliver_from(chunks, 1, bad_row_stops=False)

    assert str(caught.value) == (
        "AD401 epoch 0: 4 rows read, 0 kept: 1 by bad row AD101, 1 by no prompt, 2 by too_long"
    )


# Bad rows


def test_rows_dropped_and_noted_beside_a_bad_row_are_counted_once_each() -> None:
    chunks = [chunk_of(0, "before", BadRow("AD101"), "behind", Noted(1), BadRow("AD421"), Noted(2))]

    found = deliver_from(chunks, 3, bad_row_stops=False)

    assert found.ledger.counters.drops == {"before": 1, "bad row AD101": 1, "behind": 1, "bad row AD421": 1}
    assert found.ledger.counters.notes == {"seen": 2}


# What the coordinator makes of it


def test_a_ledger_advanced_within_a_run_is_the_one_that_delivering_makes() -> None:
    chunk = chunk_of("a", [0, 0], "b", [1], [2, 2], "a", [3])
    channel = Channel(capacity=100, max_bytes=100)
    channel.fill(channel.enter(7), chunk)
    first = deliver(channel.items(0), Ledger(), 1, samples_per_group=2).ledger
    run = channel.item(first.head)
    assert isinstance(run, Run)

    jumped = advanced(first, run, 2, samples_per_group=2)

    walked = deliver(channel.items(first.head), first, 2, samples_per_group=2).ledger
    for name in Ledger.__struct_fields__:
        assert getattr(jumped, name) == getattr(walked, name), name
