"""A caller's request, the rules by which it is served, and the state of delivery that serving it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.delivery.bad_row_policy import BadRowPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.errors import BadRowError
    from asyncdata.core.types import Sample
    from asyncdata.delivery.channel import Run
    from asyncdata.delivery.ledger import Ledger, Returned

__all__ = ("DeliveryRules", "Request", "State")


class DeliveryRules(msgspec.Struct, frozen=True, kw_only=True):
    """The loader's knobs that delivery depends on; see :class:`~asyncdata.LoaderConfig`.

    :ivar shows_rows: whether errors may quote a row.
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

    def last_epoch(self, wanted: int | None) -> int | None:
        """The last epoch that a request may be served from, if its caller wants none after ``wanted``."""
        if self.epochs is None or (wanted is not None and wanted < self.epochs):
            return wanted

        return self.epochs - 1

    def policy(self, pass_over: Callable[[BadRowError], object]) -> BadRowPolicy:
        """What is done with a bad row at which delivery stops, or that was passed over."""
        return BadRowPolicy(True, self.bad_row_stops, self.max_bad_rows, self.shows_rows, pass_over)

    def bad_rows_left(self, num_passed: int) -> int | None:
        """Bad rows that may still be passed over. Reading ends at the first one above this limit. None: no limit."""
        most = 0 if self.bad_row_stops else self.max_bad_rows
        return None if most is None else max(0, most - num_passed)


class State(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is delivered: a ledger, and ``num_taken`` samples of ``run``, the channel item that it points to.

    So the next batch of a run costs one small object; position and counters are computed only when they are read.
    """

    ledger: Ledger
    run: Run | None = None
    num_taken: int = 0

    def without(self, samples: list[Sample], samples_per_group: int) -> State:
        """The state before ``samples`` were taken from the run; this state if other samples were taken after them."""
        ledger, run, num_taken = self.ledger, self.run, self.num_taken
        num_groups = len(samples) // samples_per_group
        if run is None or num_taken < num_groups:
            return self

        last = run.start + ledger.offset + num_taken - 1
        return State(ledger, run, num_taken - num_groups) if samples[-1].position == run.chunk.position(last) else self


class Request:
    """A caller's request for ``num_groups`` groups, kept while the caller waits.

    :param last_epoch: do not go beyond this epoch; there may be fewer groups then.
    :param is_for_packs: the caller packs the samples, and then commits the delivery together with the progress of
        packing (:meth:`~asyncdata.delivery.coordinator.Coordinator.commit`). Until then nothing is delivered.
    :ivar wake: called, from any thread, when the caller should poll again.
    :ivar chosen: the groups that the buffer filter chose; they stay in the buffer until the request is served.
    :ivar served: the state before the delivery that served the request, and the ledger after it.
    :ivar commit: the states before and after the commit of that delivery, so that it can be rolled back.
    """

    __slots__ = ("chosen", "commit", "is_for_packs", "last_epoch", "num_groups", "served", "wake")

    def __init__(self, num_groups: int, last_epoch: int | None = None, *, is_for_packs: bool = False) -> None:
        self.num_groups = num_groups
        self.last_epoch = last_epoch
        self.is_for_packs = is_for_packs
        self.wake: Callable[[], object] = no_op
        self.chosen: list[Returned] | None = None
        self.served: tuple[State, Ledger] | None = None
        self.commit: tuple[State, State] | None = None

    @property
    def before(self) -> Ledger:
        """The ledger before the delivery that served it."""
        assert self.served is not None, "it is served"
        return self.served[0].ledger

    @property
    def after(self) -> Ledger:
        """The ledger after that delivery, without the progress of packing."""
        assert self.served is not None, "it is served"
        return self.served[1]
