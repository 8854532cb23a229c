"""What a loss mask shows is what a loader trains."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn, ConfigError, DataLoader, PreferenceTokenizeFn, PromptTokenizeFn, TextTokenizeFn
from asyncdata.cli.inspection.loss_mask import LossMask, MaskedText
from asyncdata.cli.inspection.window_view import OpenedOrder
from tests.support.tokenize_fns import every_third_dropped
from tests.unit.tokenization.trained import assistant, user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GRIN = "\U0001f600"


def masked(path: Path | str, fn: Any, tokenizer: str | None = None) -> list[list[MaskedText]]:
    mask = LossMask(fn, tokenizer)
    with OpenedOrder(str(path), fn, shuffle=False) as opened:
        return [mask(row) for row in opened.first(1 << 20)]


def trained(text: MaskedText) -> str:
    return "".join(piece.text for piece in text.pieces if piece.is_trained)


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


def test_what_is_trained_of_a_chat_is_shown_with_its_turns(jsonl_file: Callable[..., Path], name: str) -> None:
    path = jsonl_file([{"messages": [user("Hi"), assistant(f"Ho {GRIN}")]}])

    ((text,),) = masked(path, ChatTokenizeFn(name))

    assert trained(text) == f"Ho {GRIN}<|im_end|>"
    assert [turn.role for turn in text.turns] == ["user", "assistant"]
    assert text.is_labelled
    assert 0 < text.num_trained < text.num_tokens


@pytest.mark.thorough
def test_the_numbers_are_those_of_the_samples(test_data: Path) -> None:
    path = test_data / "chat_sft" / "chat_sft.jsonl"
    fn = ChatTokenizeFn(str(test_data / "tokenizers" / "gpt2-bpe-50k"), max_length=900, overlong="truncate_left")
    with OpenedOrder(str(path), fn, seed=3) as opened:
        rows = list(opened.first(40))
    mask = LossMask(fn)
    with DataLoader(str(path), tokenize_fn=fn, seed=3, num_workers=0) as loader:
        samples = {sample.position: sample for sample in loader.get_next_batch(40, timeout_s=240)}

    for row in rows:
        if row.sample is None:
            assert row.dropped == "no_trained_tokens"
            continue
        (text,) = mask(row)
        labels = samples[row.position].labels
        by_token = [piece.is_trained for piece in text.pieces for _ in range(piece.start, piece.stop)]
        assert by_token == (labels != -100).tolist()
        assert (text.num_tokens, text.num_trained) == (len(labels), int((labels != -100).sum()))


def test_a_pair_is_shown_as_two_texts(jsonl_file: Callable[..., Path], name: str) -> None:
    rows = [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."},
        {"prompt": [user("Hi")], "chosen": [assistant("Ho")], "rejected": [assistant("No")]},
    ]

    of_text, of_chats = masked(jsonl_file(rows), PreferenceTokenizeFn(name))

    assert [(text.name, trained(text)) for text in of_text] == [
        ("chosen", " blue.<|im_end|>"),
        ("rejected", " a fish.<|im_end|>"),
    ]
    assert [trained(text) for text in of_chats] == ["Ho<|im_end|>", "No<|im_end|>"]
    assert [[turn.role for turn in text.turns] for text in of_chats] == [["user", "assistant"]] * 2
    assert of_text[0].turns == []


def test_a_row_that_is_no_sample_has_no_text(jsonl_file: Callable[..., Path], name: str) -> None:
    path = jsonl_file([{"messages": [user("Hi")]}, b"{"])

    assert masked(path, ChatTokenizeFn(name)) == [[], []]


def test_a_prompt_has_no_labels(jsonl_file: Callable[..., Path], name: str) -> None:
    ((text,),) = masked(jsonl_file([{"input": "Hi"}]), PromptTokenizeFn(name))

    assert (text.is_labelled, text.num_trained) == (False, 0)


def test_tokens_of_a_function_are_numbers_or_what_a_tokenizer_makes_of_them(
    jsonl_file: Callable[..., Path], name: str
) -> None:
    path = jsonl_file([{"id": 65}])

    ((numbers,),) = masked(path, every_third_dropped)
    ((text,),) = masked(path, every_third_dropped, name)

    assert [piece.name for piece in numbers.pieces] == ["65"]
    assert [piece.name for piece in text.pieces] == [""]


def test_a_cut_character_is_shown_by_its_bytes(jsonl_file: Callable[..., Path], name: str) -> None:
    shown = set()
    for length in range(2, 8):
        fn = TextTokenizeFn(name, max_length=length, overlong="truncate_right", eos=False)
        ((text,),) = masked(jsonl_file([{"text": f"x{GRIN}{GRIN}"}]), fn)
        shown.add("".join(piece.text for piece in text.pieces))

    assert all(f"x{GRIN}{GRIN}".encode().startswith(each.encode("utf-8", "surrogateescape")) for each in shown)
    assert "\ufffd" not in "".join(shown)
    assert len(shown) > 2


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AD413"):
        LossMask(every_third_dropped, str(tmp_path / "none"))


def test_a_row_with_escapes_is_the_row(jsonl_file: Callable[..., Path], name: str) -> None:
    text = 'a "quote" \\ and\ttab\n'
    path = jsonl_file([json.dumps({"text": text}).encode()])

    ((shown,),) = masked(path, TextTokenizeFn(name, eos=False))

    assert "".join(piece.text for piece in shown.pieces) == text
