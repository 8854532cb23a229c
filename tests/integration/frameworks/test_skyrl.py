"""What SkyRL's trainers get of our prompts, whose base classes are stood in for; and the order of its SFT.

That a killed run continues with the next prompt is in ``tests/integration/test_adapters.py``.
"""

# ruff: noqa: SLF001 - SkyRL's trainers call methods of their own

import asyncio
import json
import pickle
import sys
from contextlib import ExitStack, closing
from itertools import islice
from types import SimpleNamespace

import pytest

from asyncdata.demo import tokenizer_folder as demo_tokenizer
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError
from asyncdata.integrations import skyrl
from asyncdata.integrations.skyrl import SkyRLAsyncTrainer, SkyRLTrainer
from asyncdata.integrations.skyrl_sft import OrderSampler
from tests.support.adapters import SkyRLBase, made_late, skyrl_experiment, skyrl_settings, skyrl_trainer, stored
from tests.support.frameworks.stand_ins import stand_in_module

pytest.importorskip("torch", reason="torch is not installed")

NUM_ROWS = 10


def prompt_of(text, number):
    return {"prompt": [{"role": "user", "content": text}], "number": number}


@pytest.fixture
def path(jsonl_file):
    return str(jsonl_file([prompt_of(str(number), number) for number in range(NUM_ROWS)]))


@pytest.fixture
def opened(path):
    """Trainers over the prompts, closed after the test."""
    with ExitStack() as stack:

        def opens(kind, batch, *, knobs=None, **changes):
            cfg = skyrl_settings([path], train_batch_size=batch, is_async=kind is SkyRLAsyncTrainer, **changes)
            trainer = skyrl_trainer(kind, cfg, **knobs or {})
            stack.enter_context(closing(trainer.train_dataset))
            return trainer

        yield opens


def numbers(batches):
    return [prompt["env_extras"]["number"] for batch in batches for prompt in batch]


def uids(batches):
    return [prompt["uid"] for batch in batches for prompt in batch]


def test_a_prompt_has_skyrls_fields_and_its_place_as_uid(opened):
    prompts = opened(SkyRLTrainer, 1, knobs={"shuffle": False}).train_dataset
    assert len(prompts) == NUM_ROWS
    assert prompts.collate_fn([1, 2]) == [1, 2]
    row = prompt_of("0", 0)["prompt"]
    assert prompts.view[0] == {"prompt": row, "env_class": None, "env_extras": {"number": 0}, "uid": "0:0:0"}


def test_a_prompt_that_is_too_long_is_dropped_as_skyrl_drops_it(jsonl_file, small_tokenizer):
    rows = jsonl_file([prompt_of("word " * length, number) for number, length in enumerate((1, 90, 3))])
    policy = SimpleNamespace(model=SimpleNamespace(path=str(small_tokenizer)))
    cfg = skyrl_settings([str(rows)], max_prompt_length=40, train_batch_size=2, policy=policy)
    with closing(skyrl_experiment(cfg, drop_overlong=True, shuffle=False).train_dataset) as prompts:
        assert len(prompts) == 3
        assert numbers([[prompts.view[0], prompts.view[1]]]) == [0, 2]


def test_the_seed_is_skyrls_unless_one_is_given(opened):
    given = [{}, {"seed": 2}, {"seed": 1}]
    orders = [numbers(opened(SkyRLTrainer, 5, knobs=knobs).train_dataloader) for knobs in given]
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize(("limit", "steps"), [(None, 9), (5, 5), (50, 9)])
def test_a_training_has_the_steps_of_its_epochs_or_as_many_as_it_may(opened, limit, steps):
    assert opened(SkyRLTrainer, 3, max_training_steps=limit).total_training_steps == steps
    assert opened(SkyRLAsyncTrainer, 3, max_training_steps=limit).total_training_steps == min(limit or 6, 6)


def test_a_batch_size_may_change_at_a_restart(opened):
    first, second, singly = (opened(SkyRLTrainer, batch).train_dataloader for batch in (3, 2, 1))
    taken = numbers(islice(first, 2))
    second.load_state_dict(stored(first)())
    assert taken + numbers(second) == numbers(singly)


# Prompts for generation workers


async def take(loader, number):
    return [await loader.get_next_non_consumed_data() for _ in range(number)]


