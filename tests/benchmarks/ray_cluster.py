"""Workers on a Ray cluster beside processes: ``python -m tests.benchmarks.ray_cluster FOLDER TOKENIZER``.

Two nodes of this machine, so that what is compared is the cost of the way and not of a network. Each way runs in a
process of its own, all of them in turn; ratios are medians. Then the head alone: answers that were recorded come at
once, so that what is left is what the trainer's process does for each row, with as many workers as one likes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import numpy as np

from asyncdata.core.messages import Scan, decode_reply, encode
from asyncdata.workers.inline import InlineExecutor
from tests.benchmarks.inputs import prompts
from tests.support.ray_cluster import two_nodes

__all__ = ("main", "measure", "simulated")

_MEGABYTES, _SIMULATED_MEGABYTES = 40, 8
_BATCH = 1024
_WINDOW_BLOCKS = 64
"""Small windows, so that many are read while it is measured: of one, all samples are there before the first."""
_WAYS = ("processes 1", "actors 1", "processes 2", "actors 2")
_NUM_SIMULATED = (2, 32, 256)
"""Workers: up to four on each of 64 nodes."""

_ANSWER_BYTES = (0, 160_000, 640_000, 2_500_000)


def measure(path: str, tokenizer: str, way: str, num_rows: int) -> dict[str, float]:
    """Rows per second after the first batch, and of this process, a row: CPU (us), and bytes in and out of actors."""
    from asyncdata import DataLoader, PromptTokenizeFn, RayExecutor, Shuffle

    kind, number = way.split()
    executor = RayExecutor(num_workers=int(number)) if kind == "actors" else None
    workers: dict[str, Any] = {"num_workers": int(number)} if executor is None else {"executor": executor}
    function = PromptTokenizeFn(tokenizer, label_key="label", tokenizer_backend="hf")
    shuffle = Shuffle(window_blocks=_WINDOW_BLOCKS)
    with DataLoader(path, tokenize_fn=function, timeout_s=600, shuffle=shuffle, **workers) as loader:
        pool: Any = loader._engine._executor  # noqa: SLF001 - nothing public counts bytes
        for _ in range(5):  # two windows, and the beginning of the next
            loader.get_next_batch(_BATCH)
        before = [getattr(pool, name, 0) for name in ("num_bytes_in", "num_bytes_out")]
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(num_rows // _BATCH):
            loader.get_next_batch(_BATCH)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        num_in, num_out = (
            getattr(pool, name, 0) - was for name, was in zip(("num_bytes_in", "num_bytes_out"), before, strict=True)
        )
    return {
        "rows_per_s": num_rows / wall,
        "cpu_us": cpu / num_rows * 1e6,
        "bytes_in": num_in / num_rows,
        "bytes_out": num_out / num_rows,
    }


class RecordedAnswers(InlineExecutor):
    """Answers a scan with samples as a scan of as many blocks was answered before, at once, as an actor would."""

    answers_with_samples = True

    def __init__(self, function: Any, num_workers: int) -> None:
        super().__init__(function)
        self.num_workers = num_workers
        self._recorded: dict[int, bytes] = {}
        self.num_bytes = self.num_requests = 0
        self._due: deque[tuple[Scan, Any]] = deque()
        self._more: anyio.Event | None = None

    async def run(self, job: Any) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(super().run, job)
            while True:
                self._more = anyio.Event()
                while self._due:
                    request, on_reply = self._due.popleft()
                    encode(request)  # as it would be sent
                    data = bytes(self._recorded[len(request.blocks)])
                    self.num_bytes += len(data)
                    self.num_requests += 1
                    on_reply(decode_reply(data))
                    self.slots.done(request.slot)
                    self._on_change()
                await self._more.wait()

    def submit(self, request: Any, on_reply: Any, max_losses: int = 10) -> None:
        if isinstance(request, Scan) and request.with_samples:
            if len(request.blocks) in self._recorded:
                self.slots.use(request.slot)
                self._due.append((request, on_reply))
                if self._more is not None:
                    self._more.set()
                return

            answer = on_reply

            def on_reply(reply: Any, number: int = len(request.blocks)) -> None:
                self._recorded[number] = encode(reply)
                answer(reply)

        super().submit(request, on_reply, max_losses)


def simulated(path: str, tokenizer: str, num_workers: int, num_windows: int = 6) -> dict[str, float]:
    """What the trainer's process does a row, if answers cost nothing."""
    from asyncdata import DataLoader, PromptTokenizeFn

    function = PromptTokenizeFn(tokenizer, label_key="label", tokenizer_backend="hf")
    pools: list[RecordedAnswers] = []

    def executor_of(*_: Any) -> RecordedAnswers:
        pools.append(RecordedAnswers(function, num_workers))
        return pools[0]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("asyncdata.loader.engine.executor_of", executor_of))
        knobs: dict[str, Any] = {"num_workers": 1, "timeout_s": 600, "epochs": num_windows, "buffer_size": 4096}
        loader = stack.enter_context(DataLoader(path, tokenize_fn=function, batch_size=_BATCH, **knobs))
        num_rows = sum(len(batch) for batch in loader)  # the first epoch records
        (pool,) = pools
        num_bytes, num_requests = pool.num_bytes, pool.num_requests
        cpu, began = time.process_time(), time.perf_counter()
        num_rows = sum(len(batch) for _ in range(num_windows - 1) for batch in loader)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "rows_per_s": num_rows / wall,
        "cpu_us": cpu / num_rows * 1e6,
        "bytes_in": (pool.num_bytes - num_bytes) / num_rows,
        "rows_per_request": num_rows / max(1, pool.num_requests - num_requests),
    }


