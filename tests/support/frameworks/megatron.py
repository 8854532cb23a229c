"""Megatron-Bridge's own functions with its example, from the folder that ASYNCDATA_MEGATRON_BRIDGE names.

Its modules need Megatron-Core and a GPU to be imported. So the functions that make a training's iterator, save its
state and restore it are taken out of their files and run as they stand there. Stood in are Megatron-Core's
``RerunDataIterator``, ``get_pg_rank``, its optional storage client, and the process group of one process.
"""

import ast
import importlib
import importlib.util
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.support.frameworks.killed_runs import kill_and_resume, write_rows
from tests.support.frameworks.stand_ins import stand_in_for

VARIABLE = "ASYNCDATA_MEGATRON_BRIDGE"
CODE = "src/megatron/bridge"
NEEDS = {VARIABLE: f"{CODE}/training/checkpointing.py"}
PACKAGES = ("torch",)
ROWS = 42
MICRO_BATCH = 2
MICRO_BATCHES = 2  # of a step
GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
GROUPS = SimpleNamespace(dp=GROUP, tp=GROUP, pp=GROUP, cp=GROUP)


class RerunDataIterator:
    """Megatron-Core's class, where nothing is run again."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)


def _load(path):
    """One file that needs nothing of Megatron-Core."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(os.environ[VARIABLE], CODE, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module


def _define(path, names, into):
    """Define functions of a file without its imports."""
    tree = ast.parse(Path(os.environ[VARIABLE], CODE, path).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in found} == names, f"{path} no longer has all of {names}"
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found)
    exec(compile(code, path, "exec"), into)  # noqa: S102 - the framework's own code


def framework():
    import torch

    quiet = SimpleNamespace(barrier=lambda **_: None)
    names = {
        "os": os,
        "shutil": shutil,
        "Path": Path,
        "torch": SimpleNamespace(distributed=quiet, save=torch.save),
        "MultiStorageClientFeature": SimpleNamespace(is_enabled=lambda: False),
        "RerunDataIterator": RerunDataIterator,
        "get_pg_rank": lambda group: group.rank(),
        "print_rank_0": lambda _: None,
        "energon_torch_load": _load("utils/safe_pickle.py").energon_torch_load,
        "GPTDatasetConfig": type("GPTDatasetConfig", (), {}),
    }
    utils = {"get_checkpoint_name", "join_paths", "ensure_directory_exists"}
    _define("training/utils/checkpoint_utils.py", utils, names)
    _define("training/checkpointing.py", {"maybe_save_dataloader_state", "maybe_load_dataloader_state"}, names)
    _define("data/loaders.py", {"build_train_valid_test_data_iterators", "cyclic_iter"}, names)
    return SimpleNamespace(names=names, **names)


def provider(rows):
    """The one of the example, for these rows."""
    import train_megatron_bridge as example

    example.CHATS, example.MICRO_BATCH = rows, MICRO_BATCH
    example.ChatTokenizeFn = lambda *_, **__: f"{__name__}:tokenize"
    example.collate = lambda samples: {"number": np.array([sample.tokens[0] for sample in samples])}
    return example.Chats()


def tokenize(row):
    return {"tokens": [row["number"]]}


class Run:
    """A training's iterator, made, saved and restored as ``setup`` and ``save_checkpoint`` do it."""

    def __init__(self, folder, bridge, rows):
        self._bridge, self._energon = bridge, str(folder / "energon")
        self._latest = folder / "latest.json"  # as much of a checkpoint of the model as is asked for
        self.step = json.loads(self._latest.read_text()) if self._latest.exists() else 0
        train = provider(rows).build_datasets(SimpleNamespace(pg_collection=GROUPS))[0]
        bridge.names["build_train_valid_test_data_loaders"] = lambda **_: (train, None, None)
        config = SimpleNamespace(dataset=SimpleNamespace(dataloader_type="external"))
        self.iterator, _, _ = bridge.build_train_valid_test_data_iterators(config, None, lambda: None, None)
        if self.step:
            bridge.maybe_load_dataloader_state(self.iterator, self.step, self._energon, pg_collection=GROUPS)

    def take(self):
        return [number for _ in range(MICRO_BATCHES) for number in next(self.iterator)["number"].tolist()]

    def save(self):
        assert hasattr(self.iterator.iterable, "save_state"), "save_checkpoint asks for it"
        self._bridge.maybe_save_dataloader_state(None, self.iterator, self.step, self._energon, pg_collection=GROUPS)
        self._latest.write_text(json.dumps(self.step))


def drive(folder):
    stand_in_for("megatron")
    importlib.import_module("megatron.bridge.training.checkpointing")
    rows = write_rows(folder, [{"number": number} for number in range(ROWS)])
    opens = partial(Run, bridge=framework(), rows=rows)
    runs = kill_and_resume(opens, folder / "ours", num_batches=27, saves=[3, 10, 11, 13], rows=ROWS)
    return {"runs": {"ours": runs}}
