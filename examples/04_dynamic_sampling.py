"""Dynamic sampling: prompts are drawn until a batch of groups is there whose rewards differ.

A group whose rewards are all alike has no advantage and no gradient. It is rejected, and counted by reason. More
groups are asked for than are needed; what is left over when the batch is full goes back to the loader, finished or not.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import anyio
from _stub_engine import StubEngine, reward_of

from asyncdata import AsyncDataLoader, Group, PromptTokenizeFn
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.filters import ByReward, has_reward_spread

ROLLOUT_BATCH_SIZE = 8
OVER_SAMPLING_BATCH_SIZE = 16
NUM_STEPS = 6


async def rollout(loader: AsyncDataLoader, engine: StubEngine, rejected: Counter[str]) -> list[Group]:
    """A full batch of groups whose rewards differ."""
    kept: list[Group] = []
    while len(kept) < ROLLOUT_BATCH_SIZE:
        if len(kept) + engine.num_running < ROLLOUT_BATCH_SIZE:
            engine.submit(await loader.get_samples(OVER_SAMPLING_BATCH_SIZE))
        for group in await engine.next_step():
            for sample in group:
                sample.reward = reward_of(sample)
            if has_reward_spread(group):
                kept.append(group)
            else:
                rejected["all right" if group[0].reward else "all wrong"] += 1
    loader.add_samples(kept[ROLLOUT_BATCH_SIZE:] + engine.abort())
    return kept[:ROLLOUT_BATCH_SIZE]


async def main(folder: Path) -> None:
    write_docstring_prompts(folder / "prompts.jsonl", num_rows=1000)
    trained, rejected = 0, Counter[str]()
    row = "{:>4} {:>5} {:>7} {:>9} {:>9} {:>10} {:>12}"
    print(row.format("step", "drawn", "trained", "all right", "all wrong", "given back", "decode steps"))

    async with AsyncDataLoader(
        folder / "prompts.jsonl",
        tokenize_fn=PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True),
        n_samples_per_prompt=4,
        buffer_filter=ByReward(),  # what is finished and has a spread first, what has no reward yet last
        num_workers=2,
    ) as loader:
        for step in range(NUM_STEPS):
            drawn_before, rejected_before = loader.statistics().groups_total, rejected.copy()
            engine = StubEngine(policy_version=step)
            batch = await rollout(loader, engine, rejected)
            trained += len(batch)

            now = loader.statistics()
            new = rejected - rejected_before
            figures = len(batch), new["all right"], new["all wrong"], now.buffered_groups, engine.num_steps
            print(row.format(step, now.groups_total - drawn_before, *figures))

        left, drawn = loader.statistics().buffered_groups, loader.statistics().groups_total
        assert drawn == trained + rejected.total() + left
        print(f"{drawn} prompts drawn = {trained} trained on + {rejected.total()} rejected + {left} in the buffer")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        anyio.run(main, Path(name))
