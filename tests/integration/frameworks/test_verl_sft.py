"""SFTDataset in verl's own SFT trainer. Needs a checkout of verl, which ASYNCDATA_VERL names."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

import asyncdata.integrations.verl_sft
from asyncdata import ConfigError
from asyncdata.integrations.verl import VerlRows
from asyncdata.integrations.verl_sft import VerlSFTRows, check
from tests.support.frameworks.killed_runs import blocks_of, checkout, resumed_of, run_driver, told
from tests.support.frameworks.verl_sft import BATCH, BATCHES, EPOCHS, ROWS, STEPS, VARIABLE, write_rows

AN_EPOCH = ROWS // BATCH
SAVES = [1, AN_EPOCH, 13, STEPS - 1, STEPS]
OWN = {"data": {"custom_cls": {"path": None, "name": None}}, "trainer": {"total_epochs": EPOCHS}}
WITH_WORKERS = {**OWN["data"], "num_workers": 2}

RUNS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1, "changes": {}, "saves": SAVES},
    "two ranks": {"ranks": 2, "changes": {}, "saves": SAVES},
    "a row a batch": {"ranks": 4, "changes": {}, "saves": [13]},
    "in the order of the files": {"ranks": 2, "changes": {"data": {"asyncdata": {"shuffle": False}}}, "saves": [13]},
    "verl's own": {"ranks": 1, "changes": OWN, "saves": [3, AN_EPOCH, 13]},
    "verl's own, workers": {"ranks": 2, "changes": {**OWN, "data": WITH_WORKERS}, "saves": [3, AN_EPOCH, 13]},
}
OURS = [name for name in RUNS if not name.startswith("verl's own")]
RESTARTS: dict[str, dict[str, Any]] = {
    "with one rank less": {"of": "two ranks/killed_13", "ranks": 1, "changes": {}},
    "with another seed": {"of": "one rank/killed_13", "ranks": 1, "changes": {"data": {"asyncdata": {"seed": 2}}}},
    "from a checkpoint of verl's own": {"of": "verl's own/killed_3", "ranks": 1, "changes": {}},
}


def of_the_page() -> dict[str, Any]:
    """The configuration that the page tells a user to write."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found: dict[str, Any] = yaml.safe_load(blocks_of("use-it-with-verl.md", "yaml")[1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needed = ("torch", "torchdata", "hydra", "tensordict", "transformers", "pandas", "PIL")
    checkout(VARIABLE, "verl/trainer/sft_trainer.py", needed)
    folder = tmp_path_factory.mktemp("verl_sft")
    changes = of_the_page()
    changes["data"] |= write_rows(folder)
    changes["data"]["asyncdata"] |= {"cache": {"folder": str(folder / "index")}, "rows_per_epoch": EPOCHS * ROWS}
    module = "tests.support.frameworks.verl_sft"
    return run_driver(module, folder, changes=changes, runs=RUNS, restarts=RESTARTS)


pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", OURS)
def test_a_killed_sft_run_of_verl_continues_with_exactly_the_next_row(found: dict[str, Any], name: str) -> None:
    assert len(resumed_of(found[name])) == len(RUNS[name]["saves"])
    for resumed in resumed_of(found[name]):
        assert resumed.trained == found[name]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


def test_each_pass_over_the_data_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any]) -> None:
    rows = [row for batch in found["one rank"]["whole"] for row in batch]
    first, second, third = rows[:ROWS], rows[ROWS : 2 * ROWS], rows[2 * ROWS :]

    assert sorted(first) == sorted(second) == sorted(third) == list(range(ROWS))
    assert first != second != third


@pytest.mark.parametrize("name", ["two ranks", "a row a batch"])
def test_all_ranks_together_train_on_the_same_order_as_one(found: dict[str, Any], name: str) -> None:
    assert found[name]["whole"] == found["one rank"]["whole"]


def test_without_a_shuffle_rows_are_trained_on_as_they_lie_in_the_files(found: dict[str, Any]) -> None:
    rows = [row for batch in found["in the order of the files"]["whole"] for row in batch]

    assert rows == [*range(ROWS)] * EPOCHS


