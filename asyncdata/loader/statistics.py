"""The loader's statistics, and the message of a call that timed out, which is made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.line_numbers import line_number_within
from asyncdata.workers.base import WorkerState  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from asyncdata.core.types import SourceLocation

__all__ = ("Statistics", "explain_timeout")

_COUNT_LINES_S = 0.25
"""Longest time for which counting the lines of a file may delay the error of a timeout."""


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
    :ivar bad_rows_total: bad rows that were passed over; they are also in ``dropped_total``.
    :ivar buffered_groups: groups given back that wait to be served.
    :ivar leased_requests: requests that are not fully acknowledged.
    :ivar ready_samples: samples that a call would get without waiting.
    :ivar in_flight_rows: rows that workers have, or that wait for earlier rows.
    :ivar capacity_samples: the channel's capacity.
    :ivar ready_bytes: bytes of the ready samples.
    :ivar waits_total: calls that had to wait for data.
    :ivar data_wait_seconds_total: seconds that they waited.
    :ivar num_workers: the target number of workers.
    :ivar autotune_changes_total: changes of the number of workers, and of the capacity, by the autotuner.
    :ivar queued_requests: requests that no worker has yet.
    :ivar worker_restarts_total: workers, and fork servers of workers, that were replaced.
    :ivar blank_lines_total: blank lines passed over, in what was read ahead.
    :ivar indexed_rows: rows that the row index has so far; 0 if the order needs no index.
    :ivar excluded_rows: indexed rows that the order excludes, by reason.
    :ivar read_seconds: seconds since a source that is read from front to back began to read its current window.
    :ivar cached_rows_total: rows that this run read from the token cache, and did not tokenize.
    :ivar token_cache_bytes: bytes of the token cache's segments that have rows of this data.
    :ivar packs_total: packs delivered to all ranks, in this run and in those that it resumed.
    :ivar packed_tokens_total: tokens of those packs, without padding.
    :ivar unpacked_samples_total: samples that are in no pack, by reason.
    :ivar unpacked_tokens_total: tokens that are in no pack, by reason.
    :ivar held_samples: samples that the packer holds, in unfinished packs or in packs not delivered yet.
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
    bad_rows_total: int
    buffered_groups: int
    leased_requests: int
    ready_samples: int
    in_flight_rows: int
    capacity_samples: int
    ready_bytes: int
    waits_total: int
    data_wait_seconds_total: float
    num_workers: int
    autotune_changes_total: int = 0
    queued_requests: int
    worker_restarts_total: int
    blank_lines_total: int
    indexed_rows: int = 0
    excluded_rows: dict[str, int] = {}
    read_seconds: float = 0.0
    cached_rows_total: int = 0
    token_cache_bytes: int = 0
    packs_total: int = 0
    packed_tokens_total: int = 0
    unpacked_samples_total: dict[str, int] = {}
    unpacked_tokens_total: dict[str, int] = {}
    held_samples: int = 0
    workers: list[WorkerState]

    def to_dict(self) -> dict[str, float]:
        """Flat numbers with Prometheus-style names, for example for ``wandb.log``."""
        flat: dict[str, float] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "workers":
                flat["asyncdata_workers_busy"] = sum(worker.state == "busy" for worker in value)
                flat["asyncdata_workers"] = len(value)
            elif isinstance(value, dict):
                stem, _, suffix = f"asyncdata_{name}".rpartition("_")
                flat[f"{stem}_{suffix}"] = sum(value.values())
                flat |= {f"{stem}_{_identifier(reason)}_{suffix}": number for reason, number in value.items()}
            else:
                flat[f"asyncdata_{name}"] = value
        return flat


def _identifier(reason: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in reason).lower()


def explain_timeout(
    waited_s: float,
    num_missing: int,
    now: Statistics,
    oldest: SourceLocation | None,
    is_started: bool,
    *,
    is_indexing: bool = False,
) -> tuple[str, dict[str, Any]]:
    """The message and the diagnosis of a PrefetchTimeoutError: the slow stage, and the knob to change.

    :param is_indexing: whether the row index is not complete yet.
    """
    stage, advice = _starving_stage(now, is_started, is_indexing=is_indexing)
    workers = ", ".join(f"{state.state} {state.busy_s:.1f} s" if state.busy_s else state.state for state in now.workers)
    lines = [
        f"AD510 no data for {waited_s:.1f} s: {now.ready_samples} samples are ready, {num_missing} more are needed.",
        f"  stage: {stage}",
        f"  channel: {now.ready_samples} ready + {now.in_flight_rows} in flight of {now.capacity_samples}",
        f"  workers: {workers or 'none'}; restarts: {now.worker_restarts_total}; queued: {now.queued_requests}",
    ]
    if oldest is not None:
        lines.append(f"  oldest row in flight: {_place(oldest)}")
    lines.append(f"  try: {advice}")
    diagnosis = {"stage": stage, "advice": advice, "num_missing": num_missing, "waited_s": waited_s}
    diagnosis["oldest_row"] = msgspec.to_builtins(oldest)
    diagnosis["statistics"] = msgspec.to_builtins(now)
    return "\n".join(lines), diagnosis


def _place(row: SourceLocation) -> str:
    if row.row_number is not None:
        return f"{row.path} (row {row.row_number})"

    # A file that is gone, or a disk that hangs, must not hide the timeout.
    line = line_number_within(row.path, row.byte_offset, _COUNT_LINES_S)
    return f"{row.path}{'' if line is None else f':{line}'} (byte {row.byte_offset})"


def _starving_stage(now: Statistics, is_started: bool, *, is_indexing: bool) -> tuple[str, str]:
    states = [worker.state for worker in now.workers]
    if not is_started or not states:
        return "start: the workers are not there yet", "a longer timeout_s for the first batch"

    if all(state == "starting" for state in states):
        return "start: the workers are loading the tokenize function", "a longer timeout_s for the first batch"

    if now.in_flight_rows and "busy" in states:
        slowest = max(worker.busy_s for worker in now.workers)
        return (
            f"tokenize: the workers cannot keep up, or one hangs (busy for {slowest:.1f} s)",
            "more num_workers, a larger buffer_size, or a lower Limits(row_timeout_s=...) if a worker hangs",
        )

    if now.read_seconds:
        return (
            f"read: the source has been giving the rows of a window for {now.read_seconds:.1f} s",
            "a faster source, a smaller Shuffle(window_blocks=...), or a longer timeout_s",
        )

    if "busy" in states and is_indexing:
        return (
            f"index: the row index is being made, {now.indexed_rows} rows are found so far",
            "a longer timeout_s for the first batch; with a Cache(folder=...) the next start finds the index there",
        )

    if "busy" in states:
        return "read: a window is being read", "faster storage, or a smaller Shuffle(window_blocks=...)"

    if sum(now.dropped_total.values()) > now.groups_total:
        return "filter: most rows are dropped", "max_length, or what the tokenize function drops"

    return (
        "read: nothing is under way",
        "look at the log for what stopped; if it says nothing, this is a fault of asyncdata: please report it",
    )
