"""One delivery: where it ends, what it counts, and what it refuses. It changes nothing."""

from __future__ import annotations

import pytest

from asyncdata import Position
from asyncdata.delivery.next_delivery import deliver
from asyncdata.errors import NoSamplesError
from tests.support.chunks import BadRow, Noted, chunk_of
from tests.support.parts import Channel, Counters, Delivery, Ledger


def deliver_from(contents, num_groups, ledger=None, **rules):
    """A delivery from these chunks, of which nothing was taken before."""
    ledger = ledger or Ledger()
    channel = Channel(capacity=1 << 20, max_bytes=1 << 30)
    for content in contents:
        channel.fill(channel.enter(0), content)
    return deliver(channel.items(ledger.head), ledger, num_groups, **rules)


def test_rows_are_counted_when_the_delivery_reaches_them_and_nothing_else_is_changed():
    ledger = Ledger(counters=Counters(drops={"short": 1}))
    chunks = [chunk_of(0, Noted(1), "short", 2, BadRow("AD101"), Noted(3), Noted(4))]

    found = [deliver_from(chunks, number, ledger).ledger.counters for number in range(1, 6)]

    assert [counters.notes.get("seen", 0) for counters in found] == [0, 1, 1, 2, 3]
    assert [counters.drops["short"] for counters in found] == [1, 1, 2, 2, 2]
    assert found[-1].epoch_drops == {"short": 1, "bad row AD101": 1}
    assert ledger.counters == Counters(drops={"short": 1})


def test_notes_are_counted_once_over_many_deliveries_and_epochs():
    channel = Channel(capacity=100, max_bytes=100)
    for epoch in range(2):
        first = chunk_of(Noted(0), 1, Noted(2), first=Position(epoch, 0, 0))
        last = chunk_of(Noted(3), 4, first=Position(epoch, 0, 3), ends_epoch=True)
        for chunk in (first, last):
            channel.fill(channel.enter(3), chunk)
    ledger, counts = Ledger(counters=Counters(notes={"seen": 10, "other": 1})), []

    for _ in range(5):
        ledger = deliver(channel.items(ledger.head), ledger, 2).ledger
        counts.append(ledger.counters.notes)

    assert counts == [{"seen": number, "other": 1} for number in (11, 13, 14, 15, 16)]


def test_beyond_the_last_epoch_there_is_nothing():
    ledger = Ledger(position=Position(1, 0, 0))

    for number, is_last in ((2, True), (0, False)):
        assert deliver_from([], number, ledger, last_epoch=0) == Delivery([], 0, ledger, [], is_last=is_last)


def test_an_epoch_that_yields_nothing_says_what_dropped_its_rows():
    first = chunk_of(0, "too_long", ends_epoch=True)
    second = chunk_of("too_long", "too_long", "no prompt", first=Position(1, 0, 0))
    last = chunk_of(BadRow("AD101"), first=Position(1, 0, 3), ends_epoch=True)

    with pytest.raises(NoSamplesError) as caught:
        deliver_from([first, second, last], 2)

    told = "AD401 epoch 1: 4 rows read, 0 kept: 1 by bad row AD101, 1 by no prompt, 2 by too_long"
    assert str(caught.value) == told
