"""Dynamic sampling with an exact refill: for each rejected group exactly one more prompt is drawn, while others run.

So no group is over-sampled, and nothing is left over at a step's end. All scores are reported: prompts that were always
solved are left out of the next epochs. One run is killed in the middle of a step, and resumed: it trains on the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import anyio
from _stub_engine import StubEngine, draw

from asyncdata import AsyncDataLoader, Group, Outcomes, PassRate, PromptTokenizeFn, Sample
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.filters import has_reward_spread

ROLLOUT_BATCH_SIZE = 8
NUM_STEPS = 24
KILLED_IN_STEP = 17


def reward_of(sample: Sample) -> float:
    """1.0 for a right answer. Of the prompts, a third is always solved, a third never, the others now and then."""
    difficulty = draw("difficulty", sample.prompt)
    chance = 0.0 if difficulty < 1 / 3 else 1.0 if difficulty > 2 / 3 else 0.5
    return float(draw("answer", sample.index) < chance)


async def rollout(loader: AsyncDataLoader, engine: StubEngine, rejected: Counter[str], dies: bool) -> list[Group]:
    """A full batch of groups whose rewards differ. Kept and running groups are never more than the batch."""
    kept: list[Group] = []
    while len(kept) < ROLLOUT_BATCH_SIZE:
        missing = ROLLOUT_BATCH_SIZE - len(kept) - engine.num_running
        engine.submit(await loader.get_samples(missing))
        if dies and len(kept) == ROLLOUT_BATCH_SIZE // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for group in await engine.next_step():
            for sample in group:
                sample.reward = reward_of(sample)
            await loader.report([group])
            if has_reward_spread(group):
                kept.append(group)
            else:
                rejected["solved" if group[0].reward else "unsolved"] += 1
    assert engine.num_running == 0
    return kept


async def train(folder: Path, kill: bool) -> None:
    """Train, from the last snapshot on if there is one."""
    async with AsyncDataLoader(
        folder.parent / "prompts.jsonl",
        tokenize_fn=PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True),
        n_samples_per_prompt=4,
        commit="on_ack",  # what is out when the process dies is served again
        outcomes=Outcomes(policy=PassRate(drop_above=1.0, revisit_every=4)),
        num_workers=0,
    ) as loader:
        if (folder / "snapshot").exists():
            loader.restore(folder / "snapshot")
        lines = (folder / "steps.jsonl").read_text().splitlines() if (folder / "steps.jsonl").exists() else []
        for step in range(len(lines), NUM_STEPS):
            drawn, rejected = loader.statistics().groups_total, Counter[str]()
            batch = await rollout(loader, StubEngine(policy_version=step), rejected, kill and step == KILLED_IN_STEP)
            loader.ack()
            loader.save(folder / "snapshot")
            now = loader.statistics()
            assert now.groups_total - drawn == len(batch) + rejected.total()
            record = {
                "epoch": batch[0][0].position.epoch,
                "drawn": now.groups_total - drawn,
                "solved": rejected["solved"],
                "unsolved": rejected["unsolved"],
                "groups": [(group[0].group_index, [sample.response for sample in group]) for group in batch],
            }
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")


def run(folder: Path, *words: str) -> int:
    """Train in a process of its own; its exit status."""
    return subprocess.run([sys.executable, __file__, str(folder), *words], check=False).returncode


def main(folder: Path) -> None:
    write_docstring_prompts(folder / "prompts.jsonl", num_rows=120)
    whole, killed = folder / "whole", folder / "killed"
    for run_folder in (whole, killed):
        run_folder.mkdir()
    assert run(whole) == 0
    assert run(killed, "kill") == -signal.SIGKILL
    assert run(killed) == 0

    row = "{:>5} {:>5} {:>7} {:>9} {:>9}"
    print(row.format("epoch", "drawn", "trained", "unsolved", "solved"))
    steps = [json.loads(line) for line in (killed / "steps.jsonl").read_text().splitlines()]
    for epoch in sorted({step["epoch"] for step in steps}):
        of_epoch = [step for step in steps if step["epoch"] == epoch]
        sums = [sum(step[name] for step in of_epoch) for name in ("drawn", "unsolved", "solved")]
        print(row.format(epoch, sums[0], len(of_epoch) * ROLLOUT_BATCH_SIZE, *sums[1:]))
    assert (whole / "steps.jsonl").read_bytes() == (killed / "steps.jsonl").read_bytes()
    print(f"killed in step {KILLED_IN_STEP} and resumed:", end=" ")
    print(f"the {len(steps)} steps trained on the same groups as without the kill")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(train, Path(sys.argv[1]), "kill" in sys.argv)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
