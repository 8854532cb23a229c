"""ChatTokenizeFn: which text of a chat is trained, and with which tokens."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn
from tests.support.chat_templates import WELL_KNOWN, plain
from tests.support.examples import each_value
from tests.support.tokenizers import CHAT, END, GENERATION, said
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.trained import (
    added_tokens,
    assistant,
    mask_of,
    outcome,
    talk,
    their_mask,
    tokenizer_of,
    trained,
    trained_texts,
    user,
    variant,
)

OVER = "<|endoftext|>"
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky", "how": [1]}}}
WITH_CALLS = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is defined %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As the templates of models that think: only the last turn keeps its thoughts, and always has a place for them.
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
# Every turn has a place for thoughts, that of earlier turns is empty; the prompt opens one.
KEEPS_A_PLACE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}{{ m.content }}
{%- elif m.thinking and loop.index0 > ns.last %}{{ '<think>\\n' + m.thinking + '\\n</think>\\n' + m.content }}
{%- else %}{{ '<think></think>' + m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# Thoughts are written after the last question only; the prompt has an empty place for them.
CLOSES_THE_PLACE = KEEPS_A_PLACE.replace("'<think></think>' + m.content", "m.content").replace(
    "'<|im_start|>assistant\\n<think>\\n'", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'"
)
# The next header is all that ends a turn.
ENDS_WITH_NOTHING = KEEPS_A_PLACE.replace("{{ '<|im_end|>\\n' }}", "").replace(
    "assistant\\n<think>\\n'", "assistant\\n'"
)
# Another token ends the last turn than ends those before; thoughts before a call are dropped once there is an answer.
CHANNELS = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user:' + m.content + '<|im_end|>' }}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call before it') }}{% endif %}
{{- '<|im_start|>tool:' + m.content + '<|im_end|>' }}
{%- elif m.tool_calls %}
{%- set ns = namespace(answer=false) %}
{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{% set ns.answer = true %}{% endif %}{% endfor %}
{%- if m.thinking and not ns.answer %}{{ '<|im_start|>assistant=thought:' + m.thinking + '<|im_end|>' }}{% endif %}
{{- '<|im_start|>assistant=call:' + m.tool_calls[0].function.name + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|im_start|>assistant=thought:' + m.thinking + '<|im_end|>' }}{% endif %}
{{- '<|im_start|>assistant=final:' + m.content + '<|endoftext|>' }}
{%- else %}{{ '<|im_start|>assistant=final:' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
# Tools, or what is like them, stand before the last question, and nothing asks for an answer.
WITHOUT_A_PROMPT = """\
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{{- ('[tools]' if m == asked[-1] else '') + '<|im_start|>' + m.content + '<|im_start|>' }}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"""
# A token ends each turn, and one more the chat.
ENDS_THE_CHAT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}LAST{% endif %}"""
TRAINS_WHAT_ENDS_THE_CHAT = ENDS_THE_CHAT.replace(
    "LAST",
    "{% elif messages[-1].role == 'assistant' %}{% generation %}<|endoftext|>{% endgeneration %}"
    "{% else %}<|endoftext|>",
)
LEAVES_OUT_WHAT_ENDS_THE_CHAT = ENDS_THE_CHAT.replace("LAST", "{% else %}<|endoftext|>")
LEAVES_OUT_THE_STOP = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|call|>' }}{% endgeneration %}{{ '<|endoftext|>' }}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
LENIENT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content or '' }}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes nothing where a turn has no content, and the reasoning if there is any."""
SEES = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] %}
{%- if part.type == 'image' or 'image' in part %}{{ '<|image_pad|>' }}
{%- elif part.type == 'thinking' %}{{ part.thinking }}{% elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As the template of a model that sees: text, or parts."""
WRITES_ALL = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As the template of a model of text, which writes whatever it is given."""
# The border lies in the middle of a word.
CUTS_WORDS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
ENDS_IN_A_WORD = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ m.content }}
{%- else %}{% generation %}{{ m.content }}{% endgeneration %}alue<|im_end|>{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def folders(small_tokenizer, tmp_path_factory):
    """With one more special token; by the token that ends a sequence, which need not be what ends a turn."""
    made = tmp_path_factory.mktemp("chat")
    more = {**added_tokens(small_tokenizer)[0], "id": 5000, "content": "<|call|>"}
    name = variant(small_tokenizer, made / "tokenizer", added_tokens=[*added_tokens(small_tokenizer), more])
    return {END: name, OVER: variant(Path(name), made / "end", config={"eos_token": OVER})}


@pytest.fixture
def name(folders):
    return folders[END]


def of_folders(folders: dict[str, str], eos: str = END, **settings: Any) -> ChatTokenizeFn:
    return ChatTokenizeFn(folders[eos], **settings)


def called(call: Any, content: Any = None) -> list[dict[str, Any]]:
    return [user("a"), assistant(content, tool_calls=[call]), {"role": "tool", "content": "x"}, assistant("b")]


def part(*texts: str) -> Any:
    return [{"type": "text", "text": text} for text in texts]


TRAP = f"<|im_start|>assistant\nfake{END}\n"
FIVE = talk("a", "b", "c", "d")
LOSSES = [user("a"), assistant("b", loss=False), user("c"), assistant("d", loss=True), assistant("e")]
THINKS = [user("a"), assistant("<think>hm</think>b"), user("c"), assistant("d", reasoning_content="so")]
SAME = [user("same"), assistant("same"), assistant("same"), user("same"), assistant("same")]
THOUGHT = assistant("", thinking="hm", tool_calls=[CALL])
RESULT = {"role": "tool", "content": "t"}
ENDS_OTHERWISE = {"eos": OVER, "chat_template": CHANNELS}
TRAINED: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "the last message alone": ({"train_on": "last_assistant"}, CHAT, [f"Nothing.{END}"]),
    "the last message of the assistant": ({"train_on": "last_assistant"}, [*CHAT, user("Thanks.")], [f"Nothing.{END}"]),
    "the whole chat but its first token, as TRL's default": ({"train_on": "all"}, talk("a", "b"),
        [f"user\na{END}\n<|im_start|>assistant\nb{END}\n"]),
    "the whole of a chat without an answer": ({"train_on": "all"}, [user("a")], [f"user\na{END}\n"]),
    "messages that say so": ({}, LOSSES, [f"d{END}", f"e{END}"]),
    "a loss of null": ({}, [{**user("a"), "loss": False}, assistant("b", loss=None)], [f"b{END}"]),
    "an empty answer": ({}, [assistant("Hi."), user("a"), assistant("")], [f"Hi.{END}", END]),
    "equal messages": ({}, SAME, [f"same{END}"] * 3),
    "text like the template": ({}, talk(TRAP, f"a{TRAP}", "b"), [f"a{TRAP}{END}"]),
    "text like a block": ({"chat_template": GENERATION}, talk(TRAP, f"a{TRAP}", "b"), [f"a{TRAP}{END}"]),
    "text like thoughts": ({"chat_template": WELL_KNOWN["thinks"]}, talk(TRAP, f"a{TRAP}", "b"), [f"a{TRAP}{END}"]),
    "messages that are JSON text": ({}, f"\n {json.dumps(talk('a', 'b'), indent=1)}", [f"b{END}"]),
    "characters of many tokens": ({}, talk("\U0001f600", "\U0001f1e9\U0001f1ea é 你好 e\u0301"),
                                  [f"\U0001f1e9\U0001f1ea é 你好 e\u0301{END}"]),
    "the template's own blocks": ({"chat_template": GENERATION}, CHAT, [f"Because.{END}", f"Nothing.{END}"]),
    "the last block": ({"chat_template": GENERATION, "train_on": "last_assistant"}, CHAT, [f"Nothing.{END}"]),
    "a part of a message as its block": (
        {"chat_template": GENERATION.replace(
            "{% generation %}{{ m.content", "{{ m.content[:-1] }}{% generation %}{{ m.content[-1:]"
        )}, CHAT, [f".{END}"] * 2,
    ),
    "thoughts that are dropped later": ({"chat_template": WELL_KNOWN["thinks"]}, THINKS,
        [f"b{END}", f"<think>\nso\n</think>\n\nd{END}"]),
    "no place for thoughts that the prompt has": (
        {"chat_template": WELL_KNOWN["thinks"], "chat_template_kwargs": {"enable_thinking": False}}, FIVE,
        [f"b{END}", f"d{END}"]),
    "a header that opens thoughts": ({"chat_template": OPENS_THINKING}, THINKS, [f"b{END}", f"d{END}"]),
    "words like that header": ({"chat_template": OPENS_THINKING}, talk("a[A]<think>\nb", "c"), [f"c{END}"]),
    "no generation prompt, and earlier turns that change": ({"chat_template": WITHOUT_A_PROMPT}, FIVE,
        [f"b{END}", f"d{END}"]),
    "a header that the model has to write, as no prompt has it": (
        {"chat_template": WITHOUT_A_PROMPT.replace("{{ m.content + '<|im_end", "{{ '[A]' + m.content + '<|im_end")},
        FIVE, [f"[A]b{END}", f"[A]d{END}"]),
    "every mark": ({}, talk("".join(map(chr, range(0xFDD0, 0xFDF0))), "a"), [f"a{END}"]),
    "a stop token that only the whole chat has": ({"chat_template": ENDS_ONCE}, talk("a", "b"), [f"b{END}"]),
    "white space, as no token ends the message": ({"chat_template": WITHOUT_STOP}, talk("a", "b", "c"), [" b\n"]),
    "parts of a content": ({"chat_template": plain(WELL_KNOWN["macro"])},
        talk(part("a", "b"), part("c", "d"), part("e"), part("f")), [f"cd{END}", f"f{END}"]),
    "calls without content": ({"chat_template": WITH_CALLS}, called(CALL), [f"<call>look</call>{END}", f"b{END}"]),
    "reasoning without content": ({"chat_template": LENIENT},
        [user("a"), {"role": "assistant", "reasoning_content": "Hm."}], [f"<think>Hm.</think>{END}"]),
    "an empty answer of a lenient template": ({"chat_template": LENIENT}, talk("a", ""), [END]),
    **{
        f"a content part, {json.dumps(part)}": ({"chat_template": SEES}, talk("a", [part]), [f"words{END}"])
        for part in [
            {"type": "text", "text": "words"}, {"text": "words"}, {"type": "output_text", "text": "words"},
            {"type": "thinking", "thinking": "words"},
            {"type": "text", "text": "words", "cache_control": {"type": "ephemeral"}},
        ]
    },
    "the stop token, not what ends past turns": (ENDS_OTHERWISE,
        [user("a"), assistant("b", thinking="hm"), user("c"), assistant("d", thinking="so")],
        ["=final:b", f"=thought:so{END}<|im_start|>assistant=final:d{OVER}"]),
    "a call with its thoughts": (ENDS_OTHERWISE, [user("a"), THOUGHT, RESULT],
        [f"=thought:hm{END}<|im_start|>assistant=call:look<|call|>"]),
    "a call whose thoughts are dropped": (ENDS_OTHERWISE, [user("a"), THOUGHT, RESULT, assistant("b")],
        ["=call:look<|call|>", f"=final:b{OVER}"]),
    "what ends the chat as a separate block": ({"eos": OVER, "chat_template": TRAINS_WHAT_ENDS_THE_CHAT}, FIVE,
        [f"b{END}\n", f"d{END}\n{OVER}"]),
    "the last block and what ends the chat": (
        {"eos": OVER, "chat_template": TRAINS_WHAT_ENDS_THE_CHAT, "train_on": "last_assistant"}, FIVE,
        [f"d{END}\n{OVER}"]),
    "not what ends the chat, as each block has a stop token": (
        {"eos": OVER, "chat_template": LEAVES_OUT_WHAT_ENDS_THE_CHAT}, FIVE, [f"b{END}\n", f"d{END}\n"]),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "chat", "texts"), TRAINED.values(), ids=TRAINED)
def test_exactly_this_is_trained(folders, settings, chat, texts):
    fn = of_folders(folders, **settings)

    for _ in range(3):  # a shape is proven when it comes again
        assert trained(fn, {"messages": chat}) == texts


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_tools_go_to_the_template(name, tools):
    fn = ChatTokenizeFn(name, chat_template=WITH_CALLS, tool_key="functions")

    chunk = run(fn.open(), [{"messages": CHAT, "functions": tools, "tools": "not looked at"}])

    assert json.dumps(TOOL) in tokenizer_of(fn).decode(token_ids(chunk)[0])


def test_a_row_with_nothing_to_train_on_is_dropped_and_counted(name):
    chats = [CHAT, [user("a")], [], [assistant("a", loss=False)]]

    chunk = run(ChatTokenizeFn(name).open(), [{"messages": chat} for chat in chats])

    assert (chunk.num_samples, drops(chunk), faults(chunk)) == (1, {"no_trained_tokens": [1, 2, 3]}, [])


# Blocks that neither prefixes nor a mark tell of, in templates of the shape that recent models have


@pytest.mark.parametrize(
    ("template", "past", "last", "end"),
    [
        (KEEPS_A_PLACE, "<think></think>", "so\n</think>\nf", END),
        (CLOSES_THE_PLACE, "", "<think>\nso\n</think>\nf", END),
        (ENDS_WITH_NOTHING, "<think></think>", "<think>\nso\n</think>\nf", ""),
    ],
    ids=["keeps a place", "closes the place", "ends with nothing"],
)
def test_a_turn_that_parts_from_its_prompt_is_trained_from_there(name, template, past, last, end):
    chat = talk("a", "b", "c", "d", "e", "f", "g")
    chat[1]["thinking"], chat[5]["thinking"] = "hm", "so"
    fn = ChatTokenizeFn(name, chat_template=template)

    assert trained(fn, {"messages": chat[:4]}) == [f"{past}b{end}", f"{past}d{end}"]
    assert trained(fn, {"messages": chat[:6]}) == [f"{past}b{end}", f"{past}d{end}", f"{last}{end}"]
    assert trained(fn, {"messages": chat}) == [f"{past}b{end}", f"{past}d{end}", f"{past}f{end}"]


DEPENDS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + HEADER + '\\n' }}
{{- (m.content or '') + BEHIND + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}!{% endif %}"""
CALLS = "((messages[loop.index0 - 1].tool_calls or []) | length | string if m.role == 'tool' else '')"
AND_MORE = [*called(CALL, "b")[:3], user("d"), assistant("e")]
POSITION = "the position of messages[{}]"
MARKS = talk("".join(map(chr, range(0xFDD0, 0xFDF0))), "a")
REFUSED: dict[str, tuple[str, Any, str]] = {
    "the stop token after the block": (
        GENERATION.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|im_end|>"), CHAT,
        f"the chat template writes the stop token '{END}' after {{% endgeneration %}}"),
    "a stop token after a block that ends with another token": (LEAVES_OUT_THE_STOP, talk("a", "b"),
        f"writes the stop token '{OVER}' after {{% endgeneration %}}"),
    "a changed block": ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", CHAT,
        "changes the text of its {% generation %} blocks"),
    "too few blocks": ("{% generation %}a{% endgeneration %}", CHAT, "has 1 {% generation %} blocks for 2 messages"),
    "every mark in a chat with blocks": (GENERATION, MARKS, ""),
    "earlier turns that change": (SHOUTS_AT_THE_END, CHAT, "renders earlier turns differently when the chat grows"),
    "one end": (ENDS_ONCE, CHAT, f"{POSITION.format(2)} in the text is unknown"),
    "backwards": (BACKWARDS, CHAT, f"{POSITION.format(4)} in the text is unknown"),
    "backwards, with places for thoughts": (
        KEEPS_A_PLACE.replace("for m in messages %}{{", "for m in messages | reverse %}{{"), FIVE,
        "TRL has such training templates for many models (get_training_chat_template)"),
    "a later message that depends on it": (DEPENDS.replace("HEADER", "''").replace("BEHIND", CALLS), AND_MORE,
        POSITION.format(1)),
    "a header that depends on it": (
        DEPENDS.replace("HEADER", "(' calls' if m.tool_calls else '')").replace("BEHIND", "''"), AND_MORE,
        POSITION.format(1)),
    "a header that is cut": (OPENS_THINKING.replace("'[A]' +", "'[A' + (' calls' if m.tool_calls else '') + ']' +"),
        AND_MORE, POSITION.format(1)),
}  # fmt: skip


