"""The samples of an old recipe for BABILong (``FixedLengthTokenizeFn(legacy_recipe=True)``), for runs that continue it.

The prompt and the answer are tokenized separately. The prompt is cut at its right end to leave room for the answer, so
a long context removes the question. No end token is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncdata.tokenization.functions.drafts import Draft

if TYPE_CHECKING:
    from array import array

    from asyncdata.tokenization.encoders.span_encoder import Located
    from asyncdata.tokenization.functions.drafts import Drafting
    from asyncdata.tokenization.functions.fixed_length_layout import Filled

__all__ = ("BETWEEN", "RecipeSample", "drafts_of", "sample_of")

BETWEEN = "\n\n"
"""The text between the context and the question."""


class RecipeSample(NamedTuple):
    """The tokens of a sample before padding; those from ``start`` on are trained.

    :ivar is_question_lost: whether the cut has removed the question.
    :ivar is_cut: whether anything was cut.
    """

    tokens: array[int]
    start: int
    is_question_lost: bool
    is_cut: bool


def drafts_of(filled: Filled) -> list[Draft]:
    """The prompt and the answer, to be tokenized separately."""
    return [Draft(filled.prompt, []), Draft(filled.answer, [])]


def sample_of(
    drafting: Drafting,
    found: list[Located],
    around: tuple[array[int], array[int]],
    *,
    max_length: int,
    reserve: int,
) -> RecipeSample:
    """The sample of a row.

    :param found: the encodings of the two drafts.
    :param around: the tokens before and after the prompt.
    :param reserve: the number of tokens that are kept free for the answer.
    """
    (before, after), (prompt, answer) = around, (each.ids for each in found)
    kept = prompt[: max(max_length - reserve - len(before) - len(after), 0)]
    end = found[0].offsets.stops[len(kept) - 1] if kept else 0
    start = len(before) + len(kept) + len(after)
    whole = before + kept + after + answer
    is_prompt_cut = len(kept) < len(prompt)
    is_question_lost = is_prompt_cut and end < drafting.of.asked
    return RecipeSample(whole[:max_length], start, is_question_lost, is_prompt_cut or len(whole) > max_length)
