"""Where the tokens of a text lie, from their ids alone.

In a byte-level vocabulary each token is a fixed number of bytes, and the tokens of a text are the text: the n-th begins
where the bytes of those before it end. So a backend that gives nothing but ids is enough to find the trained tokens.
This holds where the normalizer leaves a text as it is. A text for which it may not hold is found by the sum of its
tokens, or because it is not in the tokenizer's normal form. It has no offsets here, and goes to ``tokenizers``.
"""

from __future__ import annotations

import unicodedata
from array import array
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

from asyncdata.tokenization.encoders.hf_encoder import flat_ids
from asyncdata.tokenization.spans import Offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from numpy import ndarray
    from tokenizers import AddedToken, Tokenizer

    from asyncdata.tokenization.encoders.fast_backends import FlatIds
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    Array = ndarray[Any, Any]

__all__ = ("LengthsById", "OffsetCheck", "TokenLengths", "lengths_of")

_UNKNOWN = 0xFFFF
"""The length of a token that has no fixed one, such as one that absorbs white space."""

_NEVER = 1 << 30
"""Counts for such a token: no row has as many bytes."""


def lengths_of(files: TokenizerFiles, tokenizer: Tokenizer) -> bytes:
    """The bytes of each token, as uint16 by its id; empty if the vocabulary is not a byte-level one."""
    if not _has_lengths(files, tokenizer):
        return b""

    names = {id: name for name, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    lengths = array("H", [_UNKNOWN]) * (max(names, default=-1) + 1)
    added = tokenizer.get_added_tokens_decoder()
    for id, name in names.items():
        lengths[id] = _length(name, added.get(id))
    return lengths.tobytes()


def _has_lengths(files: TokenizerFiles, tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary is a byte-level one, with all bytes, so that each token is a fixed number of them."""
    from tokenizers import pre_tokenizers  # a worker that reads lengths does not need it

    if files.normal_form is None or not files.is_byte_level:
        return False

    # Bytes that have no token are left out, or become one that stands for any of them.
    return all(tokenizer.token_to_id(byte) is not None for byte in pre_tokenizers.ByteLevel.alphabet())


def _length(name: str, added: AddedToken | None) -> int:
    if added is None:
        length = len(name)  # one character stands for each byte
    elif added.lstrip or added.rstrip or (added.normalized and not added.content.isascii()):
        length = _UNKNOWN
    else:
        length = len(added.content.encode())
    return min(length, _UNKNOWN)


class LengthsById(dict[int, int]):
    """The bytes of each token, looked up when it is first needed: a worker uses few of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()

    @classmethod
    def of(cls, files: TokenizerFiles, tokenizer: Tokenizer) -> Self | None:
        """Of this tokenizer; None if its tokens have no fixed lengths."""
        return cls(tokenizer) if _has_lengths(files, tokenizer) else None

    def __missing__(self, id: int) -> int:
        length = self[id] = _length(self._tokenizer.id_to_token(id) or "", self._added.get(id))
        return length

    def ascii_offsets(self, text: str, ids: Sequence[int]) -> Offsets | None:
        """The offsets of the tokens of an ASCII text, which no normal form changes; None if they are not known."""
        stops = list(accumulate(map(self.__getitem__, ids)))
        starts = [0, *stops]
        return Offsets(starts[:-1], stops) if starts[-1] == len(text) else None


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
        starts, stops, borders, known = self.of_all(texts, flat, self.is_normal)
        return [
            Offsets(*each) if is_known else None
            for is_known, each in zip(known, _cut(starts, stops, borders.tolist()), strict=True)
        ]

    def is_normal(self, text: str) -> bool:
        """Whether the normalizer leaves the text as it is."""
        return not self._normal_form or unicodedata.is_normalized(self._normal_form, text)

    def of_all(
        self, texts: Sequence[str], flat: FlatIds, is_normal: Callable[[str], bool]
    ) -> tuple[Array, Array, Array, list[bool]]:
        """The first characters of all tokens, their ends, where each text's tokens begin and end, and whether the
        offsets of each text are known.

        :param is_normal: whether a text that is not ASCII is in the normal form.
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
        known = [_as_bytes(text, length, is_normal) for text, length in zip(texts, num_bytes, strict=True)]
        wide = {number: data for number, data in enumerate(known) if data}
        if wide:
            _to_characters(starts, stops, counts, wide)
        return starts, stops, borders, [data is not None for data in known]


def _as_bytes(text: str, length: int, is_normal: Callable[[str], bool]) -> bytes | None:
    """The text's bytes, or none if it is ASCII; None if it is not known that its tokens have them."""
    if text.isascii():
        return b"" if len(text) == length else None

    data = text.encode("utf-8", "surrogatepass")
    return data if len(data) == length and is_normal(text) else None


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

        import numpy as np

        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        flat = flat_ids(encodings)
        pairs = chain.from_iterable(each.offsets for each in encodings)
        given = np.frombuffer(array("i", chain.from_iterable(pairs)), np.int32)
        # Whether a text is normal takes as long as all the rest. It matters only if its offsets differ.
        starts, stops, borders, known = self._lengths.of_all(texts, flat, lambda _: True)
        differing = np.flatnonzero((given[::2] != starts) | (given[1::2] != stops))
        for number in np.unique(np.searchsorted(borders, differing, "right") - 1).tolist():
            if known[number] and (texts[number].isascii() or self._lengths.is_normal(texts[number])):
                self.difference = f"the offsets of tokens differ in {ascii(texts[number][:60])}"
                break
        return flat
