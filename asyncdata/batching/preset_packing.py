"""The packs that a folder names, in the order that a file names: the ``preset`` of XTuner v1.

The folder has ``paths.json``, the files' names; ``samples.npy``, int64 of shape (num_pieces, 6): the number of a file
in ``paths.json``, of the row in its file, two numbers that are -1, and the row's tokens from ``start`` to ``stop``; and
``boundaries.npy``, int64 of shape (num_packs + 1,): pack p has the pieces ``boundaries[p]`` to ``boundaries[p + 1]``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncdata.batching.packs import Counts, OfPacks, Packs, Positive
from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.packs import Int32, Int64


class PresetPacking(OfPacks, frozen=True, kw_only=True):
    """Packs and their order, as XTuner's ``pack_level="preset"`` and ``sampler_type="preset"`` have them.

    Every epoch has the same packs in the same order, which is cut to whole steps. A row is numbered by its line, so
    every row of the files must be a sample.

    :ivar folder: its ``pack_config_path``.
    :ivar order: its ``sampler_config_path``, a file of numpy: whole numbers of packs, of shape (num_delivered,). A pack
        may come several times, or not at all.
    :ivar max_length: its ``pack_max_length``.
    :ivar short: its ``short_pack_strategy``: what is done with a pack of fewer tokens. ``padding`` leaves it as it is,
        for the collator to pad.
    :ivar long: its ``long_pack_strategy``: what is done with a pack of more tokens.
    :raises ConfigError: AD453, if the folder or the order cannot be read.
    """

    folder: str
    order: str
    max_length: Positive
    short: Literal["error", "padding"] = "error"
    long: Literal["error", "truncate"] = "error"

    def check(self) -> None:
        """Whether both can be read."""
        self._loaded()

    def description(self) -> dict[str, Any]:
        """What a snapshot must have, too: the packs by what they are, wherever they lie."""
        paths, *arrays = self._loaded()
        content = digest(
            *(Path(path).name for path in paths), *(np.ascontiguousarray(array).data.cast("B") for array in arrays)
        )
        return {"max_length": self.max_length, "short": self.short, "long": self.long, "content": content}

    def plan(self, lengths: Int32, sizes: Int64, names: Sequence[str]) -> Packs:
        """The packs of an epoch, in their order; what a pack costs is its longest piece.

        :param lengths: int32 of shape (num_rows,): the tokens of all rows.
        :param sizes: int64 of shape (num_files,): how many rows each file has.
        :param names: of the files.
        :raises ConfigError: AD453, for packs that cannot be made of these rows.
        """
        paths, bounds, samples, order = self._loaded()
        numbers = {name: number for number, name in enumerate(names)}
        for path in paths:
            if path not in numbers:
                raise self._fault(f"paths.json names {path}, which is no file of the data: these are {names[0]} ...")

        files = np.array([numbers[path] for path in paths], np.int64)[samples[:, 0]]
        rows, starts, stops = samples[:, 1], samples[:, 4], samples[:, 5]
        self._refuse(rows >= sizes[files], lambda n: f"its file has {sizes[files[n]]} rows")
        rows = (np.cumsum(sizes) - sizes)[files] + rows
        self._refuse(stops > lengths[rows], lambda n: f"the row has {lengths[rows[n]]} tokens")
        totals = np.add.reduceat(stops - starts, bounds[:-1])
        self._refuse_totals(totals)
        before = np.cumsum(stops - starts) - (stops - starts)
        room = self.max_length - (before - np.repeat(before[bounds[:-1]], np.diff(bounds)))
        kept = room > 0  # all, unless packs are cut
        stops = np.minimum(stops, starts + room)
        bounds = np.concatenate(([0], np.cumsum(kept)))[bounds]
        columns = [column[kept] for column in (rows, starts, stops)]
        ends = np.cumsum(np.concatenate(([0], np.diff(bounds)[order])))
        chosen = np.arange(ends[-1]) + np.repeat(bounds[order] - ends[:-1], np.diff(ends))
        packed, begun, ended = (column[chosen].astype(np.int32) for column in columns)
        costs = np.maximum.reduceat(ended - begun, ends[:-1]).astype(np.float64)
        counts = Counts()
        counts.add("not_named", samples=len(lengths) - len(np.unique(packed)))
        counts.add("truncated", tokens=int(totals[order].sum() - (ended - begun).sum(dtype=np.int64)))
        return Packs(ends, packed, begun, ended, costs, counts)

    def _loaded(self) -> tuple[list[str], Int64, Int64, Int64]:
        folder = Path(self.folder)
        try:
            paths = json.loads((folder / "paths.json").read_text(encoding="utf-8"))
            bounds, samples, order = (
                np.asarray(np.load(path, mmap_mode="r"), np.int64)
                for path in (folder / "boundaries.npy", folder / "samples.npy", self.order)
            )
        except (OSError, ValueError) as error:
            raise self._fault(f"it cannot be read: {error}") from None

        if samples.ndim != 2 or samples.shape[1:] != (6,) or bounds.ndim != 1 or order.ndim != 1 or not len(order):
            raise self._fault("samples.npy is of shape (n, 6), boundaries.npy and the order of shape (n,)")

        if not len(bounds) or bounds[0] or bounds[-1] != len(samples) or (np.diff(bounds) < 1).any():
            raise self._fault(f"boundaries.npy goes up from 0 to the {len(samples)} pieces of samples.npy")

        if order.min() < 0 or order.max() >= len(bounds) - 1:
            raise self._fault(f"{self.order} names packs from {order.min()} to {order.max()}, of {len(bounds) - 1}")

        file, row, *characters, start, stop = samples.T
        if (np.array(characters) != -1).any():
            raise self._fault("pieces of texts that are cut by their characters are not supported")

        if min(file.min(), row.min(), start.min()) < 0 or file.max() >= len(paths) or (stop <= start).any():
            raise self._fault(f"samples.npy names one of {len(paths)} files, a row, and tokens from start to stop")

        return paths, bounds, samples, order

    def _refuse(self, are_wrong: Any, why: Any) -> None:
        if are_wrong.any():
            number = int(np.argmax(are_wrong))
            raise self._fault(f"piece {number} of samples.npy cannot be made: {why(number)}")

    def _refuse_totals(self, totals: Int64) -> None:
        for setting, are_wrong, way_out in (
            ("short", totals < self.max_length, "padding"),
            ("long", totals > self.max_length, "truncate"),
        ):
            if getattr(self, setting) == "error" and are_wrong.any():
                number = int(np.argmax(are_wrong))
                raise self._fault(
                    f"pack {number} has {totals[number]} tokens, and max_length is {self.max_length}: set "
                    f'{setting}="{way_out}", or give a folder without such packs'
                )

    def _fault(self, reason: str) -> ConfigError:
        return ConfigError(f"AD453 PresetPacking(folder={self.folder!r}): {reason}")
