"""Holds our source in a Ray actor, as slime's RolloutManager does.

``python -m tests.support.ray_actor DATA FOLDER`` prints one JSON object: what the actors delivered, and which processes
outlived them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import ray

DEADLINE_S = 120.0


class Manager:
    """As slime's RolloutManager: the source is made in the actor, and called in its main thread."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from asyncdata.integrations.slime import AsyncDataSource

        self.data_source = AsyncDataSource(SimpleNamespace(**settings))

    def generate(self, number: int) -> list[str]:
        groups = self.data_source.get_samples(number)
        return [f"{group[0].group_index} {group[0].index} {group[0].prompt}" for group in groups]

    def save(self, rollout_id: int) -> None:
        self.data_source.save(rollout_id)

    def load(self, rollout_id: int) -> None:
        self.data_source.load(rollout_id)

    def num_prompts(self) -> int:
        return len(self.data_source)

    def processes(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> list[int]:
    """Those of ``pids`` that are still there at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def main(path: str, folder: str) -> None:
    settings = {
        "rollout_global_dataset": True,
        "prompt_data": path,
        "input_key": "input",
        "rollout_shuffle": True,
        "n_samples_per_prompt": 2,
        "save": folder,
        "load": folder,
        "asyncdata_num_workers": 2,
    }
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    actor_class = ray.remote(num_cpus=1)(Manager)
    first = actor_class.remote(settings)
    delivered = ray.get(first.generate.remote(5))
    ray.get(first.save.remote(0))
    lost = ray.get(first.generate.remote(3))
    pids = ray.get(first.processes.remote())
    ray.kill(first)
    left = gone(pids)
    second = actor_class.remote(settings)
    ray.get(second.load.remote(0))
    resumed = ray.get(second.generate.remote(6))
    num_prompts = ray.get(second.num_prompts.remote())
    pids_of_second = ray.get(second.processes.remote())
    ray.shutdown()
    sys.stdout.write(
        json.dumps(
            {
                "delivered": delivered,
                "lost": lost,
                "resumed": resumed,
                "num_prompts": num_prompts,
                "num_processes": len(pids),
                "left": left + gone(pids_of_second),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
