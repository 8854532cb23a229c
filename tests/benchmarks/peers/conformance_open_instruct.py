"""open-instruct's ``HFDataLoader``, out of the checkout that ASYNCDATA_OPEN_INSTRUCT names.

Its module imports ray, vllm and OLMo-core, which the loader itself does not use but for a base class of attributes. So
the class alone is compiled, over a base with those attributes, and asked only for its exclusions.
"""

from __future__ import annotations

import ast
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset

from asyncdata.testing import FEATURES, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.testing import Knobs, Rows

__all__ = ("OpenInstruct",)


class _Base:
    """What OLMo-core's ``DataLoaderBase`` gives: its attributes, and a loop that counts the batches."""

    def __init__(self, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.batches_processed = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iter_batches():  # type: ignore[attr-defined]
            self.batches_processed += 1
            yield batch


def _loader_class() -> Any:
    path = Path(os.environ["ASYNCDATA_OPEN_INSTRUCT"], "open_instruct", "data_loader.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "HFDataLoader"]
    names = {
        "data_loader": type("olmo", (), {"DataLoaderBase": _Base}),
        "to_device": lambda batch, device: batch,
        "logger": logging.getLogger("open_instruct"),
        "np": np,
        "torch": torch,
        "Dataset": Dataset,
        "Callable": Callable,
        "Iterable": Iterable,
        "Iterator": Iterator,
        "Any": Any,
    }
    exec(compile(ast.Module(found, []), str(path), "exec"), names)  # noqa: S102 - the checkout is the user's own
    return names["HFDataLoader"]


class OpenInstruct:
    """One rank, reshuffled by the loop at each epoch's end."""

    name = "open-instruct's HFDataLoader"
    version = os.environ.get("ASYNCDATA_OPEN_INSTRUCT_COMMIT", "a checkout")
    lacks: Mapping[str, str] = {name: "only its exclusions are asked" for name in FEATURES if name != "outcomes"}

    def open(self, rows: Rows, knobs: Knobs) -> _Loader:
        lines = [json.loads(line) for path in rows.paths for line in Path(path).read_text().splitlines()]
        data = Dataset.from_dict({"index": [line["row"] for line in lines]})
        return _Loader(
            _loader_class()(
                data, knobs.batch_size, knobs.seed, 0, 1, work_dir="", collator=lambda examples: {"index": examples}
            )
        )


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def next_batch(self) -> list[Seen]:
        try:
            return [Seen(example["index"]) for example in next(self._loader)["index"]]
        except StopIteration:
            self._loader.reshuffle(self._loader._epoch)  # noqa: SLF001 - `next` has counted it up already
            raise

    def report(self, solved: Mapping[int, bool]) -> None:
        for row in solved:
            if solved[row]:
                self._loader.exclude_index(row)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        pass
