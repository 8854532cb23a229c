"""Writes spans in Chrome's JSON trace format, which the Perfetto UI opens.

The file is an array that is left open until the end, as the format allows. So it can be read after a kill.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.telemetry.record_file import AppendedFile

if TYPE_CHECKING:
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.telemetry.call_times import Wait

__all__ = ("Trace",)

_TRAINER, _WINDOWS, _WORKERS = 1, 2, 10
_MAX_WAITING = 100_000
_RESERVED_BYTES = 128
"""Bytes that stay free for the last event."""
_encode = msgspec.json.Encoder().encode


class Trace(AppendedFile):
    """Tracks of the trainer's waits, of windows, and of each worker's requests. On a track no two spans overlap.

    What is seen is queued, and written by :meth:`flush`, in one thread.

    :param path: of the file; for a rank above 0, the rank is added to its name.
    :param max_bytes: limit of the file.
    :ivar lost: spans that were not written, by reason.
    """

    def __init__(self, path: str, rank: int, max_bytes: int) -> None:
        super().__init__()
        stem, suffix = os.path.splitext(path)
        self._path = f"{stem}-rank-{rank:05}{suffix}" if rank else path
        self._room = max_bytes - _RESERVED_BYTES
        self._began = time.monotonic()
        self._events: deque[dict[str, Any]] = deque()
        self._ends: dict[int, float] = {}  # of the last span of each track
        self._window: tuple[int, int, float] | None = None
        self.lost: dict[str, int] = {}
        self._put({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}})
        self._name(_TRAINER, "trainer: waits")
        self._name(_WINDOWS, "windows")

    def request(self, worker: int, name: str, sent: float, ended: float, args: dict[str, Any]) -> None:
        """A worker has answered a request that was sent then. It begins after the worker's last one."""
        if _WORKERS + worker not in self._ends:
            self._name(_WORKERS + worker, f"worker {worker}")
        self._span(_WORKERS + worker, name, sent, ended, args)

    def chunk(self, chunk: Chunk) -> None:
        """A chunk came into the channel. The span of its window ends with the first chunk of a later one."""
        now, place = time.monotonic(), (chunk.first.epoch, chunk.first.window)
        if self._window is not None and place <= self._window[:2]:
            return

        self._end_window(now)
        self._window = (*place, now)

    def restarted(self) -> None:
        """Delivery continues elsewhere."""
        self._end_window(time.monotonic())
        self._window = None

    def _end_window(self, now: float) -> None:
        if self._window is not None:
            epoch, window, began = self._window
            self._span(_WINDOWS, f"window {epoch}:{window}", began, now, {})

    def wait(self, wait: Wait) -> None:
        """A call had to wait."""
        self._span(_TRAINER, f"wait: {wait.stage}", wait.began, wait.began + wait.seconds, {})

    def ready(self, num_samples: int) -> None:
        """So many samples are ready now."""
        self._put({"ph": "C", "name": "ready samples", "tid": 0, "ts": self._now(), "args": {"samples": num_samples}})

    def _now(self) -> int:
        """Microseconds since the beginning."""
        return round((time.monotonic() - self._began) * 1e6)

    def _name(self, track: int, name: str) -> None:
        self._ends[track] = self._began
        self._put({"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}})

    def _span(self, track: int, name: str, began: float, ended: float, args: dict[str, Any]) -> None:
        began = max(began, self._ends[track])
        ended = max(began, ended)
        self._ends[track] = ended
        start, stop = (round((at - self._began) * 1e6) for at in (began, ended))
        self._put({"ph": "X", "name": name, "tid": track, "ts": start, "dur": stop - start, "args": args})

    def _put(self, event: dict[str, Any]) -> None:
        if len(self._events) < _MAX_WAITING:
            self._events.append({"pid": self._pid, **event})
        else:
            self._lose("queue")

    def _lose(self, reason: str) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + 1

    def flush(self, *, is_last: bool = False) -> str:
        """Write what is queued; return why that was not possible, if it was not."""
        fault = ""
        if is_last:
            self._end_window(time.monotonic())
        while self._events:
            line = _encode(self._events.popleft()) + b",\n"
            if len(line) > self._room:
                self._lose("size")
                continue

            fault = self._write(line) or fault
            self._room -= len(line)
        if not is_last:
            return fault

        ts = max(self._now(), *(round((at - self._began) * 1e6) for at in self._ends.values()))
        end = {"ph": "i", "name": "end", "s": "p", "pid": self._pid, "tid": 0, "ts": ts}
        return self._write(_encode(end) + b"\n]\n") or fault

    def _write(self, line: bytes) -> str:
        try:
            if self._fd < 0:
                os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o644)
                os.write(self._fd, b"[\n")
            fault = self.append(line)
        except OSError as error:
            fault = str(error)
        if fault:
            self._lose("disk")
        return fault