@pytest.mark.parametrize(("template", "chat", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_does_not_show_the_assistants_text_is_refused_and_not_guessed(folders, template, chat, reason):
    train_on = "last_assistant" if "has 1" in reason else "assistant"
    fn = of_folders(folders, OVER if OVER in template else END, chat_template=template, train_on=train_on)

    chunk = run(fn.open(), [{"messages": chat}])

    assert faults(chunk) == [(0, "AD414")]
    assert reason in chunk.errors[0].reason


def test_a_refusal_names_the_template(small_tokenizer, tmp_path):
    named = {"chat_template": [{"name": "loud", "template": SHOUTS_AT_THE_END}]}
    folder = variant(small_tokenizer, tmp_path / "named", config=named)

    chunk = run(ChatTokenizeFn(folder, chat_template="loud").open(), [{"messages": CHAT}])

    assert chunk.errors[0].reason.startswith("chat template 'loud' renders earlier turns differently")


@pytest.mark.thorough
def test_a_template_without_a_stop_token_is_warned_of_once_and_its_rows_are_counted(name, tmp_path):
    def warnings(template: str, *more: str) -> tuple[list[Any], dict[str, int]]:
        rows = [{"messages": talk("a", f"b{number}", *more)} for number in range(100)]
        found = outcome(tmp_path, ChatTokenizeFn(name, chat_template=template), *rows, shuffle=True)
        return found.of("chat.no_stop_token") + found.of("chat.answer_without_stop"), found.statistics.noted_total

    (warning,), noted = warnings(ENDS_WITH_NOTHING)

    assert (warning["log_level"], noted) == ("warning", {"no_stop_token": 100})
    assert "pass chat_template= with the stop token inside {% generation %}" in warning["reason"]
    assert warnings(KEEPS_A_PLACE) == warnings(KEEPS_A_PLACE, "c", "d") == warnings(CHANNELS) == ([], {})

    (warning,), noted = warnings(CHANNELS, "c", "d")

    assert (warning["event"], warning["log_level"]) == ("chat.answer_without_stop", "warning")
    assert noted == {"answer_without_stop": 100}


def codes(name: str, template: str, *chats: Any) -> list[tuple[int, str]]:
    """The bad rows among chats; they are the same as prompts."""
    found = faults(run(ChatTokenizeFn(name, chat_template=template).open(), [{"messages": chat} for chat in chats]))
    prompts = PromptTokenizeFn(name, apply_chat_template=True, chat_template=template)
    assert faults(run(prompts.open(), [{"input": chat} for chat in chats])) == found
    return found


WITHOUT_CONTENT = [
    {"role": "assistant", "text": "Yes."},
    {"role": "assistant"},
    assistant(None),
    assistant(None, text="Yes."),
    assistant(None, tool_calls=[CALL]),  # which the template does not write
    {"role": "assistant", "content": [], "tool_calls": []},
    {"role": "user", "text": "Why?"},
]


@pytest.mark.parametrize("turn", WITHOUT_CONTENT, ids=str)
def test_a_turn_without_content_makes_a_bad_row_unless_it_is_a_tools(name, turn):
    tool = [user("a"), assistant("b"), {"role": "tool", "name": "look", "content": None}, assistant("c")]

    assert codes(name, LENIENT, tool, *[[user("a"), turn, assistant("b")]] * 40) == [
        (number, "AD132") for number in range(1, 41)
    ]


def test_what_a_turn_without_content_has_is_named_and_a_tool_may_return_anything(name):
    row = {"messages": [user("Why?"), {"role": "assistant", "text": "Yes."}]}
    template = WRITES_ALL.replace("~ m.content ~", "~ (m.content if m.content is string else m.content | tojson) ~")
    results = [[{"name": "look", "value": 1}], [1, 2], {"more": None}]

    (error,) = run(ChatTokenizeFn(name, chat_template=LENIENT).open(), [row]).errors

    assert error.reason == "'messages'[1] has no 'content', and the template writes nothing of its 'text'"
    assert codes(name, template, *([*talk("a", "b"), {**RESULT, "content": each}] for each in results)) == []


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        (WRITES_ALL, {"type": "text", "text": "words"}),
        (SEES, {"type": "refusal", "refusal": "No."}),
        (SEES, {"type": "text", "content": "words"}),
        (SEES, {"type": "text", "text": "words", "image": None}),
        (SEES, {"more": 1}),
    ],
)
def test_a_content_part_that_the_template_does_not_write_as_text_makes_a_bad_row(name, template, unread):
    assert codes(name, template, CHAT, *[talk([unread], "a")] * 4) == [(number, "AD131") for number in range(1, 5)]


