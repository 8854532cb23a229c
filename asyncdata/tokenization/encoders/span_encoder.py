"""Encodes texts to ids and the offsets of tokens: for functions that train parts of a text.

``tokenizers`` gives both. A fast backend gives ids; where the proof about it says that the lengths of tokens give the
offsets of ``tokenizers``, they follow from the ids.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.encoders.fast_backends import one_by_one
from asyncdata.tokenization.encoders.hf_encoder import encode_here
from asyncdata.tokenization.encoders.text_encoder import encoder_of, proof_of
from asyncdata.tokenization.encoders.token_lengths import LengthsById, TokenLengths
from asyncdata.tokenization.spans import Offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import AddedToken, Encoding, Tokenizer

    from asyncdata.tokenization.encoders.text_encoder import TextEncoder
    from asyncdata.tokenization.spans import Span
    from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("HfSpanEncoder", "Located", "SpanEncoder", "one_id", "open_span_encoder")


class Located(NamedTuple):
    """A text's tokens, and the characters of each."""

    ids: array[int]
    offsets: Offsets


class SpanEncoder(Protocol):
    """A tokenizer that tells where its tokens lie."""

    def encode(self, texts: list[str]) -> list[Located | Exception]:
        """Each text without special tokens around it, or the error that the library raised for it."""
        ...

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """The id of the special token that a setting names, as an array; empty for None.

        :raises ConfigError: if the tokenizer does not know it.
        """
        ...

    def around(self) -> tuple[array[int], array[int]]:
        """The special tokens that the tokenizer adds before plain text, and after it."""
        ...


class HfSpanEncoder:
    """The library ``tokenizers``.

    :param lengths: of the tokens. With them the library is not asked for the offsets of ASCII texts, which it takes a
        sixth of its time to compute and to hand over.
    """

    def __init__(self, tokenizer: Tokenizer, lengths: LengthsById | None = None) -> None:
        self._lengths = lengths
        self._encode_ids = partial(encode_here(tokenizer, with_offsets=False), add_special_tokens=False)
        self._around = _special_ids(tokenizer)
        # Some post-processors exclude the space before a word from the offsets of its token, which contains it.
        tokenizer.post_processor = None
        self._encode_all = partial(encode_here(tokenizer, with_offsets=True), add_special_tokens=False)
        self._stripping = {
            id: token for id, token in tokenizer.get_added_tokens_decoder().items() if token.lstrip or token.rstrip
        }

    def encode(self, texts: list[str]) -> list[Located | Exception]:
        """See :class:`SpanEncoder`."""
        if self._lengths is None:
            return self._with_offsets(texts)

        found = self._by_lengths(self._lengths, texts)
        others = iter(self._with_offsets([text for text, each in zip(texts, found, strict=True) if each is None]))
        return [next(others) if each is None else each for each in found]

    def _by_lengths(self, lengths: LengthsById, texts: list[str]) -> list[Located | None]:
        """What the ids of ASCII texts tell; None for the other texts."""
        numbers = [number for number, text in enumerate(texts) if text.isascii()]
        found: list[Located | None] = [None] * len(texts)
        try:
            encodings = self._encode_ids([texts[number] for number in numbers])
        except Exception:  # a bare Exception, which does not name the text
            return found

        for number, encoding in zip(numbers, encodings, strict=True):
            ids = encoding.ids
            offsets = lengths.ascii_offsets(texts[number], ids)
            found[number] = None if offsets is None else Located(array("i", ids), offsets)
        return found

    def _with_offsets(self, texts: list[str]) -> list[Located | Exception]:
        try:
            found: Sequence[Encoding | Exception] = self._encode_all(texts)
        except Exception:  # a bare Exception, which does not name the text
            found = one_by_one(self._encode_all, texts)
        return [
            each if isinstance(each, Exception) else self._located(each, text)
            for each, text in zip(found, texts, strict=True)
        ]

    def _located(self, encoding: Encoding, text: str) -> Located:
        ids, offsets = encoding.ids, encoding.offsets
        if self._stripping:
            for number, id in enumerate(ids):
                if id in self._stripping:
                    offsets[number] = _own_characters(self._stripping[id], offsets[number], text)
        return Located(array("i", ids), Offsets.of(offsets))

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """See :class:`SpanEncoder`."""
        return one_id(self._ids, token, setting)

    def _ids(self, text: str) -> array[int]:
        return array("i", self._encode_all([text])[0].ids)

    def around(self) -> tuple[array[int], array[int]]:
        """See :class:`SpanEncoder`."""
        return self._around


