"""Blocks found in a template's text, what is proven of templates, and rows in bulk, against what each is by itself."""

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncdata import ChatTokenizeFn, PromptTokenizeFn
from tests.support.chat_templates import ODD, SPECIAL, WELL_KNOWN, plain
from tests.support.examples import in_ci
from tests.support.parts import ChatSpans, ChatTemplate, Program, RowFault
from tests.support.tokenizers import GENERATION
from tests.unit.tokenization import outcomes, run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy

START, STOP = "<|start|>", "<|stop|>"

# (( and )) stand for what is trained. They become {% generation %} and {% endgeneration %}, or nothing.
PLAIN = """\
{%- for m in messages %}{{ '<|start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}((
{{- m.content + '<|stop|>' }})){% else %}{{ m.content + '<|stop|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
TRIMS = PLAIN.replace("m.content", "(m.content | trim)")
WITHOUT_HEADER = """\
{%- for m in messages %}{% if m.role == 'assistant' %}(({{ m.content + '<|stop|>' }}))
{%- else %}{{ '<|start|>' + m.content + '<|start|>' }}{% endif %}{% endfor %}"""
DROPS_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}{{ m.content + '<|stop|>' }}
{%- elif loop.index0 > ns.last %}(({{ '<think>\\n\\n</think>\\n\\n' + m.content.split('</think>')[-1] + '<|stop|>' }}))
{%- else %}(({{ m.content.split('</think>')[-1] + '<|stop|>' }})){% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
OPENS_THINKING = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|start|>' + m.content }}
{%- else %}{{ '<|A|>' }}(({{ m.content.split('</think>')[-1] + '<|stop|>' }})){% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|A|><open>\\n' }}{% endif %}"""
ENDS_MARKED = PLAIN.replace("\n{%- if add", "{% if not add_generation_prompt %}{{ '<|over|>' }}{% endif %}\n{%- if add")

KEEPS_A_PLACE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}{{ m.content + '<|stop|>' }}
{%- elif loop.index0 > ns.last and '</think>' in m.content %}{{ '<think>\\n' }}(({{ m.content + '<|stop|>' }}))
{%- else %}(({{ '<think></think>' + m.content.split('</think>')[-1] + '<|stop|>' }})){% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n<think>\\n' }}{% endif %}"""
OTHERWISE_AT_THE_END = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|start|>user:' + m.content + '<|stop|>' }}
{%- elif loop.last and not add_generation_prompt %}{{ '<|start|>assistant' }}(({{ ':' + m.content + '<|over|>' }}))
{%- else %}{{ '<|start|>assistant' }}(({{ ':' + m.content }})){{ '<|stop|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

TEMPLATES = {
    "plain": PLAIN, "trims": TRIMS, "without header": WITHOUT_HEADER, "drops thinking": DROPS_THINKING,
    "opens thinking": OPENS_THINKING, "ends with a mark": ENDS_MARKED, "keeps a place for thoughts": KEEPS_A_PLACE,
    "otherwise at the end": OTHERWISE_AT_THE_END,
}  # fmt: skip
SPECIALS = [START, STOP, "<|A|>", "<|A|><open>\n", "<|over|>"]

words = st.sampled_from(["a", "b", " ", "\n", "é", "<think>", "</think>", "assistant"])
traps = words | st.sampled_from([START, STOP, f"{START}assistant\n", f"{STOP}\n{START}user\n", "<|A|>", "<|over|>"])


def chats(pieces: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    content = st.lists(pieces, max_size=4).map("".join)
    message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "assistant"]), "content": content})
    return st.lists(message, min_size=1, max_size=5)


def found(template: str, chat: list[dict[str, Any]], *, own: bool) -> tuple[str, Any] | None:
    """The text and its blocks; None for a refusal."""
    opening, closing = ("{% generation %}", "{% endgeneration %}") if own else ("", "")
    source = template.replace("((\n{{-", "(({{-").replace("(({{", opening + "{{").replace("}}))", "}}" + closing)
    numbers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    try:
        eos = "<|over|>" if template == OTHERWISE_AT_THE_END else STOP
        return ChatSpans(ChatTemplate(source, {}), "the template", SPECIALS, eos)(chat, None, numbers)
    except RowFault as fault:
        assert fault.code == "AD414"
        return None


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(chat=chats(words), trapping=chats(traps))
def test_every_block_is_found_and_where_words_look_like_the_template_the_right_one_or_none(template, chat, trapping):
    assert found(template, chat, own=False) == found(template, chat, own=True)
    assert found(template, trapping, own=False) in (None, found(template, trapping, own=True))


VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
PIECES = ["a", "b", "ab", " ", "\n", "é", "\U0001f600", "<think>", "</think>", "<tool_response>", "</tool_response>"]
MARKS = ["<|im_end|>", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_start|>user\n", "<|im_", "end|>", "</s>"]
MARKS += [
    "<|eot|>", " [/INST]", "<end_of_turn>\n", "<start_of_turn>model\n", "<|Assistant|>", "<think>\n\n</think>\n\n",
]  # fmt: skip
MARKS += ["\n\n", "\ufdd0", "\ufdd1", "\U00100000", "\U00100001", "{{ x }}"]

some_texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
some_traps = st.lists(st.sampled_from([*PIECES, *MARKS]), max_size=4).map("".join)
strings = some_texts | some_traps
scalars = strings | st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1e400])
arguments = st.dictionaries(st.sampled_from(["x", "y"]), scalars | st.lists(scalars, max_size=2), max_size=2)
functions = st.fixed_dictionaries({"name": strings}, optional={"arguments": arguments | strings})
calls = st.fixed_dictionaries({"function": functions}, optional={"id": strings}) | functions
content_parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image"])}, optional={"text": strings})
VALUES = {
    "text": strings, "null": st.none(), "parts": st.lists(content_parts, max_size=2),
    "calls": st.lists(calls, max_size=2), "bool": st.booleans(), "int": st.integers(-2, 2),
}  # fmt: skip
KINDS = {
    "content": st.sampled_from(["text", "text", "text", "null", "parts"]),
    "reasoning_content": st.sampled_from(["text", "null"]),
    "tool_calls": st.sampled_from(["calls", "null"]),
    "flag": st.just("bool"),
    "number": st.just("int"),
}
roles = st.sampled_from(["system", "user", "user", "assistant", "assistant", "assistant", "tool", "\U00100000"])
kinds = st.fixed_dictionaries({"content": KINDS.pop("content")}, optional=KINDS)
simple = st.just({"content": "text"})
tools = st.none() | st.lists(st.fixed_dictionaries({"name": strings}, optional={"parameters": arguments}), max_size=2)

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]


@st.composite
def alike(draw: st.DrawFn) -> list[Chat]:
    """Chats of one shape, and perhaps one of another that has the same roles."""
    shape = draw(st.lists(st.tuples(roles, simple | kinds), min_size=1, max_size=5))
    has_tools = draw(st.booleans())
    chats = []
    for _ in range(draw(st.integers(2, 4))):
        messages = [{"role": role, **{key: draw(VALUES[kind]) for key, kind in keys.items()}} for role, keys in shape]
        schemas = draw(tools.filter(lambda found: found is not None)) if has_tools else None
        chats.append((messages, schemas))
    return chats


def attempt(function: Callable[[], Any]) -> Any:
    """What the function returns; None for a refusal."""
    try:
        return function()
    except RowFault:
        return None


def made_by(program: Program, chat: Chat) -> list[str] | None:
    values = program.values(*chat)
    return None if values is None else program.texts(values)


PROVEN = {
    "odd": [ChatTemplate(text, VARIABLES) for text in ODD],
    **{
        name: [ChatTemplate(text, {**VARIABLES, "add_generation_prompt": prompt}) for prompt in (True, False)]
        for name, text in WELL_KNOWN.items()
    },
}


@pytest.mark.parametrize("templates", PROVEN.values(), ids=PROVEN)
@in_ci(max_examples=50)
@given(data=st.data(), chats=alike())
def test_what_is_proven_of_a_text_holds_for_every_chat_of_the_shape(templates, data, chats):
    template = data.draw(st.sampled_from(templates))
    program = template.proven(*chats[0], lambda one: ([one.rendered(one.messages, one.tools)], ()))
    for chat in chats:
        made = made_by(program, chat)
        assert made is None or made == [attempt(lambda chat=chat: template.rendered(*chat))]


SPANNED = {**WELL_KNOWN, "macro without generation": plain(WELL_KNOWN["macro"])}


@pytest.mark.parametrize("text", SPANNED.values(), ids=SPANNED)
@in_ci(max_examples=25)
@given(chats=alike(), last=st.booleans())
def test_what_is_proven_of_blocks_holds_for_every_chat_of_the_shape(text, chats, last):
    spans = ChatSpans(ChatTemplate(text, VARIABLES), "the template", SPECIAL, "</s>")
    trained = [number for number, message in enumerate(chats[0][0]) if message["role"] == "assistant"]
    trained = trained[-1:] if last else trained
    program = spans.proven(*chats[0], trained)
    for chat in chats:
        made = made_by(program, chat)
        assert made is None or (made and blocks_of(made) == attempt(lambda chat=chat: spans.asked(*chat, trained)))


