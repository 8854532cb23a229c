"""Where the tokens of a text lie, from their ids alone.

In a byte-level vocabulary each token is a fixed number of bytes, and the tokens of a text are the text: the n-th begins
where the bytes of those before it end. So a backend that gives nothing but ids is enough to find the trained tokens.
This holds where the normalizer leaves a text as it is. A text for which it may not hold is found by the sum of its
tokens, or because it is not in the tokenizer's normal form. It has no offsets here, and goes to ``tokenizers``.
"""

from __future__ import annotations

import unicodedata
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

from asyncdata.tokenization.encoders.hf_encoder import flat_ids
from asyncdata.tokenization.spans import Offsets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy import ndarray
    from tokenizers import Tokenizer

    from asyncdata.tokenization.encoders.fast_backends import FlatIds
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    Array = ndarray[Any, Any]

__all__ = ("OffsetCheck", "TokenLengths", "lengths_of")

_UNKNOWN = 0xFFFF
"""The length of a token that has no fixed one, such as one that absorbs white space."""

_NEVER = 1 << 30
"""Counts for such a token: no row has as many bytes."""


def lengths_of(files: TokenizerFiles, tokenizer: Tokenizer) -> bytes:
    """The bytes of each token, as uint16 by its id; empty if the vocabulary is not a byte-level one."""
    from tokenizers import pre_tokenizers  # a worker that reads lengths does not need it

    if files.normal_form is None or not files.is_byte_level:
        return b""

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return b""  # bytes that have no token are left out, or become one that stands for any of them

    names = {id: name for name, id in vocabulary.items()}
    lengths = array("H", [_UNKNOWN]) * (max(names, default=-1) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for id, name in names.items():
        token = added.get(id)
        if token is None:
            length = len(name)  # one character stands for each byte
        elif token.lstrip or token.rstrip or (token.normalized and not token.content.isascii()):
            length = _UNKNOWN
        else:
            length = len(token.content.encode())
        lengths[id] = min(length, _UNKNOWN)
    return lengths.tobytes()


class TokenLengths:
    """Finds the offsets of tokens.

    :param lengths: of :func:`lengths_of`.
    :param normal_form: the Unicode normal form that the normalizer makes; empty for none.
    """

    def __init__(self, lengths: bytes, normal_form: str) -> None:
        self._lengths = lengths
        self._table: Any = None
        self._normal_form = cast("Literal['NFC']", normal_form)

    def __call__(self, texts: Sequence[str], flat: FlatIds) -> list[Offsets | None]:
        """The offsets of each text's tokens, in characters; None for a text of which they are not known.

        :param flat: the ids of the texts.
        """
        import numpy as np  # a worker that needs no offsets never loads it

        if self._table is None:
            table = np.frombuffer(self._lengths, np.uint16).astype(np.int32)
            table[table == _UNKNOWN] = _NEVER
            self._table = table
        borders = np.concatenate(([0], np.frombuffer(flat.ends, np.uint32).astype(np.int64)))
        sums = np.concatenate(([0], np.cumsum(self._table[np.frombuffer(flat.ids, np.int32)], dtype=np.int64)))
        counts, before = np.diff(borders), sums[borders[:-1]]
        base = np.repeat(before, counts)
        starts, stops = (sums[:-1] - base).astype(np.int32), (sums[1:] - base).astype(np.int32)
        num_bytes = (sums[borders[1:]] - before).tolist()
        known = [self._as_bytes(text, length) for text, length in zip(texts, num_bytes, strict=True)]
        wide = {number: data for number, data in enumerate(known) if data}
        if wide:
            _to_characters(starts, stops, counts, wide)
        return [
            None if is_known is None else Offsets(*each)
            for is_known, each in zip(known, _cut(starts, stops, borders.tolist()), strict=True)
        ]

    def _as_bytes(self, text: str, length: int) -> bytes | None:
        """The text's bytes, or none if it is ASCII; None if it is not known that its tokens have them."""
        if text.isascii():
            return b"" if len(text) == length else None

        data = text.encode("utf-8", "surrogatepass")
        is_normal = not self._normal_form or unicodedata.is_normalized(self._normal_form, text)
        return data if is_normal and len(data) == length else None


def _to_characters(starts: Array, stops: Array, counts: Array, wide: dict[int, bytes]) -> None:
    """Convert offsets in bytes to those in characters, in place.

    :param counts: the tokens of each text.
    :param wide: the bytes of the texts to convert, by their numbers.
    """
    import numpy as np

    numbers, pieces = list(wide), list(wide.values())
    data = np.frombuffer(b"".join(pieces), np.uint8)
    ends = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))  # after each byte, how many characters began
    first_bytes = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces])))[:-1]
    is_wide = np.zeros(len(counts), np.bool_)
    is_wide[numbers] = True
    tokens = np.flatnonzero(np.repeat(is_wide, counts))
    byte_base = np.repeat(first_bytes, counts[numbers])
    character_base = ends[byte_base]
    starts[tokens] = ends[starts[tokens] + byte_base + 1] - 1 - character_base
    stops[tokens] = ends[stops[tokens] + byte_base] - character_base


def _cut(starts: Array, stops: Array, borders: list[int]) -> Iterator[tuple[memoryview, memoryview]]:
    """The offsets of each text."""
    of_starts, of_stops = starts.data, stops.data
    return ((of_starts[first:stop], of_stops[first:stop]) for first, stop in pairwise(borders))


class OffsetCheck:
    """``tokenizers`` as the sweep's reference. It compares its own offsets with those that follow from its ids.

    :param lengths: None: nothing is compared.
    :ivar difference: the first text whose offsets differ; empty if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, lengths: TokenLengths | None) -> None:
        tokenizer.post_processor = None  # it may leave white space out of the offsets
        self._tokenizer = tokenizer
        self._lengths = lengths
        self.difference = ""

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text.

        :raises Exception: whatever the library raises for a text.
        """
        if self._lengths is None or self.difference:
            return flat_ids(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        flat = flat_ids(encodings)
        for text, encoding, found in zip(texts, encodings, self._lengths(texts, flat), strict=True):
            if found is not None and list(zip(*map(list, found), strict=True)) != encoding.offsets:
                self.difference = f"the offsets of tokens differ in {ascii(text[:60])}"
                break
        return flat
