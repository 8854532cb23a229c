"""What things are known by: digests of content and of settings, and files and objects as they were at the start.

Digests are pinned in tests: a changed digest would refuse every existing snapshot. Very many objects are held, and
sent, in columns. Runs without numpy.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import msgspec

if TYPE_CHECKING:
    Data = memoryview[int]
else:
    Data = memoryview  # what is decoded is a view of the frame


def digest(*parts: bytes | memoryview | str) -> str:
    """blake2b-128 of the parts, as hex. Each part's length is hashed too: ("ab", "c") is not ("a", "bc")."""
    return digest_each(parts)


def digest_each(parts: Iterable[bytes | memoryview | str]) -> str:
    """The same of parts that are made one by one."""
    state = blake2b(digest_size=16)
    for part in parts:
        # File names and row text may hold lone surrogates, which strict UTF-8 refuses.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


_EMPTY = blake2b(digest_size=16)


def short_digest(data: bytes, more: bytes | None = None) -> bytes:
    """The bytes of ``digest(data)``, or of ``digest(data, more)``; for short data, in a third of the time."""
    text = len(data).to_bytes(8, "little") + data
    if more is not None:
        text += len(more).to_bytes(8, "little") + more
    state = _EMPTY.copy()  # a new one takes twice as long
    state.update(text)
    return state.digest()


class ListDigest:
    """The digests of a list of files or objects, which are taken one by one, in order.

    :ivar with_names: of the name, size and content of each, as hex; ``without_names``: of the size and content.
    """

    def __init__(self) -> None:
        self._with_names, self._without_names = _EMPTY.copy(), _EMPTY.copy()

    def add(self, name: str, num_bytes: int, content: str) -> None:
        """Take one more; what is digested of it is ``canonical([name, num_bytes, content])``."""
        rest = b"%d,%b]" % (num_bytes, canonical(content))
        self._with_names.update(short_digest(b"[%b,%b" % (canonical(name), rest)))
        self._without_names.update(short_digest(b"[" + rest))

    @property
    def with_names(self) -> str:
        return self._with_names.hexdigest()

    @property
    def without_names(self) -> str:
        return self._without_names.hexdigest()


def canonical(value: Any) -> bytes:
    """The one encoding of a value made of builtins: JSON with sorted keys. Tuples and lists are encoded alike.

    :raises TypeError: for values JSON cannot hold, and keys that are not text.
    :raises ValueError: for text that is not valid UTF-8.
    """
    return msgspec.json.encode(value, order="deterministic")


# Files and objects

HTTP = frozenset({"http", "https"})
"""The schemes whose keys are percent-encoded in an address."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An object in a store, without what gives access to it.

    :ivar bucket: the bucket, the container, or the host with its port.
    :ivar key: the object's name in the bucket; as it is, not percent-encoded.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        """The address of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        if self.scheme not in HTTP:
            return f"{self.root}/{self.key}"

        from urllib.parse import quote  # not at a worker's start

        return f"{self.root}/{quote(self.key, safe='/~:@!$()*,;=+&')}"

    def with_key(self, key: str) -> Address:
        """Another object of the same bucket."""
        return Address(self.scheme, self.bucket, key)


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """What an object of a store was at the start: every read must find the same.

    :ivar store: the number of its store in ``Job.stores``.
    :ivar etag: as the store gives it; empty if it gives none.
    :ivar version: of a bucket with versions; empty otherwise.
    """

    store: int
    address: Address
    etag: str = ""
    version: str = ""


