"""torchdata's StatefulDataLoader: over Hugging Face streaming, and over a dataset with an index, shuffled by torch."""

import base64
import io
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import datasets
import torch
from conformance_hf import streamed
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.conformance.lab import EpochByEpoch, Knobs, Rows, Seen

_VERSION = f"torchdata {version('torchdata')}, datasets {datasets.__version__}"
_NO_BAD_ROWS = {
    "bad_rows": "a row for which a function raises ends the epoch",
    "outcomes": "it has no feedback from the trainer",
}


def seen_with(rows: list[dict[str, Any]]) -> list[Seen]:
    """A batch, made in a worker."""
    return [Seen(int(row["row"]), os.getpid()) for row in rows]


class StreamedStateful:
    """Over Hugging Face streaming."""

    name = "StatefulDataLoader, streaming"
    version = _VERSION
    lacks: Mapping[str, str] = _NO_BAD_ROWS

    def open(self, rows: Rows, knobs: Knobs) -> Any:
        found = streamed(rows, knobs)
        return _Loader(StatefulDataLoader(found, **_settings(knobs)), found)


class IndexedStateful:
    """Over a dataset whose rows have numbers, which a sampler of torch's mixes."""

    name = "StatefulDataLoader, indexed"
    version = _VERSION
    lacks: Mapping[str, str] = {
        **_NO_BAD_ROWS,
        "mixture": "a sampler's weights draw with repetition",
        "filter": "rows are left out before, when the dataset is made",
        "transform": "a function is given one row",
    }

    def open(self, rows: Rows, knobs: Knobs) -> Any:
        folder = os.path.join(os.path.dirname(rows.paths[0]), "cache")
        found = datasets.load_dataset("json", data_files=rows.paths, split="train", cache_dir=folder)
        generator = torch.Generator().manual_seed(knobs.seed)
        return _Loader(StatefulDataLoader(found, shuffle=knobs.shuffle, generator=generator, **_settings(knobs)))


def _settings(knobs: Knobs) -> dict[str, Any]:
    settings = {"batch_size": knobs.batch_size, "num_workers": knobs.num_workers, "collate_fn": seen_with}
    if knobs.num_workers:
        settings["prefetch_factor"] = max(1, knobs.read_ahead // knobs.batch_size // knobs.num_workers)
    return settings


class _Loader(EpochByEpoch):
    """It tells the dataset the number of the epoch where that asks for it."""

    def __init__(self, loader: Any, rows: Any = None) -> None:
        self._loader, self._rows = loader, rows

    def begin(self) -> Iterator[list[Seen]]:
        self._set_epoch()
        return iter(self._loader)

    def _set_epoch(self) -> None:
        if self._rows is not None:
            self._rows.set_epoch(self.epoch)

    def state_dict(self) -> Any:
        file = io.BytesIO()
        torch.save(self._loader.state_dict(), file)  # it may hold a tensor
        return {"epoch": self.epoch, "loader": base64.b64encode(file.getvalue()).decode()}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self._set_epoch()
        file = io.BytesIO(base64.b64decode(state["loader"]))
        self._loader.load_state_dict(torch.load(file, weights_only=False))  # ours, of a moment ago
