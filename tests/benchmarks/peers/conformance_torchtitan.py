"""torchtitan's mixture of datasets, which is Grain's: rows by number in each part, as its README recommends.

It is asked for nothing but its mixture; torchtitan must be importable.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
from torchtitan.components.data.dataset import DatasetMixConfig, WeightedDataset

from asyncdata.testing import FEATURES, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.testing import Knobs, Rows

__all__ = ("TorchtitanMix",)


def _version() -> str:
    try:
        return f"torchtitan {version('torchtitan')}, grain {grain.__version__}"
    except PackageNotFoundError:
        return f"torchtitan (a checkout), grain {grain.__version__}"


class _Part:
    """A dataset of rows in memory, in place of torchtitan's own, which reads the hub."""

    def __init__(self, path: str) -> None:
        self._rows = [json.loads(line)["row"] for line in Path(path).read_text().splitlines()]

    def build(self, **_: Any) -> grain.MapDataset:
        return grain.MapDataset.source(self._rows).repeat()


@dataclasses.dataclass(frozen=True)
class _Policy:
    """What the mixture reads of torchtitan's own policy."""

    seed: int = 0


class TorchtitanMix:
    """``DatasetMixConfig``, iterated by Grain's iterator, whose state torchtitan saves."""

    name = "torchtitan's mixture"
    version = _version()
    lacks: Mapping[str, str] = {name: "only its mixture is asked" for name in FEATURES if name != "mixture"}

    def open(self, rows: Rows, knobs: Knobs) -> _Loader:
        pairs = zip(rows.paths, knobs.weights, strict=True)
        weighted = [WeightedDataset(dataset=_Part(path), weight=weight) for path, weight in pairs]
        mixed = DatasetMixConfig(datasets=tuple(weighted)).build(context=None, dataset_iteration_policy=_Policy())
        return _Loader(iter(mixed.batch(knobs.batch_size, batch_fn=list).to_iter_dataset()))


class _Loader:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def next_batch(self) -> list[Seen]:
        return [Seen(row) for row in next(self._iterator)]

    def state_dict(self) -> Any:
        return self._iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._iterator.set_state(state)

    def close(self) -> None:
        self._iterator.close()
