"""A row that hangs: a timeout names it, by its line, and what the workers do is told as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from asyncdata import Limits, Mix
from asyncdata.errors import PrefetchTimeoutError
from tests.support.faults import until
from tests.support.loaders import gated, make
from tests.support.loading import line_of
from tests.support.tokenize_fns import waits_for_a_file

HANGING = 7


def tells_that_it_hangs(row):
    """Makes a file beside the gate before it waits for that."""
    if "gate" in row:
        Path(row["gate"]).with_name("hangs").touch()
    return waits_for_a_file(row)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("source", [lambda path: path, lambda path: Mix({"a": path})], ids=["one", "mixture"])
def test_a_timeout_names_the_row_that_hangs_and_its_event_has_a_field_for_each_fact(tmp_path, num_workers, source):
    path, gate = gated(tmp_path, HANGING)
    line, offset = line_of(path, HANGING)
    with (
        capture_logs() as logs,
        make(source(path), tells_that_it_hangs, shuffle=False, num_workers=num_workers, buffer_size=64) as loader,
    ):
        loader.start()
        until((tmp_path / "hangs").exists)
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(10, timeout_s=0.1)
        gate.touch()
        assert len(loader.get_next_batch(10)) == 10

    assert f"oldest row in flight: {path}:{line} (byte {offset})" in str(caught.value)
    assert caught.value.diagnosis["oldest_row"]["byte_offset"] == offset
    (event,) = [log for log in logs if log["event"] == "loader.timeout"]
    workers = event.pop("workers")
    assert "busy " in workers and workers in str(caught.value)
    assert event == {
        "event": "loader.timeout",
        "log_level": "warning",
        "waited_s": event["waited_s"],
        "stage": "tokenize",
        "missing": caught.value.diagnosis["num_missing"],
        "row": f"{path}:{line} (byte {offset})",
        "setting": "num_workers",
    }


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
