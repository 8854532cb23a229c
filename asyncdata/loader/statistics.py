"""Who waits for whom: the loader's statistics, and what they say when a call times out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.line_numbers import line_number_within
from asyncdata.workers.base import WorkerState  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from asyncdata.core.types import SourceLocation

__all__ = ("Statistics", "explain_timeout")

_COUNT_LINES_S = 0.25
"""How much later a timeout may be told because its row's line is looked up."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the loader has done and is doing. ``*_total`` only grow; the rest is of this moment.

    :ivar epoch: the epoch of the next sample.
    :ivar window: its window.
    :ivar row: its row in the window's order.
    :ivar samples_total: samples delivered from the stream, in this run and those it resumed.
    :ivar groups_total: groups likewise.
    :ivar tokens_total: tokens of those groups' prompts, each counted once.
    :ivar dropped_total: rows that yielded no sample, by reason.
    :ivar noted_total: rows that were kept and of which the tokenize function noted something, by name.
    :ivar bad_rows_total: bad rows that were passed over; they are in ``dropped_total`` too.
    :ivar buffered_groups: groups given back, waiting to be served.
    :ivar leased_requests: requests not wholly acknowledged.
    :ivar ready_samples: samples that a call would get without waiting.
    :ivar in_flight_rows: rows entered in the order that are not ready.
    :ivar capacity_samples: the channel's capacity.
    :ivar ready_bytes: bytes of the ready samples.
    :ivar waits_total: calls that had to wait for data.
    :ivar data_wait_seconds_total: seconds they waited.
    :ivar num_workers: workers that there are to be.
    :ivar autotune_changes_total: changes of their number, and of the capacity.
    :ivar queued_requests: requests no worker has yet.
    :ivar worker_restarts_total: workers and fork servers that were replaced.
    :ivar blank_lines_total: blank lines passed over, in what was read ahead.
    :ivar indexed_rows: rows that the row index knows so far; 0 where the order needs none.
    :ivar excluded_rows: those of them that the order leaves out, by reason.
    :ivar read_seconds: for how long a source that is read from front to back has been giving its present window.
    :ivar cached_rows_total: rows read from the token cache by this run, and so not tokenized.
    :ivar token_cache_bytes: bytes of the token cache's segments that have rows of this data.
    :ivar packs_total: packs delivered to all ranks, in this run and those it resumed.
    :ivar packed_tokens_total: their tokens, without padding.
    :ivar unpacked_samples_total: samples that are in no pack, by reason.
    :ivar unpacked_tokens_total: tokens that are in none, by reason.
    :ivar held_samples: samples that packs wait for, or wait with.
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
        """Flat numbers, named as Prometheus would have them: fit for ``wandb.log``."""
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
    """The message of a PrefetchTimeoutError, and the facts behind it: the stage that starves, and what to turn.

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
            "more num_workers, a larger buffer_size, or a lower row_timeout_s if the tokenize function hangs",
        )

    if now.read_seconds:
        return (
            f"read: the source has been giving the rows of a window for {now.read_seconds:.1f} s",
            "a faster source, a smaller Shuffle(window_blocks=...), or a longer timeout_s",
        )

    if "busy" in states and is_indexing:
        return (
            f"index: the row index is being made, {now.indexed_rows} rows are found so far",
            "a longer timeout_s for the first batch; with a cache_dir the next start finds the index there",
        )

    if "busy" in states:
        return "read: a window is being read", "faster storage, or a smaller Shuffle(window_blocks=...)"

    if sum(now.dropped_total.values()) > now.groups_total:
        return "filter: most rows are dropped", "max_length, or what the tokenize function drops"

    return (
        "read: nothing is under way",
        "look at the log for what stopped; if it says nothing, this is a fault of asyncdata: please report it",
    )
