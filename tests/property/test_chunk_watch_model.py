"""What is recorded of chunks, in any order of chunks, looks, and restarts: exactly what was delivered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdata import Position
from asyncdata.telemetry import chunk_watch
from tests.support.chunks import BadRow, chunk_of
from tests.support.parts import EDGES, Channel, ChunkWatch, DeliveryRules, keys_of

pytestmark = pytest.mark.thorough

ROWS_PER_WINDOW = 12
EXCLUDED_EVERY = 5


def length_of(row):
    """Tokens of row ``row`` of D; 0: it is dropped, -1: it is bad."""
    return (row * 7) % 11 - 1


def place_of(row):
    return Position(0, *divmod(row, ROWS_PER_WINDOW))


def key_of(row):
    return int(keys_of(place_of(row), np.zeros(1, np.int64))[0])


class Watching(RuleBasedStateMachine):
    """Chunks come in any order; delivery is in order, up to what has come without a gap."""

    @initialize(size=st.integers(1, 6), held=st.sampled_from([0, 300_000, 1 << 30]), excludes=st.booleans())
    def begin(self, size, held, excludes):
        self.size, self.excludes = size, excludes
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(chunk_watch, "_MAX_HELD_BYTES", held)  # chunks are looked at one by one, in pairs, or late
        self.watch = ChunkWatch(size, lambda _: True)
        self.origin = self.sent = self.delivered = self.looked = 0
        self.recorded: dict[int, Any] = {}
        self.counted: list[int] = []
        self.new_channel()

    def new_channel(self):
        self.channel = Channel(DeliveryRules(capacity=1000, max_ready_bytes=1 << 20))
        self.come: set[int] = set()
        self.away: list[tuple[int, int]] = []

    def is_sample(self, row):
        return length_of(row) > 0 and not (self.excludes and row % EXCLUDED_EVERY == 0)

    @rule(num_rows=st.integers(1, 9))
    def send(self, num_rows):
        stop = min(self.sent + num_rows, (self.sent // ROWS_PER_WINDOW + 1) * ROWS_PER_WINDOW)
        self.away.append((self.sent, stop))
        self.sent = stop

    @precondition(lambda self: self.away)
    @rule(which=st.integers(0, 9))
    def come_back(self, which):
        start, stop = self.away.pop(which % len(self.away))
        rows = [length_of(row) for row in range(start, stop)]
        values = [[row] * n if n > 0 else ("too long" if n == 0 else BadRow("AD101")) for row, n in enumerate(rows)]
        chunk = chunk_of(*values, first=place_of(start))
        if self.excludes:
            rows = start + chunk.rows_of(0, chunk.num_samples)
            chunk.excluded = np.flatnonzero(rows % EXCLUDED_EVERY == 0)
        self.watch.see(self.channel, chunk)
        self.come |= set(range(start, stop))

    @rule(num_rows=st.integers(0, 20))
    def deliver(self, num_rows):
        while num_rows and self.delivered in self.come:
            self.delivered, num_rows = self.delivered + 1, num_rows - 1

    @rule()
    def look(self):
        for record in self.watch.settle(self.channel, place_of(self.delivered)):
            row = record.place.window * ROWS_PER_WINDOW + record.place.row
            assert row not in self.recorded
            self.recorded[row] = record
        self.counted += [length_of(row) for row in range(self.looked, self.delivered) if self.is_sample(row)]
        self.looked = self.delivered

    @rule(back=st.integers(0, 30))
    def restart(self, back):
        self.look()
        self.watch.forget_rest()
        self.delivered = self.looked = self.sent = max(0, self.delivered - back)
        self.new_channel()

    @invariant()
    def the_lengths_are_those_that_were_delivered(self):
        counts: dict[int, int] = {}
        for length in self.counted:
            edge = max(edge for edge in EDGES if edge <= length)
            counts[edge] = counts.get(edge, 0) + 1
        assert self.watch.lengths == dict(sorted(counts.items()))

    def teardown(self):
        self.patch.undo()
        self.look()
        ever = set(self.recorded) | set(range(self.delivered))
        good = [row for row in ever if self.is_sample(row)]
        best = sorted(good, key=key_of)[: self.size]
        assert set(best) <= set(self.recorded)
        for row, record in self.recorded.items():
            assert self.is_sample(row)
            assert (record.key, record.num_tokens) == (key_of(row), length_of(row))


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
