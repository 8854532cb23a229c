"""The epochs of a mixture's schedule: parts that leave, nodes within nodes, and nodes that no part is left of."""

import numpy as np
import pytest

from asyncdata.order.mixture import Leaf, Node, ScheduleCursor


def tree(inner_stages=((0, (1, 1)),), *, by="rows", inner_when_done="leave"):
    """``a``, and ``n`` of ``n.b`` and ``n.c``: the leaves 0, 1 and 2."""
    inner = (Leaf("n.b", "leave", number=1), Leaf("n.c", "leave", number=2))
    node = Node("n", inner_when_done, children=inner, stages=inner_stages, by=by, quota=4)
    return Node("", children=(Leaf("a", "leave", number=0), node), stages=((0, (1, 1)),), by=by, quota=4)


def took(cursor, *leaves):
    for leaf in leaves:
        cursor.took_one(leaf, 1)


def next_leaves(cursor, number):
    """What is picked and taken."""
    found = []
    for _ in range(number):
        found.append(cursor.pick())
        cursor.took(np.array(found[-1:]), np.array([1]))
    return found


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_node_is_over_with_its_last_part_and_all_parts_are_back_in_the_next_epoch(by):
    cursor = ScheduleCursor(tree(by=by), seed=1)
    assert sorted(set(next_leaves(cursor, 16))) == [0, 1, 2]
    assert not cursor.epoch_ended(1)
    assert cursor.awaited(10) == {0, 2}
    assert sorted(set(next_leaves(cursor, 16))) == [0, 2]
    assert not cursor.epoch_ended(2), "n has left, and a is there"
    assert cursor.awaited(10) == {0}
    assert set(next_leaves(cursor, 8)) == {0}
    assert cursor.state().left == ["n"]
    assert cursor.epoch_ended(0)
    assert cursor.pick() == -1, "nothing is left"
    cursor.begin_epoch()
    assert cursor.awaited(10) == {0, 1, 2}
    assert sorted(set(next_leaves(cursor, 16))) == [0, 1, 2]
    assert cursor.state().epochs == {}


def test_the_end_of_a_part_counts_only_after_a_sample_of_it():
    cursor = ScheduleCursor(tree(), seed=1)
    took(cursor, 0)
    assert not cursor.epoch_ended(1)
    assert cursor.state().nodes["n"].left == []
    took(cursor, 1)
    assert not cursor.epoch_ended(1)
    assert cursor.state().nodes["n"].left == ["b"]


@pytest.mark.parametrize(("when_done", "is_over"), [("leave", False), ("stop", True)])
def test_a_node_without_a_part_at_a_stage_has_ended(when_done, is_over):
    cursor = ScheduleCursor(tree(((0, (1, 1)), (3, (1, 0))), inner_when_done=when_done), seed=1)
    took(cursor, 1, 2)
    assert not cursor.epoch_ended(1)
    assert not cursor.settle(), "c is there"
    took(cursor, 2, 0)
    assert cursor.settle() is is_over
    assert cursor.state().epochs == {"n": 1}
    assert cursor.state().nodes["n"].left == [], "its next epoch has begun"
    if not is_over:
        assert cursor.awaited(10) == {0}
        assert not cursor.settle(), "it is ended once"
