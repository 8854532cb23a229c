"""Where the tokens of a text lie, from their ids alone.

In a byte-level vocabulary each token is a fixed number of bytes, and the tokens of a text are the text: the n-th begins
where the bytes of those before it end. So a backend that gives nothing but ids is enough to find the trained tokens.
This holds where the normalizer leaves a text as it is. A text for which it may not hold is found by the sum of its
tokens, or because it is not in the tokenizer's normal form. It has no offsets here, and goes to ``tokenizers``.
"""

from __future__ import annotations

import unicodedata
from array import array
from typing import TYPE_CHECKING, Any, Literal, cast

from asyncdata.tokenization.encoders.fast_backends import FlatIds
from asyncdata.tokenization.spans import Offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from tokenizers import Encoding, Tokenizer

    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

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
        sums = np.concatenate(([0], np.cumsum(self._table[np.frombuffer(flat.ids, np.int32)], dtype=np.int64)))
        borders = np.concatenate(([0], np.frombuffer(flat.ends, np.uint32).astype(np.int64)))
        begins, ends = borders[:-1], borders[1:]
        num_bytes = (sums[ends] - sums[begins]).tolist()
        base = np.repeat(sums[begins], ends - begins)
        starts, stops = (sums[:-1] - base).astype(np.int32), (sums[1:] - base).astype(np.int32)
        found: list[Offsets | None] = []
        views = memoryview(starts), memoryview(stops)
        for text, first, stop, length in zip(texts, begins.tolist(), ends.tolist(), num_bytes, strict=True):
            if text.isascii():
                is_known = len(text) == length
            else:
                is_known = self._to_characters(text, starts[first:stop], stops[first:stop], length)
            found.append(Offsets(views[0][first:stop], views[1][first:stop]) if is_known else None)
        return found

    def _to_characters(self, text: str, starts: np.ndarray, stops: np.ndarray, length: int) -> bool:
        """Convert offsets in bytes to those in characters, in place; return whether they are known."""
        import numpy as np

        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        is_normal = not self._normal_form or unicodedata.is_normalized(self._normal_form, text)
        if len(data) != length or not is_normal:
            return False

        numbers = np.cumsum((data & 0xC0) != 0x80, dtype=np.int32)  # of each byte's character, counted from 1
        starts[:] = numbers[starts] - 1
        stops[:] = numbers[stops - 1]
        return True


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
            return _flat(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        flat = _flat(encodings)
        for text, encoding, found in zip(texts, encodings, self._lengths(texts, flat), strict=True):
            if found is not None and list(zip(*found, strict=True)) != encoding.offsets:
                self.difference = f"the offsets of tokens differ in {ascii(text[:60])}"
                break
        return flat


def _flat(encodings: Sequence[Encoding]) -> FlatIds:
    ids, ends = array("i"), array("I")
    for encoding in encodings:
        ids.fromlist(encoding.ids)
        ends.append(len(ids))
    return FlatIds(ids.tobytes(), ends)
