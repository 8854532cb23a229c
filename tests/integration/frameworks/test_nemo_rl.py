"""RowDataset in NeMo-RL's own loader and checkpoints. ASYNCDATA_NEMO_RL names a checkout of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import asyncdata.integrations.nemo_rl
from asyncdata import ConfigError
from asyncdata.integrations.nemo_rl import with_state
from tests.support.frameworks.killed_runs import block_of, checkout, resumed_of, run_driver, told
from tests.support.frameworks.nemo_rl import ROWS, VARIABLE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


def of_the_page() -> dict[str, Any]:
    """What the page tells a user to write under ``data``."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found: dict[str, Any] = yaml.safe_load(block_of("use-it-with-nemo-rl.md", "yaml"))["data"]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, "nemo_rl/data/utils.py", ("torch", "ray", "torchdata"))
    folder = tmp_path_factory.mktemp("nemo_rl")
    return run_driver("tests.support.frameworks.nemo_rl", folder, data=of_the_page())


def test_a_killed_run_of_nemo_rl_continues_with_exactly_the_next_row(found: dict[str, Any]) -> None:
    for resumed in resumed_of(found["runs"]["ours"]):
        assert resumed.trained == found["runs"]["ours"]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


def test_each_epoch_of_the_data_has_each_row_once(found: dict[str, Any]) -> None:
    """NeMo-RL leaves out the short batch of an epoch, and the next one begins with those rows."""
    rows = [row for batch in found["runs"]["ours"]["whole"] for row in batch]
    first, second = rows[:ROWS], rows[ROWS : 2 * ROWS]

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


def test_a_restart_without_with_state_is_refused(found: dict[str, Any]) -> None:
    assert found["forgotten"].startswith("AD445 an index of [4] is not the one after the last, which would be 0")


def test_what_nemo_rls_own_data_set_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told(found["runs"]))

    assert all(len(resumed.trained) == 27 for runs in found["runs"].values() for resumed in resumed_of(runs))


def test_a_data_set_without_a_loaders_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with_state\(\) was given list, which has no loader's state"):
        with_state(SimpleNamespace(dataset=[1, 2]))


def test_a_missing_nemo_rl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl", None)

    with pytest.raises(ConfigError, match="RowDataset needs nemo-rl"):
        _ = asyncdata.integrations.nemo_rl.RowDataset
