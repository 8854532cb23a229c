"""Whatever the number of workers, ranks, the buffer, the batch and the loop: the digest of all that comes is one."""

from __future__ import annotations

import itertools
import random
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData
from tests.faults.support.streaming import entry
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("trio")
pytest.importorskip("uvloop")

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

NUM_ROWS = 160
EPOCHS = 2
WAYS = {
    "num_workers": (0, 1, 2, 4),
    "dp_size": (1, 2, 8),
    "buffer_size": (1, 64, 4096),
    "batch": (1, 7, 64),
    "event_loop": ("asyncio", "uvloop", "trio"),
}
ALL = [dict(zip(WAYS, values, strict=True)) for values in itertools.product(*WAYS.values())]
ROUNDS = num_rounds(quick=8, full=len(ALL), long=len(ALL))


def digest_of(path: Path, batch: int, **knobs: Any) -> str:
    """Of all samples: their places, their numbers and their tokens."""
    state = blake2b(digest_size=16)
    with DataLoader(
        path, tokenize_fn=id_and_text, shuffle=SHUFFLE, epochs=EPOCHS, timeout_s=NEVER_S, **knobs
    ) as loader:
        while True:
            try:
                samples = loader.get_next_batch(batch)
            except EndOfData as end:
                state.update(b"".join(repr(entry(sample)).encode() for sample in end.samples))
                return state.hexdigest()

            state.update(b"".join(repr(entry(sample)).encode() for sample in samples))


def test_every_setting_has_the_same_digest(tmp_path):
    began = time.monotonic()
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    chosen = ALL if len(ALL) <= ROUNDS else random.Random(1).sample(ALL, ROUNDS)
    digests = {digest_of(path, **setting): setting for setting in chosen}

    with DataLoader(path, tokenize_fn=id_and_text, shuffle=SHUFFLE, num_workers=0, timeout_s=NEVER_S) as loader:
        found = [int(sample.tokens[0]) for sample in loader.get_next_batch(NUM_ROWS * EPOCHS)]
    assert found == order_of(path, EPOCHS)
    record("R3", "a file", settings=len(chosen), other_digests=len(digests) - 1)
    say(f"one order: {len(chosen)} settings, {len(digests)} digest; {time.monotonic() - began:.0f} s")
    assert len(digests) == 1, digests
