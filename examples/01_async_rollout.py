"""Reinforcement learning: groups are awaited and generated side by side; unfinished ones are given back, and saved."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import anyio

from asyncdata import AsyncDataLoader, Group, PromptTokenizeFn, Sample, Status
from asyncdata.demo import tokenizer_folder, write_docstring_prompts


async def generate(sample: Sample) -> None:
    """Stands for the inference engine: it adds to the response, and may be cut off before the end."""
    await anyio.sleep(0.01)
    sample.response += f"[{len(sample.tokens)} tokens read]"
    sample.response_length += 1
    sample.status = Status.COMPLETED if random.random() < 0.9 else Status.ABORTED


async def rollout(loader: AsyncDataLoader, num_groups: int) -> list[Group]:
    """Finished groups; what is unfinished goes back and comes first the next time."""
    groups = await loader.get_samples(num_groups)
    async with anyio.create_task_group() as tasks:
        for sample in (sample for group in groups for sample in group if sample.status != Status.COMPLETED):
            tasks.start_soon(generate, sample)
    finished = [group for group in groups if all(sample.status == Status.COMPLETED for sample in group)]
    loader.add_samples([group for group in groups if group not in finished])
    return finished


async def main(folder: Path) -> None:
    prompts, snapshot = folder / "prompts.jsonl", folder / "rollout.snapshot"
    write_docstring_prompts(prompts, num_rows=500)
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True)

    waiting = 0
    async with AsyncDataLoader(prompts, tokenize_fn=tokenize_fn, n_samples_per_prompt=4, num_workers=2) as loader:
        for step in range(5):
            finished = await rollout(loader, num_groups=16)
            waiting = loader.statistics().buffered_groups
            print(f"step {step}: {len(finished)} groups to train on, {waiting} given back")
            loader.save(snapshot)

    async with AsyncDataLoader(prompts, tokenize_fn=tokenize_fn, n_samples_per_prompt=4, num_workers=2) as loader:
        loader.restore(snapshot)
        groups = await loader.get_samples(waiting + 1)
        assert all(any(sample.response for sample in group) for group in groups[:waiting])
        assert not any(sample.response for sample in groups[waiting])
        print(f"resumed: {waiting} groups came back with their responses, then the next prompt: {groups[waiting][0]}")


if __name__ == "__main__":
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        anyio.run(main, Path(name))
