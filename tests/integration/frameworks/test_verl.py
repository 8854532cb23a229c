"""What verl's trainers get of our data sets, whose base classes are stood in for.

That a killed run continues with the next row is in ``tests/integration/test_adapters.py``.
"""

# ruff: noqa: SLF001 - verl's trainers call methods of their own

from __future__ import annotations

import base64
import json
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, Mix, RowFn
from tests.support.loading import write_rows

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch.utils.data import DistributedSampler

from asyncdata.integrations.torch.row_scores import key_of, report_keys
from asyncdata.integrations.torch.sampler_places import SamplerPlaces
from asyncdata.integrations.verl import report_in_v1_trainer
from tests.support.adapters import KNOBS, stand_in_for_frameworks, verl_rows, verl_sft_rows
from tests.support.frameworks.stand_ins import stand_in_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ROWS = 12


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


@pytest.fixture(autouse=True)
def _verl(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_frameworks(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", NUM_ROWS))


# Rows


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_validation_rows_come_as_they_lie_in_their_file_and_again(path: str, make: Callable[..., Any]) -> None:
    config = {"train_files": "others.jsonl", "val_files": path, "asyncdata": KNOBS}
    with closing(make([path], config)) as rows:
        assert [ids(rows.__getitems__(range(NUM_ROWS))) for _ in range(2)] == [list(range(NUM_ROWS))] * 2
        assert rows[3]["id"] == 3


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_max_samples_are_the_first_rows_in_the_order_and_a_seed_of_verl_is_heard(
    path: str, make: Callable[..., Any]
) -> None:
    config = {"seed": 3, "asyncdata": {"num_workers": 0}}
    with closing(make([path], config, max_samples=10)) as rows, closing(make([path], config | {"seed": 4})) as other:
        first, second = (list(DistributedSampler(data, 1, 0)) for data in (rows, other))
        found = ids(rows.__getitems__(first if make is verl_sft_rows else range(10)))

        assert sorted(found) == list(range(10))
        assert found != list(range(10))
        assert ids(other.__getitems__(second if make is verl_sft_rows else range(12)))[:10] != found


def test_a_row_has_its_place_in_the_order_and_the_bytes_of_its_images(jsonl_file: Callable[..., Path]) -> None:
    image = {"bytes": base64.b64encode(b"\x89PNG").decode(), "path": None}
    path = jsonl_file([{"id": 0, "images": [image], "extra_info": {"index": 7}}, {"id": 1, "images": []}])
    with closing(verl_rows([str(path)], {"asyncdata": KNOBS | {"shuffle": False}})) as rows:
        assert rows.__getitems__([0, 1]) == [
            {
                "id": 0,
                "images": [{"bytes": b"\x89PNG", "path": None}],
                "extra_info": {"index": 7, "asyncdata_id": "0:0:0"},
            },
            {"id": 1, "images": [], "extra_info": {"asyncdata_id": "0:0:1"}},
        ]


def test_a_row_for_sft_may_have_no_tools_and_no_thinking(jsonl_file: Callable[..., Path]) -> None:
    path = jsonl_file([{"id": 0, "tools": ["a"], "enable_thinking": True}, {"id": 1}])
    with closing(verl_sft_rows([str(path)], {"val_files": str(path)})) as rows:
        assert [(row["tools"], row["enable_thinking"]) for row in (rows[0], rows[1])] == [(["a"], True), (None, None)]
        assert (rows.system_prompt, rows.generation_prompt) == ([1], [2])


# Prompts that are too long

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint }}{% endif %}"
)


def filtered_by_verl(tokenizer: Any, rows: list[dict[str, Any]], config: dict[str, Any], hint: str) -> list[int]:
    """The numbers of the rows that verl's filter keeps, by the call that it makes."""
    given = {"tools": config.get("tool_schemas"), "hint": hint}
    found = []
    for row in rows:
        tokens = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False, **given
        )
        if len(tokens) <= config["max_prompt_length"]:
            found.append(row["id"])
    return found


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, ""),
        ({"asyncdata": {"num_workers": 0, "shuffle": {"method": "slime"}}}, ""),
        ({"apply_chat_template_kwargs": {"hint": "think first", "tokenize": False}}, "think first"),
        ({"tool_schemas": TOOLS}, ""),
    ],
    ids=["plain", "slime's order", "variables of the template", "tools"],
)
def test_prompts_that_verl_filters_out_are_dropped_and_not_counted(
    jsonl_file: Callable[..., Path], small_tokenizer: Path, given: dict[str, Any], hint: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer)
    tokenizer.chat_template = TEMPLATE  # as a setting of verl's model replaces it
    words = [{"role": "user", "content": "words of a prompt " * (number * 7 % 13)} for number in range(60)]
    rows = [{"id": number, "prompt": [message]} for number, message in enumerate(words)]
    files = {f"{name}_files": str(jsonl_file(rows, f"{name}.jsonl")) for name in ("train", "val")}
    config = {"max_prompt_length": 60, "asyncdata": {"num_workers": 0}, **files, **given}
    expected = filtered_by_verl(tokenizer, rows, config, hint)

    train, validation = (verl_rows([path], config, tokenizer) for path in files.values())
    with closing(train), closing(validation):
        assert 0 < len(expected) < len(rows)
        assert len(train) == len(validation) == len(expected)
        assert ids(validation.__getitems__(range(len(expected)))) == expected
        for _ in range(2):
            assert sorted(ids(train.__getitems__(range(len(expected))))) == expected


