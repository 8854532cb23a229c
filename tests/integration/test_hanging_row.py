"""A row that hangs: what the workers do is told as it is."""

from __future__ import annotations

from pathlib import Path

from asyncdata import Limits
from tests.support.faults import until
from tests.support.loaders import gated, make
from tests.support.tokenize_fns import waits_for_a_file

HANGING = 7


def tells_that_it_hangs(row):
    """Makes a file beside the gate before it waits for that."""
    if "gate" in row:
        Path(row["gate"]).with_name("hangs").touch()
    return waits_for_a_file(row)


def test_the_time_for_which_a_worker_is_busy_does_not_fall_while_it_hangs(tmp_path):
    path, gate = gated(tmp_path, HANGING)
    seen: list[float] = []

    def is_over() -> bool:
        (worker,) = loader.statistics().workers
        seen.append(worker.busy_s)
        return worker.num_rows_done == HANGING and worker.busy_s >= 1.5

    limits = Limits(row_timeout_s=4)  # its progress is looked at each second
    with make(path, tells_that_it_hangs, shuffle=False, num_workers=1, buffer_size=64, limits=limits) as loader:
        until((tmp_path / "hangs").exists)
        until(is_over)
        gate.touch()
    assert seen == sorted(seen)
