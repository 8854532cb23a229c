"""The packs of XTuner v1 over known lengths, for those who must reproduce or continue one of its runs.

``soft`` there is a plan over shuffled slices of 10,000 samples: packs are filled from the end of a slice, and each is
topped up with the shortest of the next samples. ``hard`` is an end-to-end concatenation of shuffled samples.
``mllm_hybrid`` is both: hard packs of the texts, and then soft ones of the data sets with pictures. ``__legacy`` fills
one pack after the other. All need all lengths before the first pack; :class:`~asyncdata.SoftPacking` needs none and
fills better.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from asyncdata.batching.packers import Packing
from asyncdata.batching.packs import Counts, Int32, Int64, OfPacks, Pack, Packs, Positive
from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import digest
from asyncdata.order.order import TorchGenerator


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


Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

Kind = Literal["expand_soft", "hard", "legacy"]

_COST_UNIT = 128


class XTunerPacking(OfPacks, frozen=True, kw_only=True):
    """A plan that is the one of XTuner v1 for the same lengths, settings and seed.

    :ivar max_length: its ``pack_max_length``.
    :ivar seed: its ``seed``.
    :ivar kind: its ``pack_level``: ``expand_soft`` is what it calls ``soft`` by default, and ``legacy`` is
        ``__legacy``. For ``mllm_hybrid``, the kind of each data set, ``hard`` or ``expand_soft``: the hard ones are
        packed together, and the soft ones after them.
    :ivar join_datasets: its ``global_pack``: the data sets are shuffled and packed as one.
    :ivar lookahead: its ``pack_extra_buffer_size``, for ``expand_soft``.
    :ivar slice_samples: its ``pack_chunk_size``, for ``expand_soft``.
    :ivar ties: which of several samples of one length tops up a pack. XTuner takes the one that numpy's unstable sort
        puts first, which depends on the machine: ``numpy`` does as it does on this one, ``stable`` takes the first.
    :raises ConfigError: for a setting that cannot work.
    """

    max_length: Positive
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    kind: Kind | tuple[Kind, ...] = "expand_soft"
    join_datasets: bool = True
    lookahead: Annotated[int, msgspec.Meta(ge=0)] = 1000
    slice_samples: Positive = 10_000
    ties: Literal["stable", "numpy"] = "stable"

    def check(self) -> None:
        """Whether data sets of several kinds are of those that XTuner joins."""
        if "legacy" in self.kind and self.kind != "legacy":
            raise ConfigError("XTunerPacking: the kind of a data set is 'hard' or 'expand_soft'; 'legacy' is of all")

    def plan(self, lengths: Sequence[Integers], costs: Sequence[Floats] | None = None) -> Packs:
        """The packs of all data sets.

        :param lengths: for each data set the tokens of its samples, integers of shape (num_samples,).
        :param costs: XTuner's ``proxy_attn_flops`` of each sample; None: those of text, :func:`proxy_cost`.
        :raises ConfigError: for a sample without a token, which XTuner drops before it packs.
        """
        sizes = [_checked(of_one) for of_one in lengths]
        weights = [proxy_cost(of_one) for of_one in sizes] if costs is None else [np.asarray(c, float) for c in costs]
        if isinstance(self.kind, str):
            return self._packs(self.kind, sizes, weights)

        if len(self.kind) != len(sizes):
            raise ConfigError(
                f"XTunerPacking: kind names {len(self.kind)} data sets, and there are {len(sizes)}: each file is one"
            )

        firsts, found = np.cumsum([0, *map(len, sizes)]), [Packs.of([], [], Counts())]
        for kind in ("hard", "expand_soft"):
            chosen = [number for number, of_one in enumerate(self.kind) if of_one == kind]
            packs = self._packs(kind, [sizes[number] for number in chosen], [weights[number] for number in chosen])
            rows = _joined([np.arange(firsts[number], firsts[number + 1]) for number in chosen])
            offsets = sum(len(before.rows) for before in found) + packs.offsets[1:]
            found.append(packs._replace(rows=rows[packs.rows].astype(np.int32), offsets=offsets))
        offsets, packed, starts, stops, costs_of_packs = (np.concatenate([one[n] for one in found]) for n in range(5))
        return Packs(offsets, packed, starts, stops, costs_of_packs, Counts())

    def _packs(self, kind: str, sizes: list[Integers], weights: list[Floats]) -> Packs:
        if self.join_datasets:
            sizes, weights = [_joined(sizes)], [_joined(weights)]
        if kind == "hard":
            return self._hard(sizes)

        found: list[int] = []
        packs = self._legacy(sizes, found) if kind == "legacy" else self._soft(sizes, weights, found)
        return Packs.of(packs, found, Counts())

    def _legacy(self, sizes: list[Integers], found: list[int]) -> Iterator[list[Pack]]:
        """The packs of each data set, one filled after the other; their costs, the longest samples, go to ``found``."""
        shuffler, first = random.Random(self.seed), 0
        for lengths in sizes:
            rows, sizes_of_rows = list(range(len(lengths))), lengths.tolist()
            shuffler.shuffle(rows)
            packs, room = list[Pack](), 0
            for row in rows:
                length = sizes_of_rows[row]
                if length > room or not packs:
                    packs.append([])
                    room = self.max_length
                packs[-1].append((first + row, 0, length))
                room -= length
            found += [max(stop for _, _, stop in pack) for pack in packs]
            yield packs
            first += len(lengths)

    def _hard(self, sizes: list[Integers]) -> Packs:
        """The samples of each data set end to end, cut at each ``max_length`` tokens; the cost is the longest piece."""
        shuffler, first, num_pieces = np.random.RandomState(self.seed), 0, 0
        pieces, offsets = [np.empty((3, 0), np.int32)], [np.zeros(1, np.int64)]
        for lengths in sizes:
            rows = np.arange(len(lengths), dtype=np.int64)
            shuffler.shuffle(rows)
            stops = np.cumsum(lengths[rows])
            ends = np.arange(1, (stops[-1] if len(stops) else 0) // self.max_length + 1) * self.max_length
            cuts = np.sort(np.concatenate((stops, ends)), kind="stable")  # two runs, which are merged
            cuts = cuts[np.diff(cuts, prepend=0) > 0]
            of_packs = np.searchsorted(cuts, ends) + 1
            cuts = cuts[: of_packs[-1] if len(of_packs) else 0]  # what fills no pack is left out
            begins = np.concatenate(([0], cuts))[: len(cuts)]
            places = np.searchsorted(stops, begins, side="right")
            starts = begins - stops[places] + lengths[rows[places]]
            pieces.append(np.array((first + rows[places], starts, starts + cuts - begins), np.int32))
            offsets.append(num_pieces + of_packs)
            first, num_pieces = first + len(lengths), num_pieces + len(cuts)
        packed, begun, ended = np.concatenate(pieces, axis=1)
        bounds = np.concatenate(offsets)
        costs = np.maximum.reduceat(ended - begun, bounds[:-1]) if len(bounds) > 1 else np.empty(0)
        return Packs(bounds, packed, begun, ended, costs.astype(np.float64), Counts())

    def _soft(self, sizes: list[Integers], weights: list[Floats], found: list[int]) -> Iterator[list[Pack]]:
        """The packs of each slice; their costs are appended to ``found``."""
        generator, first = TorchGenerator(self.seed), 0
        for lengths, costs in zip(sizes, weights, strict=True):
            rows = generator.randperm(len(lengths))
            for begin in range(0, len(rows), self.slice_samples):
                some = rows[begin : begin + self.slice_samples]
                packs = list(self._packs_of_slice(some, lengths[some]))
                # One after the other, as XTuner adds them: another order rounds otherwise.
                found += [int(np.cumsum(costs[pack])[-1]) for pack in packs]
                yield [
                    [(first + row, 0, length) for row, length in zip(pack, lengths[pack].tolist(), strict=True)]
                    for pack in packs
                ]
            first += len(lengths)

    def _packs_of_slice(self, rows: Integers, lengths: Integers) -> Iterator[list[int]]:
        """``rows`` from the end to the start, packed; both arrays are used up."""
        rows, lengths, end = rows.copy(), lengths.copy(), len(rows)
        pack: list[int] = []
        total = 0
        while end:
            end -= 1
            row, length = int(rows[end]), int(lengths[end])
            if total + length > self.max_length and pack:
                added = self._top_up(rows[:end], lengths[:end], self.max_length - total)
                end -= len(added)
                yield pack + added
                pack, total = [], 0
            pack.append(row)
            total += length
        if pack:
            yield pack

    def _top_up(self, rows: Integers, lengths: Integers, room: int) -> list[int]:
        """The shortest samples of the lookahead that fit together; those left close up, at the front of the arrays."""
        if room <= 0 or not self.lookahead:
            return []

        window = lengths[-self.lookahead :]
        order = np.argsort(window, kind="stable" if self.ties == "stable" else "quicksort")
        order = order[: np.searchsorted(np.cumsum(window[order]), room, side="right")]
        added: list[int] = rows[-self.lookahead :][order].tolist()
        is_left = np.ones(len(window), bool)
        is_left[order] = False
        first = len(lengths) - len(window)
        for array in (rows, lengths):
            array[first : len(array) - len(added)] = array[first:][is_left]
        return added


LoaderPacking = Packing | XTunerPacking | PresetPacking
"""What a loader takes as its packing: the last two open no packer, they plan."""


def proxy_cost(lengths: Integers) -> Floats:
    """XTuner's stand-in for the attention of a text: ``round(tokens / 128) ** 2``, float64, rounded half to even."""
    result: Floats = np.rint(lengths / _COST_UNIT) ** 2
    return result


def _checked(lengths: Integers) -> Integers:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 1)):
        raise ConfigError(
            "XTunerPacking: lengths are an array of whole numbers, from 1 on, for each data set; leave out samples "
            "without a token, as XTuner does"
        )

    return array.astype(np.int64)


def _joined(arrays: list[Any]) -> Any:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
