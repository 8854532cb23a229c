"""What a caller asks for, the rules it is served by, and the state that serving it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.types import Sample
    from asyncdata.delivery.channel import Run
    from asyncdata.delivery.ledger import Ledger, Returned

__all__ = ("DeliveryRules", "Request", "State")


class DeliveryRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a delivery obeys; each field is a knob of the loader.

    :ivar shows_rows: whether errors may show what stands in a row.
    """

    capacity: int
    max_ready_bytes: int
    samples_per_group: int = 1
    epochs: int | None = None
    drop_last: bool = False
    bad_row_stops: bool = True
    max_bad_rows: int | None = None
    commit_on_ack: bool = False
    digest: str = "positions"
    shows_rows: bool = True


class State(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is delivered: a ledger, and ``num_taken`` samples since from ``run``, the segment it points to.

    So the next batch of a run costs one small object, and position and counters are worked out when somebody asks.
    """

    ledger: Ledger
    run: Run | None = None
    num_taken: int = 0

    def without(self, samples: list[Sample], samples_per_group: int) -> State:
        """The state before ``samples`` were taken from the run; this one if others were taken since."""
        ledger, run, num_taken = self.ledger, self.run, self.num_taken
        num_groups = len(samples) // samples_per_group
        if run is None or num_taken < num_groups:
            return self

        last = run.start + ledger.offset + num_taken - 1
        return State(ledger, run, num_taken - num_groups) if samples[-1].position == run.chunk.position(last) else self


class Request:
    """A caller's wish for ``num_groups`` groups, kept while it waits.

    :param last_epoch: do not go beyond this epoch; fewer groups may come then.
    :ivar wake: called, from any thread, when it is worth polling again.
    :ivar chosen: what the buffer filter chose; it stays in the buffer until the request is served.
    """

    __slots__ = ("chosen", "commit", "last_epoch", "num_groups", "wake")

    def __init__(self, num_groups: int, last_epoch: int | None = None) -> None:
        self.num_groups = num_groups
        self.last_epoch = last_epoch
        self.wake: Callable[[], object] = bool
        self.chosen: list[Returned] | None = None
        self.commit: tuple[State, State] | None = None
