"""What a loader of PyTorch is opened with in the tests, and how its batches and states are compared."""

import io
import json
from itertools import islice

import numpy as np
import torch

from asyncdata import LengthGrouping, PackedCollator, SoftPacking

MAX_LENGTH = 96


def chat(number, length):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{number} " * length}]


def write_chats(path):
    """Rows of many lengths; every seventh is too long, and is dropped."""
    lengths = [1 + number % 7 * 4 ** (number % 7 // 6) for number in range(150)]
    rows = [{"number": number, "messages": chat(number, length)} for number, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenize(row):
    """As a chat, and many times as fast."""
    length = 5 + len(row["messages"][1]["content"].split())
    return {"tokens": [row["number"]] * length, "labels": [-100] * 5 + [row["number"]] * (length - 5)}


def short(row):
    return tokenize(row) if len(row["messages"][1]["content"].split()) < 20 else None


def knobs(**changes):
    return {
        "tokenize_fn": short,
        "packing": SoftPacking(max_length=MAX_LENGTH, window_samples=16, window_tokens=2 * MAX_LENGTH),
        "length_grouping": LengthGrouping(window=4),
        "collate_fn": PackedCollator(max_length=MAX_LENGTH),
        "batch_size": 1,
        "num_workers": 0,
        **changes,
    }


SAMPLES = {"packing": None, "length_grouping": None, "batch_size": 7} | {
    "collate_fn": lambda samples: [sample.tokens for sample in samples]
}
KINDS = {"packed": {}, "samples": SAMPLES, "rank 1 of 2": {"ranks": {"rank": 1, "world_size": 2}}}


def plain(batch):
    """A batch as lists, to be compared."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


def take(batches, number):
    return [plain(batch) for batch in islice(batches, number)]


def run(loader, num_epochs):
    return [plain(batch) for _ in range(num_epochs) for batch in loader]


def of_torch_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def chain_epochs(loader):
    while True:
        yield from loader
