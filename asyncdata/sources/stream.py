"""Sources that can only be read from front to back: their rows, the order over them, and examples of Python code."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.identity import FileRef, FileRefs, digest
from asyncdata.core.messages import LINES, Block
from asyncdata.core.settings import Settings
from asyncdata.core.types import SourceLocation
from asyncdata.order.order import feistel_permutation, order_keys, shuffled_rows
from asyncdata.order.shuffle import Shuffle
from asyncdata.sources.row_json import encode_row

if TYPE_CHECKING:
    from asyncdata.sources.base import Blocks

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]

MAX_ROW_BYTES = 1 << 30
"""The upper limit of ``max_row_bytes`` for streams: positions in a slot are int32."""

MAX_WINDOW_ROWS = 1 << 20
"""The largest number of rows of a window. Every saved position depends on it, so it never changes."""

_EXAMPLES_AT_ONCE, _BYTES_AT_ONCE = 256, 4 << 20


class Rows(NamedTuple):
    """Consecutive rows of one file; the order does not depend on how many there are.

    :ivar numbers: each row's number in its file, int64 of shape (num_rows,), sorted.
    :ivar lengths: the bytes of each row, int64 of shape (num_rows,).
    :ivar data: the concatenated rows, each followed by one byte, without rows longer than ``max_row_bytes``.
    :ivar num_blank: the number of blank lines between them.
    :ivar state: the argument with which :meth:`RowStream.read` starts at these rows, as builtins; None if there is
        none.
    :ivar offsets: the start of each row in the text of its file, in bytes, int64 of shape (num_rows,); None if there is
        no text.
    """

    file_id: int
    numbers: Int64
    lengths: Int64
    data: bytes
    num_blank: int
    state: dict[str, Any] | None
    offsets: Int64 | None = None


class RowStream(ABC):
    """An opened source without pieces that a worker could read independently: ``num_blocks`` is 0.

    One reader in the trainer's process reads it in each epoch.

    :ivar files: the files with the rows, numbered.
    :ivar max_row_bytes: a longer row is a bad row; :data:`MAX_ROW_BYTES` at most.
    """

    reader = LINES
    reads_single_rows = False
    are_arrays: Sequence[bool] = ()
    num_blocks = extent = block_bytes = room_bytes = 0
    files: FileRefs
    max_row_bytes: int

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """Always empty: a stream has no blocks."""
        return []

    def close(self) -> None:  # noqa: B027 - there is nothing to do
        """There are no temporary files to remove."""

    def as_blocks(self, block_bytes: int) -> Blocks | None:
        """The same rows in pieces that workers can read, for orders of single rows; None if that is not possible."""
        return None

    @abstractmethod
    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """The rows of ``epoch``, from its start or from ``state`` on. Closing the iterator closes the files.

        :param check: called regularly; it raises when the rows are no longer needed.
        :raises SourceError: for a permanent error in the data, after the rows before it.
        :raises SourceChangedError: if the data have changed.
        :raises OSError: if it cannot be read.
        """

    @abstractmethod
    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The place of the row numbered ``offset``, which begins at ``byte_offset`` of its text, if there is one."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the data: ``{"digest": ..., ...}``."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that the data have not changed.

        :raises SourceChangedError: naming what has changed.
        """


