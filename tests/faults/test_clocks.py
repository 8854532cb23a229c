"""The wall clock jumps, as at the end of summer time or when a laptop wakes: the loader does not read it."""

from __future__ import annotations

import itertools
import time
from unittest.mock import patch

import pytest

from asyncdata import DataLoader, Limits, PrefetchTimeoutError
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import row_id

pytestmark = [pytest.mark.thorough, pytest.mark.faults]

JUMPS_S = (0, -1e9, 1e9, -3600, 3600, 86_400 * 365)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_clock_that_jumps_changes_nothing(tmp_path, num_workers):
    path, now = write_rows(tmp_path / "rows.jsonl", 400), time.time
    jumps = itertools.cycle(JUMPS_S)
    found: list[int] = []
    num_saved = 0
    with (
        patch("time.time", lambda: now() + next(jumps)),
        patch("time.time_ns", lambda: int(1e9 * (now() + next(jumps)))),
        DataLoader(
            path,
            tokenize_fn=row_id,
            shuffle=SHUFFLE,
            num_workers=num_workers,
            timeout_s=NEVER_S,
            limits=Limits(row_timeout_s=5),
        ) as loader,
    ):
        for number in range(40):
            found += ids(loader.get_next_batch(20))
            if number % 5 == 0:
                loader.save(tmp_path / "snapshot")
                num_saved = len(found)
            if number % 15 == 14:
                loader.restore(tmp_path / "snapshot")
                del found[num_saved:]
            with pytest.raises(PrefetchTimeoutError):
                loader.get_next_batch(100_000, timeout_s=1e-6)
        assert loader.statistics().worker_restarts_total == 0

    assert found == order_of(path, 3)[: len(found)]
