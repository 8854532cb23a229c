"""Records what a run delivered, to compare two runs: a digest per sample, one of all samples, and a file."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from asyncdata.core.types import Sample

__all__ = ("Deliveries", "Delivered", "combined_digest", "read_record", "sample_digest")


class Delivered(msgspec.Struct, frozen=True):
    """One line of a record.

    :ivar index: number of the sample in the run, from 0.
    :ivar digest: of its position and its tokens.
    """

    index: int
    position: str
    num_tokens: int
    digest: str


def sample_digest(sample: Sample) -> bytes:
    """blake2b-128 of the sample's position in D and its token ids."""
    state = blake2b(str(sample.position).encode(), digest_size=16)
    state.update(sample.tokens.astype("<i4", copy=False).tobytes())
    return state.digest()


def combined_digest(digests: Iterable[str]) -> str:
    """The digest of a sequence of samples, from theirs."""
    state = blake2b(digest_size=16)
    for digest in digests:
        state.update(bytes.fromhex(digest))
    return state.hexdigest()


class Deliveries:
    """Records every batch that is delivered.

    :param path: a file that gets a JSON object per sample: index, position, path, byte_offset, num_bytes, num_tokens
        and digest. It is appended to.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.num_batches = 0
        self.num_samples = 0
        self.num_tokens = 0
        self.first_index: int | None = None
        self._state = blake2b(digest_size=16)
        # Unbuffered: after a kill, all batches before it are in the file.
        self._file = open(path, "ab", buffering=0) if path is not None else None

    @property
    def digest(self) -> str:
        """The digest of the sequence so far."""
        return self._state.hexdigest()

    def add(self, batch: list[Sample]) -> None:
        """Count a batch, and append it to the file in one write."""
        digests = [sample_digest(sample) for sample in batch]
        if self.first_index is None and batch:
            self.first_index = batch[0].index
        self.num_batches += 1
        self.num_samples += len(batch)
        self.num_tokens += sum(len(sample.tokens) for sample in batch)
        for digest in digests:
            self._state.update(digest)
        if self._file is not None:
            self._file.write(b"".join(map(_line, batch, digests)))

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(sample: Sample, digest: bytes) -> bytes:
    values = {"index": sample.index, "position": str(sample.position)}
    if sample.source is not None:
        values |= {
            "path": sample.source.path,
            "byte_offset": sample.source.byte_offset,
            "num_bytes": sample.source.num_bytes,
        }
    return json.dumps({**values, "num_tokens": len(sample.tokens), "digest": digest.hex()}).encode() + b"\n"


def read_record(path: str | os.PathLike[str]) -> list[Delivered]:
    """The lines of a record. A last line that a kill has cut off is left out."""
    with open(path, "rb") as file:
        return [msgspec.json.decode(line, type=Delivered) for line in file if line.endswith(b"\n")]
