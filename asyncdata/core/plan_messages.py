"""Messages about orders of rows and planned packs. As in :mod:`asyncdata.core.messages`, nothing here needs numpy."""

from __future__ import annotations

from typing import Any

import msgspec

NO_SLOT = -1
"""The slot of a request that needs none."""


class Permute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Shuffle ``range(num_rows)`` as Python's ``random.Random(seed)`` does."""

    num_rows: int
    seed: int
    slot: int = NO_SLOT
    part: int = 0


class PackRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put rows into packs, knowing only how many tokens they have: as ``asyncdata.batching.planned`` does.

    ``lengths`` is int32, a row's tokens; ``sizes`` (int64) how many of the rows each data set has. ``packing`` is a
    packing's name and settings. The rows come in the order of ``method``, ``seed`` and ``epoch``, as in a RowShuffle.
    ``weights``, linear and quadratic, say what a pack costs; without them it costs what the packing says.
    """

    lengths: bytes
    sizes: bytes
    packing: dict[str, Any]
    weights: tuple[float, float] | None
    method: str
    seed: int
    epoch: int
    slot: int = NO_SLOT
    part: int = 0


class OrderPacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order packs, knowing only what they cost (float64): as ``asyncdata.batching.planned`` does.

    ``grouping`` has a grouping's settings; without it packs are shuffled as torch does, or, if not ``shuffled``, stay.
    """

    costs: bytes
    grouping: dict[str, Any] | None
    shuffled: bool
    world_size: int
    accumulation: int
    seed: int
    epoch: int
    slot: int = NO_SLOT
    part: int = 0


class Permuted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A permutation, uint32 of shape (num_rows,)."""

    rows: bytes


class Packed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Packs, in the order of packing: as in ``asyncdata.batching.packs.Packs``.

    ``offsets`` is int64, ``costs`` float64; ``rows``, ``starts`` and ``stops``, of the pieces, are int32. ``samples``
    and ``tokens`` count what was not packed, by reason.
    """

    offsets: bytes
    rows: bytes
    starts: bytes
    stops: bytes
    costs: bytes
    samples: dict[str, int]
    tokens: dict[str, int]
