"""A plain trainer: a `for` loop over padded batches, and the loader's state in the trainer's own checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata import DataLoader, PromptTokenizeFn, Sample
from asyncdata.demo import tokenizer_folder, write_docstring_prompts

BATCH_SIZE = 32
STOP_AT = 10


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Token ids padded to the longest of the batch."""
    ids = np.zeros((len(samples), max(len(sample.tokens) for sample in samples)), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.tokens)] = sample.tokens
    return {"ids": ids, "mask": ids != 0, "labels": [sample.label for sample in samples]}


def train(data: Path, checkpoint: Path, max_steps: int) -> list[str]:
    """Train for at most `max_steps` more steps, from the checkpoint if there is one; the labels seen, in order."""
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), label_key="label", max_length=512)
    seen: list[str] = []
    step = 0
    with DataLoader(data, tokenize_fn=tokenize_fn, batch_size=BATCH_SIZE, collate_fn=collate, num_workers=2) as loader:
        if checkpoint.exists():
            loader.load_state_dict(json.loads(checkpoint.read_text())["data"])
        for step, batch in enumerate(loader, start=1):
            seen += batch["labels"]
            checkpoint.write_text(json.dumps({"model": "its weights", "data": loader.state_dict()}))
            if step == max_steps:
                break
        print(f"epoch {loader.epoch}: {step} steps, {loader.statistics().tokens_total:,} tokens so far")
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        data, checkpoint = Path(name) / "prompts.jsonl", Path(name) / "checkpoint.json"
        num_rows = write_docstring_prompts(data, num_rows=1000)
        labels = train(data, checkpoint, STOP_AT) + train(data, checkpoint, num_rows)
        whole = train(data, Path(name) / "another.json", num_rows)
        assert labels == whole
        print(f"stopped after {STOP_AT} steps and resumed: the same {len(whole)} samples in the same order")
