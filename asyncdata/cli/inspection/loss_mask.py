"""The trained tokens of a sample, with the text of each token and its turn of the chat."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.inspection.chat_turns import Turns
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.tokenization.functions.preference import PreferenceTokenizeFn
from asyncdata.tokenization.token_text import TokenTexts, without_texts
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from asyncdata.cli.inspection.chat_turns import Turn
    from asyncdata.cli.inspection.window_view import InspectedRow
    from asyncdata.core.types import Sample
    from asyncdata.tokenization.token_text import Piece

__all__ = ("LossMask", "MaskedText")


class MaskedText(NamedTuple):
    """One text of a sample.

    :ivar name: ``chosen`` or ``rejected`` in a pair, else empty.
    :ivar pieces: its tokens, in their order.
    :ivar turns: with offsets in the joined texts of the pieces; empty if it is not a chat.
    :ivar is_labelled: whether the sample has labels.
    """

    name: str
    pieces: list[Piece]
    turns: list[Turn]
    is_labelled: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def num_trained(self) -> int:
        """Trained tokens of the text."""
        return sum(piece.stop - piece.start for piece in self.pieces if piece.is_trained)


class LossMask:
    """Finds the tokens that a tokenize function trains.

    :param tokenize_fn: the function, or its description.
    :param tokenizer: the tokenizer that decodes; None: the description's own. Without either, tokens are
        shown as numbers.
    :raises ConfigError: if there is no such tokenizer.
    """

    def __init__(self, tokenize_fn: Any, tokenizer: str | None = None) -> None:
        own = getattr(tokenize_fn, "tokenizer", None)
        name = tokenizer or (os.fspath(own) if isinstance(own, str | os.PathLike) else None)
        revision = getattr(tokenize_fn, "revision", None) if tokenizer is None else None
        self._texts = None if name is None else TokenTexts(TokenizerFiles(resolve(name, revision).folder).load())
        self._turns = _turns_of(tokenize_fn)

    def __call__(self, row: InspectedRow) -> list[MaskedText]:
        """The texts of a row's sample: two for a pair, none if the row yields no sample."""
        sample = row.sample
        if sample is None:
            return []

        labels = sample.labels
        trained = [False] * len(sample.tokens) if labels is None else (labels == sample.tokens).tolist()
        other = _rejected(sample)
        name = "" if other is None else "chosen"
        masked = [self._masked(row, name, sample.tokens.tolist(), trained, labels is not None)]
        return masked if other is None else [*masked, self._masked(row, "rejected", *other, is_labelled=True)]

    def _masked(
        self, row: InspectedRow, name: str, ids: list[int], trained: list[bool], is_labelled: bool
    ) -> MaskedText:
        pieces = without_texts(ids, trained) if self._texts is None else self._texts(ids, trained)
        find = self._turns.get(name)
        turns = [] if find is None else find(row.raw, "".join(piece.text for piece in pieces))
        return MaskedText(name, pieces, turns, is_labelled)


def _turns_of(tokenize_fn: Any) -> dict[str, Turns]:
    if isinstance(tokenize_fn, ChatTokenizeFn):
        return {"": Turns(tokenize_fn, [tokenize_fn.messages_key])}

    if isinstance(tokenize_fn, PreferenceTokenizeFn):
        prompt = [] if tokenize_fn.prompt_key is None else [tokenize_fn.prompt_key]
        keys = {"chosen": tokenize_fn.chosen_key, "rejected": tokenize_fn.rejected_key}
        return {name: Turns(tokenize_fn, [*prompt, key]) for name, key in keys.items()}

    return {}


def _rejected(sample: Sample) -> tuple[list[int], list[bool]] | None:
    """The other text of a pair."""
    ids, spans = sample.extra.get("rejected_input_ids"), sample.extra.get("rejected_spans")
    if ids is None or spans is None:
        return None

    trained = [False] * len(ids)
    for start, stop in spans:
        trained[start:stop] = [True] * (stop - start)
    return ids, trained
