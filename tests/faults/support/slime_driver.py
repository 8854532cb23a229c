"""slime's driver, which is going to be killed: it generates, trains and saves, as train.py or train_async.py does.

Run with ``python -m tests.faults.support.slime_driver SETTINGS``. It continues after the last saved rollout. Each line
of its log is an event; a rollout that is trained is there with all that its groups hold. What a rollout does with a
group follows from the group alone, so that the same groups make the same rollout.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata.core import plain_values
from asyncdata.integrations.slime import AsyncDataSource, torch_data
from asyncdata.integrations.slime import groups as slime_groups
from asyncdata.integrations.slime.records import to_record
from tests.support.slime_source import args_for, set_rollout_id

NUM_ATTEMPTS = 3


class Driver:
    """One process of a run.

    :param stragglers: each rollout holds a group back that it did not finish, and the next one gives it back, once it
        has begun.
    """

    def __init__(
        self, path: str, folder: str, log: str, batch: int, over: int, stragglers: bool, step_s: float, **given: Any
    ) -> None:
        self._out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._batch, self._over, self._stragglers, self._step_s = batch, over, stragglers, step_s
        self._held: list[Any] = []
        self.start = last_saved(folder) + 1
        self.source = AsyncDataSource(args_for(path, save=folder, load=folder, **given))
        self.source.load(self.start - 1)
        self._log("start", self.start)

    def _log(self, event: str, rollout_id: int, groups: Any = None) -> None:
        os.write(self._out, json.dumps([event, rollout_id, groups]).encode() + b"\n")
        time.sleep(self._step_s)

    def generate(self, rollout_id: int, is_last: bool) -> list[Any]:
        """``batch`` groups that are done; the others are given back."""
        set_rollout_id(rollout_id)
        self._log("generate", rollout_id)
        done: list[Any] = []
        partial: list[Any] = []
        while len(done) < self._batch:
            for group in self.source.get_samples(self._over):
                attempt(group, rollout_id)
                is_done = group[0].metadata["attempts"] > group[0].group_index % NUM_ATTEMPTS
                (done if is_done and len(done) < self._batch else partial).append(group)
            self.source.add_samples(self._held)
            self._held = []
        if self._stragglers and partial and not is_last:
            self._held = [partial.pop(0)]
        self.source.add_samples(partial)
        return done

    def train(self, rollout_id: int, groups: list[Any]) -> None:
        self._log("train", rollout_id, list(map(whole, groups)))

    def save(self, rollout_id: int) -> None:
        self.source.save(rollout_id)
        self._log("saved", rollout_id)

    def finish(self) -> None:
        """What is left."""
        self.source.add_samples(self._held)
        self._log("left", self.source.sample_group_index, list(map(whole, self.source.buffer)))
        self.source.close()


def whole(group: list[Any]) -> list[Any]:
    """All that a group holds, as plain values."""
    return slime_groups.GroupRecord(list(map(to_record, group))).inline()


def attempt(group: list[Any], rollout_id: int) -> None:
    """A rollout works on a group, whether it finishes it or not."""
    for sample in group:
        sample.response += f"[{rollout_id}]"
        sample.tokens += [sample.index, rollout_id]
        sample.response_length += 2
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), -1 / (3 + sample.index), -1 / (7 + rollout_id)]
        attempts = sample.metadata["attempts"] = sample.metadata.get("attempts", 0) + 1
        sample.rollout_routed_experts = np.full((attempts, 3), rollout_id, np.int32)


def last_saved(folder: str) -> int:
    """The last rollout whose snapshot is there; -1 if there is none."""
    names = [path.name for path in Path(folder, "rollout").glob("*.asyncdata")]
    return max((int(re.findall(r"_(\d+)\.asyncdata", name)[0]) for name in names), default=-1)


def drive(
    pattern: str, num_rollouts: int, save_every: int, with_torch: bool, has_group_files: bool, **settings: Any
) -> None:
    """To the last rollout, or until somebody ends us.

    :param has_group_files: each group has a file of its own in checkpoints, with its array in it, however small.
    """
    if has_group_files:
        slime_groups.FILE_BYTES = plain_values.BLOCK_BYTES = plain_values.SHARED_BYTES = 0
    if not with_torch:  # importing it takes longer than all the rest
        torch_data.is_available = lambda: False
    driver = Driver(**settings)
    last = num_rollouts - 1
    following = None
    for rollout_id in range(driver.start, num_rollouts):
        present = following or driver.generate(rollout_id, rollout_id == last)
        if pattern == "async" and rollout_id < last:
            following = driver.generate(rollout_id + 1, rollout_id + 1 == last)
        else:
            following = None
        driver.train(rollout_id, present)
        if (rollout_id + 1) % save_every == 0:
            driver.save(rollout_id)
    driver.finish()


if __name__ == "__main__":
    drive(**json.loads(sys.argv[1]))