def test_a_filter_of_prompts_with_images_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="AD447 data.filter_overlong_prompts=True with a model that takes images"):
        verl_rows(["a"], {"max_prompt_length": 9, "train_files": "a"}, processor=object())


# Scores of rows


def scored(path: str, outcomes: Any = None) -> Any:
    """A data set of which verl's trainer gives scores back."""
    settings = {"num_workers": 0, "outcomes": outcomes, "seed": 3, "rows_per_epoch": NUM_ROWS, "shuffle": True}
    return verl_rows([path], {"asyncdata": settings})


def statistics(rows: Any) -> Any:
    return rows._view.loader.statistics()


def step(rows: Any, indices: range, repeats: int = 2) -> list[int]:
    """One step of the older trainer: rollouts of each row, their scores, and the hook. Odd rows are solved."""
    taken = [json.loads(json.dumps(row)) for row in rows.__getitems__(indices)]
    repeated = [row for row in taken for _ in range(repeats)]
    scores = torch.tensor([[0.0, float(row["id"] % 2)] for row in repeated])
    infos = [row["extra_info"] for row in repeated]
    rows.on_batch_end(SimpleNamespace(batch={"token_level_scores": scores}, non_tensor_batch={"extra_info": infos}))
    return ids(taken)


def test_rows_that_verl_says_are_solved_are_left_out_of_the_next_epoch(path: str) -> None:
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows:
        assert sorted(step(rows, range(NUM_ROWS))) == list(range(NUM_ROWS))
        assert statistics(rows).outcome_scores_total == 2 * NUM_ROWS
        assert sorted(step(rows, range(6))) == [0, 2, 4, 6, 8, 10]


class Trainer:
    """verl's trainer of ``trainer.use_v1``, as far as scores go."""

    def __init__(self, train_dataset: Any) -> None:
        self.train_dataset = train_dataset

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch, metrics


def queue_of(fields: dict[str, tuple[Any, float]]) -> Any:
    """verl's TransferQueue with ``extra_info`` and the score of each key."""

    def kv_batch_get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert (partition_id, select_fields) == ("train", ["extra_info", "rm_scores"])
        infos = [SimpleNamespace(data=fields[key][0]) for key in keys]  # as tensordict wraps what is no tensor
        return {"extra_info": infos, "rm_scores": torch.tensor([[0.0, fields[key][1]] for key in keys])}

    return SimpleNamespace(kv_batch_get=kv_batch_get)