class FileRef(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was at the start: rows beyond ``num_bytes`` belong to a later run.

    :ivar inode: 0 where the file was not looked at: then it is not held against what it was.
    :ivar mtime_ns: when its content was changed last, in nanoseconds; ``ctime_ns``: that, or its mode, links or name.
    :ivar digest: of its content then (``asyncdata.sources.files``), or of an object's size and etag; empty where
        that is not known.
    :ivar pin: for an object of a store, whose address is ``path``; None for a file.
    """

    path: str
    num_bytes: int
    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    digest: str = ""
    pin: Pin | None = None


class _Run(msgspec.Struct, frozen=True, array_like=True):
    """The objects from number ``first`` on are in this store, until the next run."""

    first: int
    store: int
    scheme: str
    bucket: str


class ObjectRefs(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Objects, in order: a sequence of :class:`FileRef` that are made when they are asked for.

    An object takes about 100 bytes in this form, and 600 as a ``FileRef``.

    :ivar texts: of each object its key, etag and version, end to end, in UTF-8; ``text_ends``, int64 of shape
        (num_objects * 3,), is where each stops.
    :ivar numbers: of each object ``num_bytes`` and ``mtime_ns``; int64 of shape (num_objects * 2,).
    :ivar is_ascending: whether all are in one store, and each key is greater than that before it, in bytes.
    """

    runs: list[_Run]
    texts: Data
    text_ends: Data
    numbers: Data
    is_ascending: bool

    def __len__(self) -> int:
        return len(self.numbers) // 16

    def __iter__(self) -> Iterator[FileRef]:
        return map(self._made, range(len(self)))

    @overload
    def __getitem__(self, number: int) -> FileRef: ...

    @overload
    def __getitem__(self, number: slice) -> list[FileRef]: ...

    def __getitem__(self, number: int | slice) -> FileRef | list[FileRef]:
        if isinstance(number, slice):
            return [self._kept(one) for one in range(len(self))[number]]

        return self._kept(range(len(self))[number])

    @cached_property
    def sizes(self) -> memoryview:
        """``num_bytes`` of each; int64."""
        return self._numbers[::2]

    @property
    def keys(self) -> Iterator[str]:
        """The key of each."""
        texts, first = memoryview(self.texts), 0
        ends = self._ends
        for number in range(0, len(ends), 3):
            yield str(texts[first : ends[number]], "utf-8", "surrogatepass")
            first = ends[number + 2]

    @property
    def paths(self) -> Iterator[str]:
        """The address of each."""
        keys = self.keys
        for run, stop in zip(self.runs, [*self._firsts[1:], len(self)], strict=True):
            here = islice(keys, stop - run.first)
            if run.scheme in HTTP:
                yield from (str(Address(run.scheme, run.bucket, key)) for key in here)
            else:
                root = f"{run.scheme}://{run.bucket}/"
                yield from (root + key for key in here)

    @property
    def schemes(self) -> set[str]:
        """The schemes of their addresses."""
        return {run.scheme for run in self.runs}

    @cached_property
    def digests(self) -> ListDigest:
        """Of the name, size and ``digest`` of each. They were taken while the objects were listed, and are not sent."""
        found = ListDigest()
        for file in self:
            found.add(base_name(file.path), file.num_bytes, file.digest)
        return found

    def in_order_of_keys(self) -> ObjectRefs:
        """The same, sorted by key, in bytes."""
        keys = [key.encode("utf-8", "surrogatepass") for key in self.keys]
        return self.taken(sorted(range(len(keys)), key=keys.__getitem__))

    def taken(self, numbers: Iterable[int]) -> ObjectRefs:
        """The files of these numbers, in that order."""
        found = ObjectsOfStore()
        self._add_to(found, numbers)
        return found.packed()

    def _add_to(self, found: ObjectsOfStore, numbers: Iterable[int]) -> None:
        for number in numbers:
            run, (size, mtime_ns) = self._run(number), self._numbers[2 * number : 2 * number + 2]
            address = Address(run.scheme, run.bucket, self._text(number, 0))
            found.add(run.store, address, size, *self._signs(number), mtime_ns)

    @cached_property
    def _ends(self) -> memoryview:
        return memoryview(self.text_ends).cast("B").cast("q")

    @cached_property
    def _numbers(self) -> memoryview:
        return memoryview(self.numbers).cast("B").cast("q")

    @cached_property
    def _firsts(self) -> list[int]:
        return [run.first for run in self.runs]

    @cached_property
    def _kept(self) -> Callable[[int], FileRef]:
        return lru_cache(1024)(self._made)

    def _run(self, number: int) -> _Run:
        return self.runs[bisect_right(self._firsts, number) - 1]

    def _text(self, number: int, part: int) -> str:
        place = 3 * number + part
        first = self._ends[place - 1] if place else 0
        return str(memoryview(self.texts)[first : self._ends[place]], "utf-8", "surrogatepass")

    def _signs(self, number: int) -> tuple[str, str]:
        return self._text(number, 1), self._text(number, 2)

    def _made(self, number: int) -> FileRef:
        run = self._run(number)
        address = Address(run.scheme, run.bucket, self._text(number, 0))
        size, mtime_ns = self._numbers[2 * number : 2 * number + 2]
        pin = Pin(run.store, address, *self._signs(number))
        return FileRef(str(address), size, 0, mtime_ns, 0, _digest(size, pin.etag, pin.version, mtime_ns), pin)


def _digest(num_bytes: int, etag: str, version: str, mtime_ns: int) -> str:
    """In it, the version and the time count only where there is no etag."""
    sign = (etag or version).encode("utf-8", "surrogatepass")
    return short_digest(b"%d" % num_bytes, sign or b"%d" % mtime_ns).hex()


def base_name(path: str) -> str:
    """The file's base name. Names that are not UTF-8 are escaped, so that every name can be stored."""
    name = path[path.rfind("/") + 1 :]
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


FileRefs = list[FileRef] | ObjectRefs


class ObjectsOfStore:
    """Collects :class:`ObjectRefs`, and digests them meanwhile: a listing waits for the store most of the time.

    :ivar is_ascending: whether each key is greater than that before it, in bytes.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._texts, self._ends, self._numbers = bytearray(), array("q"), array("q")
        self._digests = ListDigest()
        self._last: tuple[int, str, str] | None = None
        self._last_key = b""
        self.is_ascending = True

    def add(self, store: int, address: Address, num_bytes: int, etag: str, version: str, mtime_ns: int) -> None:
        """Take one more."""
        where = store, address.scheme, address.bucket
        if where != self._last:
            self.is_ascending &= self._last is None
            self._last = where
            self._runs.append(_Run(len(self._numbers) // 2, *where))
        key = address.key.encode("utf-8", "surrogatepass")
        self.is_ascending &= key > self._last_key or not self._numbers
        self._last_key = key
        texts, ends = self._texts, self._ends
        texts += key
        ends.append(len(texts))
        texts += etag.encode("utf-8", "surrogatepass")
        ends.append(len(texts))
        if version:
            texts += version.encode("utf-8", "surrogatepass")
        ends.append(len(texts))
        self._numbers.append(num_bytes)
        self._numbers.append(mtime_ns)
        path = str(address) if address.scheme in HTTP else address.key
        self._digests.add(base_name(path), num_bytes, _digest(num_bytes, etag, version, mtime_ns))

    def packed(self) -> ObjectRefs:
        """All that were taken."""
        texts, ends, numbers = (memoryview(column).cast("B") for column in (self._texts, self._ends, self._numbers))
        found = ObjectRefs(self._runs, texts, ends, numbers, self.is_ascending)
        vars(found)["digests"] = self._digests
        return found


def joined(parts: Sequence[ObjectRefs]) -> ObjectRefs:
    """All objects of the parts, in order."""
    if len(parts) == 1:
        return parts[0]

    found = ObjectsOfStore()
    for part in parts:
        part._add_to(found, range(len(part)))  # noqa: SLF001 - of this module
    return found.packed()


def all_sizes(files: FileRefs) -> Sequence[int] | memoryview:
    """``num_bytes`` of each."""
    return files.sizes if isinstance(files, ObjectRefs) else [file.num_bytes for file in files]


_STEP_BYTES = 1 << 18
_MAX_FILES = 64

_lock = threading.Lock()
_counts: OrderedDict[tuple[object, ...], array[int]] = OrderedDict()
"""For one version of a file: the newlines before each multiple of the step, as far as they were counted."""


def line_number(path: str, byte_offset: int) -> int:
    """The number, counted from 1, of the line with a byte of a file.

    The first time that reads the file up to there, at about 5 GB/s; later, at most 256 KiB of what was read before.

    :raises OSError: if the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file, _lock:
        counts, num_steps = _counts_of(file), byte_offset // _STEP_BYTES
        while len(counts) <= num_steps:
            counts.append(counts[-1] + _newlines(file, (len(counts) - 1) * _STEP_BYTES, _STEP_BYTES))
        start = num_steps * _STEP_BYTES
        return 1 + counts[num_steps] + _newlines(file, start, byte_offset - start)


def line_number_within(path: str, byte_offset: int, timeout_s: float) -> int | None:
    """The number of the line; None where the file cannot be read up to there, or not in time.

    For messages that must be raised even if the disk hangs: a thread reads, and is abandoned if it takes too long.
    """
    found: SimpleQueue[int | None] = SimpleQueue()

    def look() -> None:
        try:
            found.put(line_number(path, byte_offset))
        except OSError:
            found.put(None)

    threading.Thread(target=look, name="asyncdata-line-number", daemon=True).start()
    try:
        return found.get(timeout=timeout_s)
    except Empty:
        return None


def _counts_of(file: BinaryIO) -> array[int]:
    found = os.fstat(file.fileno())
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    counts = _counts.setdefault(key, array("q", [0]))
    _counts.move_to_end(key)
    if len(_counts) > _MAX_FILES:
        _counts.popitem(last=False)
    return counts


def _newlines(file: BinaryIO, offset: int, num_bytes: int) -> int:
    count, stop = 0, offset + num_bytes
    while offset < stop and (piece := os.pread(file.fileno(), min(stop - offset, _STEP_BYTES), offset)):
        count += piece.count(b"\n")
        offset += len(piece)
    return count
