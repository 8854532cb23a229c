"""MosaicML Streaming: streams with proportions, in its own shards.

Its package imports its data sets of pictures, and these a torchvision that goes with torch's build for GPUs; they are
stood in for.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

sys.modules["streaming.vision"] = ModuleType("streaming.vision")

from streaming import MDSWriter, Stream, StreamingDataset  # noqa: E402 - as above
from streaming.base.util import clean_stale_shared_memory  # noqa: E402 - as above

if TYPE_CHECKING:
    from mixture_checks import Setup

EPOCH = 2000


class _Rows:
    def __init__(self, setup: Setup) -> None:
        clean_stale_shared_memory()
        weights = {name: setup.weights[name] / sum(setup.weights.values()) for name in setup.files}
        if setup.end == "repeat":
            streams = [Stream(local=_shards(setup.files[name]), proportion=weights[name]) for name in setup.files]
            size = EPOCH
        else:
            streams, size = [Stream(local=_shards(path), repeat=1) for path in setup.files.values()], None
        self._mixed = StreamingDataset(
            streams=streams, epoch_size=size, shuffle=True, shuffle_seed=42, batch_size=1, num_canonical_nodes=1
        )
        self._rows = iter(self._mixed)
        self._number = 0

    def __next__(self) -> tuple[str, int]:
        row = next(self._rows)
        self._number += 1
        return row["part"], row["row"]

    def state(self) -> Any:
        return self._mixed.state_dict(num_samples=self._number, from_beginning=True)

    def restore(self, state: Any) -> None:
        self._mixed.load_state_dict(state)
        self._rows = iter(self._mixed)


def _shards(path: str) -> str:
    """The file as a folder of shards."""
    folder = Path(path).with_suffix("")
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"part": "str", "row": "int"}) as writer:
            for line in Path(path).read_text().splitlines():
                row = json.loads(line)
                writer.write({"part": row["part"], "row": row["row"]})
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return str(folder)


class Mosaic:
    name = "Mosaic Streaming"
    version = f"mosaicml-streaming {version('mosaicml-streaming')}"
    ends = ("repeat", "once")
    unable = {"tokens": "no"}

    def open(self, setup: Setup) -> _Rows:
        return _Rows(setup)


LIBRARY = Mosaic()
