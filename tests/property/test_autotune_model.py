"""Whatever a loader reports, the autotuner keeps its limits, and changes what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.loader.autotune.policy import Autotuner, Change, Observation, TuningLimits
from tests.support.examples import in_ci
from tests.support.simulated import Simulation, Step, limits

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy

shares = st.floats(0, 1)
all_limits = st.builds(
    lambda least, more, capacity, worker_bytes, ready_bytes: TuningLimits(
        min_workers=least,
        max_workers=least + more,
        max_capacity=capacity,
        max_worker_bytes=worker_bytes,
        max_ready_bytes=ready_bytes,
    ),
    st.integers(1, 4),
    st.sampled_from([0, 1, 7, 60]),
    st.sampled_from([100, 1000, 1 << 40]),
    st.sampled_from([0, 1000, 1 << 40]),
    st.sampled_from([1, 100_000, 1 << 40]),
)
passages = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from([0.0, 0.001, 0.6, 5.0, 1e5]),
        "num_replies": st.sampled_from([0, 1, 50, 5000]),
        "rows": st.sampled_from([0, 1, 64, 1024]),
        "starved": shares,
        "full": st.booleans(),
        "work": shares,
        "starting": st.booleans(),
        "delivered": st.booleans(),
        "sample_bytes": st.sampled_from([0.0, 700.0, 1e9]),
        "worker_bytes": st.sampled_from([0, 90, 10_000]),
    }
)


@given(allowed=all_limits, seen=st.lists(passages, max_size=60))
def test_limits_are_kept_and_decisions_are_of_what_is_there(
    allowed: TuningLimits, seen: list[dict[str, float]]
) -> None:
    tuner = Autotuner(allowed)
    num_workers, capacity = allowed.min_workers, min(1000, allowed.max_capacity)
    totals = dict.fromkeys(("now_s", "num_replies", "num_rows", "starved_s", "work_s"), 0)
    for item in seen:
        seconds = item["seconds"]
        totals["now_s"] += seconds
        totals["num_replies"] += item["num_replies"]
        totals["num_rows"] += item["num_replies"] * item["rows"]
        for name in ("starved", "work"):
            totals[f"{name}_s"] += item[name] * seconds
        now = Observation(
            **totals,
            num_workers=num_workers,
            num_ready_workers=num_workers - bool(item["starting"]),
            capacity=capacity,
            was_full=bool(item["full"]),
            has_delivered=bool(item["delivered"]),
            sample_bytes=item["sample_bytes"],
            worker_bytes=int(item["worker_bytes"]),
        )
        change = tuner.step(now)
        if not isinstance(change, Change):
            continue

        assert change.before != change.after
        if change.what == "num_workers":
            assert change.before == num_workers
            num_workers = change.after
            assert allowed.min_workers <= num_workers <= allowed.max_workers
            grows = num_workers > change.before
            assert not grows or num_workers * now.worker_bytes <= allowed.max_worker_bytes
            assert num_workers <= 2 * change.before or not grows
        else:
            assert change.before == capacity < change.after <= allowed.max_capacity
            capacity = change.after
            assert capacity * now.sample_bytes <= allowed.max_ready_bytes


trainers = st.lists(
    st.tuples(st.integers(1, 4000), st.sampled_from([0.0, 0.01, 0.1, 1.0, 20.0]), st.integers(1, 40)), min_size=1
)


@in_ci(max_examples=40)
@given(
    trainer=trainers,
    row_s=st.sampled_from([1e-4, 1e-3, 2e-2]),
    noise=st.sampled_from([0.0, 0.3]),
    num_cpus=st.sampled_from([1, 4, 16]),
    most=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_any_trainer_is_served_and_decisions_end(
    trainer: list[tuple[int, float, int]], row_s: float, noise: float, num_cpus: int, most: int, seed: int
) -> None:
    """A minute, from the start on, is when most is decided; all that is left for later comes seldom, and seldomer."""

    def steps_of_it() -> list[Step]:
        return [Step(num_rows, seconds) for num_rows, seconds, times in trainer for _ in range(times)]

    def for_ever():
        while True:
            yield from steps_of_it()

    allowed = limits(max_workers=most)
    loader = Simulation(
        for_ever(), row_s=row_s, noise=noise, num_cpus=num_cpus, seed=seed, allowed=allowed, start_s=0.2
    )

    loader.run(60)

    assert loader.num_delivered or loader.row_s * steps_of_it()[0].num_rows > 5
    assert loader.num_workers <= most
    assert all(isinstance(change, Change) for change in loader.changes)
    assert len(loader.changes) <= 24
