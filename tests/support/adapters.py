"""Each adapter, driven as its framework drives it. Classes and functions of the frameworks are stood in for.

An adapter is opened with a source of rows, which have a ``number``, and with knobs in place of :data:`KNOBS`. Those
that share rows out take ``rank`` and ``world_size`` too.
"""

# ruff: noqa: SLF001 - frameworks call methods of their own classes

import asyncio
import contextlib
import json
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import asyncdata.integrations.torchtitan
from asyncdata import DataLoader, PaddedCollator, Ranks, RowFn
from asyncdata.integrations.axolotl import LoaderPlugin
from asyncdata.integrations.megatron import MegatronIterator, ranks_of
from asyncdata.integrations.nemo_rl import NemoRows, with_state
from asyncdata.integrations.openrlhf import prepare_datasets
from asyncdata.integrations.prime_rl import Rows, TaskIterator
from asyncdata.integrations.skyrl import SkyRLAsyncTrainer, SkyRLExperiment, SkyRLTrainer
from asyncdata.integrations.torch import AsyncDataset, OrderView, StatefulDataLoader
from asyncdata.integrations.transformers import attach
from asyncdata.integrations.verl import VerlRows
from asyncdata.integrations.verl_sft import VerlSFTRows
from tests.support.frameworks.stand_ins import stand_in_module
from tests.support.torch_loading import chain_epochs, of_torch_load

NUM_ROWS = 20
STEPS = 24
KNOBS = {"shuffle": "full", "seed": 3, "num_workers": 0, "timeout_s": 240}

Adapter = namedtuple("Adapter", ["steps", "state", "load", "close"])
"""One that is open, by functions. The first gives the numbers of the rows of each step, without an end; the second
what the framework's checkpoint gives back of the state.
"""


def number_of(row):
    return row["number"] if isinstance(row, dict) else row.extra["number"]


def stored(of):
    """The state of an object, from a file of ``torch.save``."""
    return lambda: of_torch_load(of.state_dict())


def placed(knobs):
    """The knobs of a loader, and its ranks."""
    knobs = KNOBS | knobs
    ranks = Ranks(rank=knobs.pop("rank", 0), world_size=knobs.pop("world_size", 1))
    return knobs, ranks


def numbers_of(rows):
    return list(map(number_of, rows))


def loading(loader, numbers_of=numbers_of, close=None, epochs=chain_epochs):
    """One whose loader gives a step's rows, epoch after epoch, and has the state."""
    steps = lambda: map(numbers_of, epochs(loader))  # noqa: E731
    return Adapter(steps, stored(loader), loader.load_state_dict, close or loader.close)


