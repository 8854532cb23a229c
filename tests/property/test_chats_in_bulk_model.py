"""Chats that are decoded in one call are those that are decoded row by row, whatever the rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ChatTokenizeFn
from asyncdata.tokenization.column_writer import ColumnWriter
from tests.property.test_prompts_in_bulk_model import METADATA, VALUES, parts
from tests.support.chats import GENERATION
from tests.support.examples import in_ci

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

CONTENT = st.text(max_size=12) | st.sampled_from(["half \ud800", "", "two\nlines", 1, None, 2**70])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENT},
    optional={"loss": st.booleans() | st.just(1), "more": VALUES},
)
CHATS = st.lists(MESSAGE, max_size=4)
GOOD = st.fixed_dictionaries(
    {"messages": CHATS}, optional={"metadata": METADATA, "tools": st.none() | st.just([{"type": "function"}])}
)
ODD = st.fixed_dictionaries({}, optional={"messages": VALUES | CHATS, "metadata": METADATA, "tools": VALUES})
ASKED = '{"role": "user", "content": "a"}, {"role": "assistant", "content": %s}'
TURNS = [("[" + ASKED % content + "]").encode() for content in ('"b"', '"\\ud800"', "1e400", "NaN", "7" * 5000)]
STRANGE = [
    *(b'{"messages": %s}' % turns for turns in TURNS),
    b'{"messages": [], "messages": %s}' % TURNS[0],
    b'{"messages": %s, "other": "\xff"}' % TURNS[0],
    b'{"messages": %s, "metadata": %s}' % (TURNS[0], b"7" * 5000),
    b'{"messages": %s}{"messages": %s}' % (TURNS[0], TURNS[0]),
    b'{"messages": "[]"}',
    b'{"messages": "not a chat"}',
    b'\xef\xbb\xbf{"messages": %s}' % TURNS[0],
    b'{"messages": %s, "metadata": null, "tools": null}' % TURNS[0],
    b'{"messages": %s' % TURNS[0],
    b"{}",
    b"[]",
    b"",
    *(b'{"messages": %s}' % (b"[" * depth + b"]" * depth) for depth in (510, 511, 512, 513)),
]


@pytest.fixture(scope="module")
def fn(small_tokenizer: Path) -> Any:
    return ChatTokenizeFn(str(small_tokenizer), chat_template=GENERATION, train_on="loss", tokenizer_backend="hf")


@pytest.mark.parametrize("odd", STRANGE)
def test_a_strange_row_among_chats_is_what_it_is_alone(fn, odd):
    check_rows(fn, [b'{"messages": %s}' % TURNS[0], odd, b'{"messages": %s, "metadata": {"a": 1}}' % TURNS[0]])


@in_ci(max_examples=40)
@given(st.lists(GOOD | ODD | st.sampled_from(STRANGE), max_size=6) | st.lists(GOOD, max_size=10))
def test_chats_in_bulk_are_the_chats_row_by_row(fn, rows):
    check_rows(fn, [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows])


def check_rows(fn: ChatTokenizeFn, raws: list[bytes]) -> None:
    at_once, each = ColumnWriter(), ColumnWriter()
    tokenizer, model = fn.open(), fn.open()
    model._decode = lambda _: None  # noqa: SLF001 - the model decodes each row by itself

    tokenizer(raws, at_once)
    model(raws, each)

    assert parts(at_once, len(raws)) == parts(each, len(raws))
