"""Our source beside slime's own class and beside Hugging Face streaming: start, memory, groups per second.

``ASYNCDATA_SLIME=/path/to/slime python -m tests.benchmarks.slime_beside --tokenizer DIR --folder DIR --mb 50 2000``

Each figure is taken in a process of its own, one contestant after the other, round after round. Needs slime's tree (and
torch, ray, transformers, which its modules import) and datasets. ``hf`` is what slime's users were offered for large
data: a streaming dataset with a shuffle buffer of 10,000 rows and one prefetching thread; it is written here, as that
integration was never released.
"""

import argparse
import copy
import json
import os
import queue
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.framework import ROOT, measured, rounds, show
from tests.benchmarks.inputs import prompts

CONTESTANTS = ("slime", "hf", "legacy", "stream")
GROUPS_PER_ROLLOUT = 32
SAMPLES_PER_GROUP = 8
NUM_CALLS = 150
NONE = ("dump_details", "rollout_max_prompt_len", "multimodal_keys", "buffer_filter_path", "save", "load")


def slime_args(path: str, tokenizer: str, **extra: Any) -> SimpleNamespace:
    columns = {"input_key": "input", "label_key": "label", "metadata_key": "metadata", "tool_key": "tools"}
    return SimpleNamespace(
        prompt_data=path, hf_checkpoint=tokenizer, rollout_global_dataset=True, apply_chat_template=True,
        apply_chat_template_kwargs={}, rollout_seed=42, rollout_shuffle=True, n_samples_per_prompt=SAMPLES_PER_GROUP,
        **columns, **dict.fromkeys(NONE), **extra,
    )  # fmt: skip


class HfStreaming:
    """A streaming dataset behind a queue that one thread fills."""

    def __init__(self, path: str, tokenizer: str) -> None:
        from datasets import load_dataset
        from slime.utils.types import Sample
        from transformers import AutoTokenizer

        engine = AutoTokenizer.from_pretrained(tokenizer)
        rows = load_dataset("json", data_files=path, split="train", streaming=True)
        rows = rows.shuffle(seed=42, buffer_size=10_000)
        self._queue: queue.Queue[Any] = queue.Queue(1000)

        def fill() -> None:
            while True:
                for row in rows:
                    messages = [{"role": "user", "content": row["input"]}]
                    prompt = engine.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                    self._queue.put(Sample(prompt=prompt, label=row["label"], metadata=row["metadata"]))

        threading.Thread(target=fill, daemon=True).start()

    def get_samples(self, number: int) -> list[list[Any]]:
        prompts_ = [self._queue.get() for _ in range(number)]
        return [[copy.deepcopy(prompt) for _ in range(SAMPLES_PER_GROUP)] for prompt in prompts_]


def source(contestant: str, path: str, tokenizer: str) -> Any:
    if contestant == "hf":
        return HfStreaming(path, tokenizer)

    if contestant == "slime":
        from slime.rollout.data_source import RolloutDataSourceWithBuffer

        return RolloutDataSourceWithBuffer(slime_args(path, tokenizer))

    from asyncdata.integrations.slime import AsyncDataSource

    ours = {"asyncdata_order": contestant, "asyncdata_num_workers": 2, "asyncdata_cache": {"folder": ""}}
    return AsyncDataSource(slime_args(path, tokenizer, **ours))


def measure(contestant: str, path: str, tokenizer: str) -> dict[str, float]:
    """One contestant: seconds to the first groups, memory, and what a call costs and how many groups come.

    Imports that every run of slime makes anyway are made first and not counted.
    """
    import psutil
    import slime.rollout.data_source  # noqa: F401 - as are the next ones' imports
    import transformers  # noqa: F401

    process = psutil.Process()
    before, began = process.memory_full_info().uss, time.perf_counter()
    made = source(contestant, path, tokenizer)

    def call(number: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(number):
            made.get_samples(GROUPS_PER_ROLLOUT)
        return time.perf_counter() - start

    call()
    first, wall = time.perf_counter() - began, call(NUM_CALLS)
    memory = process.memory_full_info().uss - before
    memory += sum(child.memory_full_info().pss for child in process.children(recursive=True))
    time.sleep(1.0)  # until what is read ahead is there: what a call costs then is what a rollout pays
    ready = call()
    if hasattr(made, "close"):
        made.close()
    rate = NUM_CALLS * GROUPS_PER_ROLLOUT * SAMPLES_PER_GROUP / wall
    return {"first_groups_s": first, "memory_mb": memory / 1e6, "samples_per_s": rate, "ready_call_ms": ready * 1e3}


def probe(contestant: str, path: str, tokenizer: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.slime_beside", "--one", contestant, path, tokenizer]
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ['ASYNCDATA_SLIME']}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as cache:
        return measured(command, environment | {"HF_DATASETS_CACHE": cache}, timeout_s=3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mb", type=int, nargs="+", default=[50, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for size in args.mb:
        path = str(prompts(args.folder, size))
        calls = [partial(probe, name, path, args.tokenizer) for name in CONTESTANTS]
        for name, result in zip(CONTESTANTS, rounds(*calls, num_rounds=args.rounds), strict=True):
            print(f"{size:6} MB {name:8}", *(f"{key} {show(values)}" for key, values in result.items()), sep="  ")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:5])))
    else:
        main()
