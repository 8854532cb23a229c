"""Records a run: one daemon thread, which the trainer never waits for, and whose faults are only counted.

What the loader's threads say is queued, within limits. The thread looks at it about once a second.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from msgspec.structs import replace

from asyncdata.core.errors import (
    AsyncDataError,
    BadRowError,
    EndOfData,
    LoaderClosedError,
    events_owner,
    get_logger,
    observe_events,
    redacted,
    stop_observing,
)
from asyncdata.core.threads import at_exit, no_op, started
from asyncdata.core.types import Group, Position
from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.items import Failure
from asyncdata.telemetry.call_times import CallTimes, CpuWatch, Rollouts
from asyncdata.telemetry.chunk_watch import ChunkWatch, PackWatch, cut
from asyncdata.telemetry.records import MAX_VALUE, End, Event, Interval, Record, RunStart, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncdata.batching.packs import Pack
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.telemetry.settings import Telemetry
    from asyncdata.workers.pool import Pool

    P = ParamSpec("P")
    T = TypeVar("T")

_log = get_logger(__name__)
_TICK_S, _FIRST_TICK_S = 1.0, 0.2
_CLOSE_TIMEOUT_S = 3.0
_MAX_EVENTS = 10_000
_MAX_EVENT_TEXT = 500
_NO_FAULTS = EndOfData, LoaderClosedError, TimeoutError
"""With which a call may end in a run that does well."""
_MAX_STARTS = 10_000
_RESERVED_BYTES = 1024
"""Bytes that stay free for the last record."""


class WatchedCoordinator(Coordinator):
    """A coordinator that shows what comes into the channel.

    :ivar on_chunk: called with each chunk that comes into the current channel, before it can be delivered.
    :ivar on_restart: called before, and after, delivery continues elsewhere; with whether it is after.
    """

    on_chunk: Callable[[Channel, Chunk], object] = staticmethod(no_op)
    on_restart: Callable[[bool], object] = staticmethod(no_op)

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        if channel is self.channel and not isinstance(content, Failure):
            self.on_chunk(channel, content)
        super().fill(channel, entry, content)

    def restart(self, change: Callable[[Ledger], Ledger]) -> None:
        self.on_restart(False)
        super().restart(change)
        self.on_restart(True)


class Subject(Protocol):
    """The loader that is recorded. Its methods are called from any thread.

    :ivar coordinator: the loader's; ``executor``: what runs its workers.
    :ivar shows_rows: whether text of all rows may be recorded.
    :ivar max_samples: samples that are kept of each part of a mixture.
    """

    coordinator: Coordinator
    executor: Pool
    shows_rows: bool
    max_samples: int

    def header(self) -> RunStart:
        """The first record, without what belongs to the file."""

    def interval(self) -> Interval:
        """The totals of the stream, and the current state; the rest is filled in here."""

    def shows_rows_of(self, source: str) -> bool:
        """Whether text of rows of that part of a mixture may be recorded."""

    def waits_for(self) -> str:
        """What a call waits for now: a key of :attr:`~asyncdata.telemetry.records.Interval.wait_s`."""


def _guarded(method: Callable[Concatenate[Recorder, P], T]) -> Callable[Concatenate[Recorder, P], T | None]:
    """A fault of the recorder is counted, and does not reach the loader."""

    @functools.wraps(method)
    def guarded(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.lose("error", repr(error))
            return None

    return guarded


class RecordFile:
    """Appends lines, all of each or nothing of it. A forked child does not close it.

    The first line makes the folder and the file, under a name that no other start has.

    :param max_bytes: limit of the file: one half for details, the other for totals.
    :ivar number: of this start among its rank's.
    :ivar fault: why the last line could not be written; empty if it was.
    """

    def __init__(self, folder: str, rank: int, max_bytes: int) -> None:
        self._fd, self._pid = -1, os.getpid()
        self._folder, self._rank = folder, rank
        self._share = max_bytes // 2
        self._num_bytes = {"details": 0, "totals": 0}
        self.number = 0
        self.fault = ""

    def open(self) -> bool:
        """Make the file, unless it is there; return whether it is."""
        if self._fd >= 0:
            return True

        try:
            os.makedirs(self._folder, exist_ok=True)
            self._fd = self._made()
        except OSError as error:
            self.fault = str(error)
        return self._fd >= 0

    def _made(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            path = f"{self._folder}/rank-{self._rank:05}-{self.number:04}.jsonl"
            try:
                return os.open(path, flags, 0o644)
            except FileExistsError:
                if self.number >= _MAX_STARTS:
                    raise

                self.number += 1

    def write(self, line: bytes, *, is_detail: bool = False, is_last: bool = False) -> str:
        """Append a line. Return why it is lost: ``disk`` or ``size``; empty if it is written."""
        if self._pid != os.getpid() or not self.open():
            return "disk"

        kind = "details" if is_detail else "totals"
        room = self._share - self._num_bytes[kind] - (0 if is_last else _RESERVED_BYTES)
        if len(line) > room:
            return "size"

        self.fault = self._append(line)
        if self.fault:
            return "disk"

        self._num_bytes[kind] += len(line)
        return ""

    def _append(self, line: bytes) -> str:
        """Append a line to the open file. Return why that was not possible; empty if it was."""
        try:
            if os.fstat(self._fd).st_nlink == 0:
                return "the file was removed"

            num_written = os.write(self._fd, line)
            if num_written < len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_written)
                return "no space left for a whole record"
        except OSError as error:
            return str(error)

        return ""

    @property
    def thinning(self) -> int:
        """By how much longer intervals are: 1, and twice as much each time half of the room that was left is used."""
        left = max(1, self._share - self._num_bytes["totals"])
        return 1 << (self._share // left).bit_length() - 1

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0 and self._pid == os.getpid():
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1


class Recorder:
    """See the module.

    :ivar watch: looks at the chunks of the channel.
    :ivar calls: times of calls and waits; ``called``: a call for data begins.
    :ivar rollouts: groups given back, and scores; ``packs``: of this rank.
    """

    def __init__(self, settings: Telemetry, subject: Subject, rank: int) -> None:
        self._settings, self._subject = settings, subject
        assert settings.folder is not None, "without a folder nothing is recorded"
        self._file = RecordFile(settings.folder, rank, settings.max_bytes)
        cpu_share = CpuWatch(subject.executor).share
        self.calls, self.rollouts = CallTimes(time.monotonic, subject.waits_for, cpu_share), Rollouts()
        self.packs = PackWatch()
        self.called = self.calls.called
        self.watch = ChunkWatch(subject.max_samples, subject.shows_rows_of)
        self._events: deque[Event] = deque()
        self._records: deque[Record] = deque()
        self._header: RunStart | None = None
        self._lost = dict[str, int]()
        self._lock, self._counting = threading.Lock(), threading.RLock()  # neither is held while a file is written
        self._stopped, self._reason, self._failure = threading.Event(), "", (Position(-1), "")
        self._thread: threading.Thread | None = None
        self._pid, self._has_warned, self._events_owner = os.getpid(), False, events_owner.get()
        self._began = self._next_interval = time.monotonic()

    # The trainer's side: nothing here waits or raises.

    def start(self) -> None:
        """Begin to record; do nothing if that has begun."""
        if self._thread is not None or self._reason:
            return

        self._began = time.monotonic()
        self._next_interval = self._began + self._interval_s()
        try:
            self._header = self._subject.header()
            with self._lock:
                self._records.append(self._interval(begins=True))
            self._thread = started(self._run, "asyncdata-telemetry")
        except Exception as error:
            self._reason = "it could not be begun"
            self.lose("error", repr(error))
            return

        observe_events(self._on_event, self._events_owner)
        _running.add(self)

    @_guarded
    def see(self, channel: Channel, chunk: Chunk) -> None:
        """A chunk comes into the channel. In the service's thread."""
        if self._is_recording:
            self.watch.see(channel, chunk)

    @_guarded
    def restarted(self, is_after: bool) -> None:
        """Delivery is about to continue elsewhere, or has done so."""
        if not self._is_recording:
            return

        with self._lock:
            if is_after:
                self.watch.forget_rest()
            self._records.append(self._interval(begins=is_after))

    @_guarded
    def wait_begins(self, wait: object, now: float) -> None:
        """A call has to wait."""
        self.calls.wait_begins(wait, now, self._subject.waits_for() if self._is_recording else "read")

    @_guarded
    def packed(self, packs: Sequence[Pack], length: int) -> None:
        """Packs of so many tokens were made of samples."""
        self.packs.packed(packs, length)

    @_guarded
    def failed(self, error: BaseException | None, ends_run: bool = False) -> None:
        """A call for data, or the trainer, has raised. If nothing is delivered after it, that ended the run.

        :param ends_run: whether the loader is closed now; else, a call may also end as in a run that does well.
        """
        while isinstance(error, BaseExceptionGroup):  # of a task group
            error = error.exceptions[0]
        if isinstance(error, Exception) and not isinstance(error, EndOfData if ends_run else _NO_FAULTS):
            self._failure = self._subject.coordinator.ledger.position, self._told(error)

    def _told(self, error: BaseException) -> str:
        text = redacted(str(error))
        if not self._subject.shows_rows:
            end = "): " if isinstance(error, BadRowError) else " "  # of its place, or of a code
            text = text.partition(end)[0] + end[:-2] if isinstance(error, AsyncDataError) else ""
        return cut(f"{type(error).__name__}: {text}".rstrip(": "), MAX_VALUE)

    @_guarded
    def returned(self, groups: Sequence[Group]) -> None:
        """Groups were given back."""
        self.rollouts.returned(groups, self._subject.coordinator.ledger.counters.num_groups)

    @_guarded
    def scored(self, scores: Iterable[tuple[str, Sequence[float | None]]]) -> None:
        """Scores of groups were reported, each with the key of its reward."""
        self.rollouts.scored(scores)

    def close(self, reason: str) -> None:
        """Write what is left, and end. Waits for that, but at most ``_CLOSE_TIMEOUT_S``, as a disk may hang."""
        self._reason = self._reason or reason
        self._stopped.set()
        stop_observing(self._on_event)
        _running.discard(self)
        if self._thread is not None and self.is_here() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def is_here(self) -> bool:
        """Whether this is the process that records. In a forked child, locks may never be released."""
        return self._pid == os.getpid()

    @property
    def _is_recording(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.is_here()

    def lost(self) -> dict[str, int]:
        """What was not recorded, by reason."""
        lost = Counter(self._lost)
        lost["queue"] += self.calls.num_lost + self.watch.num_lost
        return dict(+lost)

    def _on_event(self, method: str, name: str, fields: dict[str, Any]) -> None:
        if name.startswith("telemetry.") or not self.is_here():
            return

        if len(self._events) >= _MAX_EVENTS:
            self.lose("queue")
            return

        self._events.append(Event(at=time.time(), name=name, level=method, fields=self._shown(fields)))

    def _shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in fields.items() if isinstance(value, int | float)}
        if not self._subject.shows_rows:
            return shown

        texts = {name: value if isinstance(value, str) else repr(value) for name, value in fields.items()}
        return {name: shown.get(name, cut(text, _MAX_EVENT_TEXT)) for name, text in texts.items()}

    def lose(self, reason: str, why: str = "") -> None:
        """Count something that is not recorded; the first fault is logged."""
        with self._counting:
            self._lost[reason] = self._lost.get(reason, 0) + 1
        if why:
            self._warn(why)

    def _warn(self, why: str) -> None:
        with self._counting:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning("telemetry.lost", folder=self._settings.folder, reason=why)

    # The thread.

    def _run(self) -> None:
        try:
            self.tick()  # at once: a run that is killed in its first second has its first record
            while not self._stopped.wait(min(_TICK_S, self._interval_s())):
                self.tick()
            self.tick(is_last=True)
        except BaseException as error:  # whatever it is, it is not the trainer's
            self.lose("error", repr(error))
        finally:
            self._file.close()

    def _interval_s(self) -> float:
        """Seconds to the next interval: a tenth of the run so far, so that a short run has charts, too."""
        return min(self._settings.interval_s, max(_FIRST_TICK_S, (time.monotonic() - self._began) / 10))

    def tick(self, *, is_last: bool = False) -> None:
        """Record what has happened since the last time."""
        with self._lock:
            self._records.extend([*self.watch.bad_rows(), *self.watch.dropped_rows()])
            while self._events:
                self._records.append(self._events.popleft())
            if is_last or time.monotonic() >= self._next_interval:
                self._next_interval = time.monotonic() + self._interval_s() * self._file.thinning
                self._records.append(self._interval())
            else:
                now = self._subject.coordinator
                self._records.extend(self.watch.settle(now.channel, now.ledger.position))
                self.calls.settle()
        while self._records:
            self._write(self._records.popleft())
        if is_last:
            at, error = self._failure
            is_over = at == self._subject.coordinator.ledger.position
            self._write(End(at=time.time(), reason=self._reason, error=error if is_over else ""), is_last=True)

    def _interval(self, *, begins: bool = False) -> Interval:
        """The state now. Samples that are delivered by now are recorded before it."""
        now = self._subject.interval()
        self._records.extend(self.watch.settle(self._subject.coordinator.channel, Position(*now.place)))
        self.calls.settle()
        noted = self.watch.noted
        sources = {name: replace(counts, noted=dict(noted.get(name, {}))) for name, counts in now.by_source.items()}
        return replace(
            now,
            at=time.time(),
            elapsed_s=time.monotonic() - self._began,
            begins=begins,
            by_source=sources,
            **self.calls.totals(),
            lengths=self.watch.lengths,
            **self.rollouts.totals(),
            **self.packs.totals(),
            lost=self.lost(),
        )

    def _write(self, record: Record, *, is_last: bool = False) -> None:
        if self._header is not None:
            reason = "disk"
            if self._file.open():
                reason = self._file.write(_line(replace(self._header, number=self._file.number)))
            if reason:
                self.lose(reason, self._file.fault)
                return

            self._header = None
        reason = self._file.write(_line(record), is_detail=not isinstance(record, Interval | End), is_last=is_last)
        if reason:
            self.lose(reason, self._file.fault)


def _line(record: Record) -> bytes:
    return encode(record) + b"\n"


_running: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _close_all() -> None:
    """At exit, before the loaders that are still open are closed."""
    for recorder in filter(Recorder.is_here, list(_running)):
        # In a notebook, it is the error of an earlier cell.
        error = getattr(sys, "last_value", None) or sys.exception()  # the latter in a child of multiprocessing
        recorder.failed(None if hasattr(sys, "ps1") else error, True)
        recorder.close("the interpreter ended")


at_exit(_close_all)
