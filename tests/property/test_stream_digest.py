"""However a stream is cut, it has one digest; and one that differs anywhere has another."""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncdata import Position
from asyncdata.delivery.channel import Channel
from asyncdata.delivery.chunk import Chunk
from asyncdata.delivery.ledger import Counters, Ledger
from asyncdata.delivery.next_delivery import deliver
from asyncdata.delivery.stream_digest import StreamDigest, sums_of
from tests.support.chunks import Lines, chunk_of
from tests.support.digests import Seen, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.thorough

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
rows = st.lists(st.one_of(token_lists, st.just("short")), min_size=1, max_size=40)
OF = st.sampled_from(["positions", "tokens"])


def with_sums(chunk_rows: list[list[int] | str], first: Position, of: str) -> Chunk:
    """A chunk as a worker's reply makes it."""
    chunk = chunk_of(*chunk_rows, first=first)
    if of == "positions":
        return chunk

    from asyncdata.tokenization.column_writer import ColumnWriter

    out = ColumnWriter()
    for number, row in enumerate(chunk_rows):
        if isinstance(row, str):
            out.drop(number, row)
        else:
            out.keep(number, row)
    sums = array("I", [zlib.crc32(array("i", row).tobytes()) for row in chunk_rows if not isinstance(row, str)])
    reply = msgspec.structs.replace(out.finish(len(chunk_rows), 0.0), token_sums=sums.tobytes())
    return Chunk(reply, first, len(chunk_rows), Lines(first=first.row), ends_epoch=False)


def pieces(data: st.DataObject, number: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < number:
        stop = data.draw(st.integers(start + 1, number))
        yield start, stop
        start = stop


@pytest.mark.parametrize("number", [4096, 4097, 20_000])
def test_a_chunk_of_any_length_has_the_digest_of_its_parts(number):
    ends = np.arange(3, 3 * number + 3, 3, dtype=np.uint32)

    parts = StreamDigest()
    for start in range(0, number, 1000):
        size = min(1000, number - start)
        parts = parts.plus(sums_of((0, 3, start), ends[:size]), 0, size)

    assert StreamDigest().plus(sums_of((0, 3, 0), ends), 0, number) == parts


@given(rows=rows, of=OF, data=st.data())
def test_any_cut_into_chunks_batches_and_runs_gives_one_digest(rows, of, data):
    seen = [Seen((0, 3, row), ids) for row, ids in enumerate(rows) if ids != "short"]
    ledger, left = Ledger(position=Position(0, 3, 0), counters=Counters(digest=StreamDigest(of))), len(seen)
    while left:
        # A run: a channel that begins where the last one ended, and is dropped with all that was read ahead.
        start = ledger.position.row
        channel = Channel(capacity=1000, max_bytes=1 << 30)
        for first, stop in pieces(data, len(rows) - start):
            chunk = with_sums(rows[start + first : start + stop], Position(0, 3, start + first), of)
            channel.fill(channel.enter(stop - first), chunk)
        ledger = msgspec.structs.replace(ledger, head=0, offset=0, taken=0)
        for first, stop in pieces(data, data.draw(st.integers(1, left))):
            delivery = deliver(channel.items(ledger.head), ledger, stop - first)
            assert delivery is not None
            ledger, left = delivery.ledger, left - (stop - first)
            assert ledger.counters.digest == digest_of(seen[: len(seen) - left], of)
        saved = msgspec.json.decode(msgspec.json.encode(ledger.counters))
        ledger = msgspec.structs.replace(ledger, counters=Counters.restored(saved, of))


def digest_in_one(samples: list[Seen], of: str) -> StreamDigest:
    """By the library, sample by sample: what it makes of chunks is tested above."""
    digest = StreamDigest(of)
    for (epoch, window, row), ids in samples:
        sums = np.array([zlib.crc32(array("i", ids).tobytes())], np.uint32) if of == "tokens" else None
        digest = digest.plus(sums_of((epoch, window, row), np.array([len(ids)], np.uint32), None, sums), 0, 1)
    return digest


places = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1 << 33))
streams = st.lists(st.builds(Seen, places, token_lists), min_size=2, max_size=12, unique_by=lambda seen: seen.position)


