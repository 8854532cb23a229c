"""Whatever the number of workers, ranks, the buffer, the batch and the loop: the digest of all that comes is one."""

from __future__ import annotations

import itertools
import random
from hashlib import blake2b
from typing import Any

import pytest

from asyncdata import DataLoader
from asyncdata.errors import EndOfData
from tests.faults.support.streaming import entry
from tests.support.faults import num_rounds
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, order_of, write_rows
from tests.support.tokenize_fns import id_and_text

pytest.importorskip("trio")
pytest.importorskip("uvloop")

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

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


def delivered(path, batch: int, **knobs: Any) -> list[list[int]]:
    """All samples: their places, their numbers and their tokens."""
    knobs |= {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "epochs": EPOCHS, "timeout_s": NEVER_S}
    found: list[list[int]] = []
    with DataLoader(path, **knobs) as loader:
        while True:
            try:
                found += map(entry, loader.get_next_batch(batch))
            except EndOfData as end:
                return [*found, *map(entry, end.samples)]


def test_every_setting_has_the_same_digest(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 160)
    chosen = ALL if len(ALL) <= ROUNDS else random.Random(1).sample(ALL, ROUNDS)
    digests = {}
    for setting in chosen:
        found = delivered(path, **setting)
        assert [item[4] for item in found] == order_of(path, EPOCHS)
        digests[blake2b(repr(found).encode()).hexdigest()] = setting

    record("R3", "a file", settings=len(chosen), other_digests=len(digests) - 1)
    assert len(digests) == 1, digests
