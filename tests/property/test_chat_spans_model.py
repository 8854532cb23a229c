"""Blocks that are found in a template's text, against those that the same template shows with ``{% generation %}``."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.parts import ChatSpans, ChatTemplate, RowFault

pytestmark = pytest.mark.thorough

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
ENDS_WITH_A_MARK = PLAIN.replace(
    "\n{%- if add", "{% if not add_generation_prompt %}{{ '<|over|>' }}{% endif %}\n{%- if add"
)

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
    "plain": PLAIN,
    "trims": TRIMS,
    "without header": WITHOUT_HEADER,
    "drops thinking": DROPS_THINKING,
    "opens thinking": OPENS_THINKING,
    "ends with a mark": ENDS_WITH_A_MARK,
    "keeps a place for thoughts": KEEPS_A_PLACE,
    "otherwise at the end": OTHERWISE_AT_THE_END,
}
SPECIAL = [START, STOP, "<|A|>", "<|A|><open>\n", "<|over|>"]

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
        return ChatSpans(ChatTemplate(source, {}), "the template", SPECIAL, eos)(chat, None, numbers)
    except RowFault as fault:
        assert fault.code == "AD414"
        return None


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(chat=chats(words), trapping=chats(traps))
def test_every_block_is_found_and_where_words_look_like_the_template_the_right_one_or_none(template, chat, trapping):
    assert found(template, chat, own=False) == found(template, chat, own=True)
    assert found(template, trapping, own=False) in (None, found(template, trapping, own=True))
