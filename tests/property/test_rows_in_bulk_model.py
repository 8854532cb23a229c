"""Rows that are read, decoded and written in one call are what each is by itself, for every tokenize function."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ChatTokenizeFn, PromptTokenizeFn
from tests.support.chats import GENERATION
from tests.support.examples import in_ci
from tests.unit.tokenization import outcomes, run

pytestmark = pytest.mark.thorough

VALUES = st.none() | st.booleans() | st.integers() | st.just("") | st.text(max_size=8) | st.just({}) | st.just([1])
METADATA = VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
TOOLS = st.none() | st.just([{"type": "function"}]) | st.just("[]")
TEXT = st.text(max_size=20) | st.sampled_from(["half \ud800", "", "two\nlines", "long " * 1200])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT | VALUES},
    optional={"loss": st.booleans() | st.just(1), "more": VALUES},
)
CHATS = st.lists(MESSAGE, max_size=4)
PROMPT = st.fixed_dictionaries(
    {"input": TEXT, "label": VALUES}, optional={"metadata": METADATA, "tools": TOOLS, "more": VALUES}
)
CHAT = st.fixed_dictionaries({"messages": CHATS}, optional={"metadata": METADATA, "tools": TOOLS})
ODD = st.fixed_dictionaries(
    {}, optional={"input": VALUES, "label": VALUES, "messages": VALUES | CHATS, "metadata": METADATA, "tools": VALUES}
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
    "prompt": lambda folder: PromptTokenizeFn(folder, label_key="label", max_length=6, tokenizer_backend="hf"),
    "chat": lambda folder: ChatTokenizeFn(
        folder, chat_template=GENERATION, metadata_key="label", tokenizer_backend="hf"
    ),
}


def encoded(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")


@pytest.fixture(scope="module", params=FUNCTIONS.values(), ids=FUNCTIONS)
def tokenizer(request, small_tokenizer):
    return request.param(str(small_tokenizer)).open()


def check(tokenizer: Any, rows: list[bytes]) -> None:
    """A row beside a bad one is read by itself."""
    together = outcomes(run(tokenizer, rows))

    assert [together[number] for number in range(len(rows))] == [
        outcomes(run(tokenizer, [b"{", row]))[1] for row in rows
    ]


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_a_strange_row_among_good_ones_is_what_it_is_alone(tokenizer, number):
    good = b'{%s, "label": {"a": 1}}' % GOOD

    check(tokenizer, [good, STRANGE[number], good])


@in_ci(max_examples=40)
@given(rows=st.lists(PROMPT | CHAT | ODD | st.sampled_from(STRANGE), max_size=6) | st.lists(PROMPT | CHAT, max_size=12))
def test_rows_in_bulk_are_the_rows_one_by_one(tokenizer, rows):
    check(tokenizer, [encoded(row) for row in rows])
