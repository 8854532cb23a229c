"""Each framework's adapter, driven as its framework drives it: the loader's rows in its order, through kill and resume.

Base classes of frameworks are stood in for. Their own code drives the adapters in ``tests/integration/frameworks``.
"""

from __future__ import annotations

import copy
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import DataLoader, PaddedCollator, RowFn
from asyncdata.integrations.nemo_rl import NemoRows, _WithState
from asyncdata.integrations.openrlhf import PromptLoader as OpenRLHFLoader
from asyncdata.integrations.prime_rl import TaskIterator
from asyncdata.integrations.skyrl_prompts import PromptLoader as SkyRLLoader
from asyncdata.integrations.verl import VerlRows

pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.megatron import MegatronIterator
from asyncdata.integrations.torch.rows import order_view_of_rows
from asyncdata.integrations.transformers import attach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_ROWS = 20
STEPS = 24
KNOBS: dict[str, Any] = {"shuffle": "full", "seed": 3, "num_workers": 0, "timeout_s": 240}


class Adapter(NamedTuple):
    """The numbers of rows in each step, without an end; its state, as the framework saves it; and how it is closed."""

    steps: Callable[[], Iterator[Any]]
    state: Callable[[], Any]
    load: Callable[[Any], Any]
    close: Callable[[], Any]


def number_of(row: Any) -> Any:
    return row["number"] if isinstance(row, dict) else row.extra["number"]


def over_epochs(iterable: Any) -> Iterator[Any]:
    while True:
        yield from iterable


def trainer(path: Path, **of_group: Any) -> Adapter:
    """transformers' ``Trainer``; and with ``num_generations`` TRL's that group prompts."""
    callbacks: list[Any] = []
    arguments = {"max_steps": STEPS, "world_size": 1, "process_index": 0}
    made = SimpleNamespace(
        args=SimpleNamespace(**arguments, generation_batch_size=4, steps_per_generation=1),
        callback_handler=SimpleNamespace(callbacks=callbacks),
        add_callback=callbacks.append,
        remove_callback=lambda kind: None,
        **of_group,
    )
    loader = DataLoader(path, tokenize_fn=RowFn(), **KNOBS, **({} if of_group else {"batch_size": 2}))
    attach(made, loader)

    def load(state: Any) -> None:
        found = {"AsyncDataState": state} if state else {}
        callbacks[0].on_train_begin(None, SimpleNamespace(stateful_callbacks=found, global_step=0), None)

    def steps() -> Iterator[Any]:
        for batch in made.get_train_dataloader():
            yield list(dict.fromkeys(map(number_of, batch)))

    return Adapter(steps, callbacks[0].state, load, loader.close)


def grouping_trainer(path: Path) -> Adapter:
    return trainer(path, num_generations=2)


def openrlhf(path: Path) -> Adapter:
    view = order_view_of_rows([str(path)], KNOBS, item=lambda sample: (number_of(sample),))
    loader = OpenRLHFLoader(view)
    steps = lambda: (numbers for (numbers,) in over_epochs(loader))  # noqa: E731
    return Adapter(steps, loader.state_dict, loader.load_state_dict, view.close)


def skyrl(path: Path) -> Adapter:
    view = order_view_of_rows([str(path)], KNOBS, item=number_of)
    loader = SkyRLLoader(view, 4)
    return Adapter(lambda: over_epochs(loader), loader.state_dict, loader.load_state_dict, view.close)


def stateful(dataset: Any, size: int, close: Any) -> Adapter:
    """As torchdata's ``StatefulDataLoader``: it asks for batches of indices, and saves how many there were."""
    taken = SimpleNamespace(num=0)

    def steps() -> Iterator[Any]:
        while True:
            first = taken.num % len(dataset)
            rows = dataset.__getitems__(list(range(first, first + size)))
            taken.num += size
            yield [number_of(row) for row in rows]

    def load(state: Any) -> None:
        dataset.load_state_dict(state["dataset"])
        taken.num = state["num"]

    return Adapter(steps, lambda: {"dataset": dataset.state_dict(), "num": taken.num}, load, close)


def nemo_rl(path: Path) -> Adapter:
    rows = NemoRows(str(path), asyncdata=KNOBS)

    class Processed:
        dataset = rows.dataset

        def __getitem__(self, index: int) -> Any:
            return rows.dataset[index]

    return stateful(_WithState(Processed()), 4, rows.dataset.close)


def verl(path: Path) -> Adapter:
    class Base:
        """verl's ``RLHFDataset``, as far as ours asks it."""

        image_key, video_key, audio_key = "images", "videos", "audios"
        filter_overlong_prompts = False

        def __init__(self, data_files: Any, tokenizer: Any, config: Any, max_samples: int = -1) -> None:
            self.data_files = self.original_data_files = data_files
            self.config, self.max_samples = config, max_samples
            self._read_files_and_tokenize()  # type: ignore[attr-defined]

        def __getitem__(self, item: Any) -> Any:
            return self.dataframe[item]  # type: ignore[attr-defined]

    config = {"asyncdata": KNOBS, "validation_shuffle": False}
    made = type("RLDataset", (VerlRows, Base), {})([str(path)], None, config)
    return stateful(made, 4, made.close)


def megatron(path: Path) -> Adapter:
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    tokenized = {"tokenize_fn": lambda row: {"tokens": [row["number"], 0]}, "collate_fn": PaddedCollator()}
    loader = DataLoader(path, **tokenized, batch_size=2, **KNOBS)
    iterator = MegatronIterator(loader, SimpleNamespace(dp=group))
    steps = lambda: (batch["input_ids"][:, 0].tolist() for batch in iterator)  # noqa: E731
    return Adapter(steps, iterator.save_state, iterator.restore_state, loader.close)


def prime_rl(path: Path) -> Adapter:
    config = SimpleNamespace(data_path=str(path), asyncdata={**KNOBS})
    rows: Any = SimpleNamespace(config=config, system_prompt=None, task=lambda row, number: [row["number"]])
    tasks = TaskIterator(rows)
    return Adapter(lambda: tasks, tasks.state_dict, tasks.load_state_dict, lambda: tasks.loader.close())


ADAPTERS = [trainer, grouping_trainer, openrlhf, skyrl, nemo_rl, verl, megatron, prime_rl]


@pytest.fixture
def path(jsonl_file: Callable[..., Path]) -> Path:
    return jsonl_file([{"number": number, "messages": [], "prompt": "p"} for number in range(NUM_ROWS)])


@pytest.mark.parametrize("opened", ADAPTERS)
def test_the_rows_are_the_loaders_through_kill_and_resume(path: Path, opened: Callable[[Path], Adapter]) -> None:
    with DataLoader(path, tokenize_fn=RowFn(), **KNOBS) as loader:
        order = [number_of(sample) for sample in loader.get_next_batch(4 * STEPS)]
    with closing(opened(path)) as adapter:
        whole = list(islice(adapter.steps(), STEPS))
    found = [number for step in whole for number in step]

    assert found == order[: len(found)]
    assert len(found) > NUM_ROWS, "the end of an epoch is passed"

    for saved_at in (1, 4, NUM_ROWS // len(whole[0])):
        with closing(opened(path)) as killed:
            steps = killed.steps()
            before = list(islice(steps, saved_at))
            state = copy.deepcopy(killed.state())
            next(steps)
        with closing(opened(path)) as resumed:
            resumed.load(state)
            assert before + list(islice(resumed.steps(), STEPS - saved_at)) == whole
