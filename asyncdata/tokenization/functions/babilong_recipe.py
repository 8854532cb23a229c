"""The samples of an old recipe for BABILong (``FixedLengthTokenizeFn(seed_compat=True)``), for runs that continue it.

The prompt and the answer are tokenized separately. The prompt is cut at its right end to leave room for the answer, so
a long context removes the question. No end token is trained.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.functions.drafts import Draft

if TYPE_CHECKING:
    from tokenizers import Encoding

    from asyncdata.tokenization.functions.drafts import Drafting
    from asyncdata.tokenization.functions.fixed_length import FixedLengthTokenizeFn
    from asyncdata.tokenization.functions.fixed_length_layout import Filled
    from asyncdata.tokenization.functions.labelled import SpanEncoder

__all__ = ("BETWEEN", "RecipeSample", "check", "drafts_of", "sample_of")

BETWEEN = "\n\n"
"""The text between the context and the question."""


class RecipeSample(NamedTuple):
    """The tokens of a sample before padding; those from ``start`` on are trained.

    :ivar facts: what ``extra`` and the statistics say about it.
    """

    tokens: array[int]
    start: int
    facts: dict[str, bool]


def check(fn: FixedLengthTokenizeFn) -> None:
    """Check that the other settings fit the recipe.

    :raises ConfigError: for a setting that it does not have.
    """
    if fn.on_overlong != "drop" or fn.add_eos or fn.keep_answer:
        raise ConfigError("seed_compat cuts at the right and has no end token; leave on_overlong, add_eos, keep_answer")

    if fn.reserve >= fn.max_length:
        raise ConfigError(f"reserve={fn.reserve} leaves nothing of max_length={fn.max_length} to the prompt")


def drafts_of(filled: Filled) -> list[Draft]:
    """The prompt and the answer, to be tokenized separately."""
    return [Draft(filled.prompt, []), Draft(filled.answer, [])]


def sample_of(
    fn: FixedLengthTokenizeFn,
    encoder: SpanEncoder,
    around: tuple[array[int], array[int]],
    found: list[Encoding],
    drafting: Drafting,
) -> RecipeSample:
    """The sample of a row.

    :param around: the tokens before and after the prompt.
    :param found: the encodings of the two drafts.
    """
    (before, after), (prompt, answer) = around, (array("i", encoding.ids) for encoding in found)
    kept = prompt[: max(fn.max_length - fn.reserve - len(before) - len(after), 0)]
    end = encoder.offsets(found[0], drafting.drafts[0].text)[len(kept) - 1][1] if kept else 0
    start = len(before) + len(kept) + len(after)
    facts = {"question_lost": len(kept) < len(prompt) and end < drafting.of.asked}
    return RecipeSample((before + kept + after + answer)[: fn.max_length], start, facts)