def row_loader(source, ranks, knobs, kind=DataLoader):
    return kind(source, tokenize_fn=RowFn(), batch_size=4 // ranks.world_size, ranks=ranks, **knobs)


def stateful_loader(source, **changes):
    knobs, ranks = placed(changes)
    return loading(StatefulDataLoader(row_loader(source, ranks, knobs)))


def dataset(source, **changes):
    knobs, ranks = placed(changes)
    return loading(row_loader(source, ranks, knobs, AsyncDataset))


def indexed(rows, close, indices=None):
    """As torchdata's ``StatefulDataLoader``: it asks for batches of indices, and saves how many there were."""
    taken = SimpleNamespace(num=0)
    order = list(range(len(rows))) if indices is None else indices

    def steps():
        while True:
            first = taken.num % len(order)
            found = rows.__getitems__(order[first : first + 4])
            taken.num += 4
            yield numbers_of(found)

    def load(state):
        rows.load_state_dict(state.get("dataset", state))
        taken.num = state["num"]

    return Adapter(steps, lambda: {"dataset": stored(rows)(), "num": taken.num}, load, close)


def order_view(source, rows_per_epoch=None, **changes):
    view = OrderView(DataLoader(source, tokenize_fn=RowFn(), **KNOBS | changes), rows_per_epoch)
    return indexed(view, view.close)


def trainer_of(**changes):
    """What ``attach`` uses of transformers' ``Trainer``; and with ``num_generations`` TRL's that group prompts.

    ``tp``, ``cp`` and ``sp`` are the sizes of its tensor, context and sequence parallelism.
    """
    arguments = {"max_steps": STEPS, "world_size": 1, "process_index": 0, "gradient_accumulation_steps": 1}
    arguments |= {"generation_batch_size": 4, "steps_per_generation": 1, "output_dir": "out", "num_train_epochs": 3}
    groups = {name: changes.pop(name) for name in ("num_generations", "num_iterations") if name in changes}

    sizes = {f"get_{name}_size": partial(int, changes.pop(name, 1)) for name in ("tp", "cp", "sp")}

    class Trainer(SimpleNamespace):
        def train(self, resume_from_checkpoint=None, trial=None):
            self.trained.append((resume_from_checkpoint, self.args.max_steps))

        def get_eval_dataloader(self, eval_dataset=None):
            return eval_dataset

    callbacks = []
    return Trainer(
        args=SimpleNamespace(**arguments | changes),
        callback_handler=SimpleNamespace(callbacks=callbacks),
        add_callback=callbacks.append,
        remove_callback=lambda kind: None,
        trained=[],
        **sizes,
        **groups,
    )


def attached(made, close):
    """A trainer that has its loader; its state is in ``trainer_state.json``."""
    callback = made.callback_handler.callbacks[0]

    def load(state):
        found = {"AsyncDataState": state} if "attributes" in state else {}
        callback.on_train_begin(None, SimpleNamespace(stateful_callbacks=found, global_step=4), None)

    steps = lambda: (list(dict.fromkeys(numbers_of(batch))) for batch in made.get_train_dataloader())  # noqa: E731
    return Adapter(steps, lambda: json.loads(json.dumps(callback.state())), load, close)


def trainer(source, **changes):
    knobs, ranks = placed(changes)
    loader = row_loader(source, ranks, knobs)
    made = trainer_of(world_size=ranks.world_size, process_index=ranks.rank)
    attach(made, loader)
    return attached(made, loader.close)


def grouping_trainer(source, **changes):
    loader = DataLoader(source, tokenize_fn=RowFn(), **KNOBS | changes)
    made = trainer_of(num_generations=2)
    attach(made, loader)
    return attached(made, loader.close)


def axolotl(source, **changes):
    made, cfg = trainer_of(), SimpleNamespace(asyncdata_loader=f"{__name__}.loader_for_axolotl", path=source)
    cfg.knobs = KNOBS | changes
    LoaderPlugin().post_trainer_create(cfg, made)
    return attached(made, made.get_train_dataloader().loader.close)


def loader_for_axolotl(cfg):
    return DataLoader(cfg.path, tokenize_fn=RowFn(), batch_size=2, **cfg.knobs)


def tokens_of(row):
    """Four of them: two rows fill a batch of torchtitan."""
    return {"tokens": [row["number"], 0, 0, 0]}


def megatron(source, **changes):
    knobs, ranks = placed(changes)
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: ranks.world_size, rank=lambda: ranks.rank))
    knobs |= {"batch_size": 4 // ranks.world_size, "ranks": ranks_of(groups)}
    loader = DataLoader(source, tokenize_fn=tokens_of, collate_fn=PaddedCollator(), **knobs)
    iterator = MegatronIterator(loader, groups)
    steps = lambda: (batch["input_ids"][:, 0].tolist() for batch in iterator)  # noqa: E731
    return Adapter(steps, lambda: of_torch_load(iterator.save_state()), iterator.restore_state, loader.close)


def torchtitan(source, **changes):
    knobs, ranks = placed(changes)
    kind = asyncdata.integrations.torchtitan.AsyncDataLoader
    settings = {name: knobs.pop(name) for name in ("seed", "num_workers")}
    config = kind.Config(dataset=source, tokenize_fn=tokens_of, knobs=knobs, **settings)
    lengths = {"max_context_length": 8, "num_tokens_per_batch": 8}
    loader = kind(config, dp_world_size=ranks.world_size, dp_rank=ranks.rank, **lengths)
    return loading(loader, lambda batch: batch[0]["input"][::4].tolist(), epochs=iter)


class VerlSFTBase:
    """verl's ``MultiTurnSFTDataset``, as far as ours asks it."""

    image_key, video_key, tools_key, enable_thinking_key = "images", "videos", "tools", "enable_thinking"
    enable_thinking_default, apply_chat_template_kwargs = None, {}

    def __init__(self, parquet_files, tokenizer, config, processor, max_samples):
        self.parquet_files, self.tokenizer, self.max_samples = parquet_files, tokenizer, max_samples
        self._read_files_and_process()

    def __getitem__(self, item):
        row = self.dataframe.iloc[item].to_dict()
        return {**row, "tools": self.tools[item], "enable_thinking": self.enable_thinking[item]}


def verl_sft_rows(files, config, max_samples=-1):
    made = type("SFTDataset", (VerlSFTRows, VerlSFTBase), {})
    return made(parquet_files=files, config=config, max_samples=max_samples)


def verl_sft(source, **changes):
    """One epoch is the whole training, which torch's sampler shuffles."""
    from torch.utils.data import DistributedSampler

    rows = verl_sft_rows([str(source)], {"asyncdata": {**KNOBS, **changes, "rows_per_epoch": 4 * STEPS + 4}})
    return indexed(rows, rows.close, list(DistributedSampler(rows, 1, 0, drop_last=True)))


class VerlBase:
    """verl's ``RLHFDataset``, as far as ours asks it."""

    image_key, video_key, audio_key, prompt_key = "images", "videos", "audios", "prompt"

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.data_files = self.original_data_files = data_files
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.tool_schemas, self.max_prompt_length = config.get("tool_schemas"), config.get("max_prompt_length")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", self.max_prompt_length is not None)
        self._read_files_and_tokenize()

    def __getitem__(self, item):
        return self.dataframe[item]


def verl_rows(files, config, tokenizer=None, **more):
    made = type("RLDataset", (VerlRows, VerlBase), {})
    return made(files, tokenizer, {"validation_shuffle": False} | config, **more)


def verl(source, **changes):
    rows = verl_rows([str(source)], {"asyncdata": KNOBS | changes})
    return indexed(rows, rows.close)


def nemo_rl(source, **changes):
    rows = NemoRows(str(source), asyncdata=KNOBS | changes)

    class Processed:
        dataset = rows.dataset

        def __getitem__(self, index):
            return rows.dataset[index]

    return indexed(with_state(Processed()), rows.dataset.close)


def openrlhf(source, **changes):
    """OpenRLHF's own function makes a row's prompt and label of it."""
    rollout = SimpleNamespace(batch_size=4, vllm_generate_batch_size=4, n_samples_per_prompt=2)
    data = SimpleNamespace(prompt_probs=None, prompt_dataset=str(source), input_template=None, input_key="prompt")
    train = SimpleNamespace(batch_size=8, num_episodes=3, max_epochs=1)
    args = SimpleNamespace(rollout=rollout, data=data, train=train, eval=SimpleNamespace(dataset=None))
    found = prepare_datasets(SimpleNamespace(args=args), None, source=None, settings=KNOBS | changes)
    assert found[1:] == (None, 3 * NUM_ROWS * 2 // 8)
    return loading(found[0], lambda batch: batch[2], found[0]._view.close)


class SkyRLBase:
    """SkyRL's experiment and its trainers, as far as ours call them. An error of loading is lost."""

    mini_batch_size = 4

    def __init__(self, cfg, train_dataset=None):
        self.cfg = cfg
        self.train_dataset = self.get_train_dataset() if train_dataset is None else train_dataset
        self.checkpoint = None
        if train_dataset is not None:
            self._build_train_dataloader_and_compute_training_steps()

    def save_checkpoints(self):
        self.checkpoint = stored(self.train_dataloader)()

    def load_checkpoints(self):
        if self.checkpoint is not None:  # otherwise data.pt cannot be read, which is logged too
            with contextlib.suppress(Exception):
                self.train_dataloader.load_state_dict(self.checkpoint)
        return 1, "the folder"

    def _remove_tail_data(self, entries):
        return entries[: len(entries) // 3 * 3]


def skyrl_settings(train_data, **changes):
    fully_async = {"enabled": changes.pop("is_async", False), "simulate_training": changes.pop("simulated", False)}
    groups = {"generator": {"vision_language_generator": changes.pop("has_images", False)}}
    trainer = {"seed": 1, "train_batch_size": 4, "max_prompt_length": 512, "epochs": 3, "max_training_steps": None}
    groups["trainer"] = {**trainer, "fully_async": SimpleNamespace(**fully_async), **changes}
    groups["data"] = {"train_data": train_data}
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in groups.items()})


def skyrl_experiment(cfg, source=None, **knobs):
    settings = {"num_workers": 0, "timeout_s": 240, "drop_overlong": False} | knobs
    return type("Experiment", (SkyRLExperiment, SkyRLBase), {})(cfg, source, **settings)


def skyrl_trainer(kind, cfg, source=None, **knobs):
    """One of ours over SkyRL's, with the prompts of an experiment."""
    experiment = skyrl_experiment(cfg, source, **knobs)
    return type("Trainer", (kind, SkyRLBase), {})(cfg, experiment.train_dataset)


def skyrl(source, **changes):
    made = skyrl_trainer(SkyRLTrainer, skyrl_settings([str(source)]), **KNOBS | changes)
    batches = lambda: chain_epochs(made.train_dataloader)  # noqa: E731
    return _of_skyrl(made, lambda: ([number_of(prompt["env_extras"]) for prompt in batch] for batch in batches()))


def skyrl_async(source, **changes):
    """Each step trains on the next four prompts."""
    made = skyrl_trainer(SkyRLAsyncTrainer, skyrl_settings([str(source)], is_async=True), **KNOBS | changes)
    loader = made.async_train_dataloader

    async def step():
        given = [await loader.get_next_non_consumed_data() for _ in range(4)]
        if None in given:
            await loader.reset_at_epoch_end()
            return await step()
        await loader.mark_consumed_uids([prompt["uid"] for [prompt] in given])
        return [number_of(prompt["env_extras"]) for [prompt] in given]

    def steps():
        while True:
            yield asyncio.run(step())

    opened = _of_skyrl(made, steps)

    def load(saved):
        opened.load(saved.get("data.pt", saved))
        loader.load_state_from_checkpoint(set(saved["consumed"]))

    state = lambda: {"data.pt": opened.state(), "consumed": loader.get_consumed_uids_list()}  # noqa: E731
    return opened._replace(state=state, load=load)


def _of_skyrl(made, steps):
    def state():
        made.save_checkpoints()
        return made.checkpoint

    def load(saved):
        made.checkpoint = saved
        made.load_checkpoints()

    return Adapter(steps, state, load, made.train_dataset.close)


class Numbered(Rows):
    """A taskset without verifiers: its tasks have what a ``TaskIterator`` looks at."""

    def __init__(self, path, **settings):
        self.config = SimpleNamespace(data_path=path, asyncdata=settings)
        self.system_prompt = self.transform = None

    def task(self, row, idx):
        return SimpleNamespace(key=f"task {idx}", idx=idx, row=row, with_system_prompt=lambda text: (idx, text))


def prime_rl(source, **changes):
    tasks = TaskIterator(Numbered(str(source), **KNOBS | changes))
    return loading(tasks, lambda task: [number_of(task.row)], lambda: tasks.loader.close(), iter)


def stand_in_for_frameworks(patch):
    """Let the adapters find what they import of a framework."""

    class BaseDataLoader:
        @dataclass(kw_only=True, slots=True)
        class Config:
            pass

    def system_and_generation_prompt(*_, **__):
        return [1], [2]

    def preprocess_data(row, template, input_key, *_):
        return row[input_key], number_of(row)

    stand_in_module(patch, "tyro.conf", Suppress=object())
    stand_in_module(patch, "torchtitan.components.data.loader", BaseDataLoader=BaseDataLoader)
    stand_in_module(patch, "openrlhf.datasets", PromptDataset=None)
    stand_in_module(patch, "openrlhf.datasets.prompts_dataset", preprocess_data=preprocess_data)
    stand_in_module(patch, "openrlhf.datasets.utils", blending_datasets=None)
    chat_template = "verl.utils.tokenizer.chat_template"
    stand_in_module(patch, chat_template, extract_system_prompt_and_generation=system_and_generation_prompt)
    made_late(patch, asyncdata.integrations.torchtitan, "AsyncDataLoader")


def made_late(patch, module, name):
    """Make a class of an adapter again when it is asked for, and not keep it."""
    patch.setitem(vars(module), name, None)  # so that it is taken away at the end
    del vars(module)[name]
