"""The trainer of ``streaming`` as a Ray actor, killed again and again; each continues from the last save.

``python -m tests.faults.support.ray_kills SETTINGS`` prints one JSON object: how each was killed, how many processes
it had, and how long they took to be gone. What was delivered is in the actors' logs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from tests.faults.support.streaming import num_lines, stream
from tests.support.faults import GONE_S, until

HOW = ("ray.kill", "SIGKILL")


class Trainer:
    """As a trainer in an actor: it holds the loader, and its call lasts until the data end."""

    def pid(self) -> int:
        return os.getpid()

    def train(self, settings: dict[str, Any]) -> None:
        stream(**settings)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(actor: Any, pid: int, how: str) -> float:
    """Kill it and wait for its whole family's end; the seconds that took."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    began = time.monotonic()
    if how == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    else:
        ray.kill(actor, no_restart=True)
    until(lambda: not any(map(is_alive, family)), GONE_S, f"{how} left some of {family}")
    return time.monotonic() - began


def run(settings: dict[str, Any], log: Path, how: str | None, chance: random.Random) -> dict[str, Any]:
    """One actor; killed at a random instant with batches delivered, or left alone until the data end."""
    actor = ray.remote(num_cpus=1)(Trainer).remote()
    pid = ray.get(actor.pid.remote())
    training = actor.train.remote({**settings, "log": str(log)})
    if how is None:
        ray.get(training)
        return {}

    until(lambda: num_lines(log) > 1 + settings["save_every"])
    time.sleep(chance.random() * 0.02)
    num_processes = 1 + len(psutil.Process(pid).children(recursive=True))
    return {"how": how, "num_processes": num_processes, "gone_s": kill(actor, pid, how)}


def main(folder: str, kills: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """So many kills, and one run without kills."""
    chance = random.Random(8)
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    ways = [HOW[number % len(HOW)] for number in range(kills)]
    seen = [run(settings, Path(folder, f"log.{number}"), how, chance) for number, how in enumerate([*ways, None])]
    ray.shutdown()
    return seen[:-1]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
