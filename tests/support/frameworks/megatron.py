"""Megatron-Bridge's own functions, from the folder that ASYNCDATA_MEGATRON_BRIDGE names.

Its modules need Megatron-Core and a GPU to be imported. So the functions that make a training's iterator, save its
state and restore it are taken out of their files and run as they stand there. Stood in are Megatron-Core's
``RerunDataIterator``, ``get_pg_rank``, its optional storage client, and the process group of one process.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.frameworks.killed_runs import block_of, kill_and_resume, main

VARIABLE = "ASYNCDATA_MEGATRON_BRIDGE"
MODULE = "tests.support.frameworks.megatron"
CODE = "src/megatron/bridge"
ROWS = 42
MICRO_BATCH = 2
MICRO_BATCHES = 2  # of a step


class RerunDataIterator:
    """Megatron-Core's class, where nothing is run again."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __next__(self) -> Any:
        return next(self.iterable)


class Group:
    """A process group, as much as is asked for its rank and size."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


GROUPS = SimpleNamespace(dp=Group(), tp=Group(), pp=Group(), cp=Group())


def _module(path: str) -> Any:
    """One file that needs nothing of Megatron-Core."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(os.environ[VARIABLE], CODE, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return module


def _take(path: str, names: set[str], into: dict[str, Any]) -> None:
    """Define functions of a file without its imports."""
    tree = ast.parse(Path(os.environ[VARIABLE], CODE, path).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in found} == names, f"{path} no longer has all of {names}"
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found)
    exec(compile(code, path, "exec"), into)  # noqa: S102 - the framework's own code


def framework() -> SimpleNamespace:
    import torch

    quiet = SimpleNamespace(barrier=lambda **_: None)
    names: dict[str, Any] = {
        "os": os,
        "shutil": shutil,
        "Path": Path,
        "torch": SimpleNamespace(distributed=quiet, save=torch.save),
        "MultiStorageClientFeature": SimpleNamespace(is_enabled=lambda: False),
        "RerunDataIterator": RerunDataIterator,
        "get_pg_rank": lambda group: group.rank(),
        "print_rank_0": lambda _: None,
        "energon_torch_load": _module("utils/safe_pickle.py").energon_torch_load,
        "GPTDatasetConfig": type("GPTDatasetConfig", (), {}),
    }
    utils = {"get_checkpoint_name", "join_paths", "ensure_directory_exists"}
    _take("training/utils/checkpoint_utils.py", utils, names)
    _take("training/checkpointing.py", {"maybe_save_dataloader_state", "maybe_load_dataloader_state"}, names)
    _take("data/loaders.py", {"build_train_valid_test_data_iterators", "cyclic_iter"}, names)
    names["build_pretraining_data_loader"] = _module("data/samplers.py").build_pretraining_data_loader
    return SimpleNamespace(names=names, **names)


def provider(rows: str, index: str) -> Any:
    """The class that the page tells a user to write, for these rows."""
    import numpy as np

    def collate(samples: list[Any]) -> Any:
        return {"number": np.array([sample.tokens[0] for sample in samples])}

    class DatasetProvider: ...

    code = block_of("use-it-with-megatron-bridge.md", "py").replace('"rows.jsonl"', "ROWS_PATH")
    imports = "from megatron.bridge.data.base import DatasetProvider"
    assert imports in code
    names: dict[str, Any] = {"DatasetProvider": DatasetProvider, "collate": collate, "tokenize": f"{MODULE}:tokenize"}
    names |= {"ROWS_PATH": rows, "MICRO_BATCH": MICRO_BATCH, "__name__": __name__}
    exec(code.replace(imports, ""), names)  # noqa: S102 - the project's own pages
    return names["Rows"]()


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [row["number"]]}


class Run:
    """A training's iterator, made, saved and restored as ``setup`` and ``save_checkpoint`` do it."""

    def __init__(self, bridge: SimpleNamespace, folder: Path, rows: str, *, is_ours: bool) -> None:
        self._bridge, self._folder = bridge, folder
        latest = folder / "latest.json"  # as much of a checkpoint of the model as is asked for
        self.step = json.loads(latest.read_text()) if latest.exists() else 0
        kind = "external" if is_ours else "cyclic"
        if is_ours:
            context = SimpleNamespace(pg_collection=GROUPS)
            train = provider(rows, str(folder.parent / "index")).build_datasets(context)[0]
        else:
            consumed = self.step * MICRO_BATCH * MICRO_BATCHES
            numbers = [{"number": number} for number in range(ROWS)]
            train = bridge.build_pretraining_data_loader(numbers, consumed, kind, MICRO_BATCH, 0, True)
        bridge.names["build_train_valid_test_data_loaders"] = lambda **_: (train, None, None)
        config = SimpleNamespace(dataset=SimpleNamespace(dataloader_type=kind))
        self.iterator, _, _ = bridge.build_train_valid_test_data_iterators(config, None, lambda: None, None)
        if self.step:
            bridge.maybe_load_dataloader_state(self.iterator, self.step, str(folder / "energon"), pg_collection=GROUPS)

    def take(self) -> list[Any]:
        return [number for _ in range(MICRO_BATCHES) for number in next(self.iterator)["number"].tolist()]

    def save(self) -> None:
        if hasattr(self.iterator.iterable, "save_state"):  # as save_checkpoint asks
            self._bridge.maybe_save_dataloader_state(
                None, self.iterator, self.step, str(self._folder / "energon"), pg_collection=GROUPS
            )
        (self._folder / "latest.json").write_text(json.dumps(self.step))


def drive(folder: Path) -> dict[str, Any]:
    bridge = framework()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(ROWS)))
    found = {}
    for name, is_ours in (("ours", True), ("Megatron-Bridge's cyclic", False)):

        def opens(place: Path, is_ours: bool = is_ours) -> Run:
            return Run(bridge, place, str(rows), is_ours=is_ours)

        found[name] = kill_and_resume(opens, folder / name, num_batches=27, saves=[3, 10, 11, 13])
    return found


if __name__ == "__main__":
    main(drive)
