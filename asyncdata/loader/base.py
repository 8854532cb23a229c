"""What both faces of the service share: everything that never waits for data."""

from __future__ import annotations

import operator
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdata.core.errors import ConfigError, LoaderClosedError
from asyncdata.delivery.requests import Request
from asyncdata.loader.batches.sample_batches import SampleBatches, Share
from asyncdata.workers.pool.early_start import EarlyForkServer

# Whatever needs numpy is imported by the methods, all of it at the latest when the engine is made: until then, workers
# already load what they need.
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Unpack

    from asyncdata.batching.collators.base import Document
    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.online.state import PackedSample, RestartPoint
    from asyncdata.batching.packers.base import Packing
    from asyncdata.batching.planned.plan import PlannedEpoch
    from asyncdata.core.types import Group, Position, Sample
    from asyncdata.delivery.rollout_buffer import BufferFilter
    from asyncdata.loader.batches.packed_batches import PackBatches
    from asyncdata.loader.batches.planned_batches import PlannedBatches
    from asyncdata.loader.batches.sample_batches import Batches
    from asyncdata.loader.config import Knobs
    from asyncdata.loader.statistics import Statistics
    from asyncdata.sources.base import Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.tokenization.base import TokenizeFn

T = TypeVar("T")

__all__ = ("LoaderFace", "same")

_CLOSE_TIMEOUT_S = 5.0
"""As long as the service takes at most."""