def test_a_token_of_a_word_of_both_sides_is_not_trained_and_is_counted(name, tmp_path):
    fn, text = ChatTokenizeFn(name, chat_template=CUTS_WORDS), "return value"
    *before, cut, last = tokenizer_of(fn).encode(text, add_special_tokens=False).tokens
    assert len(cut) > 1, "which tokens there are depends on the docstrings of this Python"
    assert last == "Ġvalue"
    border = len("".join(before)) + 1  # within the token before the last
    rows = [{"messages": talk(text[:border], text[border:])}, {"messages": talk("return", " value")}]

    found = outcome(tmp_path, fn, *rows)

    ids = [each.tokens[each.labels != -100].tolist() for each in found.samples]
    texts = [tokenizer_of(fn).decode(each, skip_special_tokens=False) for each in ids]
    assert (texts, found.statistics.noted_total) == ([f" value{END}"] * 2, {"straddling_token": 1})


def test_a_straddling_token_that_a_cut_took_away_is_not_counted(name):
    row = {"messages": talk("a", " return value return v")}
    assert "Ġvalue" in tokenizer_of(ChatTokenizeFn(name)).encode("return value", add_special_tokens=False).tokens
    whole = run(ChatTokenizeFn(name, chat_template=ENDS_IN_A_WORD).open(), [row])
    length = len(token_ids(whole)[0])

    def noted(max_length: int) -> Any:
        fn = ChatTokenizeFn(name, chat_template=ENDS_IN_A_WORD, max_length=max_length, overlong="truncate_right")
        return notes(run(fn.open(), [row])).get("straddling_token")

    assert trained_texts(whole, tokenizer_of(ChatTokenizeFn(name))) == [[" return value return"]]
    assert [noted(max_length) for max_length in (length, length - 1, length - 2)] == [[0], [0], None]


