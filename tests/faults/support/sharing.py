"""What ranks share that are killed, as settings of their loaders."""

from typing import Any

from asyncdata import HardPacking, Shuffle

_PACKS: dict[str, Any] = {"packing": HardPacking(max_length=24), "batch_size": 1, "epochs": 1}
WAYS: dict[str, dict[str, Any]] = {
    "rows' lengths": {**_PACKS, "plan_packs": True, "shuffle": "full"},
    "scans": {**_PACKS, "shuffle": Shuffle(block_bytes=128, window_blocks=8)},
}
SMALL = {
    "asyncdata.loader.opened_rows._INDEX_BLOCK_BYTES": 256,
    "asyncdata.read_ahead.windows.block_windows._RANKS_AT_START": 1,
    "asyncdata.read_ahead.windows.block_windows._MIN_BLOCKS_PER_SCAN": 2,
}
