"""Records a run: one daemon thread, which the trainer never waits for, and whose faults are only counted.

What the loader's threads say is queued, within limits. The thread looks at it about once a second.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from asyncdata.core.callbacks import no_op
from asyncdata.core.log import events_owner, get_logger, observe_events, stop_observing
from asyncdata.core.threads import started
from asyncdata.core.types import Position
from asyncdata.telemetry.call_times import CallTimes
from asyncdata.telemetry.chunk_watch import ChunkWatch
from asyncdata.telemetry.cpu_watch import CpuWatch
from asyncdata.telemetry.excerpts import cut
from asyncdata.telemetry.helper_process import Found, HelperProcess, Wanted
from asyncdata.telemetry.record_file import RecordFile
from asyncdata.telemetry.records import MAX_VALUE, BadRowRecord, DroppedRow, End, Event, Interval, SampleRecord, encode
from asyncdata.telemetry.rollouts import Rollouts
from asyncdata.telemetry.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, Concatenate, ParamSpec, TypeVar

    from asyncdata.core.types import Group
    from asyncdata.delivery.channel import Channel
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.merged_chunk import MergedChunk
    from asyncdata.telemetry.helper_process import Tokenizer
    from asyncdata.telemetry.records import Record, RunStart
    from asyncdata.telemetry.settings import Telemetry

    P = ParamSpec("P")
    T = TypeVar("T")

__all__ = ("NoRecorder", "Recorder", "Subject")

_log = get_logger(__name__)
_TICK_S = 1.0
_CLOSE_TIMEOUT_S = 1.5
_MAX_EVENTS = 10_000
_MAX_EVENT_TEXT = 500


class Subject(Protocol):
    """The loader that is recorded. Its methods are called from any thread.

    :ivar shows_rows: whether text of all rows may be recorded.
    :ivar max_samples: samples that are kept of each part of a mixture.
    """

    shows_rows: bool
    max_samples: int

    def header(self) -> RunStart:
        """The first record, without what belongs to the file."""
        ...

    def interval(self) -> Interval:
        """The totals of the stream, and the current state; the rest is filled in here."""
        ...

    def channel(self) -> Channel:
        """The current channel."""
        ...

    def place(self) -> Position:
        """The place of the next sample."""
        ...

    def shows_rows_of(self, source: str) -> bool:
        """Whether text of rows of that part of a mixture may be recorded."""
        ...

    def tokenizer(self, source: str) -> Tokenizer | None:
        """The tokenizer of that part, if it is known."""
        ...

    def tokenizers(self) -> list[Tokenizer]:
        """Those of all parts whose rows may be recorded."""
        ...

    def num_groups(self) -> int:
        """Groups delivered from the stream."""
        ...

    def waits_for(self) -> str:
        """What a call waits for now: one of ``records.WAITED_FOR``."""
        ...

    def worker_pids(self) -> list[int]:
        """The workers' processes on this machine."""
        ...


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