def test_a_space_that_a_post_processor_hides_belongs_to_its_token(small_tokenizer, tmp_path):
    post_processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    folder = variant(small_tokenizer, tmp_path / "trimming", post_processor=post_processor)
    template = ENDS_IN_A_WORD.replace("alue", "value")

    chunk = run(ChatTokenizeFn(folder, chat_template=template).open(), [{"messages": talk("a", " b ")}])

    # The space is the assistant's, and "value" is not, so that the token of " value" straddles the border.
    assert trained_texts(chunk, tokenizer_of(ChatTokenizeFn(folder))) == [[" b"]]
    assert notes(chunk)["straddling_token"] == [0]


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}], ids=str)
def test_a_stop_token_that_absorbs_the_white_space_beside_it_is_trained(small_tokenizer, tmp_path, flags):
    stripping = added_tokens(small_tokenizer, **flags)
    folder = variant(
        small_tokenizer, tmp_path / "stripping", added_tokens=stripping, config={"added_tokens_decoder": {}}
    )

    for last in ("Nothing.", "Rien, é."):
        texts = trained(ChatTokenizeFn(folder), {"messages": [*CHAT[:-1], assistant(last)]})
        assert texts == [f"Because.{END}", f"{last}{END}"]


def test_text_that_is_normalized_is_trained_whole(small_tokenizer, tmp_path):
    folder = variant(small_tokenizer, tmp_path / "nfc", normalizer={"type": "NFC"})
    answer = "e\u0301 caf\u00e9 e\u0301"

    texts = trained(ChatTokenizeFn(folder), {"messages": talk("e\u0301", answer, "e\u0301")})

    assert texts == [unicodedata.normalize("NFC", answer) + END]


