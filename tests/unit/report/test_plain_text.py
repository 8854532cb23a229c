"""Text of users on a page."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.report.plain_text import script_json, visible

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # with lone surrogates


@pytest.mark.thorough
@given(ANY_TEXT)
def test_nothing_that_is_visible_is_hidden_or_turns_the_direction_of_what_follows(text):
    assert all(char.isprintable() or char in "\n\t" for char in visible(text))


def test_text_stays_as_it_is_and_what_cannot_be_seen_has_its_code_point():
    assert visible("naïve 😀 قريب\n\tx") == "naïve 😀 قريب\n\tx"
    assert visible("a\u202eb\x00\ud83d") == "a⟨U+202E⟩b⟨U+0000⟩⟨U+D83D⟩"


@pytest.mark.thorough
@given(
    st.recursive(ANY_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner))
)
def test_json_in_a_script_is_the_value_and_cannot_end_the_script(value):
    text = script_json(value)

    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_a_script_cannot_be_ended_by_a_text():
    assert script_json(["</script>", "<!--", "\u2028"]) == r'["\u003c/script\u003e","\u003c!--","\u2028"]'
