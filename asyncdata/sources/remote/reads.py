"""Pinned reads of objects, many at a time: neighbours in one request, failed ones tried again, all of them bounded. An
object as a file that is read from front to back; and objects that are read, or written, whole.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from contextvars import copy_context
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

from asyncdata.core.errors import LoaderClosedError, SourceChangedError, SourceError, get_logger
from asyncdata.core.identity import Address, ObjectRefs, ObjectsOfStore
from asyncdata.core.messages import ReadCounts, ReadLimits, StoreSpec
from asyncdata.core.settings import opening_until
from asyncdata.core.threads import no_op
from asyncdata.sources.paths import GivenAddress
from asyncdata.sources.remote.block_cache import BlockCache
from asyncdata.sources.remote.store import ObjectStamp, Store, StoreError, collected, open_store, store_spec

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

_MAX_GAP_BYTES = 16 << 10
"""Bytes between two wanted ranges that are read and dropped: they cost less than another request."""
_LOUD_TRIES = 4
_LAST_WRITES_S = 1.0
_MAX_REQUEST_BYTES = 4 << 20
_PART_BYTES = 1 << 20
_PARTS_AHEAD = 16
_FIRST_WAIT_S, _FIRST_WAIT_WHEN_ASKED_S, _MAX_WAIT_S = 0.1, 1.0, 20.0


class Piece(NamedTuple):
    """One request: the bytes ``[start, stop)``, and the numbers of the wanted ranges in it."""

    start: int
    stop: int
    ranges: tuple[int, ...]


def coalesced(ranges: Sequence[tuple[int, int]]) -> list[Piece]:
    """The requests for ranges of one object: those that are near one another are read at once.

    A request has at most 4 MiB, unless one range is longer.
    """
    order = sorted(range(len(ranges)), key=ranges.__getitem__)
    cuts = [0]
    start = stop = -1
    for place, number in enumerate(order):
        first, last = ranges[number]
        if place and (first - stop > _MAX_GAP_BYTES or max(stop, last) - start > _MAX_REQUEST_BYTES):
            cuts.append(place)
            start = stop = -1
        start, stop = (first, last) if start < 0 else (start, max(stop, last))
    found = []
    for first, last in pairwise([*cuts, len(order)]):
        numbers = order[first:last]
        if numbers:
            found.append(Piece(ranges[numbers[0]][0], max(ranges[n][1] for n in numbers), tuple(numbers)))
    return found


class _Room:
    """Counts the bytes in flight. A request waits until there is room for it; a long one, until it is alone."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._change = threading.Condition()

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes)
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._change:
                self._num_bytes -= num_bytes
                self._change.notify_all()


