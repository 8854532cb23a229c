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
MODULE = "tests.support.frameworks.megatron"  # also where it is run as a program
CODE = "src/megatron/bridge"
NEEDS = {VARIABLE: f"{CODE}/training/checkpointing.py"}
PACKAGES = ("torch",)
ROWS = 42
MICRO_BATCH = 2
MICRO_BATCHES = 2  # of a step


class RerunDataIterator:
    """Megatron-Core's class, where nothing is run again."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __next__(self) -> Any:
        return next(self.iterable)


GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
GROUPS = SimpleNamespace(dp=GROUP, tp=GROUP, pp=GROUP, cp=GROUP)


def _load(path: str) -> Any:
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
        "energon_torch_load": _load("utils/safe_pickle.py").energon_torch_load,
        "GPTDatasetConfig": type("GPTDatasetConfig", (), {}),
    }
    utils = {"get_checkpoint_name", "join_paths", "ensure_directory_exists"}
    _take("training/utils/checkpoint_utils.py", utils, names)
    _take("training/checkpointing.py", {"maybe_save_dataloader_state", "maybe_load_dataloader_state"}, names)
    _take("data/loaders.py", {"build_train_valid_test_data_iterators", "cyclic_iter"}, names)
    return SimpleNamespace(names=names, **names)


def provider(rows: str) -> Any:
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

    def __init__(self, bridge: SimpleNamespace, folder: Path, rows: str) -> None:
        self._bridge, self._folder = bridge, folder
        latest = folder / "latest.json"  # as much of a checkpoint of the model as is asked for
        self.step = json.loads(latest.read_text()) if latest.exists() else 0
        train = provider(rows).build_datasets(SimpleNamespace(pg_collection=GROUPS))[0]
        bridge.names["build_train_valid_test_data_loaders"] = lambda **_: (train, None, None)
        config = SimpleNamespace(dataset=SimpleNamespace(dataloader_type="external"))
        self.iterator, _, _ = bridge.build_train_valid_test_data_iterators(config, None, lambda: None, None)
        if self.step:
            bridge.maybe_load_dataloader_state(self.iterator, self.step, str(folder / "energon"), pg_collection=GROUPS)

    def take(self) -> list[Any]:
        return [number for _ in range(MICRO_BATCHES) for number in next(self.iterator)["number"].tolist()]

    def save(self) -> None:
        assert hasattr(self.iterator.iterable, "save_state"), "save_checkpoint asks for it"
        self._bridge.maybe_save_dataloader_state(
            None, self.iterator, self.step, str(self._folder / "energon"), pg_collection=GROUPS
        )
        (self._folder / "latest.json").write_text(json.dumps(self.step))


def drive(folder: Path) -> dict[str, Any]:
    bridge = framework()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(ROWS)))

    def opens(place: Path) -> Run:
        return Run(bridge, place, str(rows))

    runs = kill_and_resume(opens, folder / "ours", num_batches=27, saves=[3, 10, 11, 13], rows=ROWS)
    return {"runs": {"ours": runs}}


if __name__ == "__main__":
    main(drive)
