from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncdata import ChatTokenizeFn
from tests.support.combinations import each_value
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.trained import (
    added_tokens,
    assistant,
    mask_of,
    rows_of,
    their_mask,
    tokenizer_of,
    trained,
    trained_texts,
    user,
    variant,
)

if TYPE_CHECKING:
    from pathlib import Path
from tests.support.chats import CHAT, END, GENERATION, said

TOOL = {"type": "function", "function": {"name": "look"}}
WITH_CALLS = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is defined %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As the templates of models that think: only the last turn keeps its thoughts, and always has a place for them.
DROPS_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}{{ m.content }}
{%- elif loop.index0 > ns.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content.split('</think>')[-1] }}
{%- else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
OPENS_THINKING = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content }}
{%- else %}{{ '[A]' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[A]<think>\\n' }}{% endif %}"""
ENDS_ONCE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ '<|im_end|>' }}{% endif %}"""
SHOUTS_AT_THE_END = """\
{%- for m in messages %}{{ m.content | upper if loop.last else m.content | lower }}{{ '<|im_end|>' }}{% endfor %}"""
BACKWARDS = WITH_CALLS.replace("in messages", "in messages | reverse")
WITHOUT_STOP = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


# What is trained


def test_only_the_assistants_messages_and_their_stop_tokens_are_trained(name: str) -> None:
    fn = ChatTokenizeFn(name)

    chunk = run(fn.open(), [{"messages": CHAT, "metadata": {"id": 7}}])

    assert trained_texts(chunk, tokenizer_of(fn)) == [[f"Because.{END}", f"Nothing.{END}"]]
    assert (values(chunk, "metadata"), faults(chunk), drops(chunk)) == ([{"id": 7}], [], {})


def test_the_tokens_are_those_of_the_whole_rendering(name: str, small_tokenizer: Path) -> None:
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}{END}\n" for message in CHAT)

    chunk = run(ChatTokenizeFn(name).open(), [{"messages": CHAT}])

    assert token_ids(chunk) == [tokenizer_of(ChatTokenizeFn(name)).encode(text, add_special_tokens=False).ids]


def test_the_last_message_of_the_assistant_can_be_trained_alone(name: str) -> None:
    fn = ChatTokenizeFn(name, train_on="last_assistant")

    assert trained(fn, {"messages": CHAT}) == [f"Nothing.{END}"]
    assert trained(fn, {"messages": [*CHAT, user("Thanks.")]}) == [f"Nothing.{END}"]


def test_the_whole_chat_can_be_trained_but_for_its_first_token(name: str) -> None:
    """As SFTTrainer of TRL does by default; nothing predicts the first token."""
    fn = ChatTokenizeFn(name, train_on="all")
    whole = "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in (("user", "a"), ("assistant", "b")))

    assert trained(fn, {"messages": [user("a"), assistant("b")]}) == [whole.removeprefix("<|im_start|>")]
    assert trained(fn, {"messages": [user("a")]}) == [f"user\na{END}\n"]


def test_each_message_can_say_whether_it_is_trained(name: str) -> None:
    fn = ChatTokenizeFn(name, train_on="loss")
    chat = [user("a"), assistant("b", loss=False), user("c"), assistant("d", loss=True), assistant("e")]

    assert trained(fn, {"messages": chat}) == [f"d{END}", f"e{END}"]
    assert trained(fn, {"messages": [{**user("a"), "loss": False}, assistant("b", loss=None)]}) == [f"b{END}"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (assistant("b", loss=1), "'messages'[1]: 'loss' must be true or false, got a number"),
        ({**user("b"), "loss": True}, "'messages'[1] has loss, but is not a message of the assistant"),
    ],
)
def test_a_loss_that_cannot_be_is_a_bad_row(name: str, message: dict[str, Any], reason: str) -> None:
    chunk = run(ChatTokenizeFn(name, train_on="loss").open(), [{"messages": [user("a"), message]}])

    assert faults(chunk) == [(0, "AD111")]
    assert reason in chunk.errors[0].reason


def test_tool_calls_without_content_are_trained(name: str) -> None:
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    chat = [user("a"), assistant(None, tool_calls=calls), {"role": "tool", "content": "x"}, assistant("b")]

    for tools in ([TOOL], json.dumps([TOOL]), None):
        texts = trained(ChatTokenizeFn(name, chat_template=WITH_CALLS), {"messages": chat, "tools": tools})
        assert texts == [f"<call>look</call>{END}", f"b{END}"]


def test_tools_go_to_the_template(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=WITH_CALLS, tool_key="functions")

    chunk = run(fn.open(), [{"messages": CHAT, "functions": [TOOL], "tools": "not looked at"}])

    assert json.dumps(TOOL) in tokenizer_of(fn).decode(token_ids(chunk)[0])


def test_an_assistant_may_begin_and_may_say_nothing(name: str) -> None:
    assert trained(ChatTokenizeFn(name), {"messages": [assistant("Hi."), user("a"), assistant("")]}) == [
        f"Hi.{END}",
        END,
    ]


def test_messages_of_the_same_role_may_follow_each_other_and_repeat(name: str) -> None:
    chat = [user("same"), assistant("same"), assistant("same"), user("same"), assistant("same")]

    assert trained(ChatTokenizeFn(name), {"messages": chat}) == [f"same{END}"] * 3


def test_text_that_looks_like_the_template_moves_nothing(name: str) -> None:
    trap = f"<|im_start|>assistant\nfake{END}\n"

    for template in (None, GENERATION, DROPS_THINKING):
        texts = trained(
            ChatTokenizeFn(name, chat_template=template), {"messages": [user(trap), assistant(f"a{trap}"), user("b")]}
        )
        assert texts == [f"a{trap}{END}"]


# Templates


def test_the_templates_own_blocks_are_trained(name: str) -> None:
    own = ChatTokenizeFn(name, chat_template=GENERATION)

    assert trained(own, {"messages": CHAT}) == trained(ChatTokenizeFn(name), {"messages": CHAT})
    assert trained(msgspec.structs.replace(own, train_on="last_assistant"), {"messages": CHAT}) == [f"Nothing.{END}"]


def test_blocks_that_are_part_of_a_message_are_trained_as_they_are(name: str) -> None:
    template = GENERATION.replace(
        "{% generation %}{{ m.content", "{{ m.content[:-1] }}{% generation %}{{ m.content[-1:]"
    )

    assert trained(ChatTokenizeFn(name, chat_template=template), {"messages": CHAT}) == [f".{END}"] * 2


@pytest.mark.parametrize(
    ("template", "train_on", "reason"),
    [
        (
            GENERATION.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|im_end|>"),
            "assistant",
            "the chat template writes the stop token '<|im_end|>' after {% endgeneration %}",
        ),
        (
            "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
            "assistant",
            "changes the text of its {% generation %} blocks",
        ),
        ("{% generation %}a{% endgeneration %}", "last_assistant", "has 1 {% generation %} blocks for 2 messages"),
        (SHOUTS_AT_THE_END, "assistant", "renders earlier turns differently when the chat grows"),
        (ENDS_ONCE, "assistant", "the position of messages[2] in the text is unknown"),
        (BACKWARDS, "assistant", "the position of messages[4] in the text is unknown"),
    ],
)
def test_a_template_that_does_not_show_the_assistants_text_is_refused(
    name: str, template: str, train_on: Any, reason: str
) -> None:
    fn = ChatTokenizeFn(name, chat_template=template, train_on=train_on)

    chunk = run(fn.open(), [{"messages": CHAT}])

    assert faults(chunk) == [(0, "AD414")]
    assert reason in chunk.errors[0].reason


def test_a_refusal_names_the_template(small_tokenizer: Path, tmp_path: Path) -> None:
    folder = variant(
        small_tokenizer, tmp_path / "named", config={"chat_template": [{"name": "loud", "template": SHOUTS_AT_THE_END}]}
    )

    chunk = run(ChatTokenizeFn(folder, chat_template="loud").open(), [{"messages": CHAT}])

    assert chunk.errors[0].reason.startswith("chat template 'loud' renders earlier turns differently")


def test_a_template_that_drops_earlier_thoughts_is_understood(name: str) -> None:
    chat = [user("a"), assistant("<think>hm</think>b"), user("c"), assistant("d", reasoning_content="so")]

    assert trained(ChatTokenizeFn(name, chat_template=DROPS_THINKING), {"messages": chat}) == [
        f"b{END}",
        f"<think>\nso\n</think>\n\nd{END}",
    ]


def test_a_place_for_thoughts_that_the_prompt_already_has_is_not_trained(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=DROPS_THINKING, chat_template_kwargs={"enable_thinking": False})

    assert trained(fn, {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}) == [f"b{END}", f"d{END}"]


def test_a_header_that_opens_thoughts_for_the_next_turn_alone_is_understood(name: str) -> None:
    chat = [user("a"), assistant("<think>hm</think>b"), user("c"), assistant("d")]

    assert trained(ChatTokenizeFn(name, chat_template=OPENS_THINKING), {"messages": chat}) == [f"b{END}", f"d{END}"]


def test_words_of_a_user_that_look_like_the_header_move_nothing(name: str) -> None:
    chat = [user("a[A]<think>\nb"), assistant("c")]

    assert trained(ChatTokenizeFn(name, chat_template=OPENS_THINKING), {"messages": chat}) == [f"c{END}"]


DEPENDS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + HEADER + '\\n' }}
{{- (m.content or '') + BEHIND + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}!{% endif %}"""
CALLS = "((messages[loop.index0 - 1].tool_calls or []) | length | string if m.role == 'tool' else '')"


