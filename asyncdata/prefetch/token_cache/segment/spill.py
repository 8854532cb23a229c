"""A reply that a worker wrote to a file of its run, as what becomes a segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.messages import Tokenized
from asyncdata.prefetch.token_cache.segment.layout import DamagedError

if TYPE_CHECKING:
    from asyncdata.core.messages import Data
    from asyncdata.prefetch.token_cache.segment.layout import Names

__all__ = ("Spill",)

_decode = msgspec.msgpack.Decoder(Tokenized).decode
Array = np.ndarray[Any, Any]


class Spill:
    """A spill.

    :param names: of the segment.
    :param num_rows: rows of its request.
    :ivar verdicts: as records have them, of each row.
    :ivar notes: as records have them, of each row.
    :ivar text_sums: checksums of the texts of rows, uint64; zeros if they were not asked for.
    """

    def __init__(self, path: str, names: Names, num_rows: int) -> None:
        with open(path, "rb") as file:
            self._reply = _decode(file.read())
        kept = np.frombuffer(self._reply.kept, np.int32) if self._reply.kept else np.arange(num_rows)
        self._samples = np.full(num_rows, -1, np.int64)
        self._samples[kept] = np.arange(len(kept))
        self.verdicts = np.zeros(num_rows, np.int32)
        self.notes = np.zeros(num_rows, np.int32)
        sums = self._reply.text_sums
        self.text_sums = np.frombuffer(sums, np.uint64) if sums else np.zeros(num_rows, np.uint64)
        for reason, rows in self._reply.drops.items():
            self.verdicts[np.frombuffer(rows, np.int32)] = -1 - names.reasons.index(reason)
        for note, rows in self._reply.notes.items():
            self.notes[np.frombuffer(rows, np.int32)] |= np.int32(1 << names.notes.index(note))

    def samples_of(self, rows: Array) -> Array:
        """The numbers of the samples of these rows, int64.

        :raises DamagedError: if one is no sample.
        """
        samples: Array = self._samples[rows]
        if len(samples) and samples.min() < 0:
            raise DamagedError("a reply that was written down lacks a row")

        return samples

    def values(self, columns: list[str]) -> list[tuple[Data, Array]]:
        """For the tokens and each column: the values of all samples, end to end, and where each stops, in bytes."""
        token_ends = np.frombuffer(self._reply.token_ends, np.uint32).astype(np.int64) * 4
        found: list[tuple[Data, Array]] = [(self._reply.tokens, token_ends)]
        for name in columns:
            column = self._reply.columns.get(name)
            if column is None:
                found.append((b"", np.zeros(len(token_ends), np.int64)))
            else:
                found.append((column.data, np.frombuffer(column.ends, np.uint32).astype(np.int64)))
        return found