class Answers:
    """An actor that answers with so many bytes."""

    def answer(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)


def cost_of_calls(num_bytes: int, num_calls: int = 100) -> float:
    """CPU time of this process for a call of an actor and its answer, copied: us. Three are under way at a time."""
    import ray

    actor = ray.remote(Answers).options(num_cpus=0.5).remote()
    ray.get(actor.answer.remote(0))
    room = threading.Semaphore(3)

    def take(future: Any) -> None:
        bytes(memoryview(future.result()))
        room.release()

    began = time.process_time()
    for _ in range(num_calls):
        room.acquire()
        actor.answer.remote(num_bytes).future().add_done_callback(take)
    for _ in range(3):
        room.acquire()
    used = time.process_time() - began
    ray.kill(actor)
    return used / num_calls * 1e6


def main(folder: str, tokenizer: str, num_rounds: int = 3, num_rows: int = 16 * _BATCH) -> dict[str, Any]:
    """Prints the figures."""
    path, small = (str(prompts(Path(folder), size)) for size in (_MEGABYTES, _SIMULATED_MEGABYTES))
    found: dict[str, list[dict[str, float]]] = {}

    def take(name: str, data: str, *words: str) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.ray_cluster", data, tokenizer, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
        print(name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)

    with two_nodes() as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        for _ in range(num_rounds):
            for way in _WAYS:
                take(way, path, way, str(num_rows))
        for num_bytes in _ANSWER_BYTES:
            print(f"a call with {num_bytes} bytes: {cost_of_calls(num_bytes):.0f} us", flush=True)
    for number in _NUM_SIMULATED:
        take(f"answers for {number}", small, "simulated", str(number))
    for number in "12":
        pairs = zip(found[f"actors {number}"], found[f"processes {number}"], strict=True)
        ratio = statistics.median(ours["rows_per_s"] / theirs["rows_per_s"] for ours, theirs in pairs)
        print(f"{number} actors over {number} processes: {ratio:.2f}")
    return found


if __name__ == "__main__":
    if len(sys.argv) <= 3:
        main(*sys.argv[1:3])
    elif sys.argv[3] == "simulated":
        print(json.dumps(simulated(*sys.argv[1:3], int(sys.argv[4]))))
    else:
        print(json.dumps(measure(*sys.argv[1:4], int(sys.argv[4]))))
