"""One side of :mod:`tests.benchmarks.xtuner_beside`, in a process of its own: ``... xtuner_probe SIDE JSON``."""

from tests.benchmarks.clock import seconds  # isort: skip - the clock starts before anything else

import importlib
import json
import logging
import os
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 42


def load_xtuner(folder: Path) -> None:
    """Make the modules of XTuner's data path importable; its packages' own ``__init__`` import the whole trainer.

    What is stood in for: mmengine, which is not installed, says rank 0 and has no barrier; loguru is logging; cyclopts
    only decorates command-line options. All that is measured is XTuner's own.
    """
    for package in ("xtuner", "xtuner.v1", "xtuner.v1.datasets", "xtuner.v1.utils"):
        _module(package, __path__=[str(folder.joinpath(*package.split(".")))])
    logger = logging.getLogger("xtuner")
    logger.setLevel(logging.ERROR)
    logs = {"get_logger": lambda *args: logger, "log_rank0": logger}
    _module("mmengine", mkdir_or_exist=partial(os.makedirs, exist_ok=True), is_installed=lambda name: False)
    _module("mmengine.dist", get_rank=lambda: 0, barrier=lambda: None, sync_random_seed=lambda: SEED)
    _module("cyclopts", Parameter=lambda **settings: settings)
    _module("xtuner.v1.utils.logger", **logs)
    utils = _module("xtuner.v1.utils", IGNORE_INDEX=-100, **logs)
    names = {"device": "get_torch_device_module", "dist_utils": "is_local_rank0", "misc": "SharedMemory"}
    for module, name in (names | {"profile": "profile_time"}).items():
        setattr(utils, name, getattr(importlib.import_module(f"xtuner.v1.utils.{module}"), name))


def _module(name: str, **contents: Any) -> Any:
    module = sys.modules.setdefault(name, ModuleType(name))
    vars(module).update(contents)
    return module


class Theirs:
    """XTuner's own classes, put together as its ``DataloaderConfig.build`` does, with nothing in its cache."""

    def __init__(self, path: str, tokenizer: str, cache: str, max_length: int, num_workers: int) -> None:
        os.environ["XTUNER_TOKENIZE_WORKERS"] = str(num_workers)
        load_xtuner(Path(os.environ["ASYNCDATA_XTUNER"]))
        from transformers import AutoTokenizer
        from xtuner.v1.datasets.collator import sft_llm_collator
        from xtuner.v1.datasets.dataloader import Dataloader
        from xtuner.v1.datasets.jsonl import JsonlDataset
        from xtuner.v1.datasets.packing import ExpandSoftPackDataset
        from xtuner.v1.datasets.sampler import LengthGroupedSampler
        from xtuner.v1.datasets.sft_tokenize_fn.openai import OpenaiTokenizeFunction

        engine = AutoTokenizer.from_pretrained(tokenizer)
        self.loaded_s = seconds()
        function = OpenaiTokenizeFunction(engine, chat_template="qwen3", max_length=max_length)
        dataset = JsonlDataset(path, tokenize_fn=function, cache_dir=cache)
        self.indexed_s = seconds()
        packing = {"pack_max_length": max_length, "global_pack": True, "pack_extra_buffer_size": 100, "seed": SEED}
        packs = ExpandSoftPackDataset([dataset], pack_workers=num_workers, **packing)
        self._loader = Dataloader(
            packs,
            batch_size=1,
            num_workers=num_workers,
            sampler=LengthGroupedSampler(packs, global_batch_size=1, seed=SEED),
            collate_fn=partial(sft_llm_collator, pack_max_length=max_length, padding_token_idx=engine.pad_token_id),
            multiprocessing_context="fork" if num_workers else None,
            persistent_workers=num_workers > 0,
        )
        # Of a whole epoch, which has each pack once, as its global batch is one pack.
        self.counts = {"samples": len(dataset), "tokens": int(dataset.num_tokens.sum()), "packs": len(packs)}

    def __iter__(self) -> Any:
        return iter(self._loader)

    def close(self) -> None:
        """Its workers are daemons."""


class Ours:
    """The loader, with as many workers."""

    def __init__(self, path, tokenizer, cache, max_length, num_workers, backend="hf"):
        from asyncdata import ChatTokenizeFn, DataLoader, LengthGrouping, PackedCollator, SoftPacking

        self.loaded_s = self.indexed_s = seconds()
        self.counts = {"samples": 0, "tokens": 0, "packs": 0}
        knobs: dict[str, Any] = {"batch_size": 1, "num_workers": num_workers, "seed": SEED, "epochs": 1}
        self._loader = DataLoader(
            path,
            tokenize_fn=ChatTokenizeFn(tokenizer, max_length=max_length, tokenizer_backend=backend),
            packing=SoftPacking(max_length=max_length),
            length_grouping=LengthGrouping(),
            collate_fn=PackedCollator(max_length=max_length),
            cache={"folder": cache},
            **knobs,
        )
        self.close = self._loader.close

    def __iter__(self) -> Any:
        for batch in self._loader:
            self.counts["samples"] += int(batch["seq_idx"].max()) + 1
            self.counts["tokens"] += batch["input_ids"].size - batch["num_padding"]
            self.counts["packs"] += 1
            yield batch


SIDES: dict[str, Any] = {"xtuner": Theirs, "ours": Ours}


def steady(side: str, cache: str, num_warm: int, num_batches: int, **settings: Any) -> dict[str, float]:
    """Batches a second after the first ``num_warm``, with what earlier runs left in ``cache``."""
    made = SIDES[side](cache=cache, **settings)
    batches = iter(made)
    for _ in range(num_warm):
        next(batches)
    began = seconds()
    found = sum(1 for _ in islice(batches, num_batches))
    passed = seconds() - began
    made.close()
    return {"batches_per_s": found / passed, "batches": found}


def measure(side: str, epoch: bool = False, **settings: Any) -> dict[str, float]:
    """Seconds from the first statement to the first batch; with ``epoch``, to the end of an epoch as well."""
    if "cache" in settings:
        return steady(side, **settings)

    with tempfile.TemporaryDirectory() as cache:
        made = SIDES[side](cache=cache, **settings)
        batches = iter(made)
        next(batches)
        found: dict[str, float] = {"first_batch_s": seconds(), "loaded_s": made.loaded_s, "indexed_s": made.indexed_s}
        if epoch:
            num_batches = 1 + sum(1 for _ in batches)
            found |= {"epoch_s": seconds(), **made.counts}
            assert num_batches == found["packs"]
        made.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], **json.loads(sys.argv[2]))))
