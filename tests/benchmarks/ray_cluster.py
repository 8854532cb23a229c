"""Workers on a Ray cluster beside processes: ``python -m tests.benchmarks.ray_cluster FOLDER TOKENIZER``.

Two nodes of this machine, so that what is compared is the cost of the way and not of a network. Each way runs in a
process of its own, all of them in turn; ratios are medians. Then the head alone: answers that were recorded come at
once, so that what is left is what the trainer's process does for each row, with as many workers as one likes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import numpy as np

from asyncdata import DataLoader, PromptTokenizeFn, RayExecutor, Shuffle
from asyncdata.core.messages import Scan, decode_reply, encode
from asyncdata.workers.inline import InlineExecutor
from tests.benchmarks.framework import ratios, rounds
from tests.benchmarks.inputs import prompts
from tests.benchmarks.watching import measured
from tests.support.ray_cluster import two_nodes

_MEGABYTES, _SIMULATED_MEGABYTES = 40, 8
_BATCH = 1024
_WINDOW_BLOCKS = 64
"""Small windows, so that many are read while it is measured: of one, all samples are there before the first."""
_WAYS = ("processes 1", "actors 1", "processes 2", "actors 2")
_NUM_SIMULATED = (2, 32, 256)
"""Workers: up to four on each of 64 nodes."""

_ANSWER_BYTES = (0, 160_000, 640_000, 2_500_000)


def _function(tokenizer: str) -> Any:
    return PromptTokenizeFn(tokenizer, label_key="label", tokenizer_backend="hf")


def _timed(num_rows: int, take: Any, counts: Any) -> dict[str, float]:
    """Rows per second, CPU time of this process a row (us), and what else is counted a row."""
    before, cpu, began = counts(), time.process_time(), time.perf_counter()
    take()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    counted = {name: (number - before[name]) / num_rows for name, number in counts().items()}
    return {"rows_per_s": num_rows / wall, "cpu_us": cpu / num_rows * 1e6, **counted}


def measure(path: str, tokenizer: str, way: str, num_rows: int) -> dict[str, float]:
    """After the first batches, with the bytes in and out of actors."""
    kind, number = way.split()
    workers: dict[str, Any] = {"num_workers": int(number)}
    if kind == "actors":
        workers = {"executor": RayExecutor(num_workers=int(number))}
    shuffle = Shuffle(window_blocks=_WINDOW_BLOCKS)
    with DataLoader(path, tokenize_fn=_function(tokenizer), timeout_s=600, shuffle=shuffle, **workers) as loader:
        pool: Any = getattr(loader._engine._executor, "actors", None)  # noqa: SLF001 - nothing public counts bytes

        def take(num_batches: int = num_rows // _BATCH) -> None:
            for _ in range(num_batches):
                loader.get_next_batch(_BATCH)

        take(5)  # two windows, and the beginning of the next
        names = ("num_bytes_in", "num_bytes_out")
        return _timed(num_rows, take, lambda: {name: getattr(pool, name, 0) for name in names})


class RecordedAnswers(InlineExecutor):
    """Answers a scan with samples as a scan of as many blocks was answered before, at once, as an actor would."""

    answers_with_samples = True
    num_workers = 1

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
    function = _function(tokenizer)
    pool = RecordedAnswers(function, num_workers)
    knobs: dict[str, Any] = {"num_workers": 1, "timeout_s": 600, "epochs": num_windows, "buffer_size": 4096}
    with (
        mock.patch("asyncdata.loader.engine.executor_of", lambda *_: pool),
        DataLoader(path, tokenize_fn=function, batch_size=_BATCH, **knobs) as loader,
    ):
        num_rows = (num_windows - 1) * sum(len(batch) for batch in loader)  # the first epoch records

        def take() -> None:
            assert num_rows == sum(len(batch) for _ in range(num_windows - 1) for batch in loader)

        return _timed(num_rows, take, lambda: {"num_bytes_in": pool.num_bytes, "num_requests": pool.num_requests})


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
    path, small = (str(prompts(Path(folder), size)) for size in (_MEGABYTES, _SIMULATED_MEGABYTES))

    def take(data: str, *words: str) -> dict[str, float]:
        found = measured([sys.executable, "-m", "tests.benchmarks.ray_cluster", data, tokenizer, *words])
        print(*words, {key: round(value, 2) for key, value in found.items()}, flush=True)
        return found

    with two_nodes() as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        found = rounds(*(partial(take, path, way, str(num_rows)) for way in _WAYS), num_rounds=num_rounds)
        for num_bytes in _ANSWER_BYTES:
            print(f"a call with {num_bytes} bytes: {cost_of_calls(num_bytes):.0f} us", flush=True)
    for number in _NUM_SIMULATED:
        take(small, "simulated", str(number))
    by_way = dict(zip(_WAYS, found, strict=True))
    for number in "12":
        ours, theirs = (by_way[f"{kind} {number}"]["rows_per_s"] for kind in ("actors", "processes"))
        print(f"{number} actors over {number} processes: {statistics.median(ratios(ours, theirs)):.2f}")
    return by_way


if __name__ == "__main__":
    if len(sys.argv) <= 3:
        main(*sys.argv[1:3])
    elif sys.argv[3] == "simulated":
        print(json.dumps(simulated(*sys.argv[1:3], int(sys.argv[4]))))
    else:
        print(json.dumps(measure(*sys.argv[1:4], int(sys.argv[4]))))
