"""The settings by which packs are made, ordered, and divided among the ranks: as samples come, or by a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers import HardPacking, SinglePacking, SoftPacking
from asyncdata.batching.packs import Positive
from asyncdata.batching.preset_packing import PresetPacking
from asyncdata.batching.xtuner_packing import XTunerPacking
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Count, Description

PACKINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (XTunerPacking, PresetPacking, SoftPacking, HardPacking, SinglePacking)
}
"""The packings that can be planned, by name."""

PLANNED_PACKINGS = XTunerPacking, PresetPacking
"""Those that are always planned, and have the same packs in every epoch, whatever the order of rows."""


class Dealt(NamedTuple):
    """The number of ranks that packs are grouped for, and the packs of each rank in an optimizer step."""

    world_size: int
    accumulation: int


class PackRules(Description, frozen=True, kw_only=True):
    """The settings by which packs are made, ordered, and divided among the ranks.

    :ivar packing: a :class:`~asyncdata.batching.packers.Packing`, or one that is always planned.
    :ivar grouping: how packs are ordered; None: in the order in which they are closed, and XTuner's are shuffled as by
        its ``ParallelSampler``.
    :ivar world_size: ranks that compute at the same time.
    :ivar batch_size: packs of each rank in a batch.
    :ivar accumulation: batches of each rank in an optimizer step, which the grouping balances.
    :ivar is_planned: the packs of an epoch are planned before its rows are read. All rows are packed by its end, and
        :data:`PLANNED_PACKINGS` have the same packs in every epoch.
    :ivar round_up: with XTuner's packs or its grouping, repeat packs from the epoch's start until the last step is
        full; otherwise, and with the order of a ``PresetPacking``, leave that step out.
    :raises ConfigError: for a setting that cannot work.
    """

    packing: Any
    grouping: LengthGrouping | None = None
    seed: int = 0
    rank: Count = 0
    world_size: Positive = 1
    batch_size: Positive = 1
    accumulation: Positive = 1
    is_planned: bool = False
    round_up: bool = True

    def check(self) -> None:
        """Check that the packing can be planned, if it is."""
        if not self.is_planned:
            return

        kind = type(self.packing).__name__
        if not isinstance(self.packing, tuple(PACKINGS.values())):
            raise ConfigError(f"AD453 packs of {kind} cannot be planned, only those of {', '.join(PACKINGS)}")

        if getattr(self.packing, "across_epochs", False):
            raise ConfigError(
                f"AD453 packs are planned an epoch at a time: use {kind}(across_epochs=False, ...), or pack without a "
                "plan"
            )

        if isinstance(self.packing, PresetPacking) and self.grouping is not None:
            raise ConfigError("AD453 PresetPacking has an order of its own: leave length_grouping out")

    @property
    def global_batch(self) -> int:
        """Packs of all ranks in a batch."""
        return self.world_size * self.batch_size

    @property
    def dealt(self) -> Dealt:
        """What the order of grouped packs depends on."""
        return Dealt(self.world_size, self.batch_size * self.accumulation)

    @property
    def has_own_packs(self) -> bool:
        """Whether the order of rows does not change the packs."""
        return isinstance(self.packing, PLANNED_PACKINGS)

    @property
    def has_xtuners_order(self) -> bool:
        """Whether the grouping is XTuner's, for which the window is the epoch."""
        return self.grouping is not None and self.grouping.method == "xtuner"

    # For packs of samples as they come.

    @property
    def across_epochs(self) -> bool:
        """Whether packs may hold samples of two epochs."""
        return bool(self.packing.across_epochs) and not self.has_xtuners_order

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins."""
        settings = {"packing": self.packing, "length_grouping": self.grouping}
        found: dict[str, Any] = {}
        for name, value in settings.items():
            if value is not None:
                fields = msgspec.to_builtins(value)
                found |= {name: type(value).__name__, **{f"{name}.{field}": fields[field] for field in fields}}
        return found

    # For packs that are planned.

    def refuse_numbers(self, num_rows: int, num_found: int) -> None:
        """Check that rows can be named by their lines, if they are.

        :raises ConfigError: AD453, if some have no number.
        """
        if isinstance(self.packing, PresetPacking) and num_rows < num_found:
            raise ConfigError(
                f"AD453 PresetPacking names rows by their lines, and {num_found - num_rows} of {num_found} rows are no "
                "samples, or are left out: every row of its files must be a sample"
            )

    @property
    def weights(self) -> tuple[float, float] | None:
        """The cost of a token, and of the square of a document's tokens; None: packs have XTuner's costs."""
        if self.grouping is None or (self.has_xtuners_order and self.has_own_packs):
            return None

        return self.grouping.linear, self.grouping.quadratic

    def num_delivered(self, num_packs: int, first: int = 0) -> int:
        """The packs that are delivered of an epoch with ``num_packs``: XTuner's, rounded to whole steps.

        :param first: the first pack that is delivered with these settings. If it is in the middle of a batch of these
            settings, whole batches are counted from it.
        """
        if not (self.has_own_packs or self.has_xtuners_order) or num_packs == 0:
            return num_packs

        batch, round_up = self.global_batch, self.round_up and not isinstance(self.packing, PresetPacking)
        first, unit = (0, batch * self.accumulation) if first % batch == 0 else (first, batch)
        left = max(0, num_packs - first)
        return first + (-(-left // unit) if round_up else left // unit) * unit