def test_prompts_that_were_given_out_and_not_trained_on_come_first_after_a_restart(opened):
    async def start():
        trainer = opened(SkyRLAsyncTrainer, 4)
        loader = trainer.async_train_dataloader
        assert (list(loader), len(loader), trainer.num_steps_per_epoch) == ([], NUM_ROWS, 2)
        given = await take(loader, 7)
        await loader.mark_consumed_uids(uids([given[0], given[2], given[5]]))
        await loader.mark_filtered_uids(uids([given[3]]))
        assert loader.num_trained() == 3
        return given, stored(loader)(), loader.get_consumed_uids_list(), loader.get_filtered_uids_list()

    given, state, consumed, filtered = asyncio.run(start())
    assert sorted(consumed) == sorted(uids([given[place] for place in (0, 2, 3, 5)]))
    assert filtered == uids([given[3]])

    async def resume():
        loader = opened(SkyRLAsyncTrainer, 4).async_train_dataloader
        loader.load_state_dict(state)
        loader.check_resumed()
        loader.load_state_from_checkpoint(set(consumed), set(filtered))
        rest = await take(loader, 5)
        assert loader.num_trained() == 3
        return rest

    rest = asyncio.run(resume())
    assert rest[:3] == [given[1], given[4], given[6]]
    assert rest[4] is None, "eight prompts are an epoch of two batches, and four are over"
    assert len({*uids(rest[:4]), *consumed}) == 8


def test_the_next_epoch_begins_with_the_prompts_that_the_last_one_left_out(opened):
    async def epochs():
        loader = opened(SkyRLAsyncTrainer, 4).async_train_dataloader
        for _ in range(2):
            given = await take(loader, 8)
            assert await loader.get_next_non_consumed_data() is None
            await loader.mark_consumed_uids(uids(given))
            await loader.reset_at_epoch_end()
            found.append(numbers(given))

    found = []
    asyncio.run(epochs())
    assert sorted(found[0] + found[1][:2]) == list(range(NUM_ROWS))


# What SkyRL would only log, or do in silence


@pytest.mark.parametrize("kind", [SkyRLTrainer, SkyRLAsyncTrainer])
def test_a_checkpoint_without_a_state_is_refused_and_none_at_all_begins_at_the_first_prompt(opened, kind, monkeypatch):
    with pytest.raises(SnapshotError, match="AD602 the checkpoint has no readable data.pt"):
        opened(kind, 2).load_checkpoints()
    monkeypatch.setattr(SkyRLBase, "load_checkpoints", lambda self: (0, ""))
    assert opened(kind, 2).load_checkpoints() == (0, "")


