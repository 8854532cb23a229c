"""Makes two padded rows of each preference pair, for DPO and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from asyncdata.batching.collators.base import IGNORE, Document, padded
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.collators.base import Batch

__all__ = ("PreferenceCollator",)

Positive = Annotated[int, msgspec.Meta(ge=1)]


class PreferenceCollator(Description, frozen=True, kw_only=True):
    """Makes the batches that DPOTrainer and RewardTrainer of TRL take, of the samples of ``PreferenceTokenizeFn``.

    Calling it with n samples gives, each int64 of shape (2 * n, width), first the chosen answers of all, then the
    rejected ones, each after its prompt: ``input_ids``; ``attention_mask``, 1 for tokens and 0 for padding, which is on
    the right; and ``completion_mask``, 1 for tokens that are trained.

    :ivar pad_id: the token of the padding.
    :ivar pad_to_multiple_of: rows are that long, or a multiple of it.
    :ivar completion_mask: whether there is a ``completion_mask``, as for DPO. The model of a RewardTrainer takes none.
    :raises ConfigError: for a setting that cannot work; when called, AD452 for a sample without a rejected answer.
    """

    takes_packs: ClassVar[bool] = False

    pad_id: int = 0
    pad_to_multiple_of: Positive = 1
    completion_mask: bool = True

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch of these pairs."""
        documents = [*samples, *map(_rejected, samples)]
        longest = max((len(document.tokens) for document in documents), default=0)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        rows = padded(documents, width, self.pad_id, left=False)
        batch = {name: rows[name] for name in ("input_ids", "attention_mask")}
        if self.completion_mask:
            batch["completion_mask"] = (rows["labels"] != IGNORE).astype(np.int64)
        return batch


def _rejected(sample: Any) -> Document:
    """The prompt with the rejected answer."""
    extra = getattr(sample, "extra", None) or {}
    if "rejected_input_ids" not in extra:
        raise ConfigError(
            "AD452 a PreferenceCollator got a sample without a rejected answer; it takes samples of "
            "PreferenceTokenizeFn, not packed"
        )

    tokens = np.array(extra["rejected_input_ids"], np.int64)
    labels = np.full_like(tokens, IGNORE)
    for start, end in extra["rejected_spans"]:
        labels[start:end] = tokens[start:end]
    return Document(tokens, labels)
