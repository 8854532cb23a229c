"""The dataloader for torchtitan, built and checkpointed by torchtitan. ASYNCDATA_TORCHTITAN names a checkout of it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

import asyncdata.integrations.torchtitan
from asyncdata import ConfigError
from tests.support.frameworks.killed_runs import checkout, resumed_of, run_driver, told
from tests.support.frameworks.torchtitan import ROWS, TOKENS, VARIABLE

OWN = "torchtitan's"
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    packages = ("torch", "tyro", "torchdata", "datasets", "spmd_types")
    checkout(VARIABLE, "torchtitan/components/checkpointer/dcp.py", packages)
    return run_driver("tests.support.frameworks.torchtitan", tmp_path_factory.mktemp("torchtitan"))


def test_a_killed_run_of_torchtitan_continues_with_exactly_the_next_batch(found: dict[str, Any]) -> None:
    for resumed in resumed_of(found["ours"]):
        assert resumed.trained == found["ours"]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


def test_each_row_is_in_each_epoch_once(found: dict[str, Any]) -> None:
    rows = [row for batch in found["ours"]["whole"] for row in batch]
    epochs = len(rows) // ROWS

    assert epochs >= 2, "the run passes the end of an epoch"
    for epoch in range(epochs):
        assert sorted(rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS))


def test_a_checkpoint_of_one_rank_continues_on_two(found: dict[str, Any]) -> None:
    continued = [row for step in found["more ranks"]["ours"] for row in step]
    wanted = [row for batch in found["ours"]["whole"][8:16] for row in batch]

    assert Counter(continued) == Counter(wanted)


def test_the_loader_of_the_page_follows_torchtitans_command_line(found: dict[str, Any]) -> None:
    """Its tokenizer and the length of its contexts are options that are read after the configuration."""
    num_tokens, num_trained, longest, num_right = found["page"]

    assert num_tokens == TOKENS
    assert num_trained > 0
    assert longest <= TOKENS, "longer rows are dropped"
    assert num_right >= 1


def test_what_torchtitans_own_loader_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    if OWN not in found:
        pytest.skip("torchtitan 0.3 has no loader for these rows")
    runs = {name: found[name] for name in ("ours", OWN)}
    sys.stdout.write(f"\n{told(runs)}{OWN}, from 1 rank to 2: {found['more ranks'][OWN]}\n")

    assert all(len(resumed.trained) == 40 for of_one in runs.values() for resumed in resumed_of(of_one))


def test_a_missing_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)

    with pytest.raises(ConfigError, match="AsyncDataLoader needs torchtitan"):
        _ = asyncdata.integrations.torchtitan.AsyncDataLoader