def blocks_of(parts: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the ranges of every second part."""
    starts = [sum(map(len, parts[:number])) for number in range(len(parts) + 1)]
    return "".join(parts), list(zip(starts[1::2], starts[2::2], strict=False))


FIELDS = st.none() | st.booleans() | st.integers() | st.just("") | st.text(max_size=8) | st.just({}) | st.just([1])
METADATA = FIELDS | st.dictionaries(st.text(max_size=3), FIELDS, max_size=2)
TOOLS = st.none() | st.just([{"type": "function"}]) | st.just("[]")
TEXT = st.text(max_size=20) | st.sampled_from(["half \ud800", "", "two\nlines", "long " * 1200])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT | FIELDS},
    optional={"loss": st.booleans() | st.just(1), "more": FIELDS},
)
CHATS = st.lists(MESSAGE, max_size=4)
PROMPT = st.fixed_dictionaries(
    {"input": TEXT, "label": FIELDS}, optional={"metadata": METADATA, "tools": TOOLS, "more": FIELDS}
)
CHAT = st.fixed_dictionaries({"messages": CHATS}, optional={"metadata": METADATA, "tools": TOOLS})
ODD_ROW = st.fixed_dictionaries(
    {}, optional={"input": FIELDS, "label": FIELDS, "messages": FIELDS | CHATS, "metadata": METADATA, "tools": FIELDS}
)
GOOD = b'"input": "a", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
STRANGE = [
    b'{%s, "label": 1} {%s, "label": 2}' % (GOOD, GOOD),
    b"{%s," % GOOD,
    b'"label": 2}',
    b'{%s, "label": [{}' % GOOD,
    b' {%s, "label": 1} ' % GOOD,
    b'{%s,\n "label":\n 1}' % GOOD,
    b'{%s, "input": "\\ud83d\\ude00", "label": 1}' % GOOD,
    b'{%s, "input": "half \\ud800", "label": 1}' % GOOD,
    b'{%s, "label": 1, "other": "\xff"}' % GOOD,
    b'{%s, "input": "b", "messages": [], "label": NaN}' % GOOD,
    b'{%s, "label": 1e400, "metadata": null, "tools": null}' % GOOD,
    *(b'{%s, "label": %s, "metadata": %s}' % (GOOD, digits, digits) for digits in (b"7" * 4300, b"7" * 5000)),
    *(b'{%s, "label": %s1%s}' % (GOOD, b"[" * depth, b"]" * depth) for depth in (510, 511, 512, 513, 600)),
    *(b'{"label": 1, "input": "a", "messages": %s}' % chat for chat in (b'"[]"', b'"not a chat"', b"7", b"[" * 600)),
    b'\xef\xbb\xbf{%s, "label": 1}' % GOOD,
    *(b"{}", b"{}{}", b"[]", b"}{", b""),
]
FUNCTIONS = {
    "prompt": lambda path: PromptTokenizeFn(path, label_key="label", max_length=6, tokenizer_backend="hf"),
    "chat": lambda path: ChatTokenizeFn(path, chat_template=GENERATION, metadata_key="label", tokenizer_backend="hf"),
}


def encoded(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")


@pytest.fixture(scope="module", params=FUNCTIONS.values(), ids=FUNCTIONS)
def tokenizer(request, small_tokenizer):
    return request.param(str(small_tokenizer)).open()


def check(tokenizer: Any, rows: list[bytes]) -> None:
    """A row beside a bad one is read by itself."""
    together = outcomes(run(tokenizer, rows))
    assert [together[n] for n in range(len(rows))] == [outcomes(run(tokenizer, [b"{", row]))[1] for row in rows]


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_a_strange_row_among_good_ones_is_what_it_is_alone(tokenizer, number):
    good = b'{%s, "label": {"a": 1}}' % GOOD
    check(tokenizer, [good, STRANGE[number], good])


@in_ci(max_examples=40)
@given(
    rows=st.lists(PROMPT | CHAT | ODD_ROW | st.sampled_from(STRANGE), max_size=6) | st.lists(PROMPT | CHAT, max_size=12)
)
def test_rows_in_bulk_are_the_rows_one_by_one(tokenizer, rows):
    check(tokenizer, [encoded(row) for row in rows])
