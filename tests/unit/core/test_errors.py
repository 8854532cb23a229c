"""Messages are bounded: what a user's row or function gives may be of any size."""

from __future__ import annotations

import pytest

from asyncdata import ConfigError
from asyncdata.core.errors import by_reason, shortened


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 30, 30) == "a" * 30
    assert shortened("a" * 20 + "b" * 20, 30) == "a" * 20 + " ... (10 characters left out) ... " + "b" * 10
    assert shortened("a\n" * 20, 30) == "a\n" * 10 + "\n... (10 characters left out) ...\n" + "a\n" * 5


def test_no_message_is_longer_than_a_page() -> None:
    text = str(ConfigError(f"AD481 the policy raised {'x' * 9_000_000}; repair it"))

    assert len(text) < 21_000
    assert text.startswith("AD481 the policy raised xxx")
    assert text.endswith("; repair it")


@pytest.mark.parametrize(
    ("drops", "text"),
    [
        ({}, "there was no row"),
        ({"b": 1, "a": 2}, "2 by a, 1 by b"),
        ({f"reason {n}": n for n in range(1, 1012)}, "1002 by reason 1002"),
    ],
)
def test_the_most_frequent_reasons_of_drops_are_named(drops: dict[str, int], text: str) -> None:
    assert by_reason(drops).startswith(text)
    assert len(by_reason(drops)) < 300
    assert by_reason(drops).endswith("1,001 other reasons" if len(drops) > 10 else text)