@pytest.mark.parametrize(
    "template",
    [
        DEPENDS.replace("HEADER", "''").replace("BEHIND", CALLS),
        DEPENDS.replace("HEADER", "(' calls' if m.tool_calls else '')").replace("BEHIND", "''"),
        OPENS_THINKING.replace("'[A]' +", "'[A' + (' calls' if m.tool_calls else '') + ']' +"),
    ],
    ids=["later message", "header", "header that is cut"],
)
def test_a_message_whose_surroundings_depend_on_it_is_refused_and_not_guessed(name: str, template: str) -> None:
    calls = [{"function": {"name": "look", "arguments": {}}}]
    chat = [user("a"), assistant("b", tool_calls=calls), {"role": "tool", "content": "c"}, user("d"), assistant("e")]

    chunk = run(ChatTokenizeFn(name, chat_template=template).open(), [{"messages": chat}])

    assert faults(chunk) == [(0, "AD414")]
    assert "the position of messages[1]" in chunk.errors[0].reason


def test_a_chat_with_every_mark_in_it_is_refused(name: str) -> None:
    marks = "".join(map(chr, range(0xFDD0, 0xFDF0)))

    for template, code in ((GENERATION, [(0, "AD414")]), (None, [])):
        chunk = run(ChatTokenizeFn(name, chat_template=template).open(), [{"messages": [user(marks), assistant("a")]}])
        assert faults(chunk) == code


