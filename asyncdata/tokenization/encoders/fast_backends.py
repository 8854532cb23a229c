"""The libraries that can replace ``tokenizers``: how each is loaded, what it returns, how its memory is bounded.

None of them is trusted. ``equivalence_sweep`` finds where one gives the ids of ``tokenizers``, ``equivalence_records``
stores the result, and ``text_encoder`` follows it. All take texts and give flat ids: no Python object is made for a
token. And what a worker puts off until it has no request, such as an audit of what a library gave.
"""

from __future__ import annotations

import ctypes
import os
import re
from array import array
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from asyncdata.core.files import cache_folder

FAST_BACKENDS = ("gigatoken", "fastokens")
"""In the order in which "auto" prefers them. The first loads in half the time and two thirds of the memory of the
second, and both are much faster than the code around them."""

SWEEP_VERSION = 4
"""Part of a proof's name: it is raised when the sweep tests more."""

PROOFS = "conformance"
"""The folder of the proofs, in the cache folder."""

MAX_GROWTH_BYTES = 128 << 20
"""How much a backend's caches may grow before it is loaded again. Neither library bounds them: both store every word
that they have encoded."""

LOOK_EVERY = 1 << 18
"""The number of ids between two measurements of the memory."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Buffer = bytes | memoryview
T = TypeVar("T")


class FlatIds(NamedTuple):
    """The concatenated ids of texts.

    :ivar ids: bytes of int32, in native (little-endian) order.
    :ivar ends: uint32: the end of each text's ids.
    :ivar utf8: the texts in UTF-8, if the library needed them so; None: it did not.
    """

    ids: Buffer
    ends: array[int]
    utf8: list[bytes] | None = None

    def of_each(self) -> list[bytes]:
        """Each text's ids."""
        ids, pieces, start = bytes(self.ids), [], 0
        for end in self.ends:
            pieces.append(ids[4 * start : 4 * end])
            start = end
        return pieces

    @classmethod
    def joined(cls, pieces: Sequence[bytes]) -> FlatIds:
        """From each text's ids."""
        return cls(b"".join(pieces), array("I", accumulate(len(piece) // 4 for piece in pieces)))


class EncodedTexts(NamedTuple):
    """The ids of texts, of which the library may have rejected some.

    :ivar flat: the ids; a rejected text has none.
    :ivar errors: ``{index: error}`` of the rejected texts.
    """

    flat: FlatIds
    errors: dict[int, Exception]

    def each(self) -> list[bytes | Exception]:
        """Each text's ids, or the error that the library raised for it."""
        return [self.errors.get(number, ids) for number, ids in enumerate(self.flat.of_each())]

    @classmethod
    def of_each(cls, found: Sequence[bytes | Exception]) -> EncodedTexts:
        """From each text's ids, or the error that the library raised for it."""
        errors = {number: each for number, each in enumerate(found) if isinstance(each, Exception)}
        return cls(FlatIds.joined([b"" if isinstance(each, Exception) else each for each in found]), errors)


FlatEncoder = Callable[[list[str]], FlatIds]
"""A tokenizer: gives the ids of each text, and never adds special tokens of its own around it."""


def one_by_one(encode: Callable[[list[str]], Sequence[T]], texts: Sequence[str]) -> list[T | Exception]:
    """The result of ``encode`` for each text alone, or the error that it raises. This finds the text to blame."""
    found: list[T | Exception] = []
    for text in texts:
        try:
            found += encode([text])
        except Exception as error:  # libraries raise any kind, often a bare Exception
            found.append(error)
    return found


def open_lock(name: str) -> int:
    """The descriptor of a file to lock, beside the proofs.

    :raises OSError: if there is no cache folder.
    """
    path = lock_path(name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def lock_path(name: str) -> str:
    """The path of that file."""
    return os.path.join(cache_folder(), PROOFS, f"{name}.lock")


def version_of(name: str) -> str | None:
    """The installed version of a library; None if it is not installed."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None

    beside = os.listdir(os.path.dirname(os.path.dirname(spec.origin)))
    info = re.compile(rf"{re.escape(name)}-(.+)\.dist-info")
    found = [match[1] for match in map(info.fullmatch, beside) if match]
    if len(found) == 1:
        return found[0]

    from importlib.metadata import version  # takes ten times as long to import as all that stands above

    return version(name)


def load_backend(name: str, tokenizer_json: bytes, *, splits_special: bool = False) -> FlatEncoder:
    """A fast backend, ready to encode. Loading starts no thread, so that a process may fork afterwards; encoding may.

    :param tokenizer_json: a ``tokenizer.json`` that neither truncates nor pads.
    :param splits_special: special tokens in a text are plain text.
    :raises Exception: whatever the library raises for a tokenizer that it cannot load.
    """
    encode = _LOADERS[name](tokenizer_json, splits_special)
    give_back_memory()
    return encode


def _load_gigatoken(tokenizer_json: bytes, splits_special: bool) -> FlatEncoder:
    import numpy  # noqa: F401 - its first call would import it: 0.1 s and 15 MB in each worker, instead of in their parent
    from gigatoken.gigatoken_rs import BytesSource, PadTruncate, load_hf_json

    if splits_special:
        raise ValueError("gigatoken always finds special tokens in a text, and this tokenizer does not")

    tokenizer = load_hf_json(tokenizer_json)
    padded = PadTruncate(pad_id=0)

    def encode_all(texts: list[str]) -> FlatIds:
        # Its calls for a list, and those that return an array of rows, import awkward: 0.4 s and 60 MB for a worker.
        data = [text.encode() for text in texts]
        longest, total = max(map(len, data), default=0), sum(map(len, data))
        if longest * len(data) > _MAX_PADDING * total:
            rows: list[Any] = [tokenizer.encode(each) for each in data]  # arrays of uint32
            return FlatIds(b"".join(rows), array("I", accumulate(map(len, rows))), data)

        matrix, counts = tokenizer.encode_batch_padded(BytesSource(data), padded, parallel=False)
        return _without_padding(matrix, counts)._replace(utf8=data)

    return encode_all


_MAX_PADDING = 8
"""With more padding than that, texts are encoded one by one: the time of a call does not count beside the long ones."""


def _without_padding(matrix: Any, counts: Any) -> FlatIds:
    """The first ``counts`` ids of each row, one after another."""
    ids = memoryview(matrix).cast("B") if matrix.size else b""
    starts, numbers = count(0, 4 * matrix.shape[1]), counts.tolist()
    rows = [ids[start : start + 4 * number] for start, number in zip(starts, numbers, strict=False)]
    return FlatIds(b"".join(rows), array("I", accumulate(numbers)))


def _load_fastokens(tokenizer_json: bytes, splits_special: bool) -> FlatEncoder:
    from fastokens import Tokenizer

    encode = Tokenizer.from_json_str(tokenizer_json.decode()).encode_batch_flat

    def encode_all(texts: list[str]) -> FlatIds:
        ids, offsets = encode(texts, False, splits_special)
        return FlatIds(ids, array("I", memoryview(offsets).cast("Q")[1:]))

    return encode_all


_LOADERS: dict[str, Callable[[bytes, bool], FlatEncoder]] = {"gigatoken": _load_gigatoken, "fastokens": _load_fastokens}


class BoundedEncoder:
    """A fast backend that is loaded again when its caches have grown too large.

    :param load: loads the backend.
    """

    def __init__(self, load: Callable[[], FlatEncoder]) -> None:
        self._load = load
        self._num_ids = 0
        self._encode: FlatEncoder | None = load()
        self._base = -1  # known after the first batch: a library takes its working memory then

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text."""
        if self._encode is None:
            self._encode = self._load()
        found = self._encode(texts)
        self._num_ids += len(found.ids) // 4
        if self._base < 0 or self._num_ids > LOOK_EVERY:
            self._num_ids = 0
            self._look()
        return found

    def _look(self) -> None:
        used = private_bytes()
        if self._base < 0:
            self._base = used
        elif used - self._base > MAX_GROWTH_BYTES:
            self._encode, self._base = None, -1  # freed now: two at once would be the peak
            give_back_memory()

    def allow(self, num_bytes: int) -> None:
        """Exclude memory that the process has allocated for another reason."""
        if self._base >= 0:
            self._base += num_bytes


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can: loading a vocabulary frees much of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def private_bytes() -> int:
    """The private memory of this process in bytes, without files and shared memory; 0 if that is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0

    return (int(resident) - int(shared)) * _PAGE_BYTES


_idle_tasks: WeakSet[Any] = WeakSet()


def do_when_idle(task: Any) -> None:
    """Call ``on_pause`` of ``task`` once, when the worker has no request. It must not raise: there is no caller to
    report to. In the trainer's process this never happens.
    """
    _idle_tasks.add(task)


def has_idle_work() -> bool:
    """Whether there is deferred work."""
    return bool(_idle_tasks)


def do_idle_work() -> None:
    """The worker is idle: run all deferred work once."""
    while _idle_tasks:
        _idle_tasks.pop().on_pause()
