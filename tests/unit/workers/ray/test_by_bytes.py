"""Requests between processes that share no memory."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from asyncdata.core.messages import NO_SLOT, Block, Index, OfPart, Overflow, Scan, Scanned, Tokenize
from asyncdata.core.row_codes import EXCLUDED, NOT_IN_SLOT, TOO_LONG, cached_start
from asyncdata.workers.ray.by_bytes import in_slot, takes_samples, text_of, to_send

SLOT = memoryview(bytearray(b"....one.two..three"))


def ints(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def slot_of(number: int) -> memoryview:
    assert number == 2
    return SLOT


def test_the_text_of_the_rows_travels_and_nothing_else():
    starts = ints(13, 4, NOT_IN_SLOT, cached_start(0), 0, 8, 5)
    lengths = ints(5, 3, 900, 7, TOO_LONG, EXCLUDED, 0)
    request = Tokenize(2, starts, lengths, [Overflow(2, 0, 70)])
    sent = to_send(request, slot_of)

    assert sent.text == b"threeone"
    assert sent.request.starts == ints(0, 5, NOT_IN_SLOT, cached_start(0), 0, 0, 0)
    assert (sent.request.lengths, sent.request.overflow) == (lengths, request.overflow)


def test_a_request_of_a_part_stays_that():
    sent = to_send(OfPart(1, Tokenize(0, ints(4), ints(3))), lambda slot: slot_of(slot + 2))

    assert (sent.request.part, sent.text) == (1, b"one")


@pytest.mark.parametrize("request_", [Tokenize(NO_SLOT, ints(-1), ints(3)), Index([Block(0, 0, 9)], "none")])
def test_what_refers_to_no_slot_travels_as_it_is(request_):
    assert to_send(request_, slot_of) == (request_, b"")


def test_a_scan_without_samples_brings_its_text_into_the_slot():
    memory = memoryview(bytearray(64))
    scan = Scan(0, 20, [Block(0, 0, 9)])
    reply = Scanned(ints(2), ints(1, -1), ints(3, 90), ints(1, 5), 0)
    text = text_of(scan, reply, memoryview(b".abc???"))
    found = in_slot(scan, reply, text, lambda _: memory)

    assert bytes(text) == b".abc"
    assert bytes(memory[20:25]) == b".abc\0"
    assert np.frombuffer(found.starts, np.int32).tolist() == [21, -1]


def test_a_scan_with_samples_brings_no_text():
    scan = Scan(0, 20, [Block(0, 0, 9)], with_samples=True)
    reply = Scanned(ints(1), ints(1), ints(3), ints(1), 0)

    assert takes_samples(OfPart(0, scan))
    assert bytes(text_of(scan, reply, memoryview(b".abc"))) == b""
    assert in_slot(scan, reply, memoryview(b""), slot_of).starts == ints(NOT_IN_SLOT)
