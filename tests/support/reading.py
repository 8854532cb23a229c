"""D as one rank reads it: a reading with a plan or a share, and all that is needed to take samples from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from asyncdata import LoaderConfig, Position
from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.ledger import Ledger
from asyncdata.delivery.requests import DeliveryRules, Request
from asyncdata.loader.opening import opened_source
from asyncdata.loader.service import Service
from asyncdata.order.order import ROWS_PER_WINDOW
from asyncdata.prefetch.producer import Producer
from asyncdata.prefetch.windows.indexed_windows import IndexedWindows
from asyncdata.sources.resolve import described
from asyncdata.workers.inline import InlineExecutor
from asyncdata.workers.pool.process_pool import ProcessExecutor
from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    from typing import Self

    from asyncdata import BadRowError, Sample
    from asyncdata.batching.planned.plan import Plan
    from asyncdata.order.rank_share import Share


class Reader:
    """One rank's samples. To be used in a ``with`` block.

    :param at: where to begin, as (epoch, row of the epoch).
    :param dealt: as a snapshot has it.
    :ivar bad_rows: that were passed over.
    """

    def __init__(
        self,
        path: Any,
        function: Any,
        *,
        plan: Plan | None = None,
        share: Share | None = None,
        at: tuple[int, int] = (0, 0),
        dealt: tuple[int, int] | None = None,
        **knobs: Any,
    ) -> None:
        config = LoaderConfig.of({"num_workers": 0, **knobs})
        self.bad_rows: list[BadRowError] = []
        paths = [str(one) for one in path] if isinstance(path, list) else str(path)
        self.reading = opened_source(described(paths), config, function, self.bad_rows.append, plan, share)
        executor: Any = ProcessExecutor(config.num_workers) if config.num_workers else InlineExecutor(function)
        windows = self.reading.windows(executor, restart_point=lambda: self.coordinator.ledger.restart_point()[0])
        assert isinstance(windows, IndexedWindows)
        self.windows = windows
        rules = DeliveryRules(
            capacity=config.capacity,
            max_ready_bytes=config.limits.max_ready_bytes,
            epochs=config.epochs,
            bad_row_stops=config.bad_rows.policy == "raise",
            max_bad_rows=config.bad_rows.max,
        )
        self.coordinator = Coordinator(rules, quarantine=self.bad_rows.append, on_room=lambda: self.service.pump_soon())
        producer = Producer(windows, self.reading.canaries(executor), executor, self.coordinator, epochs=config.epochs)
        self.service = Service(
            self.reading.job, windows, producer, executor, self.coordinator, slot_bytes=self.reading.slot_bytes
        )
        place = Position(at[0], *divmod(at[1], ROWS_PER_WINDOW))
        windows.resume_dealt(place, dealt)
        self.service.restart(lambda _: Ledger(position=place))
        self.service.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.close("the test is over")
        self.service.close()
        self.reading.close()

    def take(self, num_samples: int, last_epoch: int | None = None) -> list[Sample]:
        """The next samples; fewer at the end of ``last_epoch``."""
        request, is_ready = Request(num_samples, last_epoch), threading.Event()
        request.wake = is_ready.set
        while True:
            is_ready.clear()
            found = self.coordinator.poll(request)
            if found is not None:
                return found

            assert is_ready.wait(NEVER_S), "no sample came"

    def epoch(self, number: int) -> list[Sample]:
        """All that is left of an epoch."""
        return self.take(1 << 40, number)

    @property
    def place(self) -> tuple[int, int]:
        """Where a restart would go on: epoch, and row of the epoch."""
        position = self.coordinator.ledger.position
        return position.epoch, position.window * ROWS_PER_WINDOW + position.row

    def wait_for_index(self) -> None:
        """Until all rows are known."""
        assert self.reading.index is not None
        assert self.reading.index.wait(NEVER_S), "the index is not complete"
