"""The record of a run: a line of JSON per delivered sample, with a digest of its position and tokens."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from asyncdata.core.types import Sample

__all__ = ("Delivered", "combined_digest", "read_record", "record_line", "sample_digest")


class Delivered(msgspec.Struct, frozen=True):
    """One line of a record.

    :ivar index: number of the sample in the run, from 0.
    :ivar digest: of its position and its tokens, as 32 hexadecimal digits.
    """

    index: int
    position: str
    num_tokens: int
    digest: str


def sample_digest(sample: Sample) -> bytes:
    """blake2b-128 of the sample's position in D and of its token ids."""
    state = blake2b(str(sample.position).encode(), digest_size=16)
    state.update(sample.tokens.astype("<i4", copy=False).tobytes())
    return state.digest()


def combined_digest(digests: Iterable[str]) -> str:
    """The digest of a sequence of samples, from theirs."""
    return blake2b(bytes.fromhex("".join(digests)), digest_size=16).hexdigest()


def record_line(sample: Sample, digest: bytes) -> bytes:
    """The line of a sample: index, position, path, byte_offset, num_bytes, num_tokens and digest."""
    values = {"index": sample.index, "position": str(sample.position)}
    if sample.source is not None:
        values |= {name: getattr(sample.source, name) for name in ("path", "byte_offset", "num_bytes")}
    return json.dumps({**values, "num_tokens": len(sample.tokens), "digest": digest.hex()}).encode() + b"\n"


def read_record(path: str | os.PathLike[str]) -> list[Delivered]:
    """The lines of a record. A last line that a kill has cut off is left out."""
    with open(path, "rb") as file:
        return [msgspec.json.decode(line, type=Delivered) for line in file if line.endswith(b"\n")]
