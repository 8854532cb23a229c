"""However a stream is cut, it has the digest of the model, which is the same for ever."""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Position
from asyncdata.delivery.next_delivery import deliver
from tests.support.chunks import Lines, chunk_of
from tests.support.digests import Seen, digest_of
from tests.support.parts import Channel, Chunk, Counters, DeliveryRules, Ledger, StreamDigest, sums_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.thorough

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
rows = st.lists(st.one_of(token_lists, st.just("short")), min_size=1, max_size=40)
OF = st.sampled_from(["positions", "tokens"])


def with_sums(chunk_rows: list[list[int] | str], first: Position, of: str) -> Chunk:
    chunk = chunk_of(*chunk_rows, first=first)
    if of == "positions":
        return chunk

    from tests.support.parts import ColumnWriter

    out = ColumnWriter()
    for number, row in enumerate(chunk_rows):
        if isinstance(row, str):
            out.drop(number, row)
        else:
            out.keep(number, row)
    sums = array("I", [zlib.crc32(array("i", row).tobytes()) for row in chunk_rows if not isinstance(row, str)])
    reply = msgspec.structs.replace(out.finish(len(chunk_rows), 0.0), token_sums=sums.tobytes())
    return Chunk(reply, first, len(chunk_rows), Lines(), ends_epoch=False)


def pieces(data: st.DataObject, number: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < number:
        stop = data.draw(st.integers(start + 1, number))
        yield start, stop
        start = stop


@given(rows=rows, of=OF, data=st.data())
def test_any_cut_into_chunks_batches_and_runs_gives_one_digest(rows, of, data):
    seen = [Seen((0, 3, row), ids) for row, ids in enumerate(rows) if ids != "short"]
    ledger, left = Ledger(position=Position(0, 3, 0), counters=Counters(digest=StreamDigest(of))), len(seen)
    while left:
        # A run: a channel that begins where the last one ended, and is dropped with all that was read ahead.
        start = ledger.position.row
        channel = Channel(DeliveryRules(capacity=1000, max_ready_bytes=1 << 30))
        for first, stop in pieces(data, len(rows) - start):
            chunk = with_sums(rows[start + first : start + stop], Position(0, 3, start + first), of)
            channel.fill(channel.enter(stop - first), chunk)
        ledger = msgspec.structs.replace(ledger, head=0, offset=0, taken=0)
        for first, stop in pieces(data, data.draw(st.integers(1, left))):
            delivery = deliver(channel.items(ledger.head), ledger, stop - first)
            assert delivery is not None
            ledger, left = delivery.ledger, left - (stop - first)
            assert ledger.counters.digest == digest_of(seen[: len(seen) - left], of)
        counters = msgspec.json.decode(msgspec.json.encode(ledger.counters), type=Counters)
        ledger = msgspec.structs.replace(ledger, counters=counters)


def test_the_digest_of_a_stream_is_the_same_for_ever():
    """Snapshots of released versions hold digests, which those of a later version are compared with."""
    samples = [Seen((0, 0, 0), [1, 2, 3]), Seen((0, 0, 5), [4]), Seen((1, 7, 65535), [2**31 - 1, 0])]
    digest = StreamDigest("tokens")
    for position, ids in samples:
        sums = np.array([zlib.crc32(array("i", ids).tobytes())], np.uint32)
        digest = digest.plus(sums_of(position, np.array([len(ids)], np.uint32), None, sums), 0, 1)

    found = [f"{word:016x}" for word in (digest.positions, digest.order, digest.tokens or 0)]
    assert found == ["eef4893c7bba4e2b", "838c35ffd62d7cec", "f4147cee84645ed3"]
    assert digest == digest_of(samples, "tokens")


@pytest.mark.parametrize(("saved", "present"), [("positions", "tokens"), ("tokens", "positions")])
def test_what_was_not_hashed_from_the_beginning_is_unknown_for_ever(saved, present):
    digest = StreamDigest(saved, 3, 1, 2, 3).resumed(present)

    assert digest == StreamDigest(present, 3, 1, 2, None)
    assert digest.plus(chunk_of([1], [2]).sums, 0, 2).tokens is None
    assert digest.resumed(saved).tokens is None