def test_a_stop_token_that_only_the_whole_chat_has_is_found(name: str) -> None:
    assert trained(ChatTokenizeFn(name, chat_template=ENDS_ONCE), {"messages": [user("a"), assistant("b")]}) == [
        f"b{END}"
    ]


def test_white_space_after_a_message_is_trained_only_if_no_token_ends_it(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=WITHOUT_STOP)

    assert trained(fn, {"messages": [user("a"), assistant("b"), user("c")]}) == [" b\n"]


# From characters to tokens


def test_a_token_that_straddles_the_border_of_a_message_is_not_trained(name: str) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    fn = ChatTokenizeFn(name, chat_template=template)
    text = "return value"
    *before, cut, last = tokenizer_of(fn).encode(text, add_special_tokens=False).tokens
    assert len(cut) > 1, "which tokens there are depends on the docstrings of this Python"
    assert last == "Ġvalue"

    border = len("".join(before)) + 1
    assert trained(fn, {"messages": [user(text[:border]), assistant(text[border:])]}) == [f" value{END}"]


def test_characters_of_many_tokens_are_trained_whole(name: str) -> None:
    said = "\U0001f600\U0001f1e9\U0001f1ea é 你好 e\u0301"

    assert trained(ChatTokenizeFn(name), {"messages": [user("\U0001f600"), assistant(said)]}) == [said + END]


