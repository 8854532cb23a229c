"""What verl's trainers get of our data sets, whose base classes are stood in for.

That a killed run continues with the next row is in ``tests/integration/test_adapters.py``.
"""

# ruff: noqa: SLF001 - verl's trainers call methods of their own

import base64
import json
from contextlib import closing
from itertools import product
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader, Mix, RowFn
from asyncdata.errors import ConfigError
from tests.support.loading import write_rows

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch.utils.data import DistributedSampler

from asyncdata.integrations.adapters import key_of, report_keys
from asyncdata.integrations.torch.views import SamplerPlaces
from asyncdata.integrations.verl import report_in_v1_trainer
from tests.support.adapters import KNOBS, stand_in_for_frameworks, verl_rows, verl_sft_rows
from tests.support.frameworks.stand_ins import stand_in_module

NUM_ROWS = 12
EVEN = [0, 2, 4, 6, 8, 10]
TRAINER = "verl.trainer.ppo.v1.trainer_base"


def ids(rows):
    return [row["id"] for row in rows]


@pytest.fixture(autouse=True)
def _verl(monkeypatch):
    stand_in_for_frameworks(monkeypatch)


@pytest.fixture
def path(tmp_path):
    return str(write_rows(tmp_path / "rows.jsonl", NUM_ROWS))


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_validation_rows_come_as_they_lie_in_their_file_and_again(path, make):
    config = {"train_files": "others.jsonl", "val_files": path, "asyncdata": KNOBS}
    with closing(make([path], config)) as rows:
        assert [ids(rows.__getitems__(range(NUM_ROWS))) for _ in range(2)] == [list(range(NUM_ROWS))] * 2
        assert rows[3]["id"] == 3


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_max_samples_are_the_first_rows_in_the_order_and_a_seed_of_verl_is_heard(path, make):
    config = {"seed": 3, "asyncdata": {"num_workers": 0}}
    with closing(make([path], config, max_samples=10)) as rows, closing(make([path], config | {"seed": 4})) as other:
        first, second = (list(DistributedSampler(data, 1, 0)) for data in (rows, other))
        found = ids(rows.__getitems__(first if make is verl_sft_rows else range(10)))
        assert sorted(found) == list(range(10))
        assert found != list(range(10))
        assert ids(other.__getitems__(second if make is verl_sft_rows else range(12)))[:10] != found


def test_a_row_has_its_place_in_the_order_and_the_bytes_of_its_images(jsonl_file):
    png, place = b"\x89PNG", "asyncdata_id"
    image = {"bytes": base64.b64encode(png).decode(), "path": None}
    path = jsonl_file([{"id": 0, "images": [image], "extra_info": {"index": 7}}, {"id": 1, "images": []}])
    with closing(verl_rows([str(path)], {"asyncdata": KNOBS | {"shuffle": False}})) as rows:
        assert rows.__getitems__([0, 1]) == [
            {"id": 0, "images": [{"bytes": png, "path": None}], "extra_info": {"index": 7, place: "0:0:0"}},
            {"id": 1, "images": [], "extra_info": {place: "0:0:1"}},
        ]


def test_a_row_for_sft_may_have_no_tools_and_no_thinking(jsonl_file):
    path = jsonl_file([{"id": 0, "tools": ["a"], "enable_thinking": True}, {"id": 1}])
    with closing(verl_sft_rows([str(path)], {"val_files": str(path)})) as rows:
        assert [(row["tools"], row["enable_thinking"]) for row in (rows[0], rows[1])] == [(["a"], True), (None, None)]
        assert (rows.system_prompt, rows.generation_prompt) == ([1], [2])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint }}{% endif %}"
)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        pytest.param({}, "", id="plain"),
        pytest.param({"asyncdata": {"num_workers": 0, "shuffle": {"method": "slime"}}}, "", id="slime's order"),
        pytest.param({"apply_chat_template_kwargs": {"hint": "think", "tokenize": False}}, "think", id="variables"),
        pytest.param({"tool_schemas": TOOLS}, "", id="tools"),
    ],
)
def test_prompts_that_verl_filters_out_are_dropped_and_not_counted(jsonl_file, small_tokenizer, given, hint):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer)
    tokenizer.chat_template = TEMPLATE  # as a setting of verl's model replaces it
    words = [{"role": "user", "content": "words of a prompt " * (number * 7 % 13)} for number in range(60)]
    rows = [{"id": number, "prompt": [message]} for number, message in enumerate(words)]
    files = {f"{name}_files": str(jsonl_file(rows, f"{name}.jsonl")) for name in ("train", "val")}
    config = {"max_prompt_length": 60, "asyncdata": {"num_workers": 0}, **files, **given}
    # The call that verl's filter makes.
    call = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, "hint": hint}
    call["tools"] = config.get("tool_schemas")
    expected = [row["id"] for row in rows if len(tokenizer.apply_chat_template(row["prompt"], **call)) <= 60]

    train, validation = (verl_rows([path], config, tokenizer) for path in files.values())
    with closing(train), closing(validation):
        assert 0 < len(expected) < len(rows)
        assert len(train) == len(validation) == len(expected)
        assert ids(validation.__getitems__(range(len(expected)))) == expected
        for _ in range(2):
            assert sorted(ids(train.__getitems__(range(len(expected))))) == expected


