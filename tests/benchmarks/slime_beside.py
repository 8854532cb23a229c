"""Our source beside slime's own class and beside Hugging Face streaming: start, memory, groups per second.

``ASYNCDATA_SLIME=/path/to/slime python -m tests.benchmarks.slime_beside --tokenizer DIR --folder DIR --mb 50 2000``

Each figure is taken in a process of its own, one contestant after the other, round after round. Needs slime's tree (and
torch, ray, transformers, which its modules import) and datasets. ``hf`` is what slime's users were offered for large
data: a streaming dataset with a shuffle buffer of 10,000 rows and one prefetching thread; it is written here, as that
integration was never released.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.framework import rounds, show
from tests.benchmarks.inputs import prompts

ROOT = Path(__file__).parents[2]
CONTESTANTS = ("slime", "hf", "legacy", "stream")
GROUPS_PER_ROLLOUT = 32
SAMPLES_PER_GROUP = 8


def slime_args(path: str, tokenizer: str, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "rollout_global_dataset": True,
            "prompt_data": path,
            "hf_checkpoint": tokenizer,
            "dump_details": None,
            "rollout_max_prompt_len": None,
            "input_key": "input",
            "label_key": "label",
            "metadata_key": "metadata",
            "tool_key": "tools",
            "multimodal_keys": None,
            "apply_chat_template": True,
            "apply_chat_template_kwargs": {},
            "rollout_seed": 42,
            "rollout_shuffle": True,
            "n_samples_per_prompt": SAMPLES_PER_GROUP,
            "buffer_filter_path": None,
            "save": None,
            "load": None,
            **extra,
        }
    )


class HfStreaming:
    """A streaming dataset behind a queue that one thread fills."""

    def __init__(self, path: str, tokenizer: str) -> None:
        import copy
        import queue
        import threading

        from datasets import load_dataset
        from slime.utils.types import Sample
        from transformers import AutoTokenizer

        engine = AutoTokenizer.from_pretrained(tokenizer)
        rows = load_dataset("json", data_files=path, split="train", streaming=True)
        rows = rows.shuffle(seed=42, buffer_size=10_000)
        self._queue: queue.Queue[Any] = queue.Queue(1000)
        self._copy = copy.deepcopy

        def fill() -> None:
            while True:
                for row in rows:
                    messages = [{"role": "user", "content": row["input"]}]
                    prompt = engine.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                    self._queue.put(Sample(prompt=prompt, label=row["label"], metadata=row["metadata"]))

        threading.Thread(target=fill, daemon=True).start()

    def get_samples(self, number: int) -> list[list[Any]]:
        prompts_ = [self._queue.get() for _ in range(number)]
        return [[self._copy(prompt) for _ in range(SAMPLES_PER_GROUP)] for prompt in prompts_]


def source(contestant: str, path: str, tokenizer: str) -> Any:
    if contestant == "hf":
        return HfStreaming(path, tokenizer)

    if contestant == "slime":
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        return RolloutDataSourceWithBuffer(slime_args(path, tokenizer))

    from asyncdata.integrations.slime import AsyncDataSource

    return AsyncDataSource(
        slime_args(path, tokenizer, asyncdata_order=contestant, asyncdata_num_workers=2, asyncdata_cache={"folder": ""})
    )


def measure(contestant: str, path: str, tokenizer: str) -> dict[str, float]:
    """One contestant: seconds to the first groups, memory, and what a call costs and how many groups come.

    Imports that every run of slime makes anyway are made first and not counted.
    """
    import psutil
    import slime.rollout.data_source  # noqa: F401 - as are the next ones' imports
    import transformers  # noqa: F401

    process = psutil.Process()
    before = process.memory_full_info().uss
    began = time.perf_counter()
    made = source(contestant, path, tokenizer)
    made.get_samples(GROUPS_PER_ROLLOUT)
    first = time.perf_counter() - began
    times, num_calls = [], 150
    began = time.perf_counter()
    for _ in range(num_calls):
        call = time.perf_counter()
        made.get_samples(GROUPS_PER_ROLLOUT)
        times.append(time.perf_counter() - call)
    wall = time.perf_counter() - began
    memory = process.memory_full_info().uss - before
    memory += sum(child.memory_full_info().pss for child in process.children(recursive=True))
    times.sort()
    time.sleep(1.0)  # until what is read ahead is there: what a call costs then is what a rollout pays
    call = time.perf_counter()
    made.get_samples(GROUPS_PER_ROLLOUT)
    ready = time.perf_counter() - call
    if hasattr(made, "close"):
        made.close()
    return {
        "first_groups_s": first,
        "memory_mb": memory / 1e6,
        "samples_per_s": num_calls * GROUPS_PER_ROLLOUT * SAMPLES_PER_GROUP / wall,
        "ready_call_ms": ready * 1e3,
    }


def probe(contestant: str, path: str, tokenizer: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.slime_beside", "--one", contestant, path, tokenizer]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ['ASYNCDATA_SLIME']}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as cache:
        environment |= {"HF_DATASETS_CACHE": cache}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contestant} failed:\n{done.stderr}")

    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = {}
    for size in args.mb:
        path = str(prompts(args.folder, size))
        calls = [partial(probe, name, path, args.tokenizer) for name in CONTESTANTS]
        results = rounds(*calls, num_rounds=args.rounds)
        for name, result in zip(CONTESTANTS, results, strict=True):
            table[f"{name} {size} MB"] = result
            print(f"{size:6} MB {name:8}", *(f"{key} {show(values)}" for key, values in result.items()), sep="  ")
    if args.json:
        args.json.write_text(json.dumps(table))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:5])))
    else:
        main()