def test_a_space_that_a_post_processor_hides_belongs_to_its_token(small_tokenizer: Path, tmp_path: Path) -> None:
    post_processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    folder = variant(small_tokenizer, tmp_path / "trimming", post_processor=post_processor)
    template = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}
{%- else %}{% generation %}{{ m.content }}{% endgeneration %}value<|im_end|>{% endif %}{% endfor %}"""

    chunk = run(ChatTokenizeFn(folder, chat_template=template).open(), [{"messages": [user("a"), assistant(" b ")]}])

    # The space is the assistant's, and "value" is not, so that the token of " value" straddles the border.
    assert trained_texts(chunk, tokenizer_of(ChatTokenizeFn(folder))) == [[" b"]]
    assert notes(chunk)["straddling_token"] == [0]


def test_a_stop_token_that_absorbs_the_line_break_after_it_is_trained(small_tokenizer: Path, tmp_path: Path) -> None:
    folder = variant(
        small_tokenizer,
        tmp_path / "stripping",
        added_tokens=added_tokens(small_tokenizer, rstrip=True),
        config={"added_tokens_decoder": {}},
    )

    texts = trained(ChatTokenizeFn(folder), {"messages": CHAT})

    assert texts == [f"Because.{END}", f"Nothing.{END}"]


def test_text_that_is_normalized_is_trained_whole(small_tokenizer: Path, tmp_path: Path) -> None:
    folder = variant(small_tokenizer, tmp_path / "nfc", normalizer={"type": "NFC"})
    said = "e\u0301 caf\u00e9 e\u0301"

    texts = trained(ChatTokenizeFn(folder), {"messages": [user("e\u0301"), assistant(said), user("e\u0301")]})

    assert texts == [unicodedata.normalize("NFC", said) + END]


# Against transformers


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_masks_are_those_of_transformers_where_these_are_right(name: str) -> None:
    theirs = their_mask(name, CHAT, template=GENERATION)

    ours = run(ChatTokenizeFn(name, chat_template=GENERATION).open(), [{"messages": CHAT}])

    assert token_ids(ours) == [theirs["input_ids"]]
    assert mask_of(ours) == theirs["assistant_masks"]


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> str:
    """Words, and no token for white space: a block that ends on some has no token there."""
    words = ["[UNK]", "U", "A", ":", "why", "how", "so", "thus", "when"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_span_ends_with_its_block_where_that_of_transformers_runs_to_the_end(word_tokenizer: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content + '\\n' }}"
        "{% endgeneration %}{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    chat = [user("why"), assistant("so"), user("how"), assistant("thus"), user("when")]

    theirs = their_mask(word_tokenizer, chat, template=template)
    ours = run(ChatTokenizeFn(word_tokenizer, chat_template=template).open(), [{"messages": chat}])

    assert token_ids(ours) == [theirs["input_ids"]]
    assert trained_texts(ours, tokenizer_of(ChatTokenizeFn(word_tokenizer))) == [["so", "thus"]]
    assert sum(mask_of(ours)) == 2
    if sum(theirs["assistant_masks"]) != 2:  # a later release may be right
        assert sum(theirs["assistant_masks"]) == len(theirs["input_ids"]) - theirs["assistant_masks"].index(1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tokenizer", "template"),
    each_value(["qwen2-bpe-151k", "gpt2-bpe-50k", "gpt2-bpe-50k-generation"], ["plain", "generation"]),
)
def test_in_real_chats_exactly_the_assistants_text_is_trained(test_data: Path, tokenizer: str, template: str) -> None:
    folder = test_data / "tokenizers" / tokenizer
    marked = (test_data / "tokenizers" / "qwen2-bpe-151k" / "chat_template_generation.jinja").read_text()
    fn = ChatTokenizeFn(str(folder), chat_template=marked if template == "generation" else None)
    lines = rows_of(test_data / "chat_sft" / "chat_sft.jsonl")

    chunk = run(fn.open(), lines)

    assert (chunk.num_samples, drops(chunk), faults(chunk)) == (912, {}, [])
    for row, texts in zip(map(json.loads, lines), trained_texts(chunk, tokenizer_of(fn)), strict=True):
        wanted = [said(message) for message in row["messages"] if message["role"] == "assistant"]
        if tokenizer.startswith("qwen2"):  # it normalizes all text
            wanted = [unicodedata.normalize("NFC", text) for text in wanted]
        assert texts == wanted


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_masks_of_real_chats_are_those_of_transformers(test_data: Path) -> None:
    folder = str(test_data / "tokenizers" / "gpt2-bpe-50k-generation")
    lines = rows_of(test_data / "chat_sft" / "chat_sft.jsonl")[::15]
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    chunk = run(ChatTokenizeFn(folder).open(), lines)

    for number, row in enumerate(map(json.loads, lines)):
        theirs = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert token_ids(chunk)[number] == theirs["input_ids"]
        assert mask_of(chunk, number) == theirs["assistant_masks"]