class FastSpanEncoder:
    """A proven backend. ``tokenizers`` encodes the texts of which the ids alone do not tell the offsets."""

    def __init__(self, encoder: TextEncoder, lengths: TokenLengths, around: tuple[list[int], list[int]]) -> None:
        self._encoder = encoder
        self._lengths = lengths
        self._around = around
        self._hf: HfSpanEncoder | None = None

    def encode(self, texts: list[str]) -> list[Located | Exception]:
        """See :class:`SpanEncoder`."""
        flat, errors = self._encoder(texts)
        ids = array("i")
        ids.frombytes(flat.ids)
        found: list[Located | None] = []
        start = 0
        for stop, offsets in zip(flat.ends, self._lengths(texts, flat), strict=True):
            found.append(None if offsets is None else Located(ids[start:stop], offsets))
            start = stop
        self._audit(texts, found)
        others = [number for number, each in enumerate(found) if each is None or number in errors]
        slow = self._trusted().encode([texts[number] for number in others]) if others else []
        known = dict(zip(others, slow, strict=True))
        return [known[number] if each is None or number in known else each for number, each in enumerate(found)]

    def _trusted(self) -> HfSpanEncoder:
        if self._hf is None:
            self._hf = HfSpanEncoder(self._encoder.tokenizer())
        return self._hf

    def _audit(self, texts: list[str], found: list[Located | None]) -> None:
        """Compare the offsets of the text whose ids were compared.

        :raises WrongIdsError: if they are not those of ``tokenizers``.
        """
        text = self._encoder.audited
        located = None if text is None else found[texts.index(text)]
        if text is None or located is None:
            return

        (expected,) = self._trusted().encode([text])
        if isinstance(expected, Exception) or list(map(tuple, expected.offsets)) != list(map(tuple, located.offsets)):
            self._encoder.reject(text, "offsets")

    def ids_of(self, token: str | None, setting: str) -> array[int]:
        """See :class:`SpanEncoder`."""
        return one_id(lambda text: array("i", self._encoder([text]).flat.of_each()[0]), token, setting)

    def around(self) -> tuple[array[int], array[int]]:
        """See :class:`SpanEncoder`."""
        before, after = self._around
        return array("i", before), array("i", after)


def open_span_encoder(files: TokenizerFiles, backend: str = "auto") -> SpanEncoder:
    """The encoder of a tokenizer, by the backend that is chosen for it, if that one's offsets are proven too.

    :param backend: "auto" for the first that is proven, "hf" for ``tokenizers``, or one by name.
    :raises ConfigError: if the backend that is named is not installed, or not exact for this tokenizer.
    """
    proof = proof_of(files, backend, needs_offsets=True)
    if proof is None or proof.around is None:
        tokenizer = files.load()
        return HfSpanEncoder(tokenizer, LengthsById.of(files, tokenizer))

    lengths = TokenLengths(proof.token_lengths, files.normal_form or "")
    return FastSpanEncoder(encoder_of(files, proof), lengths, proof.around)


def one_id(ids_of: Callable[[str], array[int]], token: str | None, setting: str) -> array[int]:
    """The id of the special token that a setting names, as an array; empty for None.

    :raises ConfigError: if it is not one token.
    """
    if token is None:
        return array("i")

    ids = ids_of(token)
    if len(ids) != 1:
        raise ConfigError(f"{setting}={token!r} is {len(ids)} tokens of the tokenizer; name one of its own tokens")

    return ids


def _special_ids(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    encoding = tokenizer.encode("a", add_special_tokens=True)
    inner = [number for number, special in enumerate(encoding.special_tokens_mask) if not special]
    ids = array("i", encoding.ids)
    return (ids[: inner[0]], ids[inner[-1] + 1 :]) if inner else (ids, array("i"))


def _own_characters(token: AddedToken, offsets: Span, text: str) -> Span:
    """The offsets without the white space that the token has absorbed: the model does not generate it."""
    start = text.find(token.content, *offsets)
    return (start, start + len(token.content)) if start >= 0 else offsets
