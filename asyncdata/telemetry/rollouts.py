"""What came back of delivered groups: how stale those are that were given back, and whether scores differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ("Rollouts",)


class Rollouts:
    """Totals, from the trainer's threads.

    :ivar num_returned: groups given back; ``num_degenerate``: scored groups of which all scores were equal.
    """

    def __init__(self) -> None:
        self._staleness, self._sizes = Histogram(), dict[int, int]()
        self.num_returned = self.num_degenerate = 0

    def returned(self, groups: Iterable[Sequence[Any]], num_groups: int) -> None:
        """Groups were given back, when ``num_groups`` had been delivered from the stream."""
        indexes = [group[0].group_index for group in groups if len(group)]
        self.num_returned += len(indexes)
        self._staleness.add([num_groups - 1 - index for index in indexes if index is not None])

    def scored(self, scores: Iterable[Sequence[float]]) -> None:
        """Scores of groups were reported."""
        for group in scores:
            self._sizes[len(group)] = self._sizes.get(len(group), 0) + 1
            self.num_degenerate += len(group) > 1 and min(group) == max(group)

    def totals(self) -> dict[str, Any]:
        """The fields of an interval."""
        return {
            "returned": self.num_returned,
            "staleness": self._staleness.counts(),
            "group_sizes": dict(sorted(self._sizes.copy().items())),
            "degenerate": self.num_degenerate,
        }