def test_a_filter_of_prompts_with_images_is_refused_by_name():
    with pytest.raises(ConfigError, match="AD447 data.filter_overlong_prompts=True with a model that takes images"):
        verl_rows(["a"], {"max_prompt_length": 9, "train_files": "a"}, processor=object())


def scored(path, outcomes=None):
    """A data set of which verl's trainer gives scores back."""
    settings = {"num_workers": 0, "outcomes": outcomes, "seed": 3, "rows_per_epoch": NUM_ROWS, "shuffle": True}
    return verl_rows([path], {"asyncdata": settings})


def statistics(rows):
    return rows._view.loader.statistics()


def step(rows, indices, repeats=2):
    """One step of the older trainer: rollouts of each row, their scores, and the hook. Odd rows are solved."""
    taken = [json.loads(json.dumps(row)) for row in rows.__getitems__(indices)]
    repeated = [row for row in taken for _ in range(repeats)]
    scores = torch.tensor([[0.0, float(row["id"] % 2)] for row in repeated])
    infos = [row["extra_info"] for row in repeated]
    rows.on_batch_end(SimpleNamespace(batch={"token_level_scores": scores}, non_tensor_batch={"extra_info": infos}))
    return ids(taken)


def test_rows_that_verl_says_are_solved_are_left_out_of_the_next_epoch(path):
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows:
        assert sorted(step(rows, range(NUM_ROWS))) == list(range(NUM_ROWS))
        assert statistics(rows).outcome_scores_total == 2 * NUM_ROWS
        assert sorted(step(rows, range(6))) == EVEN


def test_without_outcomes_a_batch_is_left_alone(path):
    with closing(scored(path)) as rows:
        assert len(step(rows, range(2))) == 2
        assert statistics(rows).outcome_rows == 0


@pytest.fixture
def v1(monkeypatch):
    """Stands in for verl's trainer of ``use_v1`` and its replay buffer; ``fields`` is its TransferQueue."""
    fields = {}

    class Trainer:
        def __init__(self, train_dataset):
            self.train_dataset = train_dataset

        def _compute_advantage(self, batch, metrics):
            return batch, metrics

        def add_prompts(self): ...

    class Buffer:
        def __init__(self, refill_fn, filter_groups_metric="acc"):
            self.refill_fn, self.filter_groups_metric = refill_fn, filter_groups_metric
            self.partitions = {name: dict.fromkeys(fields, {}) for name in ("train", "val")}

        def _clear_groups(self, partition_id, uids):
            for key in [key for key in fields if key.split("_")[0] in uids]:
                del fields[key]

    def kv_batch_get(keys, partition_id, select_fields):
        assert (partition_id, select_fields) == ("train", ["extra_info", "rm_scores"])
        infos = [SimpleNamespace(data=fields[key][0]) for key in keys]  # as tensordict wraps what is no tensor
        return {"extra_info": infos, "rm_scores": torch.tensor([[0.0, fields[key][1]] for key in keys])}

    queue = SimpleNamespace(kv_batch_get=kv_batch_get)
    stand_in_module(monkeypatch, TRAINER, PPOTrainer=Trainer, ReplayBuffer=Buffer, tq=queue)
    return SimpleNamespace(Trainer=Trainer, Buffer=Buffer, fields=fields)


def generate(rows, fields):
    """Two rollouts of each row with two outputs: odd rows are solved, as their last one says."""
    for row in rows.__getitems__(range(NUM_ROWS)):
        for rollout, output in product(range(2), (9, 10)):
            score = float(row["id"] % 2 if output == 10 else 7)
            fields[f"{row['id']}_{rollout}_{output}"] = row["extra_info"], score


def test_the_trainer_of_use_v1_reports_scores_before_it_saves(path, v1):
    """Of a rollout's outputs the last one counts, and padding of a batch does not."""
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows, closing(scored(path, {})):
        generate(rows, v1.fields)
        tags = [{}] * len(v1.fields) + [{"is_padding": True}]
        batch = SimpleNamespace(keys=[*v1.fields, "padding_0_0"], tags=tags, partition_id="train")
        padding = SimpleNamespace(keys=batch.keys[-1:], tags=tags[-1:], partition_id="train")

        assert v1.Trainer(rows)._compute_advantage(batch, metrics={}) == (batch, {})
        assert v1.Trainer(rows)._compute_advantage(padding, {}) == (padding, {})
        assert statistics(rows).outcome_scores_total == 2 * NUM_ROWS
        assert sorted(ids(rows.__getitems__(range(6)))) == EVEN


