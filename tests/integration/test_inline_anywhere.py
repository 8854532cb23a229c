"""With ``num_workers=0`` nothing is needed that Linux alone has: without it a process delivers the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).parents[2]

WITHOUT = """
import ctypes, errno, os, signal, sys

sys.platform = "darwin"
for name in ("memfd_create", "eventfd", "pidfd_open", "sched_getaffinity", "sched_setscheduler", "P_PIDFD"):
    delattr(os, name)
del signal.pidfd_send_signal


def refuse(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
    if event == "ctypes.dlsym" and args[1] == "prctl":
        raise AttributeError(args[1])


sys.addaudithook(refuse)
"""

RUN = """
import asyncio, sys
from asyncdata import AsyncDataLoader, DataLoader, PackedCollator, PromptTokenizeFn, SoftPacking, TextTokenizeFn
from asyncdata.demo import tokenizer_folder

data, table, folder = sys.argv[1:]
prompts = PromptTokenizeFn(tokenizer_folder())
kept = {"shuffle": "full", "telemetry": folder, "cache": {"folder": folder}}
for source, more in ((data, {}), (data, kept), (table, {}), (table, kept)):
    with DataLoader(source, tokenize_fn=prompts, batch_size=16, num_workers=0, epochs=1, **more) as loader:
        print([(sample.index, sample.prompt) for batch in loader for sample in batch])
        loader.save(f"{folder}/state")
texts, packs = TextTokenizeFn(tokenizer_folder(), text_key="input"), SoftPacking(max_length=64)
knobs = {"packing": packs, "collate_fn": PackedCollator(max_length=64), "batch_size": 1, "num_workers": 0}
with DataLoader(data, tokenize_fn=texts, **knobs) as loader:
    print([batch["input_ids"].sum() for batch in loader])


async def rollouts():
    async with AsyncDataLoader(data, tokenize_fn=prompts, n_samples_per_prompt=2, num_workers=0) as loader:
        groups = await loader.get_samples(3)
        loader.add_samples(groups[1:])
        print([[sample.prompt for sample in group] for group in await loader.get_samples(3)])


asyncio.run(rollouts())
"""


def printed_by(program, *words):
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loader_without_workers_needs_nothing_that_linux_alone_has(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps({'input': f'What is {number}?'})}\n" for number in range(100)))
    rows = [{"input": f"How much is {number}?"} for number in range(100)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), table := tmp_path / "table.parquet")
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    assert printed_by(WITHOUT + RUN, data, table, there) == printed_by(RUN, data, table, here) != ""
