"""The base class of both loaders: everything that does not wait for data."""

from __future__ import annotations

import html
import threading
import time
import warnings
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, cast

from asyncdata.core.errors import ConfigError, LoaderClosedError, events_owner, owning_events, redacted
from asyncdata.core.identity import all_sizes
from asyncdata.core.settings import is_loaded_instance, opening_until, whole_number
from asyncdata.core.threads import check_platform, identity
from asyncdata.loader.config import B_co, BadRows, Cache, Item_co, Limits, LoaderConfig, Policy, Ranks
from asyncdata.loader.waits import progress_of
from asyncdata.telemetry.settings import NoRecorder, Telemetry
from asyncdata.workers.popen import EarlyForkServer
from asyncdata.workers.ray import RayExecutor, local_workers_of

# Modules that need numpy are imported in the methods, so that the fork server starts before this process loads them.
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping
    from contextlib import AbstractContextManager

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.core.types import Group, Position, Sample
    from asyncdata.delivery.ledger import Request
    from asyncdata.delivery.outcome_policy import Outcomes
    from asyncdata.delivery.rollout_buffer import BufferFilter
    from asyncdata.delivery.rollouts import WorkRequest
    from asyncdata.loader.config import PackingOf
    from asyncdata.loader.engine import Engine
    from asyncdata.loader.mix import Mix
    from asyncdata.loader.pack_batches import PackBatches
    from asyncdata.loader.sample_batches import SampleBatches
    from asyncdata.loader.statistics import Statistics
    from asyncdata.order.shuffle import RowShuffle, Shuffle
    from asyncdata.sources.base import Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.telemetry.recorder import Recorder
    from asyncdata.tokenization.base import TokenizeFn

_CLOSE_TIMEOUT_S = 5.0
"""The longest time that closing the service takes."""


