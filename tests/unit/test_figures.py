"""The figures of the fault tests: added up, or the worst of them; whether a target is reached is never guessed."""

from __future__ import annotations

from tests.support.figures import TARGETS, Figure, table, total


def block(figures: list[Figure], name: str) -> str:
    lines = table(figures).splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith(f"{name:<4} ")]
    return " ".join(lines[place : place + 3])


def test_counts_are_added_up_and_of_times_the_longest_counts():
    figures = [
        Figure("R7", "idle", {"kills": 60, "left": 0, "gone_s": 0.5}),
        Figure("R7", "busy", {"kills": 50, "left": 0, "gone_s": 0.25}),
    ]

    assert total(figures) == {"R7": {"kills": 110, "left": 0, "gone_s": 0.5}}
    assert TARGETS["R7"].title + ": reached" in block(figures, "R7")
    assert "gone 0.5 s" in block(figures, "R7")


def test_a_bad_count_is_said_whatever_else_was_reached():
    figures = [Figure("R1", "all", {"kills": 10_000, "lost": 1, "repeated": 0})]

    assert "MISSED, 1 lost" in block(figures, "R1")


def test_fewer_rounds_than_wanted_are_not_the_target():
    assert "so far, with 5 kills" in block([Figure("R1", "quick", {"kills": 5, "lost": 0})], "R1")
    assert "not measured" in block([], "R1")
