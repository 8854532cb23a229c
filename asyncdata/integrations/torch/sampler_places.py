"""The shuffle of torch's ``DistributedSampler``, undone."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ("SamplerPlaces",)


class SamplerPlaces:
    """The places of indices in the first epoch of a ``DistributedSampler`` that shuffles with its default seed.

    So a dataset can undo a shuffle that a framework has no setting for.

    A rank's first place is its number, and each later one is as many places on as there are ranks.

    :param length: items of the dataset.
    :ivar first: this rank's first place; None before it.
    :ivar last: its last place so far.
    :ivar gap: places between two of them; None before the second one.
    """

    def __init__(self, length: int) -> None:
        import torch

        order = torch.randperm(length, generator=torch.Generator().manual_seed(0), device="cpu")
        self._place_of = torch.empty_like(order)
        self._place_of[order] = torch.arange(length, device="cpu")
        self.first: int | None = None
        self.last: int | None = None
        self.gap: int | None = None

    def of(self, indices: Sequence[int]) -> list[int] | None:
        """The places of the next indices, which :meth:`took` takes; None if they are not this rank's next ones.

        :raises IndexError: for an index that no epoch has.
        """
        import torch

        outside = [index for index in indices if not 0 <= index < len(self._place_of)]
        if outside:
            raise IndexError(f"index {outside[0]} is not in 0..{len(self._place_of) - 1}")

        places: list[int] = self._place_of[torch.as_tensor(indices, dtype=torch.int64, device="cpu")].tolist()
        gaps = self._gaps(places)
        first = places[0] if self.first is None else self.first
        is_next = len(gaps) <= 1 and all(gap > first for gap in gaps)
        return places if is_next else None

    def took(self, places: Sequence[int]) -> None:
        """These places of :meth:`of` were delivered."""
        self.gap = next(iter(self._gaps(places)), None)
        self.first = places[0] if self.first is None else self.first
        self.last = places[-1]

    def _gaps(self, places: Sequence[int]) -> set[int]:
        before = () if self.last is None else (self.last,)
        known = () if self.gap is None else (self.gap,)
        return {*known, *(after - place for place, after in pairwise((*before, *places)))}

    def state_dict(self) -> dict[str, int | None]:
        """The state after the last place."""
        return {"first": self.first, "last": self.last, "gap": self.gap}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Demand the place after the last one of the state."""
        self.first, self.last, self.gap = state["first"], state["last"], state["gap"]
