"""RLDataset in verl's own trainers. Needs a checkout of verl, which ASYNCDATA_VERL names."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

import asyncdata.integrations.verl
from asyncdata import ConfigError
from asyncdata.integrations.verl import VerlRows, check
from tests.support.frameworks.killed_runs import block_of, checkout, resumed_of, run_driver, told
from tests.support.frameworks.verl import BATCH, ROWS, VARIABLE, write_rows

OWN = {"data": {"custom_cls": {"path": None, "name": None}, "shuffle": True, "seed": 1, "dataloader_num_workers": 2}}
ONE_EPOCH = {"data": {"asyncdata": {"rows_per_epoch": 3 * ROWS}}, "trainer": {"total_epochs": 1}}
STEPS = ROWS // BATCH

RUNS: dict[str, dict[str, Any]] = {
    "v1": {"trainer": "v1", "changes": {}, "saves": [7, STEPS, 13]},
    "v1 one prompt a fetch": {"trainer": "v1", "changes": {"data": {"gen_batch_size": 1}}, "saves": [7, STEPS]},
    "v1 in the order of the files": {
        "trainer": "v1",
        "changes": {"data": {"asyncdata": {"shuffle": False}}},
        "saves": [13],
    },
    "v0": {"trainer": "v0", "changes": ONE_EPOCH, "saves": [7, STEPS, 13]},
    "v0 with epochs": {"trainer": "v0", "changes": {}, "saves": [STEPS]},
    "v1 of verl": {"trainer": "v1", "changes": OWN, "saves": [7, STEPS, 13]},
    "v0 of verl": {"trainer": "v0", "changes": OWN, "saves": [7, STEPS, 13]},
}


def of_the_page() -> dict[str, Any]:
    """The configuration that the page tells a user to write."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found: dict[str, Any] = yaml.safe_load(block_of("use-it-with-verl.md", "yaml"))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, "verl/utils/dataset/rl_dataset.py", ("torch", "ray", "tensordict", "transfer_queue", "PIL"))
    folder = tmp_path_factory.mktemp("verl")
    changes = of_the_page()
    changes["data"] |= write_rows(folder)
    changes["data"]["asyncdata"]["cache"] = {"folder": str(folder / "index")}
    return run_driver("tests.support.frameworks.verl", folder, changes=changes, runs=RUNS)


pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["v1", "v1 one prompt a fetch", "v1 in the order of the files", "v0"])
def test_a_killed_run_of_verl_continues_with_exactly_the_next_row(found: dict[str, Any], name: str) -> None:
    for resumed in resumed_of(found[name]):
        assert resumed.trained == found[name]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


@pytest.mark.parametrize("name", ["v1", "v0"])
def test_each_epoch_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any], name: str) -> None:
    rows = [row for batch in found[name]["whole"] for row in batch]
    first, second = rows[:ROWS], rows[ROWS : 2 * ROWS]

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


def test_the_older_trainer_begins_the_epochs_again_where_the_training_is_not_one_epoch(found: dict[str, Any]) -> None:
    """It is why the page asks for that; should verl restore there one day, the page can be shorter."""
    [resumed] = resumed_of(found["v0 with epochs"])

    assert resumed.trained[STEPS : 2 * STEPS] == resumed.trained[:STEPS]


def test_a_row_has_the_fields_that_verls_own_class_gives_it(found: dict[str, Any]) -> None:
    ours, own = found["fields"]["ours"], found["fields"]["own"]

    assert ours["train"] == own["train"]
    assert len(own["train"]) == ROWS
    assert "b'\\x89PNG" in own["train"]["3"]["raw_prompt"], "an image has its bytes"
    assert {"raw_prompt", "data_source", "reward_model", "extra_info", "dummy_tensor"} <= set(own["validation"][0])


def test_validation_rows_are_those_of_verl_in_their_order_and_again(found: dict[str, Any]) -> None:
    assert found["fields"]["ours"]["validation"] == found["fields"]["own"]["validation"]
    assert len(found["fields"]["ours"]["validation"]) == 6 + 2


def test_without_a_shuffle_rows_come_as_they_lie_in_the_files(found: dict[str, Any]) -> None:
    rows = [row for batch in found["v1 in the order of the files"]["whole"] for row in batch]

    assert rows[: 2 * ROWS] == [*range(ROWS), *range(ROWS)]


def test_train_max_samples_takes_the_first_rows_in_the_order(found: dict[str, Any]) -> None:
    assert sorted(found["fields"]["first"]) == list(range(10))
    assert found["fields"]["first"] != list(range(10))


