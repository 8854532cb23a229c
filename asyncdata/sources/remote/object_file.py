"""An object that is read from front to back, as a file is: large parts, several of them ahead."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncdata.sources.remote.reads import Reads
    from asyncdata.sources.remote.store import ObjectStamp

__all__ = ("ObjectFile",)

_PART_BYTES = 1 << 20
_PARTS_AHEAD = 16


class ObjectFile:
    """An object of a store. It must be closed, or it is read further ahead for nothing.

    :param reads: the stores of the object; they stay open.
    """

    def __init__(self, reads: Reads, stamp: ObjectStamp) -> None:
        self._reads = reads
        self._stamp = stamp
        self._ahead: deque[Future[bytes]] = deque()
        self._next = self._place = 0
        self._data = b""

    def begin(self) -> None:
        """Begin to read its first part, before it is asked for."""
        self._read_ahead(1)

    def seek(self, place: int) -> None:
        """Continue at byte ``place``."""
        if place == self._place:
            return

        self.close()
        self._data = b""
        self._next = self._place = place

    def tell(self) -> int:
        """The byte that is read next."""
        return self._place

    def read(self, num_bytes: int) -> bytes:
        """At most so many bytes; none at the end.

        :raises SourceError: if they cannot be read, or the object has changed.
        """
        if not self._data:
            self._data = self._part()
        found, self._data = self._data[:num_bytes], self._data[num_bytes:]
        self._place += len(found)
        return found

    def _part(self) -> bytes:
        self._read_ahead(_PARTS_AHEAD)
        return self._ahead.popleft().result() if self._ahead else b""

    def _read_ahead(self, num_parts: int) -> None:
        while len(self._ahead) < num_parts and self._next < self._stamp.num_bytes:
            stop = min(self._next + _PART_BYTES, self._stamp.num_bytes)
            self._ahead.append(self._reads.start(self._reads.load, self._stamp, self._next, stop))
            self._next = stop

    def check(self) -> None:
        """As of a file: each read was checked."""

    def close(self) -> None:
        """Cancel what is read ahead."""
        while self._ahead:
            self._ahead.pop().cancel()
