"""One measurement in a process of its own: ``python -m tests.benchmarks.probe NAME JSON`` prints one JSON object."""

from __future__ import annotations

import time

_BEGAN = time.perf_counter()

import json  # noqa: E402 - the clock starts before anything else
import sys  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

TOKENIZE_FNS = {"bytes": "tests.benchmarks.probe:byte_tokens"}


def byte_tokens(row: dict[str, Any]) -> list[int]:
    """A tokenize function that costs next to nothing, so that what remains is the library."""
    return [len(row["input"])]


def _loader(path: str, tokenizer: str, **knobs: Any) -> Any:
    from asyncdata import DataLoader, PromptTokenizeFn

    function = TOKENIZE_FNS.get(tokenizer) or PromptTokenizeFn(tokenizer, label_key="label")
    return DataLoader(path, tokenize_fn=function, **knobs)


def process_tree_pss() -> int:
    """Proportional set size of this process and its children, in bytes."""
    import psutil

    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)])


def first_batch(path: str, tokenizer: str, **knobs: Any) -> dict[str, float]:
    """Seconds from this process's first statement, and the parts of it."""
    with _loader(path, tokenizer, **knobs) as loader:
        constructed = time.perf_counter()
        loader.get_next_batch(32)
        return {"first_batch_s": time.perf_counter() - _BEGAN, "constructed_s": constructed - _BEGAN}


def steady(path: str, tokenizer: str, num_rows: int = 20_000, watch: bool = False, **knobs: Any) -> dict[str, float]:
    """Rows per second after the first batch, CPU of this process per row, and, watched, memory at its highest."""
    with _loader(path, tokenizer, **knobs) as loader:
        loader.get_next_batch(32)
        peak, done = [0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(peak, done))
        if watch:
            watcher.start()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_rows // 32):
            loader.get_next_batch(32)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        done.set()
        if watch:
            watcher.join()
        return {
            "rows_per_s": num_rows / wall,
            "peak_pss_mb": peak[0] / 1e6,
            "parent_cpu_us_per_row": cpu / num_rows * 1e6,
        }


def _watch(peak: list[int], done: threading.Event) -> None:
    while not done.wait(0.2):
        peak[0] = max(peak[0], process_tree_pss())


def raw(path: str, tokenizer: str, num_rows: int = 20_000) -> dict[str, float]:
    """Rows per second of nothing but ``encode_batch_fast`` in one process."""
    from tokenizers import Tokenizer

    texts = []
    with open(path, "rb") as file:
        for line in file:
            texts.append(json.loads(line)["input"])
            if len(texts) == num_rows:
                break
    engine = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    engine.encode_batch_fast(texts[:256], add_special_tokens=False)
    began = time.perf_counter()
    for start in range(0, len(texts), 256):
        engine.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
    return {"rows_per_s": len(texts) / (time.perf_counter() - began)}


def raw_in_processes(path: str, tokenizer: str, num_processes: int) -> dict[str, float]:
    """The sum of :func:`raw` over processes that run at the same time."""
    import subprocess

    argument = json.dumps({"path": path, "tokenizer": tokenizer})
    command = [sys.executable, "-m", "tests.benchmarks.probe", "raw", argument]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    outputs = [process.communicate()[0] for process in running]
    return {"rows_per_s": sum(json.loads(output)["rows_per_s"] for output in outputs)}


def idle_trainer(seconds: float = 4.0) -> dict[str, float]:
    """The turns that :func:`busy_trainer` makes when nobody is beside it."""
    began, num_turns = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        num_turns += 1
    return {"turns_per_s": num_turns / (time.perf_counter() - began)}


def call_cost(path: str, tokenizer: str, **knobs: Any) -> dict[str, float]:
    """Microseconds of one get_next_batch(32) with everything ready and the workers at rest."""
    with _loader(path, tokenizer, epochs=1, buffer_size=40_000, **knobs) as loader:
        loader.get_next_batch(32)
        while loader.statistics().in_flight_rows or loader.statistics().ready_samples < 20_000:
            threading.Event().wait(0.05)
        times = []
        for _ in range(600):
            began = time.perf_counter_ns()
            loader.get_next_batch(32)
            times.append((time.perf_counter_ns() - began) / 1e3)
    times.sort()
    return {"call_us_p50": times[300], "call_us_p99": times[594]}


def resume(path: str, tokenizer: str, snapshot: str, **knobs: Any) -> dict[str, float]:
    """Seconds from this process's first statement to the first batch after a restore."""
    with _loader(path, tokenizer, **knobs) as loader:
        loader.restore(snapshot)
        loader.get_next_batch(32)
        return {"resume_s": time.perf_counter() - _BEGAN}


def make_snapshots(path: str, tokenizer: str, snapshot: str, **knobs: Any) -> dict[str, float]:
    """Snapshots at 0 % and 99 % of an epoch, ``snapshot.0`` and ``snapshot.99``: the position is set, not reached."""
    with _loader(path, tokenizer, **knobs) as loader:
        loader.get_next_batch(32)
        loader.get_next_batch(32)
        state = loader.state_dict()
        from asyncdata.snapshot import from_state_dict, save

        num_windows = -(-state["order"]["num_blocks"] // state["order"]["window_blocks"])
        save(f"{snapshot}.0", from_state_dict(state))
        state["position"] = [0, num_windows * 99 // 100, 64]
        save(f"{snapshot}.99", from_state_dict(state))
    return {}


def delivered_ids(path: str, out: str, **knobs: Any) -> dict[str, float]:
    """Write, as int32, the line number (token 0) of every sample of one epoch, in the order of delivery."""
    import numpy as np

    from asyncdata import DataLoader

    ids: list[int] = []
    began = time.perf_counter()
    with DataLoader(path, tokenize_fn="tests.support.tokenize_fns:row_id", batch_size=256, **knobs) as loader:
        for batch in loader:
            ids += [int(sample.tokens[0]) for sample in batch]
    np.array(ids, dtype=np.int32).tofile(out)
    return {"rows": len(ids), "seconds": time.perf_counter() - began}


def busy_trainer(path: str, tokenizer: str, rows_per_s: float, seconds: float = 8.0, **knobs: Any) -> dict[str, float]:
    """A trainer that never lets go of the GIL, taking 32 rows at a fixed rate: its worst stall, and the rate it got."""
    with _loader(path, tokenizer, **knobs) as loader:
        loader.get_next_batch(32)
        loader.get_next_batch(32)
        began = due = time.perf_counter()
        worst = waited = 0.0
        num_batches = num_turns = 0
        while due - began < seconds:
            while time.perf_counter() < due:
                num_turns += 1
            asked = time.perf_counter()
            loader.get_next_batch(32)
            stall = time.perf_counter() - asked
            worst, waited = max(worst, stall), waited + stall
            num_batches += 1
            due = max(due + 32 / rows_per_s, time.perf_counter() - 0.05)
        wall = time.perf_counter() - began
    return {
        "rows_per_s": num_batches * 32 / wall,
        "worst_stall_ms": worst * 1e3,
        "waited_share": waited / wall,
        "turns_per_busy_s": num_turns / (wall - waited),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