def test_a_checkpoint_is_not_written_without_the_state_of_the_loader(opened):
    trainer = opened(SkyRLTrainer, 2)
    trainer.train_dataloader = SimpleNamespace(state_dict=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.save_checkpoints()
    assert trainer.checkpoint is None, "SkyRL has saved nothing"


def test_a_batch_that_skyrl_would_shorten_is_refused(opened):
    shortened = opened(SkyRLTrainer, 2)._remove_tail_data
    assert shortened([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(ConfigError, match="AD463 SkyRL would leave out 1 of the 4 prompts of each batch"):
        shortened([1, 2, 3, 4])


def test_an_epoch_without_a_batch_and_a_trainer_with_another_data_set_are_refused(path):
    with pytest.raises(ConfigError, match=r"AD463 an epoch has 10 prompts, fewer than trainer.train_batch_size=11"):
        skyrl_experiment(skyrl_settings([path], train_batch_size=11))
    trainer = SkyRLTrainer()
    trainer.train_dataset = []
    with pytest.raises(ConfigError, match=r"AD463 SkyRLTrainer was given the data set list: it needs that of .*PPOExp"):
        trainer._build_train_dataloader_and_compute_training_steps()


@pytest.mark.parametrize("read", [lambda prompts: prompts[0], pickle.dumps], ids=["an item", "workers of torch"])
def test_a_loader_of_skyrl_over_our_prompts_is_refused(opened, read):
    with pytest.raises(ConfigError, match="AD463 a loader of SkyRL reads the prompts of PPOExp"):
        read(opened(SkyRLTrainer, 2).train_dataset)


@pytest.mark.parametrize(("own", "seed"), [(["asyncdata.seed=2"], 2), ([], 1)])
def test_settings_of_ours_on_skyrls_command_line_reach_the_experiment_in_a_process_of_ray(monkeypatch, path, own, seed):
    """SkyRL's own settings are SkyRL's to read."""
    said = []

    class BasePPOExp(SkyRLBase):
        def run(self):
            with closing(self.train_dataset) as prompts:
                said.append(prompts.view.loader.config.seed)

    def from_cli(words):
        pairs = (word.removeprefix("asyncdata.").split("=") for word in words)
        return {"asyncdata": {name: int(value) for name, value in pairs}} if words else {}

    def from_cli_overrides(words):
        said.append(words)
        return skyrl_settings([path], policy=SimpleNamespace(model=SimpleNamespace(path=str(demo_tokenizer()))))

    for module, names in {
        "omegaconf": {"OmegaConf": SimpleNamespace(from_cli=from_cli, to_container=lambda given: given)},
        "skyrl.train.config": {"SkyRLTrainConfig": SimpleNamespace(from_cli_overrides=from_cli_overrides)},
        "skyrl.train.utils": {"validate_cfg": lambda cfg: said.append("checked")},
        "skyrl.train.utils.utils": {"initialize_ray": lambda cfg: said.append("started Ray")},
        "skyrl.train.entrypoints.main_base": {"BasePPOExp": BasePPOExp},
        "ray": {"remote": lambda **_: lambda call: SimpleNamespace(remote=call), "get": lambda found: found},
    }.items():
        stand_in_module(monkeypatch, module, **names)
    made_late(monkeypatch, skyrl, "PPOExp")
    words = ["trainer.override_entrypoint=asyncdata.integrations.skyrl", "trainer.epochs=2"]
    monkeypatch.setattr(sys, "argv", ["main_base", *words, *own])

    skyrl.main()

    assert said == [["trainer.epochs=2"], "checked", "started Ray", seed]


# The order of SFT

SFT_ROWS = 2500  # more than are computed together


def sampler(number=SFT_ROWS, seed=1):
    return OrderSampler(range(number), lengths=[number], seed=seed)


def endless(ours):
    while True:
        yield from ours


def test_each_epoch_of_sft_has_each_index_once_in_an_order_of_its_own():
    ours = sampler()
    epochs = [list(ours) for _ in range(3)]
    assert len(ours) == SFT_ROWS
    assert all(sorted(epoch) == list(range(SFT_ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(sampler(seed=2)) != epochs[0]


def test_the_order_of_sft_is_pinned():
    """Another one would continue a run that was begun with an earlier release with other rows."""
    ours, plain = sampler(10), OrderSampler(range(10))
    assert [list(ours), list(ours)] == [[5, 8, 7, 3, 9, 1, 0, 6, 2, 4], [4, 5, 0, 9, 3, 1, 7, 6, 2, 8]]
    assert list(plain) == list(sampler(10, seed=0))


@pytest.mark.parametrize("number", [0, 1, 1024, 1025, SFT_ROWS - 1, SFT_ROWS, SFT_ROWS + 7])
def test_a_restored_sampler_continues_with_exactly_the_next_index(number):
    """After the last index of an epoch with the next one: an empty epoch would count as one."""
    first, second, whole = sampler(), sampler(), list(islice(endless(sampler()), 2 * SFT_ROWS))
    taken = list(islice(endless(first), number))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = list(second)
    assert rest
    assert taken + rest + list(islice(endless(second), 2 * SFT_ROWS - number - len(rest))) == whole


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (
            sampler(SFT_ROWS + 1).state_dict(),
            SnapshotMismatchError,
            "AD603 the checkpoint has num_rows=2501, and .*=2500: restore",
        ),
        (
            sampler(seed=2).state_dict(),
            SnapshotMismatchError,
            "AD603 the checkpoint has seed=2, and the sampler seed=1: restore the seed",
        ),
        ({"position": 3}, SnapshotError, "AD602 this is the state of another sampler: it has no 'epoch'"),
    ],
)
def test_a_state_of_other_data_or_another_sampler_is_refused(state, kind, message):
    with pytest.raises(kind, match=message):
        sampler().load_state_dict(state)
