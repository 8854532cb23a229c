"""The schedule of any tree of mixtures: planned, picked and resumed, it is one.

What it is, is held by the model of `tests/support/model_order.py`.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncdata.order.mixture import Leaf, Node, NodeState, ScheduleCursor, whole_weights

pytestmark = pytest.mark.thorough

seeds = st.integers(-(2**70), 2**70)
WHEN_DONE, MAX_EPOCHS = st.sampled_from(["repeat", "leave", "stop"]), st.none() | st.integers(1, 3)


@st.composite
def nodes(draw, name, depth, by="rows"):
    number = draw(st.integers(1, 4))
    names = [f"{name}.{letter}".lstrip(".") for letter in "abcd"[:number]]
    children = [
        draw(nodes(child, depth + 1, by))
        if depth < 2 and draw(st.integers(0, 3)) == 0
        else Leaf(child, draw(WHEN_DONE), draw(MAX_EPOCHS), number=-1)
        for child in names
    ]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=2)))]
    positive = st.lists(st.integers(0, 9), min_size=number, max_size=number).filter(any)
    stages = tuple((start, tuple(draw(positive))) for start in starts)
    by = draw(st.sampled_from(["rows", "tokens"])) if by == "any" else by
    ends = {"quota": draw(st.integers(1, 20)), "when_done": draw(WHEN_DONE), "max_epochs": draw(MAX_EPOCHS)}
    return Node(name, children=tuple(children), stages=stages, by=by, **ends)


def numbered(node):
    count = iter(range(1000))

    def renumber(child: Any) -> Any:
        if isinstance(child, Leaf):
            return msgspec.structs.replace(child, number=next(count))
        return msgspec.structs.replace(child, children=tuple(renumber(inner) for inner in child.children))

    return renumber(node)


@given(nodes("", 0, "any").map(numbered), seeds, st.lists(st.lists(st.integers(1, 50), max_size=30), max_size=20))
def test_a_plan_is_what_is_picked_and_many_samples_taken_at_once_and_a_state_continue_it(tree, seed, batches):
    at_once, each, plan = ScheduleCursor(tree, seed), ScheduleCursor(tree, seed), []
    if tree.is_by_rows:
        plan = ScheduleCursor(tree, seed).plan(sum(map(len, batches))).tolist()
    for lengths in batches:
        leaves = []
        for length in lengths:
            leaves.append(each.pick())
            assume(leaves[-1] >= 0)
            each.took_one(leaves[-1], length)
        if tree.is_by_rows:
            assert at_once.plan(len(leaves)).tolist() == plan[: len(leaves)] == leaves
            del plan[: len(leaves)]
        at_once.took(np.array(leaves, np.int64), np.array(lengths, np.int64))
        assert at_once.state() == each.state()
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(at_once.state()), type=NodeState)
        at_once = ScheduleCursor(tree, seed, state)


def test_weights_are_the_decimal_numbers_that_are_written():
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([5, 3, 2]) == (5, 3, 2)
    assert whole_weights([0.5, 0]) == (1, 0)
