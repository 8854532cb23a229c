"""XTuner's own data code, from the folder that ASYNCDATA_XTUNER names: what ours is compared with."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

VARIABLE = "ASYNCDATA_XTUNER"


def xtuner_module(name: str) -> ModuleType:
    """XTuner's module ``name``, as ``datasets.packing``. Skips the test where there is no checkout of it."""
    folder = Path(os.environ.get(VARIABLE) or "/no folder") / "xtuner" / "v1"
    if not (folder / "datasets" / "packing.py").is_file():
        pytest.skip(f"nothing to compare with: {VARIABLE} names no checkout of XTuner")

    for needed in ("torch", "datasets", "xxhash", "tqdm"):
        pytest.importorskip(needed, reason=f"XTuner's data code needs {needed}")
    return _load(folder, f"xtuner.v1.{name}")


@cache
def _load(folder: Path, name: str) -> ModuleType:
    """Loaded alone: XTuner's packages import its whole trainer. It does not stay in ``sys.modules``."""
    before = set(sys.modules)
    for package in ("xtuner", "xtuner.v1", "xtuner.v1.datasets", "xtuner.v1.utils"):
        path = folder.parents[1].joinpath(*package.split("."))
        sys.modules[package] = module = ModuleType(package)
        module.__path__ = [str(path)]
    for stand_in, contents in _stand_ins().items():
        module = sys.modules.setdefault(stand_in, ModuleType(stand_in))
        vars(module).update(contents)
    try:
        return importlib.import_module(name)
    finally:
        for module_name in set(sys.modules) - before:
            if module_name.partition(".")[0] in {"xtuner", "mmengine"}:
                del sys.modules[module_name]


def _stand_ins() -> dict[str, dict[str, Any]]:
    """What the files import and the comparisons do not use."""

    class Unused: ...

    logger = logging.getLogger("xtuner")
    return {
        "mmengine": {},
        "mmengine.dist": {"sync_random_seed": int},
        "xtuner.v1.utils": {
            "IGNORE_INDEX": -100,
            "get_logger": lambda: logger,
            "is_local_rank0": lambda: True,
            "log_rank0": logger,
        },
        "xtuner.v1.utils.executor": {"SharedPoolExecutor": Unused},
        "xtuner.v1.datasets.jsonl": {"JsonlDataset": Unused},
        "xtuner.v1.datasets.vlm_jsonl": {"VLMJsonlDataset": Unused},
        "xtuner.v1.datasets.preset_pack": {"PresetPackDataset": Unused},
        # The real one keeps plans in /dev/shm, for ever.
        "xtuner.v1.datasets.utils": {"_get_mmap_dir": Path, "ndarray_to_mmap": lambda array, group: array},
    }


class FakeDataset:
    """What XTuner's packing asks of a data set."""

    def __init__(self, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.num_tokens = lengths
        self.proxy_attn_flops = np.array([float(round(int(length) / 128) ** 2) for length in lengths])

    def __len__(self) -> int:
        return len(self.num_tokens)


class FakeMesh:
    """A mesh of ``world_size`` ranks, seen from one of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.world_size