@given(samples=streams, of=OF, data=st.data())
def test_two_samples_that_change_places_are_noticed(samples, of, data):
    first, second = sorted(data.draw(st.sets(st.integers(0, len(samples) - 1), min_size=2, max_size=2)))
    other = list(samples)
    other[first], other[second] = other[second], other[first]

    before, after = digest_in_one(samples, of), digest_in_one(other, of)

    assert (before.positions, before.tokens) == (after.positions, after.tokens)
    assert before.order != after.order


@given(samples=streams, of=OF, data=st.data())
def test_a_missing_a_repeated_and_another_sample_are_noticed(samples, of, data):
    number = data.draw(st.integers(0, len(samples) - 2))
    row = data.draw(places)
    assume(row not in [seen.position for seen in samples])
    level = samples[:-1]  # all of as many samples

    missing = samples[:number] + samples[number + 1 :]
    repeated = [*level[: number + 1], level[number], *level[number + 1 :]][: len(level)]
    another = [*level[:number], Seen(row, level[number].tokens), *level[number + 1 :]]

    wanted = digest_in_one(level, of)
    for other in (missing, repeated, another):
        if other != level:
            found = digest_in_one(other, of)
            assert found.num_samples == wanted.num_samples
            assert found.positions != wanted.positions


@given(samples=streams, data=st.data())
def test_one_changed_token_is_noticed_where_tokens_are_hashed_and_one_more_in_any_case(samples, data):
    number = data.draw(st.integers(0, len(samples) - 1))
    position, ids = samples[number]
    place = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:place], ids[place] ^ (1 << data.draw(st.integers(0, 30))), *ids[place + 1 :]]
    others = [*samples[:number], Seen(position, changed), *samples[number + 1 :]]
    longer = [*samples[:number], Seen(position, [*ids, 0]), *samples[number + 1 :]]

    assert digest_in_one(samples, "positions") == digest_in_one(others, "positions")
    assert digest_in_one(samples, "tokens").tokens != digest_in_one(others, "tokens").tokens
    for of in ("positions", "tokens"):
        assert digest_in_one(samples, of).tokens != digest_in_one(longer, of).tokens


@given(samples=streams, of=OF)
def test_the_library_gives_the_digest_of_the_model(samples, of):
    assert digest_in_one(samples, of) == digest_of(samples, of)


def test_the_digest_of_a_stream_is_the_same_for_ever():
    """Snapshots of released versions hold digests, which those of a later version are compared with."""
    samples = [Seen((0, 0, 0), [1, 2, 3]), Seen((0, 0, 5), [4]), Seen((1, 7, 65535), [2**31 - 1, 0])]

    found = digest_in_one(samples, "tokens")

    assert [f"{word:016x}" for word in (found.positions, found.order, found.tokens or 0)] == GOLDEN


GOLDEN = ["eef4893c7bba4e2b", "838c35ffd62d7cec", "f4147cee84645ed3"]


def test_a_run_that_goes_on_from_a_snapshot_without_a_digest_begins_one_there():
    counters = Counters.restored({"num_groups": 70, "num_samples": 140}, "tokens")

    assert counters.digest == StreamDigest("tokens", first=70)


@pytest.mark.parametrize(("saved", "present"), [("positions", "tokens"), ("tokens", "positions")])
def test_what_was_not_hashed_from_the_beginning_is_unknown_for_ever(saved, present):
    before = msgspec.to_builtins(Counters(num_groups=3, digest=StreamDigest(saved, 0, 3, 1, 2, 3)))

    digest = Counters.restored(before, present).digest

    assert digest == StreamDigest(present, 0, 3, 1, 2, None)
    chunk = chunk_of([1], [2])
    assert digest.plus(chunk.sums, 0, 2).tokens is None
    assert Counters.restored(msgspec.to_builtins(Counters(digest=digest)), present).digest.tokens is None


def test_a_chunk_without_a_sample_adds_nothing():
    assert StreamDigest().plus(chunk_of("short").sums, 0, 0) == StreamDigest()
