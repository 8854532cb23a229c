"""What ranks share that are killed, as settings of their loaders."""

from typing import Any

from asyncdata import HardPacking, Shuffle

_PACKS: dict[str, Any] = {"packing": HardPacking(max_length=24), "batch_size": 1, "epochs": 1}
WAYS: dict[str, dict[str, Any]] = {
    "rows' lengths": {**_PACKS, "plan_packs": True, "shuffle": "full"},
    "scans": {**_PACKS, "shuffle": Shuffle(block_bytes=128, window_blocks=8)},
}
