"""The loader's statistics, and the message of a call that timed out, which is made from them."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.workers.base import ExecutorStatistics, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncdata.core.types import SourceLocation
    from asyncdata.delivery.channel import Channel
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.loader.sample_batches import PackTotals
    from asyncdata.sources.base import Blocks

_OF_OUTCOMES = (
    *("outcome_rows", "outcome_scores_total", "outcome_repeated_total", "outcome_late_total"),
    "outcome_skipped_total",
)
_COUNT_LINES_S = 0.25
"""Longest time for which counting the lines of a file may delay the error of a timeout."""
HELD = "loop", "the samples are ready; other code holds the event loop of an earlier call", "run it in a thread"
_MAKE_ROOM = "room in the cluster (see `ray status`), a smaller RayExecutor(num_workers=...), or ask its administrators"


class SourceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was delivered of one part of a mixture, in this run and in those that it resumed.

    :ivar samples: samples delivered.
    :ivar tokens: tokens of their prompts, each prompt counted once.
    :ivar epoch: the part's own epoch of its next sample.
    :ivar dropped: its rows that yielded no sample, by reason.
    :ivar wait: seconds for which calls of this run waited for its next sample.
    :ivar target: its share of the mixture now, 0 to 1: of samples, or of tokens with ``Mix(by="tokens")``.
    :ivar outcome_rows: rows of which its outcome memory has scores.
    :ivar outcome_scores_total: scores that were counted in it.
    :ivar outcome_repeated_total: scores that were reported again, and not counted.
    :ivar outcome_late_total: scores of an earlier epoch than the last one of their row, which were not counted.
    :ivar outcome_skipped_total: scores that were None.
    """

    samples: int
    tokens: int
    epoch: int
    dropped: dict[str, int]
    wait: float
    target: float = 0.0
    outcome_rows: int = 0
    outcome_scores_total: int = 0
    outcome_repeated_total: int = 0
    outcome_late_total: int = 0
    outcome_skipped_total: int = 0

    def to_dict(self, prefix: str) -> dict[str, float]:
        """Flat numbers, named by the prefix."""
        return {
            f"{prefix}_samples_total": self.samples,
            f"{prefix}_tokens_total": self.tokens,
            f"{prefix}_epoch": self.epoch,
            f"{prefix}_dropped_total": sum(self.dropped.values()),
            f"{prefix}_wait_seconds_total": self.wait,
            f"{prefix}_target": self.target,
            **{f"{prefix}_{name}": getattr(self, name) for name in _OF_OUTCOMES},
        }


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and the current state of a loader. ``*_total`` only grow; the others are current values.

    :ivar epoch: the epoch of the next sample.
    :ivar window: the window of the next sample.
    :ivar row: the row of the next sample in the window's order.
    :ivar samples_total: samples delivered from the stream, in this run and in those that it resumed.
    :ivar groups_total: groups delivered from the stream, in this run and in those that it resumed.
    :ivar tokens_total: tokens of those groups' prompts, each prompt counted once.
    :ivar dropped_total: rows that yielded no sample, by reason.
    :ivar noted_total: rows that were kept and noted by the tokenize function, by name of the note.
    :ivar unread_keys: of some rows that this run has looked at, how many have each key that is not read; in a mixture,
        after the name of the part.
    :ivar bad_rows_total: bad rows that were passed over; they are also in ``dropped_total``.
    :ivar buffered_groups: groups given back that wait to be served.
    :ivar leased_requests: requests that are not fully acknowledged.
    :ivar tracked_groups: groups that were served and are neither acknowledged, consumed, dropped nor given back; 0 if
        groups are not tracked.
    :ivar dropped_groups_total: tracked groups that the trainer has dropped, by reason; under ``excluded``, groups that
        were given back, and their row is excluded; under ``too_old``, those of ``max_policy_lag``.
    :ivar too_old_groups_total: groups that ``max_policy_lag`` has found too old: ``reset``, ``drop``.
    :ivar ready_samples: samples that a call would get without waiting.
    :ivar in_flight_rows: rows that workers have, or that wait for earlier rows.
    :ivar capacity_samples: the channel's capacity.
    :ivar ready_bytes: bytes of the ready samples.
    :ivar waits_total: calls that had to wait for data.
    :ivar data_wait_seconds_total: seconds that they waited, until now, or until their samples were ready.
    :ivar loop_held_seconds_total: seconds for which samples were ready, and other code held the event loop of the call
        that awaited them; added when the call ends.
    :ivar num_workers: the target number of workers.
    :ivar queued_requests: requests that no worker has yet.
    :ivar worker_restarts_total: workers, and fork servers of workers, that were replaced.
    :ivar tokenized_rows_total: rows that this loader's workers have tokenized.
    :ivar tokenize_seconds_total: seconds of CPU time that the workers needed for them.
    :ivar blank_lines_total: blank lines passed over, in what was read ahead.
    :ivar indexed_rows: rows that the row index has so far; 0 if the order needs no index.
    :ivar excluded_rows: indexed rows that the order excludes, by reason.
    :ivar read_seconds: seconds since a source that is read from front to back began to read its current window.
    :ivar store_reads_total: requests to object stores that were answered.
    :ivar store_retries_total: requests to object stores that failed and were tried again.
    :ivar store_cached_total: blocks of objects that were read from the local disk instead.
    :ivar store_cache_failures_total: blocks that could not be read from the local disk or kept there, or were damaged.
    :ivar media_waiting_samples: samples that wait for their media, or for samples before them that do.
    :ivar media_held_bytes: bytes of media that are loaded ahead or that the trainer holds.
    :ivar media_loaded_total: samples whose media were loaded by this run.
    :ivar media_bytes_total: bytes of these media.
    :ivar media_load_seconds_total: seconds of work for them.
    :ivar media_failed_total: samples whose media could not be loaded; also those that were not delivered yet.
    :ivar packs_total: packs delivered to all ranks, in this run and in those that it resumed.
    :ivar packed_tokens_total: tokens of those packs, without padding.
    :ivar unpacked_samples_total: samples that are in no pack, by reason.
    :ivar unpacked_tokens_total: tokens that are in no pack, by reason.
    :ivar held_samples: samples that the packer holds, in unfinished packs or in packs not delivered yet.
    :ivar by_source: what was delivered of each part of a mixture, by name; empty for a single source.
    :ivar outcome_rows: rows of which the outcome memory has scores.
    :ivar outcome_scores_total: scores that were reported and counted, in this run and in those that it resumed.
    :ivar outcome_repeated_total: scores that were reported again, and not counted.
    :ivar outcome_late_total: scores of an earlier epoch than the last one of their row, which were not counted.
    :ivar outcome_skipped_total: scores that were None.
    :ivar outcome_rewards_total: of several rewards, the scores that were counted, by key.
    :ivar telemetry_lost_total: records of the telemetry that could not be written, by reason.
    :ivar workers: what each worker is doing.
    """

    epoch: int
    window: int
    row: int
    samples_total: int
    groups_total: int
    tokens_total: int
    dropped_total: dict[str, int]
    noted_total: dict[str, int] = {}
    unread_keys: dict[str, int] = {}
    bad_rows_total: int
    buffered_groups: int
    leased_requests: int
    tracked_groups: int = 0
    dropped_groups_total: dict[str, int] = {}
    too_old_groups_total: dict[str, int] = {}
    ready_samples: int
    in_flight_rows: int
    capacity_samples: int
    ready_bytes: int
    waits_total: int
    data_wait_seconds_total: float
    loop_held_seconds_total: float = 0.0
    num_workers: int
    queued_requests: int
    worker_restarts_total: int
    tokenized_rows_total: int = 0
    tokenize_seconds_total: float = 0.0
    blank_lines_total: int
    indexed_rows: int = 0
    excluded_rows: dict[str, int] = {}
    read_seconds: float = 0.0
    store_reads_total: int = 0
    store_retries_total: int = 0
    store_cached_total: int = 0
    store_cache_failures_total: int = 0
    media_waiting_samples: int = 0
    media_held_bytes: int = 0
    media_loaded_total: int = 0
    media_bytes_total: int = 0
    media_load_seconds_total: float = 0.0
    media_failed_total: int = 0
    packs_total: int = 0
    packed_tokens_total: int = 0
    unpacked_samples_total: dict[str, int] = {}
    unpacked_tokens_total: dict[str, int] = {}
    held_samples: int = 0
    by_source: dict[str, SourceStatistics] = {}
    outcome_rows: int = 0
    outcome_scores_total: int = 0
    outcome_repeated_total: int = 0
    outcome_late_total: int = 0
    outcome_skipped_total: int = 0
    outcome_rewards_total: dict[str, int] = {}
    telemetry_lost_total: dict[str, int] = {}
    workers: list[WorkerState]

    def to_dict(self) -> dict[str, float]:
        """Flat numbers with Prometheus-style names, for example for ``wandb.log``."""
        flat: dict[str, float] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "workers":
                flat["asyncdata_workers_busy"] = sum(worker.state == "busy" for worker in value)
                flat["asyncdata_workers"] = len(value)
            elif name == "by_source":
                for source, counts in value.items():
                    flat |= counts.to_dict(f"asyncdata_source_{_identifier(source)}")
            elif isinstance(value, dict):
                stem, _, suffix = f"asyncdata_{name}".rpartition("_")
                flat[f"{stem}_{suffix}"] = sum(value.values())
                flat |= {f"{stem}_{_identifier(reason)}_{suffix}": number for reason, number in value.items()}
            else:
                flat[f"asyncdata_{name}"] = value
        return flat

    def to_prometheus(self, labels: Mapping[str, str] = {}) -> str:
        """The numbers in Prometheus' text format, as a scrape returns them; ``text/plain; version=0.0.4``.

        Names are as in :meth:`to_dict`, but a dict's key is a label: ``reason``, ``note`` for noted rows, and
        ``source`` for the parts of a mixture.

        :param labels: of every number, such as ``{"rank": "0"}``.
        """
        from asyncdata.loader.measurements import prometheus_text

        return prometheus_text(self, labels)


def numbers_of(
    ledger: Ledger, channel: Channel, workers: ExecutorStatistics, files: Iterable[Blocks], packs: PackTotals
) -> dict[str, Any]:
    """What was delivered, what is ready, and what stores have given."""
    counters = ledger.counters
    # What is read from front to back, this process reads.
    reads: list[Any] = [workers, *filter(None, (getattr(one, "read_counts", None) for one in files))]
    numbers = {
        "samples_total": counters.num_samples,
        "groups_total": counters.num_groups,
        "tokens_total": counters.num_tokens,
        "dropped_total": dict(Counter(counters.drops) + Counter(packs.bad_rows)),
        "noted_total": dict(counters.notes),
        "bad_rows_total": counters.num_bad_rows + sum(packs.bad_rows.values()),
        "buffered_groups": len(ledger.buffer),
        "leased_requests": len(ledger.leases),
        "tracked_groups": ledger.num_out,
        "dropped_groups_total": dict(ledger.group_drops),
        "too_old_groups_total": {} if ledger.rollouts is None else dict(ledger.rollouts.counts),
        "ready_samples": channel.num_produced - ledger.taken,
        "in_flight_rows": channel.num_rows_in_flight,
        "capacity_samples": channel.capacity,
        "ready_bytes": channel.num_ready_bytes,
        "store_reads_total": sum(one.num_reads for one in reads),
        "store_retries_total": sum(one.num_retried for one in reads),
        "store_cached_total": sum(one.num_cached for one in reads),
        "store_cache_failures_total": sum(one.num_cache_failures for one in reads),
        "queued_requests": workers.num_queued,
        "worker_restarts_total": workers.num_restarts,
        "workers": workers.workers,
    }
    if packs.counts is None:
        return numbers

    return numbers | {
        "packs_total": packs.num_packs,
        "packed_tokens_total": packs.num_tokens,
        "unpacked_samples_total": dict(packs.counts.samples),
        "unpacked_tokens_total": dict(packs.counts.tokens),
        "held_samples": packs.num_held,
    }


def _identifier(reason: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in reason).lower()


def explain_timeout(
    waited_s: float, num_missing: int, now: Statistics, oldest: SourceLocation | None, lack: tuple[str, str, str]
) -> tuple[str, dict[str, Any], tuple[str, str, str]]:
    """The message and the diagnosis of a PrefetchTimeoutError; and as texts what each worker does, the oldest row in
    flight, and the name of the first setting to change.

    :param lack: what :func:`lacking` says.
    """
    stage, what, advice = lack
    workers = ", ".join(f"{state.state} {state.busy_s:.1f} s" if state.busy_s else state.state for state in now.workers)
    row = "" if oldest is None else oldest.described(_COUNT_LINES_S)
    lines = [
        f"AD510 no data for {waited_s:.1f} s: {now.ready_samples} samples are ready, {num_missing} more are needed.",
        f"  stage: {stage}: {what}",
        f"  channel: {now.ready_samples} ready + {now.in_flight_rows} in flight of {now.capacity_samples}",
        f"  workers: {workers or 'none'}; restarts: {now.worker_restarts_total}; queued: {now.queued_requests}",
        *([f"  oldest row in flight: {row}"] if row else []),
        f"  try: {advice}",
    ]
    diagnosis = {"stage": f"{stage}: {what}", "advice": advice, "num_missing": num_missing, "waited_s": waited_s}
    diagnosis |= {"oldest_row": msgspec.to_builtins(oldest), "statistics": msgspec.to_builtins(now)}
    setting, *_ = *re.findall(r"\w+_\w+", advice), ""
    return "\n".join(lines), diagnosis, (workers, row, setting)


def lacking(now: Statistics, is_started: bool, *, is_indexing: bool) -> tuple[str, str, str]:
    """The stage that is too slow now, in a word; what it does; and what may help.

    :param is_indexing: whether the row index is being made.
    """
    states = [worker.state for worker in now.workers]
    if not is_started or all(state == "starting" for state in states):
        if lacks := next(filter(None, (one.lacks for one in now.workers)), ""):
            return "start", lacks, _MAKE_ROOM

        what = "loading the tokenize function" if is_started and states else "not there yet"
        return "start", f"the workers are {what}", "a longer timeout_s for the first batch"

    if now.media_waiting_samples and "busy" in states:
        return (
            "media",
            f"the workers load the media of the {now.media_waiting_samples} samples that are next",
            "more num_workers, smaller pictures, or a larger Limits(max_media_bytes=...)",
        )

    if now.in_flight_rows and "busy" in states:
        slowest = max(worker.busy_s for worker in now.workers)
        return (
            "tokenize",
            f"the workers have {now.in_flight_rows:,} rows and cannot keep up, or one hangs (busy for {slowest:.1f} s)",
            "more num_workers, a larger buffer_size, or a lower Limits(row_timeout_s=...) if a worker hangs",
        )

    if now.read_seconds:
        return (
            "read",
            f"the source has been giving the rows of a window for {now.read_seconds:.1f} s",
            "a faster source, a smaller Shuffle(window_blocks=...), or a longer timeout_s",
        )

    if "busy" in states and is_indexing:
        return (
            "index",
            f"the row index is being made, {now.indexed_rows} rows are found so far",
            "a longer timeout_s for the first batch; with a Cache(folder=...) the next start finds the index there",
        )

    if "busy" in states:
        return "read", "a window is being read", "faster storage, or a smaller Shuffle(window_blocks=...)"

    if sum(now.dropped_total.values()) > now.groups_total:
        return "filter", "most rows are dropped", "max_length, or what the tokenize function drops"

    return (
        "read",
        "nothing is under way",
        "look at the log for what stopped; if it says nothing, this is a fault of asyncdata: please report it",
    )
