"""A store that is told what to answer; opened by its import path, as every store is."""

import threading
from collections.abc import Callable
from typing import ClassVar

from asyncdata.core.identity import Address
from asyncdata.sources.remote.store import ObjectStamp


class FakeStore:
    """Answers as it is told, and counts the requests and bytes in flight: now, and at most."""

    answer: ClassVar[Callable[[int, int], bytes]] = staticmethod(lambda start, stop: b"")
    in_flight = most = 0
    most_bytes = num_bytes = 0
    lock = threading.Lock()

    def __init__(self, url: str, options: dict[str, object]) -> None: ...

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        kind = FakeStore
        with self.lock:
            kind.in_flight += 1
            kind.num_bytes += stop - start
            kind.most, kind.most_bytes = max(kind.most, kind.in_flight), max(kind.most_bytes, kind.num_bytes)
        try:
            return kind.answer(start, stop)
        finally:
            with self.lock:
                kind.in_flight -= 1
                kind.num_bytes -= stop - start

    def head(self, key: str) -> ObjectStamp:
        return ObjectStamp(Address("s3", "bucket", key), 7, '"new"')

    def close(self) -> None: ...