def test_the_trainer_of_use_v1_reports_scores_before_it_saves(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rollout's outputs the last one counts, and padding of a batch does not."""
    kind = type("PPOTrainer", (Trainer,), {"_compute_advantage": Trainer._compute_advantage})
    stand_in_module(monkeypatch, "verl.trainer.ppo.v1.trainer_base", PPOTrainer=kind, tq=None)
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows, closing(scored(path, {})):
        fields = {
            f"{row['id']}_{rollout}_{output}": (row["extra_info"], float(row["id"] % 2 if output == 10 else 7))
            for row in rows.__getitems__(range(NUM_ROWS))
            for rollout in range(2)
            for output in (9, 10)
        }
        vars(sys.modules["verl.trainer.ppo.v1.trainer_base"])["tq"] = queue_of(fields)
        tags = [{}] * len(fields) + [{"is_padding": True}]
        batch = SimpleNamespace(keys=[*fields, "padding_0_0"], tags=tags, partition_id="train")

        assert kind(rows)._compute_advantage(batch, metrics={}) == (batch, {})
        padding = SimpleNamespace(keys=["padding_0_0"], tags=[{"is_padding": True}], partition_id="train")
        assert kind(rows)._compute_advantage(padding, {}) == (padding, {})
        assert statistics(rows).outcome_scores_total == 2 * NUM_ROWS
        assert sorted(ids(rows.__getitems__(range(6)))) == [0, 2, 4, 6, 8, 10]


def test_a_trainer_of_use_v1_without_the_place_for_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_module(monkeypatch, "verl.trainer.ppo.v1.trainer_base", PPOTrainer=type("PPOTrainer", (), {}))

    with pytest.raises(ConfigError, match="AD447 data.asyncdata.outcomes: .* no _compute_advantage"):
        report_in_v1_trainer()


def test_a_row_of_a_mixture_is_reported_to_its_part(tmp_path: Path) -> None:
    mix = Mix({name: write_rows(tmp_path / f"{name}.jsonl", NUM_ROWS) for name in ("math", "code")}, quota=4)
    with DataLoader(mix, tokenize_fn=RowFn(), outcomes={}, num_workers=0, timeout_s=240) as loader:
        keys = json.loads(json.dumps([key_of(loader, sample) for sample in loader.get_next_batch(8)]))

        assert report_keys(loader, keys * 2, [1.0] * 15 + [float("nan")]) == 15
        by_source = loader.statistics().by_source
        assert [by_source[name].outcome_scores_total for name in ("code", "math")] == [8, 7]


def test_without_outcomes_a_batch_is_left_alone(path: str) -> None:
    with closing(scored(path)) as rows:
        assert len(step(rows, range(2))) == 2
        assert statistics(rows).outcome_rows == 0


# The shuffle of torch's sampler, which verl's SFT trainer has no setting for, undone


def indices(length: int, ranks: int = 1, rank: int = 0, **settings: Any) -> list[int]:
    """What torch's own sampler gives to a rank."""
    return list(DistributedSampler(range(length), ranks, rank, drop_last=True, **settings))  # type: ignore[arg-type]


def places_of(places: SamplerPlaces, wanted: list[int], batch_size: int) -> list[int]:
    found: list[int] = []
    for start in range(0, len(wanted), batch_size):
        batch = places.of(wanted[start : start + batch_size])
        assert batch is not None
        places.took(batch)
        found += batch
    return found


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (40, 3), (101, 8)])
def test_each_rank_has_every_nth_place(length: int, ranks: int, batch_size: int) -> None:
    for rank in range(ranks):
        found = places_of(SamplerPlaces(length), indices(length, ranks, rank), batch_size)

        assert found == list(range(length))[rank : length // ranks * ranks : ranks]


@pytest.mark.parametrize("taken", [0, 1, 2, 7])
def test_a_restored_rank_demands_the_next_place(taken: int) -> None:
    wanted = indices(40, 2, 1)
    before, after = SamplerPlaces(40), SamplerPlaces(40)
    places_of(before, wanted[:taken], 1)

    after.load_state_dict(before.state_dict())

    if taken:
        assert after.of(wanted[:4]) is None, "these were taken before"
    assert after.of(wanted[taken + 1 :]) is None, "one is skipped"
    assert places_of(after, wanted[taken:], 4) == list(range(1, 40, 2))[taken:]


SECOND_EPOCH = DistributedSampler(range(40), 1, 0, drop_last=True)  # type: ignore[arg-type, var-annotated]
SECOND_EPOCH.set_epoch(1)


@pytest.mark.parametrize(
    ("taken", "wanted"),
    [
        pytest.param([], indices(40, seed=1)[:4], id="another seed"),
        pytest.param([], [0, 1, 2, 3], id="no shuffle"),
        pytest.param([], indices(40)[3::-1], id="backwards"),
        pytest.param([], indices(40)[4:8], id="not from the start"),
        pytest.param([], indices(40)[:1] * 2, id="one twice"),
        pytest.param([], [*indices(40)[:2], *indices(40)[3:5]], id="a gap"),
        pytest.param(indices(40)[8:9], indices(40)[9:10], id="a first place of 8 is that of nine ranks or more"),
        pytest.param(indices(40, 2, 0)[:8], indices(40)[8:12], id="with one rank less"),
        pytest.param(indices(40, 2, 0)[:8], indices(40, 4, 0)[2:6], id="with more ranks"),
        pytest.param(indices(40), list(SECOND_EPOCH)[:1], id="a second epoch"),
        pytest.param(indices(40), indices(40)[:1], id="the same epoch again"),
    ],
)
def test_indices_of_another_sampler_have_no_places_and_nothing_is_taken(taken: list[int], wanted: list[int]) -> None:
    places = SamplerPlaces(40)
    places_of(places, taken, 1)
    state = places.state_dict()

    assert places.of(wanted) is None
    assert places.state_dict() == state


def test_an_index_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError, match=r"index 40 is not in 0\.\.39"):
        SamplerPlaces(40).of([40])


def test_a_sampler_of_another_order_is_refused_by_the_rows(path: str) -> None:
    with closing(verl_sft_rows([path], {"asyncdata": KNOBS})) as rows:
        with pytest.raises(ConfigError, match=r"AD447 the sampler asks for .* Set trainer.total_epochs=1"):
            rows.__getitems__([0, 1, 2, 3])

        assert rows.__getitems__([]) == []


def test_more_than_one_epoch_of_verls_sft_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"..trainer.total_epochs": 3}
    seen = SimpleNamespace(is_config=lambda config: True, select=lambda config, name: found[name])
    stand_in_module(monkeypatch, "omegaconf", OmegaConf=seen)

    with pytest.raises(ConfigError, match=r"AD447 trainer.total_epochs=3.* Set trainer.total_epochs=1, and data.async"):
        verl_sft_rows([path], {"train_files": path})