class BaseLoader(Generic[Item_co, B_co]):
    """A loader without the calls that wait for data. ``B_co`` is what its loop yields: what ``collate_fn`` returns, or
    a list of ``Item_co``, samples or packs.

    :ivar group_size: samples of a group.
    """

    _closed_because = "the loader's constructor failed"  # reset at its end, so also set if Python refuses an argument

    def __init__(
        self,
        source: Source | Paths | Mix,
        *,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str | None = None,
        collate_fn: Callable[[list[Any]], B_co] | None = None,
        buffer_filter: BufferFilter | str | None = None,
        too_old: Literal["reset", "drop"] | Callable[[Group], str] = "reset",
        packing: PackingOf[Item_co] | None = None,
        length_grouping: LengthGrouping | None = None,
        seed: int = 42,
        shuffle: bool | Literal["full"] | Shuffle | RowShuffle | Mapping[str, Any] = True,
        batch_size: int | None = None,
        drop_last: bool = False,
        epochs: int | None = None,
        n_samples_per_prompt: int = 1,
        num_workers: int | None = None,
        buffer_size: int | None = None,
        dp_size: int = 1,
        timeout_s: float | None = None,
        plan_packs: bool = False,
        commit: Literal["on_delivery", "on_ack"] = "on_delivery",
        digest: Literal["positions", "tokens"] = "positions",
        event_loop: Literal["asyncio", "uvloop", "trio"] = "asyncio",
        ranks: Ranks | Mapping[str, Any] = Ranks(),
        limits: Limits | Mapping[str, Any] = Limits(),
        cache: Cache | Mapping[str, Any] = Cache(),
        bad_rows: BadRows | Policy | Mapping[str, Any] = BadRows(),
        executor: RayExecutor | Mapping[str, Any] | None = None,
        outcomes: Outcomes | Mapping[str, Any] | None = None,
        telemetry: Telemetry | Mapping[str, Any] | str | os.PathLike[str] = Telemetry(),
        progress: Literal["auto", "bar", "lines", "log", "none"] = "auto",
        max_policy_lag: int | None = None,
        **unknown: Never,
    ) -> None:
        knobs = {name: value for name, value in locals().items() if name in LoaderConfig.__struct_fields__}
        check_platform(has_workers=num_workers != 0 or executor is not None)
        early = EarlyForkServer.for_workers(num_workers if executor is None else local_workers_of(executor))
        try:
            if is_loaded_instance(source, "asyncdata.loader.mix:Mix"):
                tokenize_fn = cast("Mix", source).functions(tokenize_fn)
            if tokenize_fn is None:
                raise ConfigError("a loader needs tokenize_fn=...; only the parts of a Mix may have their own")

            self._events_owner = object()  # not the loader: threads that refer to it would keep it from being garbage
            config, opening = LoaderConfig.of({**knobs, **unknown}), copy_context()
            opening.run(events_owner.set, self._events_owner)
            if config.timeout_s is not None:
                opening.run(opening_until.set, time.monotonic() + config.timeout_s)
            functions = getattr(tokenize_fn, "functions", [tokenize_fn])
            if any(isinstance(one, str) or getattr(one, "is_of_any_dialect", False) for one in functions):  # chats
                from asyncdata.loader.recognised_dialects import with_dialects

                tokenize_fn = opening.run(with_dialects, source, tokenize_fn)
            if early is not None:
                early.tell(tokenize_fn)

            args = (source, tokenize_fn, buffer_filter, config, collate_fn or identity, packing, length_grouping, early)
            self._progress = opening.run(progress_of, config.progress, config.ranks.rank)
            with self._progress.waiting(lambda: "files are opened, and a tokenizer_backend by name is proven"):
                self._engine = opening.run(lambda: _engine_class(source)(*cast("Any", args)))
            self._recorder = opening.run(_recorder_of, self._engine, tokenize_fn, packing)
        except BaseException:
            if early is not None:
                early.close()
            if "_progress" in vars(self):
                self._progress.close()
            raise

        if config.max_policy_lag is not None:
            from asyncdata.delivery.rollouts import set_lag

            engine = self._engine
            set_lag(engine.coordinator, config.max_policy_lag, too_old, engine.batching.loops_only)
        self._measured = time.monotonic(), 0.0  # the last metrics(), and the wait by then
        self._pack_length = getattr(packing, "max_length", 0)
        self.group_size = config.n_samples_per_prompt
        self._loops_only = self._engine.batching.loops_only
        self._loop_lock = threading.RLock()
        self._is_epoch_named = False
        self._closing = threading.RLock()
        self._is_closed = False
        self._closed_because = ""

    # Groups that are given back or acknowledged.

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back: they are served first, each once, and are in every snapshot until then.

        A group given back belongs to the loader until it is served again; change it before, not after.

        A group of a row that :meth:`exclude` was given is dropped, which ``statistics().dropped_groups_total`` counts.

        :param groups: lists of ``n_samples_per_prompt`` samples.
        :raises InvalidGroupError: naming the first group that cannot be kept; none is added then.
        """
        self._check()
        if self._loops_only:
            self._refuse_call("add_samples")
        engine = self._engine
        engine.coordinator.add_groups(groups, engine.is_of, engine.batching.row_keys.files_of)
        self._recorder.returned(groups)

    def ack(self, delivered: Iterable[Sample] | Iterable[Group] | None = None) -> None:
        """Under ``commit="on_ack"``: acknowledge these samples or groups (None: all delivered so far)."""
        self._check()
        if delivered is None:
            self._engine.coordinator.acknowledge(None)
            return

        from asyncdata.delivery.ledger import grouped, lease_key

        self._engine.coordinator.acknowledge([lease_key(group) for group in grouped(delivered, "ack")])

    def track(self) -> None:
        """From now on, a group that is served is in every state until it is consumed, dropped or given back.

        For loops that generate without end, beside the training. Say where each group ends: :meth:`consume`,
        :meth:`drop` or :meth:`add_samples`. A restart serves all others again, in their order: groups of the stream are
        made again from their rows. ``commit="on_ack"`` is the same from the start; a second call has no effect.

        :raises ConfigError: for a loader that packs samples.
        """
        self._check()
        if self._loops_only:
            self._refuse_call("track")
        from asyncdata.delivery.rollouts import set_rollouts

        set_rollouts(self._engine.coordinator, tracked=True)

    def consume(self, groups: Iterable[Sample] | Iterable[Group]) -> None:
        """Tracked groups were trained: no state has them any more. To be called before the state of that step is taken.

        :param groups: the groups, copies of them, or a sample of each.
        :raises ConfigError: AD437, if groups are not tracked, or one of these is not out: it was not served, or was
            already consumed, dropped or given back. Nothing has changed then.
        """
        self._end("consume", groups)

    def drop(self, groups: Iterable[Sample] | Iterable[Group], reason: str) -> int:
        """Tracked groups are not trained, and will not be served again; return how many of them were out.

        A group that is not out, such as one that was given back, is no longer the loop's: nothing happens to it.

        :param reason: under which ``statistics().dropped_groups_total`` and states count them, such as ``stale``.
        :raises ConfigError: AD437, if groups are not tracked, or the reason is empty.
        """
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"AD437 drop() takes a reason, such as 'stale', got {reason!r}")

        return self._end("drop", groups, reason)

    @property
    def policy_version(self) -> int | None:
        """The version of the policy from now on: a whole number that grows; None: not known. States have it.

        A sample has that with which its response began in ``extra["policy_version"]``.
        """
        rollouts = self._engine.coordinator.ledger.rollouts
        return None if rollouts is None else rollouts.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        from asyncdata.delivery.rollouts import set_version

        self._check()
        set_version(self._engine.coordinator, version)

    def _end(self, call: str, groups: Any, reason: str | None = None) -> int:
        self._check()
        from asyncdata.delivery.ledger import grouped, lease_key

        keys = [lease_key(group) for group in grouped(groups, call)]
        return self._engine.coordinator.end_groups(call, keys, reason)

    def _report(self, samples_or_groups: Any, scores: Any) -> Callable[[], int]:
        """What ``report`` does."""
        self._check()
        if self._engine.outcomes is None:
            raise ConfigError("AD483 this loader remembers no scores: give it outcomes=Outcomes(...)")

        return partial(self._engine.report, self._recorder, samples_or_groups, scores)

    def exclude(self, rows: Iterable[Any]) -> int:
        """Continue without these rows, from here on and in all epochs; the others keep their order.

        The state keeps them by file and place, so that every run that resumes from it leaves them out, too.
        They count in ``dropped_total`` as ``excluded``. Their groups in the buffer are removed, and those that are out
        are when they are given back; ``dropped_groups_total`` counts them. Those that are out may be consumed or
        dropped as any other, and do not come again after a restart. All other groups keep their numbers. From packs
        that are made of samples as they come, and from planned packs, the rows are left out as a gap: no other pack
        changes.
        With several ranks, exclude the same rows on all of them.

        :param rows: samples or groups that a loader of these data delivered, their ``source``, or the objects that
            ``asyncdata sample --json`` prints.
        :return: the number of rows that are excluded now.
        :raises ConfigError: if one of them is no row of this loader, or a place at which no row begins (AD485); nothing
            is excluded then. A place in a store, a compressed file or an array is only held against its size.
        """
        self._check()
        with owning_events(self._events_owner):
            return self._engine.exclude(rows)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The current state, as plain builtins that torch.save and JSON can store. May be called at any time.

        It has what was *delivered*, not what was read ahead, and the groups in the buffer.

        A distributed checkpoint (DCP) restores only the keys that a new loader's state has, which may be fewer: save
        an :class:`asyncdata.integrations.torch.StatefulDataLoader` there.
        """
        from asyncdata.checkpoint import snapshot as snapshots

        return snapshots.to_state_dict(self._engine.snapshot())

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed: Collection[str] = (), same_rows: bool = False
    ) -> None:
        """Continue with exactly the sample that would have come next when ``state`` was taken.

        :param allow_changed: what may have changed since: any of data, tokenizer, template, tokenize_fn, seed, order,
            outcomes. If data, seed or order has changed, the next epoch begins, and the event
            ``snapshot.rows_left_out`` tells how many rows of the current epoch are left out.
        :param same_rows: files may have other names if their content, by their fingerprints, and their order are the
            same. Then the run continues at its place.
        :raises SnapshotMismatchError: if anything else differs; it names the difference and both values.
        :raises SnapshotError: if ``state`` is not a state of a loader.
        """
        from asyncdata.checkpoint import snapshot as snapshots

        self._check()
        self._restore(snapshots.from_state_dict(state), allow_changed, same_rows=same_rows)

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] = {}) -> None:
        """Write the state to a file, atomically and durably (it survives a power loss). The last three are kept.

        :param path: a path, or an address such as ``s3://bucket/run/data.state``.
        :param storage_options: for an address, as in :class:`~asyncdata.JsonlSource`.
        :raises SnapshotError: if it cannot be written; the previous file stays, and no partial file is left.
        """
        from asyncdata.checkpoint.snapshot import save_at

        save_at(path, self._engine.snapshot(), storage_options)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        allow_changed: Collection[str] = (),
        same_rows: bool = False,
        storage_options: Mapping[str, Any] = {},
    ) -> None:
        """Like :meth:`load_state_dict`, from a file or object that :meth:`save` wrote."""
        from asyncdata.checkpoint.snapshot import load_from

        self._check()
        self._restore(load_from(path, storage_options), allow_changed, same_rows=same_rows)

    def _restore(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool) -> bool:
        with owning_events(self._events_owner):
            return self._engine.restore(saved, allow_changed, same_rows=same_rows)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``. A loader in the middle of that epoch, as after a resume, stays there.

        The next loop covers this epoch only, even if it has no samples left. Without this call, a loop that finds no
        samples left covers the next epoch.

        :raises ConfigError: directly after a restore, for an epoch that had ended: it would be delivered again; or, of
            data that grow, if it is not known any more what the epoch covered (AD311).
        """
        self._check()
        if epoch < 0:
            raise ConfigError(f"an epoch is counted from 0, got {epoch}")

        self._engine.set_epoch(epoch)
        self._is_epoch_named = True

    def seek(self, epoch: int, row: int, *, group_index: int | None = None) -> None:
        """Go to row ``row`` of ``epoch``, counted in delivery order. Waits until the row index is complete.

        :param row: from 0 to the number of rows of an epoch; the latter is the next epoch's start.
        :param group_index: the number of the next group of the stream; None continues the current numbers.
        :raises ConfigError: if there is no such row, or the order has no row index.
        """
        self.start()
        with self._waiting():
            self._engine.seek(epoch, row, group_index)

    @property
    def config(self) -> LoaderConfig:
        """The loader's settings, with their defaults."""
        return self._engine.config

    def position(self) -> Position:
        """The position in D of the next sample of the stream."""
        return self._engine.coordinator.ledger.position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._engine.epoch

    def statistics(self) -> Statistics:
        """Counters and the current state of the loader; ``.to_dict()`` gives flat numbers."""
        from msgspec.structs import replace

        return replace(self._engine.statistics(), telemetry_lost_total=self._recorder.lost())

    def metrics(self) -> dict[str, float]:
        """The few numbers that belong in a trainer's log beside the loss; :meth:`statistics` has all others.

        Totals are of this run and those that it resumed.

        :return: ``data/epoch``: epochs that were delivered, such as 1.5; whole ones for mixtures, streams and planned
            packs; an estimate where windows are of different sizes. ``data/samples`` and ``data/tokens``, of
            prompts: what was delivered to all ranks. ``data/dropped``: rows that were not, for any reason.
            ``data/wait_share``: of the time since the last call, or since the loader was made, how much this rank
            waited for data, 0 to 1. With a packing, ``data/pack_fill``: tokens of ``max_length``, 0 to 1.
        """
        from asyncdata.loader.measurements import metrics_of

        found, self._measured = metrics_of(self._engine, self.statistics(), self._measured, self._pack_length)
        return found

    # Start and close.

    def start(self) -> None:
        """Begin to read ahead now. Entering ``with``, or the first call for data, does the same."""
        self._check()
        self._recorder.start()
        self._engine.start()

    def _close(self, reason: str) -> None:
        self._closed_because = self._closed_because or reason
        # A second call waits for the first one; with a timeout, as an interrupt may have left the lock locked.
        if self._is_closed or not self._engine.service.is_here or not self._closing.acquire(timeout=_CLOSE_TIMEOUT_S):
            return

        try:
            if not self._is_closed:
                self._progress.close()
                self._recorder.close(self._closed_because)
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
            self._progress.close()
            self._engine.service.close()
            return

        message = f"unclosed {type(self).__name__}: use `with`, or call close()"
        try:
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:
            self._close("the loader was garbage")

    def _facts(self) -> dict[str, str]:
        engine = getattr(self, "_engine", None)
        return {"closed": self._closed_because} if engine is None else _facts_of(engine, self._closed_because)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}: {text}" for name, text in self._facts().items())
        return f"<{type(self).__name__} {facts}>"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return _html_table(type(self).__name__, self._facts())

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns a thread and processes. Make one where it "
            "is used, and carry state_dict() over."
        )

    # Parts of a call, without the waiting.

    def _begin(self) -> None:
        service = self._engine.service
        service.check_caller()
        if not service.is_started:
            self._recorder.start()
            self._engine.start()

    def _roll_back(self, error: BaseException) -> None:
        """After a call has failed with ``error``: its delivery, if there was one, has not happened."""
        self._engine.coordinator.settle()
        self._recorder.failed(error)

    def _waiting(self, request: Request | None = None) -> AbstractContextManager[None]:
        """During the block, a call waits; that is shown if it lasts."""
        return self._progress.waiting(lambda: (request and request.held) or self._engine.describe_wait(request))

    def _request(self, num_groups: int, at_least: int | None, *, finished: bool = False) -> Request | None:
        """The request of a call that takes fewer groups, too; None for exactly so many."""
        if at_least is None:
            return None

        from asyncdata.delivery.rollouts import request_of

        return request_of(self._groups(num_groups), at_least, finished=finished)

    def _work(self, max_out: int, max_finished: int | None) -> WorkRequest:
        """The first request of a loop over groups, which are tracked from now on."""
        from asyncdata.delivery.rollouts import work_of

        self.track()
        return work_of(max_out, max_finished)

    def _num_groups(self, num_samples: int) -> int:
        if self._loops_only:
            self._refuse_call("get_next_batch")
        size = self.group_size
        number = whole_number(num_samples)
        if number < 1 or number % size:
            raise ConfigError(
                f"AD440 num_samples must be a positive multiple of n_samples_per_prompt={size}, got {num_samples!r}"
            )

        return number // size

    def _peek(self, num_groups: int) -> Request:
        """The request of a call of ``peek``."""
        number = _checked_number(num_groups)
        self._check()
        self._begin()
        from asyncdata.delivery.ledger import Request

        return Request(number, is_peek=True)

    def _groups(self, num_groups: int) -> int:
        if self._loops_only:
            self._refuse_call("get_samples")
        return _checked_number(num_groups)

    def _regroup(self, samples: list[Sample]) -> list[Group]:
        size = self.group_size
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def _refuse_call(self, what: str) -> None:
        raise ConfigError(f"this loader {self._loops_only}: its batches come from a `for` loop, not from {what}()")

    def _batches(self) -> SampleBatches | PackBatches:
        """The batches of a new loop. It may cover a later epoch than the current one, unless ``set_epoch`` named it."""
        self._check()
        is_named, self._is_epoch_named = self._is_epoch_named, False
        engine = self._engine
        batches: SampleBatches | PackBatches = engine.batching.batches(engine.coordinator, runs_on=not is_named)
        return batches


