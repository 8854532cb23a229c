"""The schedule of a mixture: every count is within one sample of its target, and any position is reached by state."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncdata.order.mixture import NodeState, ScheduleCursor, next_counts
from asyncdata.order.mixture_tree import Leaf, Node, whole_weights

pytestmark = pytest.mark.thorough

weights_of_parts = st.lists(st.integers(0, 10_000) | st.integers(0, 3), min_size=1, max_size=12).filter(any)
seeds = st.integers(-(2**70), 2**70)


def node_of(weights: list[int], **settings: Any) -> Node:
    leaves = tuple(Leaf(f"part{number:02}", number) for number in range(len(weights)))
    return Node("", leaves, ((0, tuple(weights)),), **settings)


def took(cursor: ScheduleCursor, leaves: np.ndarray, lengths: np.ndarray | None = None) -> None:
    cursor.took(leaves, np.ones(len(leaves), np.int64) if lengths is None else lengths)


@given(weights_of_parts, st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_the_bound_holds_for_blocks_of_any_sizes(weights: list[int], sizes: list[int]) -> None:
    counts, total = [0] * len(weights), 0
    for size in sizes:
        total += size
        after = next_counts(weights, counts, total)
        assert sum(after) == total
        assert all(new >= old for new, old in zip(after, counts, strict=True))
        assert all(
            abs(Fraction(weight * total, sum(weights)) - count) < 1
            for count, weight in zip(after, weights, strict=True)
        )
        counts = after


@st.composite
def nodes(draw: Any, name: str, depth: int, by: str = "rows") -> Node:
    """A node with leaves numbered later."""
    number = draw(st.integers(1, 4))
    names = [f"{name}.{letter}".lstrip(".") for letter in "abcd"[:number]]
    children = [
        draw(nodes(child, depth + 1, by))
        if depth < 2 and draw(st.integers(0, 3)) == 0
        else Leaf(child, -1, draw(st.sampled_from(["repeat", "leave", "stop"])), draw(st.none() | st.integers(1, 3)))
        for child in names
    ]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=2)))]
    positive = st.lists(st.integers(0, 9), min_size=number, max_size=number).filter(any)
    stages = tuple((start, tuple(draw(positive))) for start in starts)
    return Node(
        name,
        tuple(children),
        stages,
        by=draw(st.sampled_from(["rows", "tokens"])) if by == "any" else by,
        quota=draw(st.integers(1, 20)),
        when_done=draw(st.sampled_from(["repeat", "leave", "stop"])),
        max_epochs=draw(st.none() | st.integers(1, 3)),
    )


def numbered(node: Node) -> Node:
    """The tree with its leaves numbered, in order."""
    count = iter(range(1000))

    def renumber(child: Any) -> Any:
        if isinstance(child, Leaf):
            return msgspec.structs.replace(child, number=next(count))
        return msgspec.structs.replace(child, children=tuple(renumber(inner) for inner in child.children))

    return renumber(node)


@given(nodes("", 0).map(numbered), seeds, st.integers(0, 100), st.integers(1, 100))
def test_a_state_taken_at_any_position_continues_the_schedule(tree: Node, seed: int, first: int, number: int) -> None:
    whole = ScheduleCursor(tree, seed)
    leaves = whole.plan(first + number)
    assume(len(leaves) > first and (leaves >= 0).all())
    there = ScheduleCursor(tree, seed)
    took(there, leaves[:first])

    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(there.state()), type=NodeState)

    assert ScheduleCursor(tree, seed, saved).plan(len(leaves) - first).tolist() == leaves[first:].tolist()


@given(nodes("", 0).map(numbered), seeds, st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_how_many_are_taken_at_once_makes_no_difference(tree: Node, seed: int, sizes: list[int]) -> None:
    leaves = ScheduleCursor(tree, seed).plan(sum(sizes))
    assume((leaves >= 0).all())
    bit_by_bit, one_by_one, found = ScheduleCursor(tree, seed), ScheduleCursor(tree, seed), []
    start = 0
    for size in sizes:
        some = leaves[start : start + size]
        assert bit_by_bit.plan(len(some)).tolist() == some.tolist()
        took(bit_by_bit, some)
        for _ in some:
            found.append(one_by_one.pick())
            one_by_one.took_one(found[-1], 1)
        start += size

    assert found == leaves.tolist()
    assert bit_by_bit.state() == one_by_one.state()


@given(weights_of_parts, st.lists(st.integers(1, 500), min_size=1, max_size=150), seeds)
def test_by_tokens_no_part_falls_behind_by_more_than_the_longest_sample(
    weights: list[int], lengths: list[int], seed: int
) -> None:
    cursor, tokens, total = ScheduleCursor(node_of(weights, by="tokens"), seed), [0] * len(weights), 0
    for length in lengths:
        leaf = cursor.pick()
        cursor.took_one(leaf, length)
        tokens[leaf] += length
        total += length
        assert weights[leaf], "a part without weight has no sample"
        behind = [Fraction(weight * total, sum(weights)) - had for weight, had in zip(weights, tokens, strict=True)]
        assert max(behind) <= len(weights) * max(lengths)
        assert min(behind) >= -max(lengths), "only a part that was not ahead gets more"


@given(nodes("", 0, "any").map(numbered), st.lists(st.integers(1, 50), min_size=1, max_size=80), st.data(), seeds)
def test_taking_many_samples_at_once_is_taking_each(tree: Node, lengths: list[int], data: Any, seed: int) -> None:
    each, leaves = ScheduleCursor(tree, seed), []
    for length in lengths:
        leaf = each.pick()
        if leaf < 0:
            break
        each.took_one(leaf, length)
        leaves.append(leaf)
    cut = data.draw(st.integers(0, len(leaves)))
    at_once = ScheduleCursor(tree, seed)

    for some in (slice(0, cut), slice(cut, len(leaves))):
        took(at_once, np.array(leaves[some], np.int64), np.array(lengths[: len(leaves)][some], np.int64))

    assert at_once.state() == each.state()


def test_weights_are_the_decimal_numbers_that_are_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([5, 3, 2]) == (5, 3, 2)
    assert whole_weights([0.5, 0]) == (1, 0)


def test_the_schedule_is_pinned() -> None:
    """A run that was saved continues with it, on any machine and after any update."""
    cursor = ScheduleCursor(node_of([5, 3, 2], quota=10), 42)

    assert "".join(map(str, cursor.plan(40))) == PINNED


PINNED = "1001010202021000011212001000211020201010"