class StreamOrder:
    """D over a stream, for one seed: the order of files, and of the rows in a window.

    A window has the next rows of the stream: up to ``window_bytes``, where each row counts one byte more than its
    length, and up to :data:`MAX_WINDOW_ROWS` rows; a longer row has its own window. The number of windows is not known
    in advance. A window mixes as well as a shuffle buffer of the same size that is emptied before it is filled again.
    """

    def __init__(self, shuffle: Shuffle, seed: int, num_files: int) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.num_files = num_files
        self.window_bytes = shuffle.block_bytes * shuffle.window_blocks

    def files(self, epoch: int) -> list[int]:
        """The files in their order."""
        ids = np.arange(self.num_files, dtype=np.int64)
        if self.shuffle.enabled:
            ids = feistel_permutation(ids, self.num_files, order_keys(self.seed, epoch, "files"))
        return [int(number) for number in ids]

    def rows(self, epoch: int, window: int, num_rows: int) -> Int64:
        """The window's rows, numbered as they are read, in the order of delivery: int64 of shape (num_rows,)."""
        if not self.shuffle.enabled:
            return np.arange(num_rows, dtype=np.int64)

        return shuffled_rows(num_rows, order_keys(self.seed, epoch, f"rows {window}")[0])

    def key(self, epoch: int) -> int:
        """A key from 1 to 2**31 with which a source may shuffle its own parts; 0 for the order of the source."""
        if not self.shuffle.enabled:
            return 0

        return 1 + order_keys(self.seed, epoch, "parts")[0] % (1 << 31)

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must match, as builtins."""
        return {"seed": self.seed, **msgspec.to_builtins(self.shuffle), "num_files": self.num_files}


class IterableSource(Settings, frozen=True, forbid_unknown_fields=True):
    """The examples of ``make(epoch)``, in the trainer's process.

    An iterable cannot start in the middle: a restart creates it again and skips the delivered examples of the epoch. So
    it must give the same examples for the same epoch; the example at the resume position is compared.

    :param make: a function from an epoch's number, counted from 0, to an iterable of examples: dicts (see
        ``asyncdata.sources.row_json``), or bytes with the JSON text of a row. Other values are bad rows.
    :param version: a number or text. Change it when ``make`` gives other examples; older snapshots are refused then.
    :param max_row_bytes: an example whose JSON is longer is a bad row.
    """

    make: Callable[[int], Iterable[Any]]
    version: int | str | None = None
    max_row_bytes: int = 64 * 1024 * 1024

    def open(self, block_bytes: int) -> IterableStream:
        """Open the source; ``make`` is not called yet.

        :raises ConfigError: if ``make`` cannot be called.
        """
        if not callable(self.make):
            raise ConfigError(
                f"an IterableSource takes a function from an epoch's number to an iterable; got a "
                f"{type(self.make).__name__}, which could not be iterated again: pass lambda epoch: ..."
            )

        return IterableStream(self.make, self.version, self.max_row_bytes)


class ExampleStream(RowStream):
    """Examples of one origin, numbered from 0 in each epoch.

    :param title: the name of the origin in errors.
    """

    def __init__(self, title: str, max_row_bytes: int) -> None:
        self.files: FileRefs = [FileRef(title, 0)]
        self.max_row_bytes = min(max_row_bytes, MAX_ROW_BYTES)

    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The example's number."""
        return SourceLocation(self.files[file_id].path, -1, num_bytes, row_number=offset)

    def check_unchanged(self) -> None:
        """Nothing can be checked."""

    def rows(
        self,
        examples: Iterator[Any],
        number: int,
        state: dict[str, Any] | None,
        state_now: Callable[[int], dict[str, Any] | None],
        check: Callable[[], object],
    ) -> Generator[Rows]:
        """The examples as rows, from index ``number`` on. If the iterator raises, the examples before come first.

        :param state: the state of the first example.
        :param state_now: gives the state of the next example, from its index.
        """
        try:
            while True:
                texts, fault = self._texts(examples, number, check)
                if texts:
                    yield self._rows(texts, number, state)
                if fault is not None:
                    raise fault

                if not texts:
                    return

                number += len(texts)
                state = state_now(number)
        finally:
            close = getattr(examples, "close", None)  # a generator's; it may hold files
            if close is not None:
                close()

    def _texts(
        self, examples: Iterator[Any], number: int, check: Callable[[], object]
    ) -> tuple[list[bytes], Exception | None]:
        """The next examples as JSON, and the error that came instead of another one."""
        texts: list[bytes] = []
        size = 0
        try:
            for example in islice(examples, _EXAMPLES_AT_ONCE):
                check()
                texts.append(self._text(example, number + len(texts)))
                if (size := size + len(texts[-1])) >= _BYTES_AT_ONCE:
                    break
        except Exception as error:
            return texts, error

        return texts, None

    def _text(self, example: Any, number: int) -> bytes:
        if isinstance(example, bytes):
            return example

        try:
            return encode_row(example)
        except (TypeError, ValueError, RecursionError) as error:
            raise SourceError(
                f"AD128 {self.files[0].path}: example {number} cannot be written as JSON: {error}; leave the column "
                "out, or make it a text or numbers"
            ) from error

    def _rows(self, texts: list[bytes], number: int, state: dict[str, Any] | None) -> Rows:
        lengths = np.array([len(text) for text in texts], np.int64)
        kept = [text for text in texts if len(text) <= self.max_row_bytes]
        data = b"\n".join((*kept, b""))
        return Rows(0, number + np.arange(len(texts), dtype=np.int64), lengths, data, 0, state)


class IterableStream(ExampleStream):
    """Examples that a function makes for each epoch."""

    def __init__(self, make: Callable[[int], Iterable[Any]], version: int | str | None, max_row_bytes: int) -> None:
        self._make = make
        name = getattr(make, "__qualname__", type(make).__qualname__)
        super().__init__(f"{getattr(make, '__module__', type(make).__module__)}:{name}", max_row_bytes)
        self._version = version

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """The examples from the first one on, as there is no state to begin at."""
        yield from self.rows(iter(self._make(epoch)), 0, None, lambda _: None, check)

    def fingerprint(self) -> dict[str, Any]:
        """The function's name and version; its examples are not known."""
        return {"digest": digest(self.files[0].path, repr(self._version)), "make": self.files[0].path}


def plain_state(state: Any) -> dict[str, Any] | None:
    """``state`` if JSON stores it without loss; otherwise None, as a snapshot could not store it."""
    try:
        return state if isinstance(state, dict) and json.loads(json.dumps(state)) == state else None
    except (TypeError, ValueError, RecursionError):
        return None
