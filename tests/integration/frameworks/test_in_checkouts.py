"""The adapters in the frameworks' own trainers and checkpoints: of checkouts that variables of the environment name.

A module of ``tests/support/frameworks`` drives each framework, and says which checkouts and packages it needs. What the
frameworks ask of the adapters is in ``tests/integration/test_adapters.py``, without a checkout.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

import pytest

from tests.support.frameworks.killed_runs import checkout, run_driver

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

DRIVERS = ("megatron", "nemo_rl", "openrlhf", "prime_rl", "skyrl", "skyrl_sft", "torchtitan", "verl", "verl_sft")


@pytest.fixture(scope="module", params=DRIVERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    driver = importlib.import_module(f"tests.support.frameworks.{request.param}")
    for variable, file in driver.NEEDS.items():
        checkout(variable, file, driver.PACKAGES)
    return {"runs": {}, "same": {}, "refused": {}} | run_driver(driver.__name__, tmp_path_factory.mktemp("framework"))


def rows_of(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_a_killed_run_continues_with_exactly_the_next_row(found: dict[str, Any]) -> None:
    """Where rollouts end in any order, the batches may differ, and the rows may not."""
    for name, runs in found["runs"].items():
        for save_at, trained in runs["resumed"]:
            told = f"{name}, killed after a save at step {save_at}"
            assert Counter(rows_of(trained)) == Counter(rows_of(runs["whole"])), told
            assert trained == runs["whole"] or runs.get("order") == "any", told


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any]) -> None:
    """The short batch that a framework leaves out at the end of an epoch begins the next one."""
    for name, runs in found["runs"].items():
        rows, size, order = rows_of(runs["whole"]), runs["rows"], runs.get("order", "own")
        first, second = rows[:size], rows[size : 2 * size]
        if order == "any":
            times = {rows.count(row) for row in range(size)}
            assert max(times) - min(times) <= 1, name
        else:
            assert sorted(first) == sorted(second) == list(range(size)), name
            assert (first == second == list(range(size))) if order == "files" else (first != second), name


def test_what_the_framework_gets_is_what_its_own_code_makes(found: dict[str, Any]) -> None:
    for name, (ours, expected) in found["same"].items():
        assert ours == expected, name


def test_what_would_lose_rows_is_refused_with_the_way_out(found: dict[str, Any]) -> None:
    for name, (said, expected) in found["refused"].items():
        assert re.match(expected, said, re.DOTALL), f"{name}: {said}"