def _checked_number(num_groups: int) -> int:
    number = whole_number(num_groups)
    if number < 0:
        raise ConfigError(f"AD440 num_groups must be a whole number from 0 on, got {num_groups!r}")

    return number


def _recorder_of(engine: Engine, tokenize_fn: Any, packing: Any) -> Recorder | NoRecorder:
    if not engine.config.telemetry.is_on:
        return NoRecorder()

    from asyncdata.loader.recording import recorder_of

    return recorder_of(engine, tokenize_fn, packing)


def _engine_class(source: Any) -> type[Engine]:
    if not is_loaded_instance(source, "asyncdata.loader.mix:Mix"):
        from asyncdata.loader.engine import Engine

        return Engine

    from asyncdata.loader.mixture_engine import MixtureEngine

    return MixtureEngine


def _facts_of(engine: Engine, closed_because: str) -> dict[str, str]:
    """What the loader reads, where it is, and how it does, by name.

    :param closed_because: why it is closed; empty if it is open.
    """
    if not engine.service.is_here:  # its locks may be held for ever
        return {"belongs to": "the process that forked this one"}

    files, now = engine.files, engine.statistics()
    num_bytes = sum(all_sizes(files))
    facts = {
        "source": redacted(files[0].path) + (f" and {len(files) - 1:,} more files" if len(files) > 1 else ""),
        "size": f"{num_bytes / 1e6:,.1f} MB",
        "position": f"{now.epoch}:{now.window}:{now.row}",
        "delivered": f"{now.samples_total:,} samples, {now.tokens_total:,} tokens",
        "dropped": f"{sum(now.dropped_total.values()):,} rows",
        "ready": f"{now.ready_samples:,} of {now.capacity_samples:,} samples",
        "waited": f"{now.data_wait_seconds_total:.1f} s in {now.waits_total:,} calls",
        "workers": f"{now.num_workers:,}",
    }
    return facts | ({"closed": closed_because} if closed_because else {})


def _html_table(title: str, facts: Mapping[str, str]) -> str:
    """A table of two columns."""
    left = "style='text-align: left'"
    rows = [f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(facts[name])}</td></tr>" for name in facts]
    return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"
