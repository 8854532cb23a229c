"""TextTokenizeFn: texts that are trained whole, with tokens around them."""

from __future__ import annotations

import pytest

from asyncdata import TextTokenizeFn
from tests.unit.tokenization import drops, run, token_ids, values
from tests.unit.tokenization.trained import tokenizer_of, variant

TEXT = "All of this is trained, caf\u00e9 \U0001f600 too."


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], ["<|im_end|>"]),
        ({"eos": False}, [], []),
        ({"eos": "<|endoftext|>"}, [], ["<|endoftext|>"]),
        ({"bos": "<|im_start|>"}, ["<|im_start|>"], ["<|im_end|>"]),
        ({"bos": True}, ["<|im_start|>"], ["<|im_end|>"]),
    ],
    ids=str,
)
def test_tokens_are_put_around_a_text_as_asked_and_all_but_the_first_are_trained(
    small_tokenizer, tmp_path, settings, before, after
):
    folder = variant(small_tokenizer, tmp_path / "bos", config={"bos_token": "<|im_start|>"})
    tokenizer = tokenizer_of(TextTokenizeFn(folder))

    chunk = run(TextTokenizeFn(folder, **settings).open(), [{"text": TEXT}])

    front, back = ([tokenizer.token_to_id(token) for token in tokens] for tokens in (before, after))
    ids = [*front, *tokenizer.encode(TEXT).ids, *back]
    assert (token_ids(chunk), values(chunk, "spans")) == ([ids], [[[1, len(ids)]]])


def test_rows_without_trained_tokens_are_dropped_with_a_reason(small_tokenizer):
    fn = TextTokenizeFn(str(small_tokenizer), eos=False)

    chunk = run(fn.open(), [{"text": ""}, {"text": "a"}, {"text": "a b"}])

    assert (chunk.num_samples, drops(chunk)) == (1, {"empty_text": [0], "no_trained_tokens": [1]})
