"""What is proven of a template for the chats of one shape, against what the template makes of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.chat_templates import ODD, SPECIAL, WELL_KNOWN, plain
from tests.support.examples import in_ci
from tests.support.parts import ChatSpans, ChatTemplate, RowFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.parts import Program

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # many examples; minutes on a machine that is busy

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
PIECES = ["a", "b", "ab", " ", "\n", "é", "\U0001f600", "<think>", "</think>", "<tool_response>", "</tool_response>"]
TRAPS = [
    "<|im_end|>",
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
    "<|im_start|>user\n",
    "<|im_",
    "end|>",
    "</s>",
    "<|eot|>",
]
TRAPS += [" [/INST]", "<end_of_turn>\n", "<start_of_turn>model\n", "<|Assistant|>", "<think>\n\n</think>\n\n", "\n\n"]
TRAPS += ["\ufdd0", "\ufdd1", "\U00100000", "\U00100001", "{{ x }}"]

texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
traps = st.lists(st.sampled_from([*PIECES, *TRAPS]), max_size=4).map("".join)
strings = texts | traps
scalars = strings | st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1e400])
arguments = st.dictionaries(st.sampled_from(["x", "y"]), scalars | st.lists(scalars, max_size=2), max_size=2)
functions = st.fixed_dictionaries({"name": strings}, optional={"arguments": arguments | strings})
calls = st.fixed_dictionaries({"function": functions}, optional={"id": strings}) | functions
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image"])}, optional={"text": strings})
VALUES = {
    "text": strings,
    "null": st.none(),
    "parts": st.lists(parts, max_size=2),
    "calls": st.lists(calls, max_size=2),
    "bool": st.booleans(),
    "int": st.integers(-2, 2),
}
KINDS = {
    "content": st.sampled_from(["text", "text", "text", "null", "parts"]),
    "reasoning_content": st.sampled_from(["text", "null"]),
    "tool_calls": st.sampled_from(["calls", "null"]),
    "flag": st.just("bool"),
    "number": st.just("int"),
}
roles = st.sampled_from(["system", "user", "user", "assistant", "assistant", "assistant", "tool", "\U00100000"])
kinds = st.fixed_dictionaries(
    {"content": KINDS["content"]}, optional={key: kind for key, kind in KINDS.items() if key != "content"}
)
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


TEMPLATES = {
    "odd": [ChatTemplate(text, VARIABLES) for text in ODD],
    **{
        name: [ChatTemplate(text, {**VARIABLES, "add_generation_prompt": prompt}) for prompt in (True, False)]
        for name, text in WELL_KNOWN.items()
    },
}


@pytest.mark.parametrize("templates", TEMPLATES.values(), ids=TEMPLATES)
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
