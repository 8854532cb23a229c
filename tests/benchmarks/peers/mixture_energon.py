"""Megatron-Energon: a metadataset that blends JSONL files."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
)
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron.energon.task_encoder.base import stateless

if TYPE_CHECKING:
    from mixture_checks import Setup


@stateless
def cook(sample: dict[str, Any]) -> TextSample:
    """A row as a sample."""
    row = sample["json"]
    row = row if isinstance(row, dict) else json.loads(row)
    return TextSample(**basic_sample_keys(sample), text=f"{row['part']} {row['row']}")


class _Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = [Cooker(cook)]


class _Rows:
    def __init__(self, setup: Setup) -> None:
        for path in setup.files.values():
            if not Path(f"{path}.idx").exists():
                CrudeJsonlDatasetFactory.prepare_dataset(Path(path))
        first = next(iter(setup.files.values()))
        names = "_".join(f"{name}{setup.weights[name]}" for name in setup.files)
        described = Path(first).parent / f"{names}_{setup.end}.yaml"
        described.write_text(_metadataset(setup))
        dataset = get_train_dataset(
            described,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=None,
            shuffle_buffer_size=100,
            max_samples_per_sequence=100,
            task_encoder=_Encoder(),
            repeat=setup.end != "once",
        )
        self._loader = get_savable_loader(dataset)
        self._rows = iter(self._loader)

    def __next__(self) -> tuple[str, int]:
        part, _, row = next(self._rows).text.partition(" ")
        return part, int(row)

    def state(self) -> Any:
        return self._loader.save_state_rank()

    def restore(self, state: Any) -> None:
        self._loader.restore_state_rank(state)
        self._rows = iter(self._loader)


def _metadataset(setup: Setup) -> str:
    """The YAML: a blend by weights, or, for one pass, by repetitions."""
    kind = "blend_epochized" if setup.end == "once" else "blend"
    lines = ["__module__: megatron.energon", "__class__: MetadatasetV2", "splits:", "  train:", f"    {kind}:"]
    for name, path in setup.files.items():
        share = "repetitions: 1" if setup.end == "once" else f"weight: {setup.weights[name]}"
        lines += [f"      - {share}", f"        path: {path}"]
    return "\n".join([*lines, ""])


class Energon:
    name = "Energon metadataset"
    version = f"megatron-energon {version('megatron-energon')}"
    ends = ("repeat", "once")
    unable = {"tokens": "no"}

    def open(self, setup: Setup) -> _Rows:
        return _Rows(setup)


LIBRARY = Energon()
