from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, TextTokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import tokenizer_of, variant

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "All of this is trained, caf\u00e9 \U0001f600 too."


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


def test_all_tokens_of_a_text_are_trained_but_the_first_and_its_end_is_too(name: str) -> None:
    fn = TextTokenizeFn(name)
    tokenizer = tokenizer_of(fn)
    ids = tokenizer.encode(TEXT).ids

    chunk = run(fn.open(), [{"text": TEXT, "metadata": {"a": 1}}])

    assert token_ids(chunk) == [[*ids, tokenizer.token_to_id("<|im_end|>")]]
    assert values(chunk, "spans") == [[[1, len(ids) + 1]]]
    assert values(chunk, "metadata") == [{"a": 1}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"eos": False}, [], []),
        ({"eos": "<|endoftext|>"}, [], ["<|endoftext|>"]),
        ({"bos": "<|im_start|>"}, ["<|im_start|>"], ["<|im_end|>"]),
    ],
)
def test_tokens_are_put_around_a_text_as_asked(name: str, settings: Any, before: Any, after: Any) -> None:
    fn = TextTokenizeFn(name, **settings)
    tokenizer = tokenizer_of(fn)

    chunk = run(fn.open(), [{"text": TEXT}])

    ids = [tokenizer.token_to_id(token) for token in before], [tokenizer.token_to_id(token) for token in after]
    assert token_ids(chunk) == [[*ids[0], *tokenizer.encode(TEXT).ids, *ids[1]]]


def test_the_tokenizers_own_tokens_are_asked_for_by_true(small_tokenizer: Path, tmp_path: Path) -> None:
    folder = variant(small_tokenizer, tmp_path / "bos", config={"bos_token": "<|im_start|>"})

    (ids,) = token_ids(run(TextTokenizeFn(folder, bos=True).open(), [{"text": "a"}]))

    assert (ids[0], ids[-1]) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bos": True}, "bos=True, but the tokenizer has no bos_token; pass bos='the token', or False"),
        ({"eos": "no token of it"}, "eos='no token of it' is . tokens of the tokenizer"),
    ],
)
def test_a_token_that_the_tokenizer_lacks_is_refused(name: str, settings: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TextTokenizeFn(name, **settings).resolve().open()


def test_a_text_that_is_too_long_is_cut_at_either_end_dropped_or_an_error(name: str) -> None:
    (ids,) = token_ids(run(TextTokenizeFn(name).open(), [{"text": TEXT}]))
    kept = {"truncate_right": ids[:5], "truncate_left": ids[-5:]}

    for how, wanted in kept.items():
        chunk = run(TextTokenizeFn(name, max_length=5, overlong=how).open(), [{"text": TEXT}])
        assert (token_ids(chunk), values(chunk, "spans")) == ([wanted], [[[1, 5]]])
    assert drops(run(TextTokenizeFn(name, max_length=5).open(), [{"text": TEXT}])) == {"max_length": [0]}
    assert faults(run(TextTokenizeFn(name, max_length=5, overlong="error").open(), [{"text": TEXT}])) == [(0, "AD415")]


def test_rows_without_trained_tokens_are_dropped_with_a_reason(name: str) -> None:
    chunk = run(TextTokenizeFn(name, eos=False).open(), [{"text": ""}, {"text": "a"}, {"text": "a b"}])

    assert (chunk.num_samples, drops(chunk)) == (1, {"empty_text": [0], "no_trained_tokens": [1]})


@pytest.mark.parametrize(
    ("row", "code"),
    [(b'{"text": 5}', "AD111"), (b'{"txt": "a"}', "AD110"), (b'{"text": "\\ud800"}', "AD107"), (b"{", "AD101")],
)
def test_a_bad_row_is_named_and_the_others_are_kept(name: str, row: bytes, code: str) -> None:
    chunk = run(TextTokenizeFn(name).open(), [{"text": "a"}, row, {"text": "b"}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, code)])


def test_a_text_that_the_tokenizer_refuses_is_named(small_tokenizer: Path, tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"aa": 0}, "unk_token": "?"}
    folder = variant(small_tokenizer, tmp_path / "words", model=words)

    chunk = run(TextTokenizeFn(folder).open(), [{"text": "aa"}, {"text": "c"}, {"text": "aa"}])

    assert (chunk.num_samples, faults(chunk)) == (2, [(1, "AD421")])


def test_every_setting_is_in_the_fingerprint_and_reaches_the_worker(name: str) -> None:
    changes: list[dict[str, Any]] = [
        {"text_key": "t"},
        {"bos": "<|im_start|>"},
        {"eos": False},
        {"max_length": 9},
        {"overlong": "error"},
    ]
    prints = [json.dumps(TextTokenizeFn(name, **settings).fingerprints()) for settings in [{}, *changes]]

    assert len(set(prints)) == 6
    again = open_spec(describe(TextTokenizeFn(name, text_key="t", eos=False)))
    assert token_ids(run(again, [{"t": "a b"}])) == [tokenizer_of(TextTokenizeFn(name)).encode("a b").ids]
