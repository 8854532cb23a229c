"""The digest of a stream, in the simplest words: one sample after the other, in Python's own numbers."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.delivery.chunk import StreamDigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WORD = 1 << 64


class Seen(NamedTuple):
    """A sample: its position and its tokens."""

    position: tuple[int, int, int]
    tokens: Sequence[int]


def splitmix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def digest_of(samples: Iterable[Seen], of: str = "positions") -> StreamDigest:
    num_samples = positions = order = tokens = 0
    for position, ids in samples:
        num_samples += 1
        epoch, window, row = position
        place = (splitmix((splitmix(epoch + 1) + window) % WORD) + row * 0x9E3779B97F4A7C15) % WORD
        content = len(ids) * 0x9E3779B97F4A7C15
        if of == "tokens":
            content += zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))
        positions += splitmix(place)
        order += positions
        tokens += (splitmix(place) | 1) * content
    return StreamDigest(of, num_samples, positions % WORD, order % WORD, tokens % WORD)
