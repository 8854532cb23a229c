"""The packs of XTuner v1 over known lengths, for those who must reproduce or continue one of its runs.

``soft`` there is a plan over shuffled slices of 10,000 samples: packs are filled from the end of a slice, and each is
topped up with the shortest of the next samples. ``hard`` is an end-to-end concatenation of shuffled samples.
``mllm_hybrid`` is both: hard packs of the texts, and then soft ones of the data sets with pictures. ``__legacy`` fills
one pack after the other. All need all lengths before the first pack; :class:`~asyncdata.SoftPacking` needs none and
fills better.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from asyncdata.batching.packers import Packing
from asyncdata.batching.packs import Counts, OfPacks, Pack, Packs, Positive
from asyncdata.batching.preset_packing import PresetPacking
from asyncdata.core.errors import ConfigError
from asyncdata.order.order import TorchGenerator

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
