"""A tokenize function whose backend becomes wrong in the workers, where no fixture reaches."""

import pytest
from tokenizers import Tokenizer

from asyncdata import PromptTokenizeFn
from asyncdata.tokenization.base import BatchTokenizer
from asyncdata.tokenization.encoders import text_encoder
from tests.support.backends import Fake, install

__all__ = ("RARE", "FoundOut", "audit_often")

RARE = "a rare text"


class FoundOut(PromptTokenizeFn, frozen=True, kw_only=True):
    """Prompts by a backend that was proven, and is wrong on one text."""

    def open(self) -> BatchTokenizer:
        patch = pytest.MonkeyPatch()  # for as long as the process is there
        audit_often(patch)
        right = Tokenizer.from_file(f"{self.tokenizer}/tokenizer.json")
        install(patch, {"gigatoken": lambda: Fake(right, lambda text: text == RARE)}, points=range(0x20, 0x7F))
        return super().open()


def audit_often(patch: pytest.MonkeyPatch) -> None:
    """Every second text is audited, from the first on."""
    patch.setattr(text_encoder, "FIRST_AUDIT_TOKENS", 1)
    patch.setattr(text_encoder, "AUDIT_EVERY", 2)
    patch.setattr(text_encoder, "WORK_BEFORE_AUDIT_S", 0.0)
