"""The packs of XTuner v1 over known lengths, for those who must reproduce or continue one of its runs.

``soft`` there is a plan over shuffled slices of 10,000 samples: packs are filled from the end of a slice, and each is
topped up with the shortest of the next samples. ``hard`` is an end-to-end concatenation of shuffled samples. Both need
all lengths before the first pack; :class:`~asyncdata.batching.packers.soft.SoftPacking` needs none and fills better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from asyncdata.batching.packers.base import Pack, Packing, Positive
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description
from asyncdata.order.torch_randperm import TorchGenerator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("LoaderPacking", "PackPlan", "XTunerPacking", "proxy_cost")

Integers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_COST_UNIT = 128


class PackPlan(NamedTuple):
    """All packs of a set of samples, in their order before any grouping.

    :ivar offsets: int64 of shape (num_packs + 1,): pack p has the pieces ``offsets[p]`` to ``offsets[p + 1]``.
    :ivar rows: int64 of shape (num_pieces,): the sample of each piece, numbered across the data sets.
    :ivar starts: int64 of shape (num_pieces,): its first token.
    :ivar stops: int64 of shape (num_pieces,): where it ends.
    :ivar costs: int64 of shape (num_packs,): what XTuner sorts packs by when it groups them, its ``longest``.
    """

    offsets: Integers
    rows: Integers
    starts: Integers
    stops: Integers
    costs: Integers

    @property
    def num_packs(self) -> int:
        """How many there are."""
        return len(self.costs)

    def pack(self, number: int) -> Pack:
        """Pack ``number``; its references are the samples' numbers."""
        piece = slice(*self.offsets[number : number + 2].tolist())
        columns = (column[piece].tolist() for column in (self.rows, self.starts, self.stops))
        return list(zip(*columns, strict=True))


class XTunerPacking(Description, frozen=True, kw_only=True):
    """A plan that is the one of XTuner v1 for the same lengths, settings and seed.

    :ivar max_length: its ``pack_max_length``.
    :ivar seed: its ``seed``.
    :ivar kind: its ``pack_level``: ``expand_soft`` is what it calls ``soft`` by default.
    :ivar join_datasets: its ``global_pack``: the data sets are shuffled and packed as one.
    :ivar lookahead: its ``pack_extra_buffer_size``, for ``expand_soft``.
    :ivar slice_samples: its ``pack_chunk_size``, for ``expand_soft``.
    :ivar ties: which of several samples of one length tops up a pack. XTuner takes the one that numpy's unstable sort
        puts first, which depends on the machine: ``numpy`` does as it does on this one, ``stable`` takes the first.
    :raises ConfigError: for a setting that cannot work.
    """

    max_length: Positive
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    kind: Literal["expand_soft", "hard"] = "expand_soft"
    join_datasets: bool = True
    lookahead: Annotated[int, msgspec.Meta(ge=0)] = 1000
    slice_samples: Positive = 10_000
    ties: Literal["stable", "numpy"] = "stable"

    def plan(self, lengths: Sequence[Integers], costs: Sequence[Floats] | None = None) -> PackPlan:
        """The packs of all data sets.

        :param lengths: for each data set the tokens of its samples, integers of shape (num_samples,).
        :param costs: XTuner's ``proxy_attn_flops`` of each sample; None: those of text, :func:`proxy_cost`.
        :raises ConfigError: for a sample without a token, which XTuner drops before it packs.
        """
        sizes = [_checked(of_one) for of_one in lengths]
        weights = [proxy_cost(of_one) for of_one in sizes] if costs is None else [np.asarray(c, float) for c in costs]
        if self.join_datasets:
            sizes, weights = [_joined(sizes)], [_joined(weights)]
        bases = np.cumsum([0, *map(len, sizes)])
        plans = self._hard(sizes) if self.kind == "hard" else self._soft(sizes, weights)
        return _merged([plan._replace(rows=plan.rows + base) for plan, base in zip(plans, bases, strict=False)])

    def _hard(self, sizes: list[Integers]) -> Iterator[PackPlan]:
        shuffler = np.random.RandomState(self.seed)
        for lengths in sizes:
            rows = np.arange(len(lengths), dtype=np.int64)
            shuffler.shuffle(rows)
            yield _cut(rows, lengths[rows], self.max_length)

    def _soft(self, sizes: list[Integers], weights: list[Floats]) -> Iterator[PackPlan]:
        generator = TorchGenerator(self.seed)
        for lengths, cost in zip(sizes, weights, strict=True):
            rows = generator.randperm(len(lengths))
            slices = [rows[i : i + self.slice_samples] for i in range(0, len(rows), self.slice_samples)]
            yield _whole([pack for some in slices for pack in self._packs_of_slice(some, lengths[some])], lengths, cost)

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


LoaderPacking = Packing | XTunerPacking
"""What a loader takes as its packing: XTuner's opens no packer, it plans."""


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


def _cut(rows: Integers, lengths: Integers, max_length: int) -> PackPlan:
    """``rows`` end to end, cut every ``max_length`` tokens; what is left is dropped."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cuts = np.arange(ends[-1] // max_length + 1, dtype=np.int64) * max_length
    # A piece begins where a sample or a pack does, and ends where the next one begins.
    begins = np.union1d(ends[ends < cuts[-1]], cuts)
    first, stop = begins[:-1], begins[1:]
    sample = np.searchsorted(ends, first, side="right") - 1
    offsets = np.searchsorted(first, cuts)
    sizes = stop - first
    longest = np.maximum.reduceat(sizes, offsets[:-1]) if len(sizes) else sizes
    return PackPlan(offsets, rows[sample], first - ends[sample], stop - ends[sample], longest)


def _whole(packs: list[list[int]], lengths: Integers, costs: Floats) -> PackPlan:
    """Packs of whole samples."""
    rows = np.array([row for pack in packs for row in pack], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    # One after the other, as XTuner adds them: another order rounds otherwise.
    sums = np.array([np.cumsum(costs[pack])[-1] for pack in packs]).astype(np.int64)
    return PackPlan(offsets, rows, np.zeros_like(rows), lengths[rows], sums)


def _merged(plans: list[PackPlan]) -> PackPlan:
    bases = np.cumsum([0, *(plan.offsets[-1] for plan in plans)])
    offsets = [np.zeros(1, np.int64)] + [plan.offsets[1:] + base for plan, base in zip(plans, bases, strict=False)]
    columns = [_joined(list(column)) for column in zip(*(plan[1:] for plan in plans), strict=True)]
    rows, starts, stops, costs = columns or [np.empty(0, np.int64)] * 4
    return PackPlan(np.concatenate(offsets), rows, starts, stops, costs)
