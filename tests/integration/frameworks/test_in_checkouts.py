"""Adapters in the frameworks' own trainers and checkpoints; modules of ``tests/support/frameworks`` drive them."""

import importlib
from itertools import chain

import pytest

from tests.support.frameworks.killed_runs import needs, run_driver

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

DRIVERS = ("torchtitan", "verl", "verl_sft")


@pytest.fixture(scope="module", params=DRIVERS)
def found(request, tmp_path_factory):
    driver = importlib.import_module(f"tests.support.frameworks.{request.param}")
    needs(*driver.PACKAGES)
    return {"runs": {}, "same": {}} | run_driver(request.param, tmp_path_factory.mktemp("framework"))


def test_a_killed_run_continues_with_exactly_the_next_row(found):
    for name, runs in found["runs"].items():
        for save_at, trained in runs["resumed"]:
            assert trained == runs["whole"], f"{name}, killed after a save at step {save_at}"


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(found):
    """The short batch that a framework leaves out at the end of an epoch begins the next one."""
    for name, runs in found["runs"].items():
        rows, size, order = list(chain(*runs["whole"])), runs["rows"], runs.get("order", "own")
        first, second = rows[:size], rows[size : 2 * size]
        assert sorted(first) == sorted(second) == list(range(size)), name
        assert (first == second == list(range(size))) if order == "files" else (first != second), name


def test_what_the_framework_gets_is_what_its_own_code_makes(found):
    for name, (ours, expected) in found["same"].items():
        assert ours == expected, name
