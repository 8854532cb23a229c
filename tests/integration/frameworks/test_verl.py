"""What verl's trainers get of our data sets, where verl is installed; and its sampler's order, undone."""

# ruff: noqa: SLF001 - verl's trainers call methods of their own

import base64
import io
import json
import pkgutil
from contextlib import closing

import numpy as np
import pytest

from asyncdata import DataLoader, Mix, RowFn
from asyncdata.errors import ConfigError
from tests.support.loading import write_rows

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch.utils.data import DistributedSampler

from asyncdata.integrations import verl, verl_sft
from asyncdata.integrations.adapters import key_of, report_keys
from asyncdata.integrations.torch.datasets import SamplerPlaces
from tests.support.adapters import KNOBS, NUM_ROWS, made_late, number_of, numbers_of, verl_rows, verl_sft_rows
from tests.support.frameworks import verl_sft as sft
from tests.support.frameworks.killed_runs import needs
from tests.support.frameworks.verl import PACKAGES

pytestmark = pytest.mark.filterwarnings("ignore")  # those of verl's own imports
EVEN = [number for number in range(NUM_ROWS) if number % 2 == 0]


def row_of(number):
    return {"number": number, "prompt": "p", "messages": sft.row_of(number)["messages"]}


@pytest.fixture
def path(jsonl_file):
    return str(jsonl_file(map(row_of, range(NUM_ROWS))))


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_validation_rows_come_as_they_lie_in_their_file_and_again(path, make):
    config = {"train_files": "others.jsonl", "val_files": path, "asyncdata": KNOBS}
    with closing(make([path], config)) as rows:
        assert [numbers_of(rows.__getitems__(range(NUM_ROWS))) for _ in range(2)] == [list(range(NUM_ROWS))] * 2
        assert number_of(rows[3]) == 3


@pytest.mark.parametrize("make", [verl_rows, verl_sft_rows])
def test_max_samples_are_the_first_rows_in_the_order_and_a_seed_of_verl_is_heard(path, make):
    config = {"seed": 3, "asyncdata": {"num_workers": 0}}
    with closing(make([path], config, max_samples=10)) as rows, closing(make([path], config | {"seed": 4})) as other:
        first, second = (list(DistributedSampler(data, 1, 0)) for data in (rows, other))
        found = numbers_of(rows.__getitems__(first if make is verl_sft_rows else range(10)))
        assert sorted(found) == list(range(10))
        assert found != list(range(10))
        assert numbers_of(other.__getitems__(second if make is verl_sft_rows else range(12)))[:10] != found


def test_a_row_has_its_place_in_the_order_and_the_bytes_of_its_images(jsonl_file):
    data, place = io.BytesIO(), "asyncdata_id"
    pytest.importorskip("PIL.Image").new("RGB", (3, 2)).save(data, "png")
    png = data.getvalue()
    image = {"bytes": base64.b64encode(png).decode(), "path": None}
    asked = [{"role": "user", "content": "<image>What is it?"}]
    path = jsonl_file(
        [{"prompt": asked, "images": [image], "extra_info": {"index": 7}}, {"prompt": asked[:0], "images": []}]
    )
    with closing(verl_rows([str(path)], {"asyncdata": KNOBS | {"shuffle": False}}, processor=object())) as rows:
        first, second = rows.__getitems__([0, 1])
    assert (first["index"], first["extra_info"]) == (7, {"index": 7, place: "0:0:0"})
    assert second["extra_info"] == {place: "0:0:1"}
    [shown, said] = first["raw_prompt"][0]["content"]
    assert (shown["bytes"], shown["image"].size, said["text"]) == (png, (3, 2), "What is it?")


def test_a_row_for_sft_may_have_no_tools_and_no_thinking(jsonl_file):
    """What is not there is as where the column is missing; the template's first word says whether there are tools."""
    rows = [sft.row_of(number) for number in (1, 2)]
    for name in ("tools", "enable_thinking"):
        del rows[1][name]
    path = str(jsonl_file(rows))
    with closing(verl_sft_rows([path], {"val_files": path})) as found:
        with_tools, without = (sft.tokenizer().decode(found[number]["input_ids"]) for number in (0, 1))
    assert with_tools.startswith("tools 2 ")
    assert without.startswith("<s> user 12 </s>")


TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool
def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other one.
    """
    return first + second
'''
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint }}{% endif %}"
)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="plain"),
        pytest.param({"asyncdata": {"num_workers": 0, "shuffle": {"method": "slime"}}}, id="slime's order"),
        pytest.param({"apply_chat_template_kwargs": {"hint": "think", "tokenize": False}}, id="variables"),
        pytest.param({"function_tool_path": "tools.py", "max_prompt_length": 160}, id="tools"),
    ],
)
def test_prompts_that_verl_filters_out_are_dropped_uncounted(jsonl_file, small_tokenizer, tmp_path, monkeypatch, given):
    needs(*PACKAGES)
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer)
    tokenizer.chat_template = TEMPLATE  # as a setting of verl's model replaces it
    words = [{"role": "user", "content": "words of a prompt " * (number * 7 % 13)} for number in range(60)]
    rows = [{"number": number, "prompt": [message]} for number, message in enumerate(words)]
    files = {f"{name}_files": str(jsonl_file(rows, f"{name}.jsonl")) for name in ("train", "val")}
    settings = {"filter_overlong_prompts": True, "max_prompt_length": 60, "asyncdata": {"num_workers": 0}}
    train, validation = (verl_rows([path], {**settings, **files, **given}, tokenizer) for path in files.values())
    expected = list(RLHFDataset([files["train_files"]], tokenizer, train.config).dataframe["number"])

    with closing(train), closing(validation):
        assert 0 < len(expected) < len(rows)
        assert len(train) == len(validation) == len(expected)
        assert numbers_of(validation.__getitems__(range(len(expected)))) == expected
        for _ in range(2):
            assert sorted(numbers_of(train.__getitems__(range(len(expected))))) == expected


def test_a_filter_of_prompts_with_images_is_refused_by_name():
    with pytest.raises(ConfigError, match="AD447 data.filter_overlong_prompts=True with a model that takes images"):
        verl_rows(["a"], {"filter_overlong_prompts": True, "train_files": "a"}, processor=object())


def scored(path, outcomes=None):
    """A data set of which verl's trainer gives scores back."""
    settings = {"num_workers": 0, "outcomes": outcomes, "seed": 3, "rows_per_epoch": NUM_ROWS, "shuffle": True}
    return verl_rows([path], {"asyncdata": settings})


def statistics(rows):
    return rows._view.loader.statistics()


def step(rows, indices, repeats=2):
    """One step of the older trainer: rollouts of each row, their scores, and the hook. Odd rows are solved."""
    from verl import DataProto

    taken = [row for row in rows.__getitems__(indices) for _ in range(repeats)]
    scores = torch.tensor([[0.0, float(number % 2)] for number in numbers_of(taken)])
    infos = np.array([row["extra_info"] for row in taken], dtype=object)
    rows.on_batch_end(DataProto.from_dict({"token_level_scores": scores}, {"extra_info": infos}))
    return numbers_of(taken[::repeats])


def test_rows_that_verl_says_are_solved_are_left_out_of_the_next_epoch(path):
    with closing(scored(path, {"policy": {"drop_above": 0.9}})) as rows:
        assert sorted(step(rows, range(NUM_ROWS))) == list(range(NUM_ROWS))
        assert statistics(rows).outcome_scores_total == 2 * NUM_ROWS
        assert sorted(step(rows, range(len(EVEN)))) == EVEN


def test_without_outcomes_a_batch_is_left_alone(path):
    with closing(scored(path)) as rows:
        assert len(step(rows, range(2))) == 2
        assert statistics(rows).outcome_rows == 0


@pytest.mark.parametrize(
    "place",
    [
        "trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage",
        "trainer.ppo.v1.trainer_base:ReplayBuffer._clear_groups",
        "utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize",
        "utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset._read_files_and_process",
    ],
)
def test_a_version_without_a_name_that_is_touched_is_refused(path, monkeypatch, place):
    needs(*PACKAGES)
    kind, _, name = place.rpartition(".")
    kind = pkgutil.resolve_name(f"verl.{kind}")
    monkeypatch.delattr(kind, name)
    for module, ours in ((verl, "RLDataset"), (verl_sft, "SFTDataset")):
        made_late(monkeypatch, module, ours)
    with pytest.raises(ConfigError, match=f"AD644 verl.*{kind.__name__} of verl .* no '{name}': .* with verl 0"):
        assert verl_sft.SFTDataset if "sft" in place else scored(path, {})


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


def test_a_sampler_of_another_order_and_more_than_one_epoch_of_verls_sft_are_refused(path):
    with closing(verl_sft_rows([path], {"asyncdata": KNOBS})) as rows:
        assert rows.__getitems__([]) == []
        with pytest.raises(ConfigError, match=r"AD447 the sampler asks for .* Set trainer.total_epochs=1"):
            rows.__getitems__([0, 1, 2, 3])
    from omegaconf import OmegaConf

    config = OmegaConf.create({"data": {"train_files": path}, "trainer": {"total_epochs": 3}})
    with pytest.raises(ConfigError, match=r"AD447 trainer.total_epochs=3.* Set trainer.total_epochs=1, and data.async"):
        verl_sft_rows([path], config.data)
