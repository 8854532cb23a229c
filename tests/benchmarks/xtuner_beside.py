"""The first packed batch beside XTuner's cold build: seconds, memory of the whole process tree, and a whole epoch.

``ASYNCDATA_XTUNER=/path/to/xtuner python -m tests.benchmarks.xtuner_beside --tokenizer DIR --folder DIR``

Each figure is taken in a process of its own, one side after the other, round after round. Both sides have two workers,
packs of 4096 tokens, length grouping, and one pack a batch. Theirs is XTuner's own code: ``JsonlDataset`` with
``OpenaiTokenizeFunction``, ``ExpandSoftPackDataset``, ``LengthGroupedSampler``, ``sft_llm_collator`` and its
``Dataloader``, with an empty cache; see :mod:`tests.benchmarks.xtuner_probe` for what is stood in for. Seconds are
counted from the process's first statement, so both sides pay for what they import. Needs torch, transformers, datasets,
pydantic and xxhash.

Where others use the machine as well, compare CPU seconds: they count what was computed, not what was waited for.

Memory is proportional set size, looked at from outside; see :mod:`tests.benchmarks.framework`.
"""

import argparse
import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.framework import measured, over, rounds, show
from tests.benchmarks.inputs import sft_chats

SIDES = ("xtuner", "ours")
MAX_LENGTH = 4096
KEYS = {
    "first_batch_s": "first batch, s",
    "loaded_s": "of which imports and tokenizer, s",
    "cpu_s": "CPU of the whole process tree, s",
    "peak_pss_mb": "whole process tree at its highest, MB",
}
EPOCH_KEYS = KEYS | {
    "epoch_s": "a whole epoch, from the first statement, s",
    "samples_per_s": "samples/s of it",
    "tokens_per_s": "tokens/s of it",
    "samples_per_s_after_first": "samples/s after the first batch",
    "samples": "samples",
    "tokens": "tokens",
    "packs": "packs",
    "fill": "tokens over room in packs",
}


def probe(side: str, **settings: Any) -> dict[str, float]:
    """One side once; and what the figures of a whole epoch come to."""
    command = [sys.executable, "-m", "tests.benchmarks.xtuner_probe", side, json.dumps(settings)]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = measured(command, environment, watched=True, timeout_s=3600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if "epoch_s" in found:
        found["samples_per_s"] = found["samples"] / found["epoch_s"]
        found["tokens_per_s"] = found["tokens"] / found["epoch_s"]
        found["samples_per_s_after_first"] = found["samples"] / (found["epoch_s"] - found["first_batch_s"])
        found["fill"] = found["tokens"] / (found["packs"] * MAX_LENGTH)
    return found


def beside(title: str, num_rounds: int, keys: dict[str, str], **settings: Any) -> None:
    """Run the sides in turn and print what ``keys`` name; ratios are of the medians' own rounds."""
    calls = [partial(probe, side, **settings) for side in SIDES]
    results = rounds(*calls, num_rounds=num_rounds)
    print(f"\n{title}, median (range) of {num_rounds}")
    for key, label in keys.items():
        theirs, ours, ratio = (show(values) for values in (*(side[key] for side in results), over(*results, key)))
        print(f"  {label:44} xtuner {theirs:26} ours {ours:26} ratio {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json and a ChatML template")
    parser.add_argument("--folder", type=Path, required=True, help="for inputs")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epoch-rows", type=int, default=50_000, help="rows of a whole epoch; 0 leaves it out")
    parser.add_argument("--epoch-rounds", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()
    settings = {"tokenizer": args.tokenizer, "max_length": MAX_LENGTH, "num_workers": args.num_workers}
    path = str(sft_chats(args.folder, args.rows))
    beside(f"first batch of {args.rows} rows", args.rounds, KEYS, path=path, **settings)
    if args.epoch_rows:
        settings |= {"path": str(sft_chats(args.folder, args.epoch_rows)), "epoch": True}
        beside(f"an epoch of {args.epoch_rows} rows", args.epoch_rounds, EPOCH_KEYS, **settings)


if __name__ == "__main__":
    main()
