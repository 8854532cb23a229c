"""Rows from Python code: the examples of an iterator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable  # noqa: TC003 - msgspec reads the annotations
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.digest import digest
from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.messages import FileRef
from asyncdata.core.settings import Settings
from asyncdata.core.types import SourceLocation
from asyncdata.sources.row_json import encode_row
from asyncdata.sources.stream import MAX_ROW_BYTES, Rows, RowStream

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from asyncdata.core.file_refs import FileRefs
    from asyncdata.sources.stream import StreamOrder

__all__ = ("ExampleStream", "IterableSource", "IterableStream", "plain_state")

_EXAMPLES_AT_ONCE = 256


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
        """As the protocol says; nothing can be checked."""

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
        try:
            for example in islice(examples, _EXAMPLES_AT_ONCE):
                check()
                texts.append(self._text(example, number + len(texts)))
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
        """As the base class says; there are no states."""
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
