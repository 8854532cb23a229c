"""``DatasetMixConfig`` of torchtitan, over its own ``SingleDatasetConfig``; torchtitan must be importable."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from conformance_torchtitan import TorchtitanMix
from mixture_grain import GrainRows, read
from torchtitan.components.data.dataset import DatasetMixConfig, SingleDatasetConfig, WeightedDataset

if TYPE_CHECKING:
    from mixture_checks import Setup


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """A source of rows, in place of torchtitan's, which read the hub."""

    path: str

    def build(self, **_: Any) -> list[dict[str, Any]]:
        return read(self.path)


@dataclasses.dataclass(frozen=True)
class _Policy:
    """What the mixture and its parts read of torchtitan's own policy."""

    repeat: bool
    seed: int = 42
    shuffle: bool = True
    dp_rank: int = 0
    dp_world_size: int = 1


class Torchtitan:
    name = "torchtitan `DatasetMixConfig`"
    version = TorchtitanMix.version
    ends = ("repeat", "stop")
    unable = {"tokens": "no; a TODO in its code"}

    def open(self, setup: Setup) -> GrainRows:
        parts = tuple(
            WeightedDataset(dataset=SingleDatasetConfig(source=_InMemory(path)), weight=float(setup.weights[name]))
            for name, path in setup.files.items()
        )
        policy = _Policy(repeat=setup.end == "repeat")
        mixed = DatasetMixConfig(datasets=parts).build(context=None, dataset_iteration_policy=policy)
        return GrainRows(mixed.to_iter_dataset())


LIBRARY = Torchtitan()
