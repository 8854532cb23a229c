"""The library ``tokenizers`` itself, the reference for every other backend; and offsets that follow from ids alone.

In a byte-level vocabulary each token is a fixed number of bytes, and the tokens of a text are the text: the n-th begins
where the bytes of those before it end. So a backend that gives nothing but ids is enough to find the trained tokens.
This holds where the normalizer leaves a text as it is. A text for which it may not hold is found by the sum of its
tokens, or because it is not in the tokenizer's normal form. It has no offsets here, and goes to ``tokenizers``.
"""

from __future__ import annotations

import os
import unicodedata
from array import array
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast

from asyncdata.tokenization.column_writer import Offsets, Span
from asyncdata.tokenization.encoders.fast_backends import EncodedTexts, FlatIds, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy import ndarray
    from tokenizers import AddedToken, Encoding, Tokenizer

    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

    Array = ndarray[Any, Any]

_PLAIN = ("", "a", " a", "Hello, world", "1 2\n", "\u4e2d\u6587", "\n", "\U0001f600 it's")

_NO = frozenset({"", "off", "false", "f", "no", "n", "0"})
"""The values of TOKENIZERS_PARALLELISM that the library reads as no, in upper or lower case."""


_UNKNOWN = 0xFFFF
"""The length of a token that has no fixed one, such as one that absorbs white space."""

_NEVER = 1 << 30
"""Counts for such a token: no row has as many bytes."""

NOWHERE = Offsets((), ())
"""The offsets of tokens that were not asked for, or are not known."""


class Located(NamedTuple):
    """A text's tokens, and the characters of each."""

    ids: array[int]
    offsets: Offsets = NOWHERE


def encode_here(tokenizer: Tokenizer, *, with_offsets: bool) -> Callable[..., list[Encoding]]:
    """``encode_batch`` of ``tokenizer``, or ``encode_batch_fast``, in the calling thread.

    The library encodes a batch in its own threads, which end only with the process and keep memory for each tokenizer:
    4 to 5 MB a thread for every loader of a trainer. So texts are encoded one by one, unless these threads are turned
    off, as in workers. The CPU time is the same.
    """
    if os.environ.get("TOKENIZERS_PARALLELISM", "yes").lower() in _NO:
        return tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast

    def each(texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return each


def flat_ids(encodings: Iterable[Encoding]) -> FlatIds:
    """The ids of texts that the library has encoded."""
    ids, ends = array("i"), array("I")
    for encoding in encodings:
        ids.fromlist(encoding.ids)
        ends.append(len(ids))
    return FlatIds(ids.tobytes(), ends)


class HfEncoder:
    """Texts to ids, and to the offsets of tokens.

    :param add_special_tokens: add the special tokens around a text.
    :param offsets: whether :meth:`located` and ``around`` are wanted.
    :param lengths: of the tokens. With them the library is not asked for the offsets of ASCII texts, which it takes a
        sixth of its time to compute and to hand over.
    :ivar around: the special tokens that the tokenizer adds before plain text, and after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_special_tokens: bool = False,
        offsets: bool = False,
        lengths: LengthsById | None = None,
    ) -> None:
        self.around = _special_ids(tokenizer) if offsets else (array("i"), array("i"))
        if offsets:
            # Some post-processors exclude the space before a word from the offsets of its token, which contains it.
            tokenizer.post_processor = None
        self._encode = partial(encode_here(tokenizer, with_offsets=False), add_special_tokens=add_special_tokens)
        self._encode_all = partial(encode_here(tokenizer, with_offsets=True), add_special_tokens=False)
        self._lengths = lengths
        added = tokenizer.get_added_tokens_decoder() if offsets else {}
        self._stripping = {id: token for id, token in added.items() if token.lstrip or token.rstrip}

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text.

        :raises Exception: whatever the library raises for a text.
        """
        return flat_ids(self._encode(texts))

    def each(self, texts: list[str]) -> EncodedTexts:
        """The ids of each text, or the error that the library raised for it."""
        try:
            return EncodedTexts(self(texts), {})
        except Exception:  # a bare Exception, which does not name the text
            return EncodedTexts.of_each(one_by_one(lambda text: self(text).of_each(), texts))

    def located(self, texts: list[str]) -> list[Located | Exception]:
        """The ids and offsets of each text, or the error that the library raised for it."""
        known = {} if self._lengths is None else self._by_lengths(self._lengths, texts)
        others = [text for number, text in enumerate(texts) if number not in known]
        try:
            encodings: Sequence[Encoding | Exception] = self._encode_all(others)
        except Exception:  # a bare Exception, which does not name the text
            encodings = one_by_one(self._encode_all, others)
        slow = iter([self._located(*each) for each in zip(encodings, others, strict=True)])
        return [known[number] if number in known else next(slow) for number in range(len(texts))]

    def _by_lengths(self, lengths: LengthsById, texts: list[str]) -> dict[int, Located]:
        """The ASCII texts whose ids tell their offsets, by their numbers."""
        numbers = [number for number, text in enumerate(texts) if text.isascii()]
        try:
            encodings = self._encode([texts[number] for number in numbers])
        except Exception:  # a bare Exception, which does not name the text
            return {}

        found = {}
        for number, encoding in zip(numbers, encodings, strict=True):
            ids = encoding.ids
            if (offsets := lengths.ascii_offsets(texts[number], ids)) is not None:
                found[number] = Located(array("i", ids), offsets)
        return found

    def _located(self, encoding: Encoding | Exception, text: str) -> Located | Exception:
        if isinstance(encoding, Exception):
            return encoding

        ids, offsets = encoding.ids, encoding.offsets
        if self._stripping:
            for number, id in enumerate(ids):
                if id in self._stripping:
                    offsets[number] = _own_characters(self._stripping[id], offsets[number], text)
        return Located(array("i", ids), Offsets.of(offsets))


def _special_ids(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    encoding = tokenizer.encode("a", add_special_tokens=True)
    inner = [number for number, special in enumerate(encoding.special_tokens_mask) if not special]
    ids = array("i", encoding.ids)
    return (ids[: inner[0]], ids[inner[-1] + 1 :]) if inner else (ids, array("i"))


def _own_characters(token: AddedToken, offsets: Span, text: str) -> Span:
    """The offsets without the white space that the token has absorbed: the model does not generate it."""
    start = text.find(token.content, *offsets)
    return (start, start + len(token.content)) if start >= 0 else offsets


def ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the tokenizer adds before and after every text; None if they depend on the text."""
    whole = tokenizer.encode("", add_special_tokens=True).ids
    for split in range(len(whole) + 1):
        before, after = whole[:split], whole[split:]
        if all(_is_between(tokenizer, text, before, after) for text in _PLAIN):
            return before, after

    return None


def _is_between(tokenizer: Tokenizer, text: str, before: list[int], after: list[int]) -> bool:
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(tokenizer.encode(text, add_special_tokens=True).ids == [*before, *plain, *after])


def separator_of(tokenizer: Tokenizer) -> str | None:
    """An added token that splits a text before all other steps; None if there is none."""
    if tokenizer.encode_special_tokens:
        return None

    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word):
            return str(token.content)

    return None


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
        of_starts, of_stops = starts.data, stops.data
        return [
            Offsets(of_starts[first:stop], of_stops[first:stop]) if is_known else None
            for is_known, (first, stop) in zip(known, pairwise(borders.tolist()), strict=True)
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
