"""Tokens that lie across the border of what is trained, and chats whose template writes no token that ends a reply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn, PromptTokenizeFn, TextTokenizeFn
from tests.unit.tokenization import notes, run, token_ids
from tests.unit.tokenization.trained import assistant, mask_of, their_mask, tokenizer_of, trained, trained_texts, user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

END = "<|im_end|>"
WORDS = "yes no it is far near the sky looks blue here and there nothing else was found when we asked".split()
REPLIES = [f"{' '.join(WORDS[start : start + 4])}." for start in range(0, len(WORDS) - 4, 2)]

# As templates of Llama's kind: a space, which is no part of the block, and the reply. Its stop token is in the block.
INSTRUCTS = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST] ' }}
{%- else %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}"""
# The border lies in the middle of a word.
CUTS_WORDS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
ENDS_IN_A_WORD = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}
{%- else %}{% generation %}{{ m.content }}{% endgeneration %}alue<|im_end|>{% endif %}{% endfor %}"""
WITHOUT_STOP = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


@pytest.fixture(scope="module")
def metaspace_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As SentencePiece's: a word and the space in front of it are one token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([f" {reply} [INST] [/INST] " for reply in REPLIES] * 8, trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    folder = tmp_path_factory.mktemp("metaspace")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": INSTRUCTS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


# Straddling tokens


def test_the_first_word_of_a_reply_is_trained_where_its_token_begins_with_the_space_before_it(
    metaspace_tokenizer: str,
) -> None:
    fn = ChatTokenizeFn(metaspace_tokenizer)

    chunk = run(fn.open(), [{"messages": [user("why"), assistant(reply)]} for reply in REPLIES])

    assert trained_texts(chunk, tokenizer_of(fn)) == [[f" {reply}</s>"] for reply in REPLIES]
    assert notes(chunk) == {}


@pytest.mark.filterwarnings("ignore")
def test_masks_of_a_metaspace_tokenizer_are_those_of_transformers(metaspace_tokenizer: str) -> None:
    chats = [[user("why"), assistant(reply), user("no"), assistant(reply[::-1])] for reply in REPLIES]

    chunk = run(ChatTokenizeFn(metaspace_tokenizer).open(), [{"messages": chat} for chat in chats])

    for number, chat in enumerate(chats):
        theirs = their_mask(metaspace_tokenizer, chat)
        assert token_ids(chunk)[number] == theirs["input_ids"]
        assert mask_of(chunk, number) == theirs["assistant_masks"]


def test_a_token_of_white_space_alone_that_begins_a_reply_is_trained(name: str) -> None:
    template = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content + '\\n' }}
{%- else %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor %}"""
    fn = ChatTokenizeFn(name, chat_template=template)
    whole = tokenizer_of(fn).encode("a\n\n    b", add_special_tokens=False)
    assert any(start < 2 < stop for start, stop in whole.offsets), "a token holds the border of the reply"

    (text,) = trained(fn, {"messages": [user("a"), assistant("\n    b")]})

    assert text == f"\n\n    b{END}"


def test_a_token_of_a_word_of_both_sides_is_not_trained_and_is_counted(
    name: str, jsonl_file: Callable[..., Path]
) -> None:
    fn = ChatTokenizeFn(name, chat_template=CUTS_WORDS)
    text = "return value"
    *before, cut, _ = tokenizer_of(fn).encode(text, add_special_tokens=False).tokens
    assert len(cut) > 1, "which tokens there are depends on the docstrings of this Python"
    border = len("".join(before)) + 1
    rows = [
        {"messages": [user(text[:border]), assistant(text[border:])]},
        {"messages": [user("return"), assistant(" value")]},
    ]

    with DataLoader(str(jsonl_file(rows)), tokenize_fn=fn, shuffle=False, num_workers=0, epochs=1) as loader:
        samples = loader.get_next_batch(2)
        noted = loader.statistics().noted_total

    said = [
        tokenizer_of(fn).decode(each.tokens[each.labels != -100].tolist(), skip_special_tokens=False)
        for each in samples
    ]
    assert (said, noted) == ([f" value{END}", f" value{END}"], {"straddling_token": 1})


def test_a_token_across_the_end_of_a_block_is_not_trained_and_is_counted(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=ENDS_IN_A_WORD)
    assert "Ġvalue" in tokenizer_of(fn).encode("return value", add_special_tokens=False).tokens

    chunk = run(fn.open(), [{"messages": [user("a"), assistant(" return v")]}])

    assert trained_texts(chunk, tokenizer_of(fn)) == [[" return"]]
    assert notes(chunk)["straddling_token"] == [0]


def test_a_straddling_token_that_a_cut_took_away_is_not_counted(name: str) -> None:
    row = {"messages": [user("a"), assistant(" return value return v")]}
    whole = run(ChatTokenizeFn(name, chat_template=ENDS_IN_A_WORD).open(), [row])
    length = len(token_ids(whole)[0])

    def noted(max_length: int) -> Any:
        fn = ChatTokenizeFn(name, chat_template=ENDS_IN_A_WORD, max_length=max_length, overlong="truncate_right")
        return notes(run(fn.open(), [row])).get("straddling_token")

    assert [noted(max_length) for max_length in (length, length - 1, length - 2)] == [[0], [0], None]


def test_the_answers_of_a_pair_begin_with_the_token_that_has_the_space_before_them(metaspace_tokenizer: str) -> None:
    fn = PreferenceTokenizeFn(metaspace_tokenizer)

    chunk = run(fn.open(), [{"prompt": "the sky is ", "chosen": "blue here", "rejected": "nothing"}])

    (extra,) = (chunk.value("extra", number) for number in range(chunk.num_samples))
    ((start, _),) = extra["rejected_spans"]
    assert trained_texts(chunk, tokenizer_of(fn)) == [[" blue here</s>"]]
    assert tokenizer_of(fn).decode(extra["rejected_input_ids"][start:]) == " nothing"


def test_functions_whose_labels_are_others_now_have_another_fingerprint(name: str) -> None:
    def version(fn: Any) -> int:
        return type(fn).version

    assert version(ChatTokenizeFn(name)) == version(PreferenceTokenizeFn(name)) == 2
    assert version(PromptTokenizeFn(name)) == version(TextTokenizeFn(name)) == 1