def test_a_row_tells_its_place_in_the_order(found: dict[str, Any]) -> None:
    assert found["fields"]["places"] == ["1:0:0", "1:0:1", "1:0:2"]


def test_what_verls_own_data_set_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told({name: found[name] for name in RUNS}))

    assert all(len(resumed.trained) == 27 for name in RUNS for resumed in resumed_of(found[name]))


def test_settings_of_verl_that_break_the_order_are_refused_with_the_way_out() -> None:
    settings = {"shuffle": False, "dataloader_num_workers": 0, "validation_shuffle": False}
    check(settings)

    for name, way_out in {
        "shuffle": "data.asyncdata.shuffle to the order",
        "dataloader_num_workers": "data.asyncdata.num_workers to the number",
        "validation_shuffle": "data.validation_shuffle=false",
    }.items():
        with pytest.raises(ConfigError, match=f"AD447 data.{name}=.*{re.escape(way_out)}"):
            check({**settings, name: True})


class Own:
    """What verl's own class does before it reads its files."""

    def __init__(self, data_files: list[str], tokenizer: Any, config: dict[str, Any], processor: Any = None) -> None:
        self.data_files = self.original_data_files = data_files
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, -1
        self.image_key, self.video_key, self.audio_key = "images", "videos", "audios"
        self.prompt_key, self.tool_schemas = "prompt", config.get("tool_schemas")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self._read_files_and_tokenize()

    def __getitem__(self, item: Any) -> Any:
        return self.dataframe[item]


class Filtered(VerlRows, Own):  # type: ignore[misc]
    """Ours over it."""


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint }}{% endif %}"
)


def filtered_by_verl(tokenizer: Any, rows: list[dict[str, Any]], config: dict[str, Any]) -> list[int]:
    """The numbers of the rows that verl's filter keeps, by the call that it makes."""
    given = {"tools": config["tool_schemas"]} if config.get("tool_schemas") else {}
    given |= config.get("apply_chat_template_kwargs", {})
    found = []
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **given
        )
        if len(ids) <= config["max_prompt_length"]:
            found.append(row["id"])
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"asyncdata": {"num_workers": 0, "shuffle": {"method": "slime"}}},
        {"apply_chat_template_kwargs": {"hint": "think first", "tokenize": False}},
        {"tool_schemas": TOOLS},
    ],
)
def test_prompts_that_verl_filters_out_are_dropped_and_not_counted(tmp_path, small_tokenizer, given):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer)
    tokenizer.chat_template = TEMPLATE  # as a setting of verl's model replaces it
    rows = [
        {"id": number, "prompt": [{"role": "user", "content": "words of a prompt " * (number * 7 % 13)}]}
        for number in range(60)
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {f"{name}_files": str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}
    plain = {name: given[name] for name in given if name != "apply_chat_template_kwargs"}
    config = {"max_prompt_length": 60, "asyncdata": {"num_workers": 0}, "shuffle": False, **files, **given}
    config |= {"dataloader_num_workers": 0, "validation_shuffle": False}
    hint = {"apply_chat_template_kwargs": {"hint": given.get("apply_chat_template_kwargs", {}).get("hint", "")}}
    expected = filtered_by_verl(tokenizer, rows, {**config, **plain, **hint})

    train, validation = (Filtered([files[name]], tokenizer, config) for name in ("train_files", "val_files"))
    try:
        assert 0 < len(expected) < len(rows)
        assert len(train) == len(validation) == len(expected)
        assert [row["id"] for row in validation.__getitems__(range(len(expected)))] == expected
        for _ in range(2):
            assert sorted(row["id"] for row in train.__getitems__(range(len(expected)))) == expected
    finally:
        train.close()
        validation.close()


def test_a_filter_of_prompts_with_images_is_refused_by_name(tmp_path):
    config = {"shuffle": False, "dataloader_num_workers": 0, "validation_shuffle": False, "train_files": "a"}

    with pytest.raises(ConfigError, match="AD447 data.filter_overlong_prompts=True with a model that takes images"):
        Filtered(["a"], None, config, processor=object())


def test_the_same_files_for_training_and_validation_are_refused() -> None:
    class Rows(VerlRows):
        config: Any = {"train_files": ["a"], "val_files": "a"}
        original_data_files = ("a",)

    with pytest.raises(ConfigError, match="AD447 data.train_files and data.val_files of verl are the same"):
        Rows().is_validation()


def test_a_missing_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)

    with pytest.raises(ConfigError, match="RLDataset needs verl"):
        _ = asyncdata.integrations.verl.RLDataset
