"""The library ``tokenizers`` itself, with flat ids: what every other backend is measured by."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from asyncdata.tokenization.backends import FlatIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ("HfEncoder", "ids_around", "separator_of")

_PLAIN = ("", "a", " a", "Hello, world", "1 2\n", "\u4e2d\u6587", "\n", "\U0001f600 it's")


class HfEncoder:
    """Texts to ids.

    :param add_special_tokens: with those that the tokenizer puts around a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> None:
        self._encode = tokenizer.encode_batch_fast
        self._add_special_tokens = add_special_tokens

    def __call__(self, texts: list[str]) -> FlatIds:
        """The ids of each text.

        :raises Exception: whatever the library raises for a text.
        """
        ids, ends = array("i"), array("I")
        for encoding in self._encode(texts, add_special_tokens=self._add_special_tokens):
            ids.fromlist(encoding.ids)
            ends.append(len(ids))
        return FlatIds(ids.tobytes(), ends)

    def each(self, texts: list[str]) -> tuple[FlatIds, dict[int, Exception]]:
        """The ids of each text, and what the library raised for those that have none, by their number."""
        try:
            return self(texts), {}
        except Exception:  # the library raises a bare Exception; one by one, the text to blame is named
            return self._one_by_one(texts)

    def _one_by_one(self, texts: list[str]) -> tuple[FlatIds, dict[int, Exception]]:
        pieces: list[bytes] = []
        errors: dict[int, Exception] = {}
        ends, end = array("I"), 0
        for number, text in enumerate(texts):
            try:
                pieces += self([text]).of_each()
            except Exception as error:  # as above
                errors[number] = error
                pieces.append(b"")
            end += len(pieces[-1]) // 4
            ends.append(end)
        return FlatIds(b"".join(pieces), ends), errors


def ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the tokenizer puts in front of any text and behind it; None where that depends on the text."""
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
    """An added token at which a text is cut as it is, before anything else is done; None where there is none."""
    if tokenizer.encode_special_tokens:
        return None

    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word):
            return str(token.content)

    return None
