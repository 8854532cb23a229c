"""The library ``tokenizers`` itself, with flat ids: the reference for every other backend."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

from asyncdata.tokenization.encoders.fast_backends import EncodedTexts, FlatIds, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tokenizers import Encoding, Tokenizer

__all__ = ("HfEncoder", "encode_here", "flat_ids", "ids_around", "separator_of")

_PLAIN = ("", "a", " a", "Hello, world", "1 2\n", "\u4e2d\u6587", "\n", "\U0001f600 it's")


_NO = frozenset({"", "off", "false", "f", "no", "n", "0"})
"""The values of TOKENIZERS_PARALLELISM that the library reads as no, in upper or lower case."""


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
    """Texts to ids.

    :param add_special_tokens: add the special tokens around a text.
    :param in_threads: use the threads of the library; for work that happens once, and that a caller waits for.
    """

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False, in_threads: bool = False) -> None:
        self.tokenizer = tokenizer
        self._encode = tokenizer.encode_batch_fast if in_threads else encode_here(tokenizer, with_offsets=False)
        self._add_special_tokens = add_special_tokens

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text.

        :raises Exception: whatever the library raises for a text.
        """
        return flat_ids(self._encode(texts, add_special_tokens=self._add_special_tokens))

    def each(self, texts: list[str]) -> EncodedTexts:
        """The ids of each text, or the error that the library raised for it."""
        try:
            return EncodedTexts(self(texts), {})
        except Exception:  # a bare Exception, which does not name the text
            return EncodedTexts.of_each(one_by_one(lambda text: self(text).of_each(), texts))


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