class Reads:
    """The stores of a job, opened when they are first read, in this process.

    :ivar on_progress: called after each try of a request, in any thread.
    :ivar counts: requests so far; may be replaced before the first.
    """

    def __init__(self, stores: Sequence[StoreSpec]) -> None:
        self.on_progress: Callable[[], object] = no_op
        self.counts = ReadCounts()
        self._specs = list(stores)
        self._stores: dict[int, Store] = {}
        self._limits = stores[0].limits if stores else ReadLimits()
        self._room = _Room(self._limits.max_bytes)
        kept = stores[0].cache if stores else None
        self._cache = BlockCache(kept.folder, kept.max_bytes) if kept is not None else None
        if self._cache is not None:
            self._cache.on_failure = lambda: self.counts.add_cached(has_failed=True)
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Future[Any]] = set()
        self._log = _log.owned()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def start(self, function: Callable[..., ResultT], *args: Any) -> Future[ResultT]:
        """Call the function in a thread of its own, as one of at most ``max_reads``. It may call :meth:`fetch`."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(int(self._limits.max_reads), "asyncdata-read")
            future = self._pool.submit(copy_context().run, function, *args)
        if self._cache is not None:
            self._under_way.add(future)
            future.add_done_callback(self._under_way.discard)
        return future

    def read(self, wanted: Sequence[tuple[ObjectStamp, int, int]]) -> list[bytes]:
        """The bytes ``[start, stop)`` of objects, all requests in flight at once.

        :raises SourceError: as :meth:`fetch`.
        """
        return self.begin(wanted)()

    def begin(self, wanted: Sequence[tuple[ObjectStamp, int, int]]) -> Callable[[], list[bytes]]:
        """The same, without waiting: what this gives waits, and is called once."""
        found = [b""] * len(wanted)
        objects: dict[ObjectStamp, list[int]] = {}
        for number, (stamp, start, stop) in enumerate(wanted):
            data = self.cached(stamp, start, stop)
            if data is None:
                objects.setdefault(stamp, []).append(number)
            else:
                found[number] = data
        under_way = []
        for stamp, numbers in objects.items():
            for piece in coalesced([wanted[number][1:] for number in numbers]):
                future = self.start(self.fetch, stamp, piece.start, piece.stop)
                under_way.append((future, piece, [numbers[n] for n in piece.ranges]))

        def result() -> list[bytes]:
            for future, piece, owners in under_way:
                data = future.result()
                for number in owners:
                    stamp, start, stop = wanted[number]
                    found[number] = data[start - piece.start : stop - piece.start]
                    self.keep(stamp, start, stop, found[number])
            return found

        return result

    def cached(self, stamp: ObjectStamp, start: int, stop: int) -> bytes | None:
        """The bytes ``[start, stop)``, if the local disk has them; never of an object without an identity."""
        if self._cache is None or not self.keeps(stamp):
            return None

        found = self._cache.find(stamp, start, stop)
        if found is not None:
            self.counts.add_cached()
            self.on_progress()
        return found

    def keeps(self, stamp: ObjectStamp) -> bool:
        """Whether the bytes of an object are kept on the local disk."""
        return self._cache is not None and bool(stamp.etag or stamp.version)

    def keep(self, stamp: ObjectStamp, start: int, stop: int, data: bytes) -> None:
        """Keep the bytes ``[start, stop)`` on the local disk, if there is a place for them."""
        if self._cache is not None and self.keeps(stamp):
            self._cache.keep(stamp, start, stop, data)

    def load(self, stamp: ObjectStamp, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)`` from the local disk, or by one request.

        :raises SourceError: as :func:`tried`.
        """
        data = self.cached(stamp, start, stop)
        if data is None:
            data = self.fetch(stamp, start, stop)
            self.keep(stamp, start, stop, data)
        return data

    def fetch(self, stamp: ObjectStamp, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)``, by one request, which is tried again after failures that may pass.

        :raises SourceChangedError: AD322, if the object is not the one that was stamped.
        :raises SourceError: AD324 if it may not be read, AD325 if the store refuses the request, AD326 if it fails for
            longer than ``retry_timeout_s``, or while a loader is opened than its ``timeout_s``.
        :raises LoaderClosedError: after :meth:`close`.
        """
        with self._room.of(stop - start):
            if self._is_closed.is_set():
                raise LoaderClosedError("the loader is closed")

            store = self.store(stamp.store)
            where = f"{stamp.path} (bucket {stamp.address.bucket}, key {stamp.address.key}, bytes {start}-{stop})"
            data: bytes = self._tried(lambda: store.read(stamp, start, stop), where, stamp)
        return data

    def pinned(self, number: int, address: Address) -> Address:
        """The address whose content can never change, if store ``number`` has one."""
        store = self.store(number)
        key: str = self._tried(lambda: store.pinned(address.key), str(address))
        return address.with_key(key)

    def list(self, number: int, prefix: str, is_wanted: Callable[[str], object]) -> ObjectRefs:
        """The objects of store ``number`` whose keys begin with ``prefix``, sorted by key.

        :param is_wanted: called with each key; others are left out.
        """
        store = self.store(number)

        def listed() -> ObjectsOfStore:
            return collected((stamp for stamp in store.list(prefix) if is_wanted(stamp.address.key)), number)

        found: ObjectsOfStore = self._tried(listed, f"the list of {prefix!r}")
        return found.packed() if found.is_ascending else found.packed().in_order_of_keys()

    def head(self, number: int, address: Address) -> ObjectStamp:
        """The object's state now."""
        store = self.store(number)
        found: ObjectStamp = self._tried(lambda: store.head(address.key), str(address))
        return msgspec.structs.replace(found, store=number)

    def write(self, number: int, address: Address, data: bytes) -> None:
        """Write the object in one step."""
        store = self.store(number)
        self._tried(lambda: store.write(address.key, data), str(address))

    def copy(self, number: int, address: Address, to: Address) -> None:
        """Copy the object, if there is one."""
        store = self.store(number)

        def copy() -> None:
            try:
                store.copy(address.key, to.key)
            except StoreError as error:
                if error.kind != "missing":
                    raise

        self._tried(copy, str(address))

    def _tried(self, request: Callable[[], ResultT], where: str, stamp: ObjectStamp | None = None) -> ResultT:
        began, num_tries = time.monotonic(), 0
        limit_s = min(self._limits.retry_timeout_s, opening_until.get() - began)
        while True:
            try:
                result = request()
            except StoreError as error:
                num_tries += 1
                left = began + limit_s - time.monotonic()
                if error.kind != "transient" or left <= 0 or self._is_closed.is_set():
                    after = f" after {num_tries} tries in {limit_s:.3g} s" if num_tries > 1 else ""
                    raise self._named(error, where, after, stamp) from None

                if num_tries >= _LOUD_TRIES and num_tries.bit_count() == 1:
                    self._log.warning("store.retried", what=where, reason=str(error), num_tries=num_tries)
                self.counts.add(is_retry=True)
                self.on_progress()
                self._is_closed.wait(min(left, max(error.retry_after_s, _wait_s(error, num_tries))))
            else:
                self.counts.add(is_retry=False)
                self.on_progress()
                return result

    def _named(self, error: StoreError, where: str, after: str, stamp: ObjectStamp | None) -> SourceError:
        request_id = f"; request id {error.request_id}" if error.request_id else ""
        if error.kind in {"changed", "missing"} and stamp is not None:
            try:
                now = self.store(stamp.store).head(stamp.address.key).identity
            except StoreError as why:
                now = "gone" if why.kind == "missing" else f"not known, as the store did not say it ({why})"
            return SourceChangedError(
                f"AD322 {where} was replaced: at the start it was {stamp.identity}; now it is {now} "
                f"({error}{request_id}). Put the object back, or start a new run on the new one"
            )

        code, what, way_out = _CODES.get(error.kind, _CODES["permanent"])
        return SourceError(f"{code} {where} {what}{after}: {error}{request_id}{way_out}")

    def store(self, number: int) -> Store:
        """The open store of this number."""
        with self._lock:
            if number not in self._stores:
                self._stores[number] = open_store(self._specs[number])
            return self._stores[number]

    def close(self) -> None:
        """Cancel what is not begun, and end the threads when their requests have ended.

        What is kept on the local disk is written before this returns, unless a request takes longer than 1 s.
        """
        self._is_closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            wait(list(self._under_way), _LAST_WRITES_S)
        while self._stores:
            self._stores.popitem()[1].close()


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
        """Nothing is left to check: each read was."""

    def close(self) -> None:
        """Cancel what is read ahead."""
        while self._ahead:
            self._ahead.pop().cancel()


