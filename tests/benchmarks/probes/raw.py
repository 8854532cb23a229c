"""What no loader can go beyond: the tokenizer alone, in as many plain processes, over texts that are in memory.

What counts: the seconds from when all processes have their texts, extracted from the JSON beforehand, to when the last
of them has called the tokenizer for all of its own: HF's ``encode_batch_fast``, or the fast backend's flat call, in
batches of 256, in one thread each. What it returns is dropped: no id is taken out of it. Before that each has encoded
other texts, since a fast backend is slow on the first megabytes it sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tests.benchmarks.clock import seconds

__all__ = ("load_vocabulary", "raw", "raw_in_processes")

BATCH = 256
NUM_WARM_ROWS = 4096


def load_vocabulary(path: str, tokenizer: str, backend: str = "hf") -> dict[str, float]:
    """Seconds of a process that does nothing but load the tokenizer and encode one batch of 32."""
    from tests.benchmarks.backends import raw_encoder

    texts = _texts(path, 0, 1, 32)
    raw_encoder(tokenizer, backend)(texts)
    return {"load_s": seconds()}


def raw(
    path: str, tokenizer: str, backend: str, first: int, step: int, num_rows: int, num_warm_rows: int
) -> dict[str, float]:
    """One of the processes: every ``step``-th row from ``first`` on, of ``num_rows`` behind ``num_warm_rows``.

    Waits on stdin for its start.
    """
    from tests.benchmarks.backends import raw_encoder

    texts = _texts(path, first, step, num_warm_rows + num_rows)
    encode = raw_encoder(tokenizer, backend)
    num_warm = num_warm_rows // step
    for start in range(0, num_warm, BATCH):
        encode(texts[start : start + BATCH])
    del texts[:num_warm]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    for start in range(0, len(texts), BATCH):
        encode(texts[start : start + BATCH])
    return {"num_rows": len(texts), "num_bytes": sum(map(len, texts)), "seconds": time.perf_counter() - began}


def _texts(path: str, first: int, step: int, num_rows: int) -> list[str]:
    texts = []
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if number >= num_rows:
                break

            if number % step == first:
                texts.append(json.loads(line)["input"])
    return texts


def raw_in_processes(
    path: str,
    tokenizer: str,
    num_processes: int,
    num_rows: int,
    num_warm_rows: int = NUM_WARM_ROWS,
    backend: str = "hf",
) -> dict[str, float]:
    """Rows per second of :func:`raw` in so many processes, which start together."""
    argument = {"path": path, "tokenizer": tokenizer, "backend": backend, "step": num_processes, "num_rows": num_rows}
    argument["num_warm_rows"] = num_warm_rows
    running = []
    for first in range(num_processes):
        command = [sys.executable, "-m", "tests.benchmarks.probe", "raw", json.dumps(argument | {"first": first})]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a process of the raw measurement failed"
    outputs = [process.stdin for process in running if process.stdin is not None]
    for stdin in outputs:
        stdin.write("go\n")
        stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in running]
    return {
        "rows_per_s": sum(one["num_rows"] for one in found) / max(one["seconds"] for one in found),
        "megabytes_per_s": sum(one["num_bytes"] for one in found) / max(one["seconds"] for one in found) / 1e6,
    }
