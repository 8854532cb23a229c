"""The run of ``asyncdata report --demo``: chats about this Python's standard library, as a mixture, in packs."""

from __future__ import annotations

import json
import threading
from itertools import islice
from typing import TYPE_CHECKING

from asyncdata.batching.packers.soft import SoftPacking
from asyncdata.demo import docstring_prompts, tokenizer_folder
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix import Mix, Part
from asyncdata.telemetry.settings import Telemetry
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("record_demo_run",)

_WEIGHTS = {"function": 0.6, "class": 0.3, "module": 0.1}
_STAGES = {1500: {"function": 0.4, "class": 0.4, "module": 0.2}}
_NUM_ROWS = 2500
_NUM_STEPS = 300
_STEP_S = 0.01
_BROKEN_ROW = '{"messages": [{"role": "user", "content": "this row is cut off'


def record_demo_run(folder: Path) -> Path:
    """Run with data of its own in ``folder``; the folder of its telemetry."""
    parts = {kind: Part(path, weight=_WEIGHTS[kind]) for kind, path in _write_chats(folder).items()}
    telemetry = Telemetry(folder=str(folder / "demo"), samples=200, interval_s=0.1)
    with DataLoader(
        Mix(parts, stages=_STAGES, quota=100),
        tokenize_fn=ChatTokenizeFn(tokenizer_folder(), max_length=512),
        packing=SoftPacking(max_length=1024),
        batch_size=2,
        bad_rows="skip",
        num_workers=min(2, num_usable_cpus()),
        telemetry=telemetry,
    ) as loader:
        training = threading.Event()  # never set: a pretended step lasts as long as the wait for it
        for _ in islice(loader, _NUM_STEPS):
            training.wait(_STEP_S)
    return folder / "demo"


def _write_chats(folder: Path) -> dict[str, str]:
    """A file of chats for each kind of docstring; one of its rows is broken."""
    files = {kind: (folder / f"{kind}.jsonl").open("w", encoding="utf-8") for kind in _WEIGHTS}
    try:
        for row in islice(docstring_prompts(), _NUM_ROWS):
            turns = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["label"]}]
            files[row["metadata"]["kind"]].write(json.dumps({"messages": turns}) + "\n")
        files["function"].write(_BROKEN_ROW + "\n")
    finally:
        for file in files.values():
            file.close()
    return {kind: file.name for kind, file in files.items()}
