"""Partial rollouts: a response that is not finished at the step's end is given back, and continued in the next step.

It keeps its tokens and log-probabilities; those of an older policy are masked from the loss. The run is killed with
SIGKILL in the middle of a step, and resumed: the partial groups are there, byte for byte, and what follows is the same
as without the kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _stub_engine import StubEngine

from asyncdata import DataLoader, Group, PromptTokenizeFn
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.filters import ByStaleness

ROLLOUT_BATCH_SIZE = 16
DECODE_STEPS = 24
NUM_STEPS = 6
KILLED_IN = 3


def open_loader(folder: Path) -> DataLoader:
    return DataLoader(
        folder / "prompts.jsonl",
        tokenize_fn=PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True),
        n_samples_per_prompt=4,
        buffer_filter=ByStaleness(order="stalest_first"),  # what was begun long ago is to be finished
        num_workers=2,
    )


def mask_what_an_older_policy_wrote(groups: list[Group]) -> None:
    for sample in (sample for group in groups for sample in group):
        sample.loss_mask = [0] * sample.response_length


def rollout(loader: DataLoader, engine: StubEngine, dies: bool) -> tuple[list[Group], list[Group]]:
    """What is finished after so many decode steps, and the rest, which goes back."""
    groups = loader.get_samples(ROLLOUT_BATCH_SIZE)
    mask_what_an_older_policy_wrote(groups)
    engine.submit(groups)
    finished: list[Group] = []
    for decode_step in range(DECODE_STEPS):
        finished += engine.step()
        if dies and decode_step == DECODE_STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
    partial = engine.abort()
    loader.add_samples(partial)
    return finished, partial


def digest(groups: list[Group]) -> str:
    """Of everything that the rollouts wrote, in whatever order the groups come."""
    result = hashlib.blake2b(digest_size=8)
    for sample in sorted((sample for group in groups for sample in group), key=lambda sample: sample.index):
        log_probs, mask = np.array(sample.rollout_log_probs), np.array(sample.loss_mask)
        result.update(sample.tokens.tobytes() + log_probs.tobytes() + mask.tobytes())
        result.update(f"{sample.index} {sample.response!r} {sample.status} {sample.extra}".encode())
    return result.hexdigest()


def train(folder: Path, checkpoint: Path, killed_in: int | None = None) -> dict[int, tuple[str, str]]:
    """Train to the end, from the checkpoint if there is one; by step, what was trained on and what was given back."""
    digests = {}
    row = "{:>4} {:>9} {:>7} {:>10} {:>6} {:>7}"
    print(row.format("step", "continued", "trained", "given back", "tokens", "masked"), flush=True)
    with open_loader(folder) as loader:
        saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"steps_done": 0}
        if saved["steps_done"]:
            loader.load_state_dict(saved["data"])
        for step in range(saved["steps_done"], NUM_STEPS):
            continued = loader.statistics().buffered_groups
            finished, partial = rollout(loader, StubEngine(policy_version=step), dies=step == killed_in)
            digests[step] = digest(finished), digest(partial)

            mask = [token for group in finished for sample in group for token in sample.loss_mask or []]
            masked = f"{mask.count(0) / len(mask):.0%}"
            print(row.format(step, continued, len(finished), len(partial), len(mask), masked), flush=True)
            write(checkpoint, {"steps_done": step + 1, "data": loader.state_dict()})
    return digests


def write(checkpoint: Path, state: dict[str, object]) -> None:
    """Whole at every instant."""
    part = checkpoint.with_suffix(".part")
    part.write_text(json.dumps(state))
    part.replace(checkpoint)


def partial_groups(folder: Path, checkpoint: Path) -> list[Group]:
    """What a new loader has in its buffer, from the checkpoint."""
    with open_loader(folder) as loader:
        loader.load_state_dict(json.loads(checkpoint.read_text())["data"])
        return loader.get_samples(loader.statistics().buffered_groups)


def main(folder: Path) -> None:
    write_docstring_prompts(folder / "prompts.jsonl", num_rows=1000)
    print("without interruption")
    whole = train(folder, folder / "whole.json")

    print(f"killed in step {KILLED_IN}")
    done = subprocess.run([sys.executable, __file__, str(folder)])
    assert done.returncode == -signal.SIGKILL

    partial = partial_groups(folder, folder / "killed.json")
    _, given_back = whole[KILLED_IN - 1]
    assert digest(partial) == given_back
    num_tokens = sum(sample.response_length for group in partial for sample in group)
    print(f"{len(partial)} partial groups with {num_tokens} response tokens are there, byte for byte")

    print("resumed")
    resumed = train(folder, folder / "killed.json")
    assert resumed == {step: whole[step] for step in range(KILLED_IN, NUM_STEPS)}
    print(f"steps {KILLED_IN} to {NUM_STEPS - 1} trained on the same bytes as without interruption")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), Path(sys.argv[1]) / "killed.json", killed_in=KILLED_IN)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
