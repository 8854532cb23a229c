"""plug_in in OpenRLHF's own trainer and checkpoints. ASYNCDATA_OPENRLHF names a checkout of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdata import ConfigError, SnapshotError
from asyncdata.integrations.openrlhf import PromptLoader, plug_in, prepare_datasets
from asyncdata.integrations.torch.views import LoaderOrderView
from tests.support.frameworks.killed_runs import checkout, resumed_of, run_driver, told
from tests.support.frameworks.openrlhf import BATCHES, EPISODES, ROWS, VARIABLE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

# A batch of 4 leaves a short one at an episode's end, at which OpenRLHF sees that end. After whole ones it does not.
OURS = {"ours, a short last batch": [True, 4, [3, 11, 13]], "ours, whole batches": [True, 6, [3, 7, 9]]}
OWN = {"OpenRLHF's, a short last batch": [False, 4, [3, 11, 13]], "OpenRLHF's, whole batches": [False, 6, [3, 7, 9]]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, "openrlhf/trainer/ppo_trainer.py", ("torch", "ray", "torchdata", "peft", "pylatexenc"))
    folder = tmp_path_factory.mktemp("openrlhf")
    return run_driver("tests.support.frameworks.openrlhf", folder, runs=OURS | OWN)


@pytest.mark.parametrize("name", OURS)
def test_a_killed_run_of_openrlhf_continues_with_exactly_the_next_row(found: dict[str, Any], name: str) -> None:
    runs = found["runs"][name]
    for resumed in resumed_of(runs):
        assert resumed.trained == runs["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


@pytest.mark.parametrize("name", OURS)
def test_each_episode_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any], name: str) -> None:
    rows = [row for batch in found["runs"][name]["whole"] for row in batch]
    first, second = rows[:ROWS], rows[ROWS : 2 * ROWS]

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert len(rows) == EPISODES * ROWS


def test_the_actors_of_ray_find_it_too(found: dict[str, Any]) -> None:
    assert found["functions"] == ["asyncdata.integrations.openrlhf"] * 2


def test_what_openrlhfs_own_loader_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told(found["runs"]))

    assert all(len(resumed.trained) == BATCHES for runs in found["runs"].values() for resumed in resumed_of(runs))


def _strategy(**changes: Any) -> Any:
    rollout = SimpleNamespace(batch_size=4, vllm_generate_batch_size=changes.get("generated", 4))
    data = SimpleNamespace(prompt_probs=changes.get("probs"), prompt_dataset="rows.jsonl")
    return SimpleNamespace(args=SimpleNamespace(rollout=rollout, data=data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generated": 8}, r"AD460 --rollout.vllm_generate_batch_size is 8 and --rollout.batch_size 4: .* Leave the"),
        ({"probs": "0.7,0.3"}, r"AD460 --data.prompt_probs is not followed: .* pass a mixture of sources to plug_in"),
    ],
)
def test_a_setting_with_which_prompts_would_be_lost_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_datasets(_strategy(**changes), None, source=None, settings={})


def test_a_state_of_openrlhfs_own_loader_is_refused() -> None:
    view: Any = LoaderOrderView.__new__(LoaderOrderView)

    with pytest.raises(SnapshotError, match="AD602 this is not the state of a view"):
        PromptLoader(view).load_state_dict({"_iterator_finished": False})


def test_a_missing_openrlhf_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openrlhf", None)

    with pytest.raises(ConfigError, match="plug_in needs openrlhf"):
        plug_in()
