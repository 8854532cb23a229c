"""``IterDataset.mix`` of Grain, over data sets that are shuffled by row number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain

if TYPE_CHECKING:
    from mixture_checks import Setup


class GrainRows:
    """An iterator of a Grain dataset of rows."""

    def __init__(self, mixed: Any) -> None:
        self._rows = iter(mixed)

    def __next__(self) -> tuple[str, int]:
        row = next(self._rows)
        return row["part"], row["row"]

    def state(self) -> Any:
        return self._rows.get_state()

    def restore(self, state: Any) -> None:
        self._rows.set_state(state)


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Grain:
    name = "Grain `mix`"
    version = f"grain {grain.__version__}"
    ends = ("repeat", "stop")
    unable = {"tokens": "no"}

    def open(self, setup: Setup) -> GrainRows:
        parts = [grain.MapDataset.source(read(path)).shuffle(seed=42) for path in setup.files.values()]
        if setup.end == "repeat":
            parts = [part.repeat() for part in parts]
        weights = [float(setup.weights[name]) for name in setup.files]
        return GrainRows(grain.IterDataset.mix([part.to_iter_dataset() for part in parts], weights))


LIBRARY = Grain()