# As templates of Llama's kind: a space, which is no part of the block, and the reply. Its stop token is in the block.
INSTRUCTS = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST] ' }}
{%- else %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}"""
WORDS = "yes no it is far near the sky looks blue here and there nothing else was found when we asked".split()
REPLIES = [f"{' '.join(WORDS[start : start + 4])}." for start in range(0, len(WORDS) - 4, 2)]


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
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


@pytest.mark.filterwarnings("ignore")
def test_the_first_word_of_a_reply_is_trained_where_its_token_begins_with_the_space_before_it(metaspace):
    fn = ChatTokenizeFn(metaspace)
    chats = [talk("why", reply, "no", reply[::-1]) for reply in REPLIES]

    chunk = run(fn.open(), [{"messages": chat} for chat in chats])

    assert notes(chunk) == {}
    for number, (chat, reply) in enumerate(zip(chats, REPLIES, strict=True)):
        theirs = their_mask(metaspace, chat)
        assert trained_texts(chunk, tokenizer_of(fn))[number][0] == f" {reply}</s>"
        assert token_ids(chunk)[number] == theirs["input_ids"]
        assert mask_of(chunk, number) == theirs["assistant_masks"]


def test_the_answers_of_a_pair_begin_with_the_token_that_has_the_space_before_them(metaspace):
    fn = PreferenceTokenizeFn(metaspace)

    chunk = run(fn.open(), [{"prompt": "the sky is ", "chosen": "blue here", "rejected": "nothing"}])

    (extra,) = values(chunk, "extra")
    ((start, _),) = extra["rejected_spans"]
    assert trained_texts(chunk, tokenizer_of(fn)) == [[" blue here</s>"]]
    assert tokenizer_of(fn).decode(extra["rejected_input_ids"][start:]) == " nothing"


@pytest.fixture
def word_tokenizer(tmp_path):
    """Words, and no token for white space: a block that ends on some has no token there."""
    words = ["[UNK]", "U", "A", ":", "why", "how", "so", "thus", "when"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_span_ends_with_its_block_where_that_of_transformers_runs_to_the_end(word_tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content + '\\n' }}"
        "{% endgeneration %}{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    chat = talk("why", "so", "how", "thus", "when")

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
def test_in_real_chats_exactly_the_assistants_text_is_trained(test_data, tokenizer, template):
    folder = test_data / "tokenizers" / tokenizer
    marked = (test_data / "tokenizers" / "qwen2-bpe-151k" / "chat_template_generation.jinja").read_text()
    fn = ChatTokenizeFn(str(folder), chat_template=marked if template == "generation" else None)
    lines = (test_data / "chat_sft" / "chat_sft.jsonl").read_bytes().splitlines()

    chunk = run(fn.open(), lines)

    assert (chunk.num_samples, drops(chunk), faults(chunk)) == (912, {}, [])
    for row, texts in zip(map(json.loads, lines), trained_texts(chunk, tokenizer_of(fn)), strict=True):
        wanted = [said(message) for message in row["messages"] if message["role"] == "assistant"]
        if tokenizer.startswith("qwen2"):  # it normalizes all text
            wanted = [unicodedata.normalize("NFC", text) for text in wanted]
        assert texts == wanted