class LoaderFace:
    """A loader, but for the calls that wait.

    :ivar group_size: samples of a group.
    """

    _closed_because = "the loader's constructor failed"  # until it has not, also where Python refuses its arguments

    def __init__(
        self,
        source: Source | Paths,
        *,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        buffer_filter: BufferFilter | str | None = None,
        packing: Packing | None = None,
        length_grouping: LengthGrouping | None = None,
        **knobs: Unpack[Knobs],
    ) -> None:
        _check_platform()
        early = EarlyForkServer.for_workers(knobs.get("num_workers"))
        try:
            if early is not None:
                early.tell(tokenize_fn)
            from asyncdata.loader.config import LoaderConfig
            from asyncdata.loader.engine import Engine

            config = LoaderConfig.of(dict(knobs))
            self._engine = Engine(source, tokenize_fn, buffer_filter, config, packing, length_grouping, early)
        except BaseException:
            if early is not None:
                early.close()
            raise

        self._collate_fn = collate_fn or same
        self.group_size = config.n_samples_per_prompt
        self._loops_only = self._engine.packs or config.world_size > 1
        self._loop_lock = threading.RLock()
        self._is_epoch_named = False
        self._closing = threading.RLock()
        self._is_closed = False
        self._closed_because = ""

    # Giving back, acknowledging.

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back: they are served first, each once, and are in every snapshot until then.

        A group given back belongs to the loader until it is served again; change it before, not after.

        :param groups: lists of ``n_samples_per_prompt`` samples.
        :raises InvalidGroupError: naming the first group that cannot be kept; none is added then.
        """
        self._check()
        if self._loops_only:
            self._refuse_call("add_samples")
        self._engine.coordinator.add_groups(groups)

    def ack(self, delivered: Iterable[Sample] | Iterable[Group] | None = None) -> None:
        """Under ``commit="on_ack"``: these samples or groups (None: all delivered so far) are done with."""
        self._check()
        if delivered is None:
            self._engine.coordinator.acknowledge(None)
            return

        from asyncdata.core.types import Sample
        from asyncdata.delivery.ledger import lease_key

        groups = [[item] if isinstance(item, Sample) else item for item in delivered]
        self._engine.coordinator.acknowledge([lease_key(group) for group in groups])

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The state of this moment, as plain builtins: fit for torch.save and JSON. May be called at any time.

        It says what was *delivered*, not what was read ahead, and holds the buffer.

        A distributed checkpoint (DCP) restores only the keys that a fresh loader's state has, which may lack some: save
        an :class:`asyncdata.integrations.torch.StatefulDataLoader` there.
        """
        from asyncdata.checkpoint import snapshot as snapshots

        return snapshots.to_state_dict(self._engine.snapshot())

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed: Collection[str] = (), same_rows: bool = False
    ) -> None:
        """Go on with exactly the sample that would have come next when ``state`` was taken.

        :param allow_changed: what may differ from then: any of data, tokenizer, template, tokenize_fn, seed, order.
            With another data, seed or order, the next epoch begins, and the event ``snapshot.rows_left_out`` tells how
            many rows of the present one are left out.
        :param same_rows: files may have other names, as long as their content, by their fingerprints, and their order
            are the same. The run continues at its place then.
        :raises SnapshotMismatchError: if something else differs; it says what, and both values.
        :raises SnapshotError: if ``state`` is no state of a loader.
        """
        from asyncdata.checkpoint import snapshot as snapshots

        self._check()
        self._engine.restore(snapshots.from_state_dict(state), allow_changed, same_rows=same_rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, atomically; returns when it would survive a power loss. The last three are kept.

        :raises SnapshotError: if it could not be written; the previous file is whole, and nothing half-written stays.
        """
        from asyncdata.checkpoint import snapshot as snapshots

        snapshots.save(path, self._engine.snapshot())

    def restore(
        self, path: str | os.PathLike[str], *, allow_changed: Collection[str] = (), same_rows: bool = False
    ) -> None:
        """As :meth:`load_state_dict`, from a file that :meth:`save` wrote."""
        from asyncdata.checkpoint import snapshot as snapshots

        self._check()
        self._engine.restore(snapshots.load(path), allow_changed, same_rows=same_rows)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``. In the middle of that very epoch, as after a resume, it goes on from there.

        The next loop is over this epoch and no other, even if nothing is left of it. Without this call, a loop that
        finds nothing left is over the next epoch.

        :raises ConfigError: directly after a restore, for an epoch that was over by then: it would be delivered again.
        """
        self._check()
        if epoch < 0:
            raise ConfigError(f"an epoch is counted from 0, got {epoch}")

        self._engine.set_epoch(epoch)
        self._is_epoch_named = True

    def seek(self, epoch: int, row: int, *, group_index: int | None = None) -> None:
        """Go to row ``row`` of ``epoch``, counted in the order of delivery. Waits until the row index is complete.

        :param row: as many as an epoch has is the next epoch's start.
        :param group_index: the number of the next group of the stream; None goes on counting.
        :raises ConfigError: if there is no such row, or the order needs no row index.
        """
        self.start()
        self._engine.seek(epoch, row, group_index)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._engine.epoch

    def statistics(self) -> Statistics:
        """What the loader has done and is doing; ``.to_dict()`` is flat."""
        return self._engine.statistics()

    # Life.

    def start(self) -> None:
        """Begin to read ahead now; entering ``with``, and the first call for data, do so as well."""
        self._check()
        self._engine.start()

    def _close(self, reason: str) -> None:
        self._closed_because = self._closed_because or reason
        # Who comes second waits for the first; not for ever, as an interrupt may have left the lock locked.
        if self._is_closed or not self._engine.service.is_here or not self._closing.acquire(timeout=_CLOSE_TIMEOUT_S):
            return

        try:
            if not self._is_closed:
                self._engine.close(f"AD502 {self._closed_because}")
                self._is_closed = True
        finally:
            self._closing.release()

    def _check(self) -> None:
        if self._closed_because:
            raise LoaderClosedError(f"AD502 {self._closed_because}")

        self._engine.service.check_process()

    def __del__(self) -> None:
        if self._closed_because or not self._engine.service.is_here:
            return

        if not self._engine.service.is_started:
            self._engine.service.close()
            return

        message = f"unclosed {type(self).__name__}: use `with`, or call close()"
        try:
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:
            self._close("the loader was garbage")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns a thread and processes. Make one where it "
            "is used, and carry state_dict() over."
        )

    # What a call does, but for the waiting.

    def _begin(self, num_groups: int, last_epoch: int | None) -> Request:
        service = self._engine.service
        service.check_caller()
        if not service.is_started:
            self._engine.start()
        return Request(num_groups, last_epoch)

    def _num_groups(self, num_samples: int) -> int:
        if self._loops_only:
            self._refuse_call("get_next_batch")
        size = self.group_size
        number = whole(num_samples)
        if number < 1 or number % size:
            raise ConfigError(
                f"AD440 num_samples must be a positive multiple of n_samples_per_prompt={size}, got {num_samples!r}"
            )

        return number // size

    def _groups(self, num_groups: int) -> int:
        if self._loops_only:
            self._refuse_call("get_samples")
        number = whole(num_groups)
        if number < 0:
            raise ConfigError(f"AD440 num_groups must be a whole number from 0 on, got {num_groups!r}")

        return number

    def _regroup(self, samples: list[Sample]) -> list[Group]:
        size = self.group_size
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def _refuse_call(self, what: str) -> None:
        reason = "packs samples" if self._engine.packs else f"is one of world_size={self._engine.config.world_size}"
        raise ConfigError(f"this loader {reason}: its batches come from a `for` loop, not from {what}()")

    # What a loop asks for.

    def _batches(self) -> Batches:
        self._check()
        return SampleBatches(self, runs_on=self._runs_on())

    def _runs_on(self) -> bool:
        """Whether the next loop may be over a later epoch than the present one; not, if the caller named it."""
        is_named, self._is_epoch_named = self._is_epoch_named, False
        return not is_named

    def _pack_batches(self) -> PackBatches | PlannedBatches | None:
        """Where there are packs. Their batches are made one after the other: samples that are no batch can be put
        back only while nobody else has taken any."""
        self._check()
        engine, stage, config = self._engine, self._engine.stage, self._engine.config
        if engine.tally is not None:
            from asyncdata.loader.batches.planned_batches import PlannedBatches

            return PlannedBatches(
                self, engine.coordinator, engine.tally, drop_last=config.drop_last, runs_on=self._runs_on()
            )

        if stage is None:
            return None

        from asyncdata.loader.batches.packed_batches import PackBatches

        max_push = max(1, config.capacity // 2)
        return PackBatches(
            self,
            stage,
            epochs=config.epochs,
            drop_last=config.drop_last,
            max_push=max_push,
            runs_on=self._runs_on(),
        )

    @property
    def share(self) -> Share:
        """What this rank has of a batch of all ranks: groups of samples, or packs."""
        config = self._engine.config
        if config.batch_size is None:
            raise ConfigError("iterating needs batch_size=...; or call get_next_batch(n)")

        size = config.batch_size // config.n_samples_per_prompt * config.world_size
        return Share(config.rank, config.world_size, size, config.rounds_up)

    def position(self) -> Position:
        """The place in D of the next sample of the stream."""
        return self._engine.coordinator.ledger.position

    def plan(self, epoch: int) -> PlannedEpoch | None:
        """The planned packs of an epoch; known once a sample of it is ready."""
        return self._engine.plan(epoch)

    def tip(self) -> RestartPoint:
        """Where D goes on."""
        from asyncdata.batching.online.state import RestartPoint

        ledger = self._engine.coordinator.ledger
        return RestartPoint(ledger.position, ledger.counters)

    def collate(self, samples: list[Sample]) -> Any:
        """What ``collate_fn`` makes of a batch."""
        return self._collate_fn(samples)

    def collate_packs(self, packs: list[list[PackedSample]]) -> Any:
        """What ``collate_fn`` makes of packs: each a list of documents; or of samples, where they are not packed."""
        if self._engine.packs_are_samples:
            return self._collate_fn([pack[0].sample for pack in packs])

        return self._collate_fn([[_document(piece) for piece in pack] for pack in packs])


def _document(piece: PackedSample) -> Document:
    from asyncdata.batching.collators.base import Document

    sample, start, stop = piece
    labels = sample.labels
    return Document(sample.tokens[start:stop], None if labels is None else labels[start:stop], None, sample)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"asyncdata needs Linux, and this is {sys.platform}: its workers share memory by memfd, and die with the "
            "trainer by a signal of Linux. On macOS or Windows, run it in a container or in WSL 2"
        )


def same(samples: list[T]) -> list[T]:
    return samples


def whole(number: Any) -> int:
    """The number, be it numpy's; -1 for what is no whole number."""
    try:
        return operator.index(number)
    except TypeError:
        return -1