class Recorder:
    """See the module.

    :ivar watch: looks at the chunks of the channel.
    :ivar calls: times of calls and waits; ``called``: a call for data begins.
    :ivar rollouts: groups given back, and scores.
    """

    def __init__(self, settings: Telemetry, subject: Subject, rank: int) -> None:
        self._settings, self._subject = settings, subject
        self._file = None if settings.folder is None else RecordFile(settings.folder, rank, settings.max_bytes)
        self._trace = None if settings.trace is None else Trace(settings.trace, rank, settings.max_bytes)
        cpu_share = CpuWatch(subject.worker_pids).share
        self.calls, self.rollouts = CallTimes(time.monotonic, subject.waits_for, cpu_share), Rollouts()
        self.called = self.calls.called
        self.watch = ChunkWatch(subject.max_samples, subject.shows_rows_of)
        self._helper = HelperProcess(subject.tokenizers())
        self._events: deque[Event] = deque()
        self._records: deque[Record] = deque()
        self._header: RunStart | None = None
        self._lost = dict[str, int]()
        self._lock, self._counting = threading.Lock(), threading.RLock()  # neither is held while a file is written
        self._stopped, self._reason = threading.Event(), ""
        self._thread: threading.Thread | None = None
        self._pid, self._has_warned, self._events_owner = os.getpid(), False, events_owner.get()
        self._began = self._next_interval = time.monotonic()

    # The trainer's side: nothing here waits or raises.

    def start(self) -> None:
        """Begin to record; do nothing if that has begun."""
        if self._thread is not None or self._reason:
            return

        self._began = time.monotonic()
        self._next_interval = self._began + self._settings.interval_s
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
    def see(self, channel: Channel, chunk: Chunk | MergedChunk) -> None:
        """A chunk comes into the channel. In the service's thread."""
        if not self._is_recording:
            return

        if self._file is not None:
            self.watch.see(channel, chunk)
        if self._trace is not None:
            self._trace.chunk(chunk)

    @_guarded
    def request(self, worker: int, name: str, sent: float, ended: float, args: dict[str, Any]) -> None:
        """A worker has answered a request. In the service's thread."""
        if self._trace is not None and self._is_recording:
            self._trace.request(worker, name, sent, ended, args)

    @_guarded
    def restarted(self, is_after: bool) -> None:
        """Delivery is about to continue elsewhere, or has done so."""
        if not self._is_recording:
            return

        with self._lock:
            if is_after:
                self.watch.forget_rest()
                if self._trace is not None:
                    self._trace.restarted()
            self._records.append(self._interval(begins=is_after))

    @_guarded
    def wait_begins(self, wait: object, now: float) -> None:
        """A call has to wait."""
        self.calls.wait_begins(wait, now, self._subject.waits_for() if self._is_recording else "read")

    @_guarded
    def returned(self, groups: Iterable[Group]) -> None:
        """Groups were given back."""
        self.rollouts.returned(groups, self._subject.num_groups())

    @_guarded
    def scored(self, scores: Iterable[Sequence[float]]) -> None:
        """Scores of groups were reported."""
        self.rollouts.scored(scores)

    def close(self, reason: str) -> None:
        """Write what is left, and end. Waits for that, but at most twice ``_CLOSE_TIMEOUT_S``, as a disk may hang."""
        self._reason = self._reason or reason
        self._stopped.set()
        stop_observing(self._on_event)
        _running.discard(self)
        if self._thread is not None and self._pid == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                self._helper.abort()
                self._thread.join(_CLOSE_TIMEOUT_S)

    @property
    def _is_recording(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._pid == os.getpid()

    def lost(self) -> dict[str, int]:
        """What was not recorded, by reason."""
        lost = Counter(self._lost)
        lost["queue"] += self.calls.num_lost + self.watch.num_lost
        lost.update({} if self._trace is None else self._trace.lost)
        return dict(+lost)

    def _on_event(self, method: str, name: str, fields: dict[str, Any]) -> None:
        if name.startswith("telemetry.") or self._pid != os.getpid():
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
            _log.warning("telemetry.lost", folder=self._settings.folder or self._settings.trace, reason=why)

    # The thread.

    def _run(self) -> None:
        try:
            self.tick()  # at once: a run that is killed in its first second has its first record
            if self._subject.max_samples and self._file is not None:
                self._helper.start()
            while not self._stopped.wait(min(_TICK_S, self._settings.interval_s)):
                self.tick()
            self.tick(is_last=True)
        except BaseException as error:  # whatever it is, it is not the trainer's
            self.lose("error", repr(error))
        finally:
            self._helper.close()
            for file in (self._file, self._trace):
                if file is not None:
                    file.close()

    def tick(self, *, is_last: bool = False) -> None:
        """Record what has happened since the last time."""
        with self._lock:
            self._records.extend([*self.watch.bad_rows(), *self.watch.dropped_rows()])
            while self._events:
                self._records.append(self._events.popleft())
            if is_last or time.monotonic() >= self._next_interval:
                thinning = 1 if self._file is None else self._file.thinning
                self._next_interval = time.monotonic() + self._settings.interval_s * thinning
                self._records.append(self._interval())
            else:
                self._records.extend(self.watch.settle(self._subject.channel(), self._subject.place()))
                self._settle_calls()
        while self._records:
            self._write(self._records.popleft())
        if is_last:
            self._write(End(at=time.time(), reason=self._reason), is_last=True)
        if self._trace is not None and (fault := self._trace.flush(is_last=is_last)):
            self._warn(fault)

    def _settle_calls(self) -> None:
        for wait in self.calls.settle():
            if self._trace is not None:
                self._trace.wait(wait)

    def _interval(self, *, begins: bool = False) -> Interval:
        """The state now. Samples that are delivered by now are recorded before it."""
        now = self._subject.interval()
        channel, place = self._subject.channel(), Position(*now.place)
        self._records.extend(self.watch.settle(channel, place))
        self._settle_calls()
        if self._trace is not None:
            self._trace.ready(now.ready)
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
            lost=self.lost(),
        )

    def _write(self, record: Record, *, is_last: bool = False) -> None:
        if self._file is None:
            return

        if self._header is not None:
            reason = "disk"
            if self._file.open():
                reason = self._file.write(_line(replace(self._header, number=self._file.number)))
            if reason:
                self.lose(reason, self._file.fault)
                return

            self._header = None
        if isinstance(record, SampleRecord | BadRowRecord | DroppedRow):
            record = self._completed(record)
        reason = self._file.write(_line(record), is_detail=not isinstance(record, Interval | End), is_last=is_last)
        if reason:
            self.lose(reason, self._file.fault)

    def _completed(self, record: SampleRecord | BadRowRecord | DroppedRow) -> Record:
        """The record with what the helper process finds."""
        is_line_wanted = not record.line and record.row_number < 0
        wanted = Wanted(record.path if is_line_wanted else "", record.byte_offset)
        if isinstance(record, BadRowRecord):
            return replace(record, line=self._helper(wanted).line) if is_line_wanted else record

        if isinstance(record, DroppedRow):
            num_bytes = record.num_bytes if self._subject.shows_rows_of(record.source) else 0
            found = self._helper(replace(wanted, num_bytes=num_bytes)) if is_line_wanted else Found(record.line)
            return replace(record, line=found.line, excerpt=cut(found.excerpt, MAX_VALUE))

        tokenizer = self._subject.tokenizer(record.source) if record.ids else None
        found = self._helper(replace(wanted, tokenizer=tokenizer, ids=record.ids, trained=record.trained))
        text = "" if found.pieces else record.text
        return replace(record, line=found.line or record.line, pieces=found.pieces, text=text)


class NoRecorder:
    """Of a loader that is not recorded."""

    start = called = returned = scored = close = staticmethod(no_op)

    def lost(self) -> dict[str, int]:
        """Nothing."""
        return {}


def _line(record: Record) -> bytes:
    return encode(record) + b"\n"


_running: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _close_all() -> None:
    """At exit, before the loaders are closed that are still open."""
    for recorder in list(_running):
        recorder.close("the interpreter ended")


atexit.register(_close_all)
