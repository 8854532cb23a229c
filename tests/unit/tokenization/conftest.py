"""Shared by this folder: the small tokenizer by its name and by its files."""

import pytest

from tests.support.parts import TokenizerFiles


@pytest.fixture
def name(small_tokenizer):
    return str(small_tokenizer)


@pytest.fixture
def files(small_tokenizer):
    return TokenizerFiles(str(small_tokenizer))