def test_groups_that_a_filter_of_use_v1_drops_are_reported_before_they_are_cleared(path, v1):
    """Those of validation data are not, nor those of a trainer with another data set, or without a filter."""
    solved = {str(number) for number in range(1, NUM_ROWS, 2)}
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows:
        generate(rows, v1.fields)
        before = dict(v1.fields)
        refill = v1.Trainer(rows).add_prompts
        v1.Buffer(refill)._clear_groups("val", solved)
        v1.fields.update(before)
        v1.Buffer(refill, None)._clear_groups("train", solved)
        v1.fields.update(before)
        v1.Buffer(v1.Trainer([]).add_prompts)._clear_groups("train", solved)
        v1.fields.update(before)
        assert statistics(rows).outcome_scores_total == 0

        v1.Buffer(refill)._clear_groups("train", solved)
        assert len(v1.fields) == len(before) // 2
        assert statistics(rows).outcome_scores_total == NUM_ROWS
        assert sorted(ids(rows.__getitems__(range(6)))) == EVEN


def test_a_trainer_of_use_v1_without_the_place_for_scores_is_refused(monkeypatch):
    stand_in_module(monkeypatch, TRAINER, PPOTrainer=type("PPOTrainer", (), {}))
    with pytest.raises(ConfigError, match="AD447 data.asyncdata.outcomes: .* no _compute_advantage"):
        report_in_v1_trainer()


def test_a_row_of_a_mixture_is_reported_to_its_part(tmp_path):
    mix = Mix({name: write_rows(tmp_path / f"{name}.jsonl", NUM_ROWS) for name in ("math", "code")}, quota=4)
    with DataLoader(mix, tokenize_fn=RowFn(), outcomes={}, num_workers=0, timeout_s=240) as loader:
        keys = json.loads(json.dumps([key_of(loader, sample) for sample in loader.get_next_batch(8)]))
        assert report_keys(loader, keys * 2, [1.0] * 15 + [float("nan")]) == 15
        by_source = loader.statistics().by_source
        assert [by_source[name].outcome_scores_total for name in ("code", "math")] == [8, 7]


# The shuffle of torch's sampler, which verl's SFT trainer has no setting for, undone


def indices(length, ranks=1, rank=0, epoch=0, **settings):
    """What torch's own sampler gives to a rank."""
    sampler = DistributedSampler(range(length), ranks, rank, drop_last=True, **settings)
    sampler.set_epoch(epoch)
    return list(sampler)


def places_of(places, wanted, batch_size):
    found = []
    for start in range(0, len(wanted), batch_size):
        batch = places.of(wanted[start : start + batch_size])
        assert batch is not None
        places.took(batch)
        found += batch
    return found


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (40, 3), (101, 8)])
def test_each_rank_has_every_nth_place(length, ranks, batch_size):
    for rank in range(ranks):
        found = places_of(SamplerPlaces(length), indices(length, ranks, rank), batch_size)
        assert found == list(range(length))[rank : length // ranks * ranks : ranks]


@pytest.mark.parametrize("taken", [0, 1, 2, 7])
def test_a_restored_rank_demands_the_next_place(taken):
    wanted = indices(40, 2, 1)
    before, after = SamplerPlaces(40), SamplerPlaces(40)
    places_of(before, wanted[:taken], 1)
    after.load_state_dict(before.state_dict())
    if taken:
        assert after.of(wanted[:4]) is None, "these were taken before"
    assert after.of(wanted[taken + 1 :]) is None, "one is skipped"
    assert places_of(after, wanted[taken:], 4) == list(range(1, 40, 2))[taken:]


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
        pytest.param(indices(40), indices(40, epoch=1)[:1], id="a second epoch"),
        pytest.param(indices(40), indices(40)[:1], id="the same epoch again"),
    ],
)
def test_indices_of_another_sampler_have_no_places_and_nothing_is_taken(taken, wanted):
    places = SamplerPlaces(40)
    places_of(places, taken, 1)
    state = places.state_dict()
    assert places.of(wanted) is None
    assert places.state_dict() == state


def test_an_index_outside_is_an_index_error():
    with pytest.raises(IndexError, match=r"index 40 is not in 0\.\.39"):
        SamplerPlaces(40).of([40])


def test_a_sampler_of_another_order_and_more_than_one_epoch_of_verls_sft_are_refused(path, monkeypatch):
    with closing(verl_sft_rows([path], {"asyncdata": KNOBS})) as rows:
        assert rows.__getitems__([]) == []
        with pytest.raises(ConfigError, match=r"AD447 the sampler asks for .* Set trainer.total_epochs=1"):
            rows.__getitems__([0, 1, 2, 3])
    found = {"..trainer.total_epochs": 3}
    seen = SimpleNamespace(is_config=lambda config: True, select=lambda config, name: found[name])
    stand_in_module(monkeypatch, "omegaconf", OmegaConf=seen)
    with pytest.raises(ConfigError, match=r"AD447 trainer.total_epochs=3.* Set trainer.total_epochs=1, and data.async"):
        verl_sft_rows([path], {"train_files": path})
