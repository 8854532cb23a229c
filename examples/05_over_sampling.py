"""Over-sampling: more groups are begun than a batch needs, the first to finish make the batch, the rest goes back.

A batch is no longer held up by its longest response. What was begun is not thrown away: it is given back with its
response so far, and comes first in the next step. The same loop twice: for a plain trainer, and `await`-based.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import anyio
from _stub_engine import StubEngine

from asyncdata import AsyncDataLoader, DataLoader, Group, PromptTokenizeFn
from asyncdata.demo import tokenizer_folder, write_docstring_prompts

ROLLOUT_BATCH_SIZE = 8
NUM_STEPS = 8


def settings(folder: Path) -> dict[str, Any]:
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True)
    return {"source": folder / "prompts.jsonl", "tokenize_fn": tokenize_fn, "n_samples_per_prompt": 4, "num_workers": 2}


def rollout(loader: DataLoader, engine: StubEngine, num_asked: int) -> list[Group]:
    """The first groups to finish, of `num_asked`."""
    engine.submit(loader.get_samples(num_asked))
    finished: list[Group] = []
    while len(finished) < ROLLOUT_BATCH_SIZE:
        finished += engine.step()
    # Several groups may finish in the step that fills the batch. What is too many is whole, and comes first next time.
    loader.add_samples(finished[ROLLOUT_BATCH_SIZE:] + engine.abort())
    return finished[:ROLLOUT_BATCH_SIZE]


async def rollout_async(loader: AsyncDataLoader, engine: StubEngine, num_asked: int) -> list[Group]:
    """The same with `await`: the trainer's other tasks run while groups are awaited and decoded."""
    engine.submit(await loader.get_samples(num_asked))
    finished: list[Group] = []
    while len(finished) < ROLLOUT_BATCH_SIZE:
        finished += await engine.next_step()
    loader.add_samples(finished[ROLLOUT_BATCH_SIZE:] + engine.abort())
    return finished[:ROLLOUT_BATCH_SIZE]


def run(folder: Path, num_asked: int) -> tuple[list[list[Group]], StubEngine, int]:
    """The batches of a run, its engine, and the groups that are left in the buffer."""
    engine = StubEngine()
    with DataLoader(**settings(folder)) as loader:
        batches = [rollout(loader, engine, num_asked) for _ in range(NUM_STEPS)]
        return batches, engine, loader.statistics().buffered_groups


async def run_async(folder: Path, num_asked: int) -> list[list[Group]]:
    engine = StubEngine()
    async with AsyncDataLoader(**settings(folder)) as loader:
        return [await rollout_async(loader, engine, num_asked) for _ in range(NUM_STEPS)]


def mean_length(batches: list[list[Group]]) -> float:
    lengths = [sample.response_length for batch in batches for group in batch for sample in group]
    return sum(lengths) / len(lengths)


def responses(batches: list[list[Group]]) -> list[tuple[int | None, str]]:
    return [(sample.index, sample.response) for batch in batches for group in batch for sample in group]


def main(folder: Path) -> None:
    write_docstring_prompts(folder / "prompts.jsonl", num_rows=1000)
    row = "{:>5} {:>12} {:>15} {:>19} {:>17} {:>9}"
    print(f"{NUM_STEPS} steps of {ROLLOUT_BATCH_SIZE} groups of 4 samples")
    titles = "asked", "decode steps", "tokens per step", "length, first batch", "in later batches", "in buffer"
    print(row.format(*titles))
    for num_asked in (8, 12, 16, 24):
        batches, engine, left = run(folder, num_asked)
        density = f"{engine.num_tokens / engine.num_steps:.1f}"
        lengths = f"{mean_length(batches[:1]):.1f}", f"{mean_length(batches[1:]):.1f}"
        print(row.format(num_asked, engine.num_steps, density, *lengths, left))
    print("the first batch has the short responses; the long ones come later, and none is lost")

    assert responses(batches) == responses(anyio.run(run_async, folder, num_asked))
    print(f"with await: the same {len(responses(batches))} responses")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