def test_an_item_is_what_verls_own_class_makes_of_the_row(found: dict[str, Any]) -> None:
    ours, own = found["items"]["ours"], found["items"]["own"]

    assert ours["train"] == own["train"]
    assert len(set(own["train"])) == own["length"] == ROWS
    assert ours["length"] == EPOCHS * ROWS
    assert ours["validation"] == own["validation"]
    assert len(own["validation"]) == 6 + 2


def test_a_row_may_have_no_tools_and_no_enable_thinking(found: dict[str, Any]) -> None:
    assert found["null"][0] == "<s> user 10 </s> <s> assistant 11 </s>"
    assert len(found["null"]) == 25


def test_an_image_has_its_bytes(found: dict[str, Any]) -> None:
    assert found["images"]["ours"] == found["images"]["own"]
    assert sum("pixel_values" in item for item in found["images"]["own"]) == 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with one rank less", "ConfigError: AD447 the sampler asks for .* continue a run with its number of"),
        ("with another seed", "SnapshotMismatchError: AD603 .*seed"),
        ("from a checkpoint of verl's own", "ConfigError: AD447 the sampler asks for .* that SFTDataset was used for"),
    ],
)
def test_a_restart_that_would_skip_or_repeat_rows_is_refused(found: dict[str, Any], name: str, said: str) -> None:
    assert re.match(said, found[name], re.DOTALL), found[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("workers", r"AD447 data.num_workers=8 .* data.asyncdata.num_workers to the number"),
        ("epochs", r"AD447 trainer.total_epochs=3.* Set trainer.total_epochs=1, and data.asyncdata.rows_per_epoch"),
        ("no index", "AD447 data.asyncdata.shuffle=true .* to 'full'"),
        ("the RL class", "AD447 .* pkg://asyncdata.integrations.verl_sft, and data.custom_cls.name to SFTDataset"),
        ("the SFT class for RL", "AD447 .* pkg://asyncdata.integrations.verl, and data.custom_cls.name to RLDataset"),
        ("a second epoch", "AD447 the sampler asks for .* Set trainer.total_epochs=1"),
        ("another seed", "AD447 the sampler asks for .* change no sampler of verl"),
        ("no shuffle", "AD447 the sampler asks for .* change no sampler of verl"),
        ("the trainer of Ray", "AD447 .* sft_trainer_ray always starts workers of torch"),
    ],
)
def test_what_would_break_the_order_is_refused_with_the_way_out(found: dict[str, Any], name: str, said: str) -> None:
    assert found["refusals"][name].startswith("ConfigError"), found["refusals"][name]
    assert re.search(said, found["refusals"][name], re.DOTALL), found["refusals"][name]


def test_verl_loses_an_epoch_where_it_is_restarted_at_an_epochs_end(found: dict[str, Any]) -> None:
    """It is why the training must be one epoch; should verl restore there one day, the page can be shorter."""
    [resumed] = [each for each in resumed_of(found["verl's own"]) if each.save_at == AN_EPOCH]

    assert (resumed.skipped, resumed.repeated) == (ROWS, 0)


def test_what_verls_own_data_set_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told({name: found[name] for name in RUNS}))

    assert all(len(resumed.trained) == BATCHES for name in RUNS for resumed in resumed_of(found[name]))


def test_settings_of_verl_that_break_the_order_are_refused_without_a_verl() -> None:
    check({"num_workers": 0, "asyncdata": {"shuffle": "full"}})

    with pytest.raises(ConfigError, match=r"AD447 data.num_workers=8 .* Set data.num_workers=0"):
        check({"num_workers": 8})
    with pytest.raises(ConfigError, match=r"AD447 data.asyncdata.shuffle=true .* to 'full'"):
        check({"asyncdata": {"shuffle": True}})


def test_each_class_names_the_other_where_it_is_given_to_the_wrong_trainer() -> None:
    with pytest.raises(ConfigError, match="AD447 data.custom_cls names RLDataset, .*verl_sft.* to SFTDataset"):
        VerlRows(parquet_files=["a"], tokenizer=None, config={}, processor=None, max_samples=-1)
    with pytest.raises(ConfigError, match="AD447 data.custom_cls names SFTDataset, .* data_files: .* to RLDataset"):
        VerlSFTRows(data_files=["a"], tokenizer=None, config={}, processor=None, max_samples=-1)


def test_a_missing_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)

    with pytest.raises(ConfigError, match="SFTDataset needs verl"):
        _ = asyncdata.integrations.verl_sft.SFTDataset
