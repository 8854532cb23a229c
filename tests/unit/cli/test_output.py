"""Numbers, tables and paths as commands print them."""

from __future__ import annotations

import pytest

from asyncdata.cli.output import fields, printable, shown_path, si, table


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (812, "812"), (999.4, "999"), (1000, "1.00k"), (81_234, "81.2k"), (99_960, "100k"), (8_123_456, "8.12M"),
     (2e9, "2.00G"), (3e12, "3T")],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_unit(number, text):
    assert si(number) == text


def test_columns_of_a_table_are_aligned():
    assert table([("", "n"), ("some", "12"), ("x", "1,234")]) == "          n\nsome     12\nx     1,234"
    assert fields([("a", 1), ("longer", "")]) == "a       1\nlonger"
    assert fields([]) == ""


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\nb é") == "a\\x1b[31m\\nb é"


def test_a_path_is_as_short_as_it_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert shown_path(str(tmp_path / "deep" / "x.jsonl")) == "deep/x.jsonl"
    assert shown_path("/elsewhere/x.jsonl") == "/elsewhere/x.jsonl"