def write_stored(path: str, data: bytes, keep: int, storage_options: Mapping[str, Any]) -> None:
    """Write the object at an address; what it was becomes ``path.1``, and so on: ``keep`` stay in all.

    At every instant the object is the old one or the new one, whole: a store shows a PUT when it is complete. The older
    ones are copied before that, from the oldest on.

    :raises SourceError: if it cannot be written; the object is as it was.
    """
    given = GivenAddress.parse(path)
    with closing(Reads([store_spec(given, storage_options)])) as store:
        names = [given.address] + [given.address.with_key(f"{given.address.key}.{n}") for n in range(1, keep)]
        for newer, older in reversed(list(pairwise(names))):
            store.copy(0, newer, older)
        store.write(0, given.address, data)


def read_stored(path: str, storage_options: Mapping[str, Any]) -> bytes:
    """The object at an address, as it is now.

    :raises SourceError: if it cannot be read.
    """
    given = GivenAddress.parse(path)
    with closing(Reads([store_spec(given, storage_options)])) as store:
        found = store.head(0, given.address)
        return store.fetch(found, 0, found.num_bytes) if found.num_bytes else b""


_CODES = {
    "missing": ("AD323", "does not exist", "; check the address"),
    "denied": (
        "AD324",
        "may not be accessed with the present credentials",
        "; pass others by the environment or storage_options",
    ),
    "permanent": ("AD325", "was refused by the store", ""),
    "elsewhere": (
        "AD346",
        "is redirected to another place",
        "; name the object where it lies, or set storage_options={'allow_private_redirects': True}",
    ),
    "transient": (
        "AD326",
        "could not be accessed",
        "; the run resumes exactly from its last state when the store is back",
    ),
}


def _wait_s(error: StoreError, num_tries: int) -> float:
    """A random time up to a limit that doubles: many readers do not come back at the same moment."""
    first = _FIRST_WAIT_WHEN_ASKED_S if error.is_throttled else _FIRST_WAIT_S
    return random.uniform(0, min(_MAX_WAIT_S, first * 2.0 ** min(num_tries - 1, 10)))
