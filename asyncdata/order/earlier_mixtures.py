"""A mixture whose weights have changed at a restart, while samples that the old weights had chosen are read again.

A state is taken before samples that wait to be packed. A restart reads these by the schedule of that time, up to the
sample at which the run had been; the new schedule begins there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.order.mixture import NodeState, ScheduleCursor
from asyncdata.order.mixture_tree import Leaf, Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ("Earlier", "adapted", "node_of", "schedule_at")

_WEIGHT = re.compile(r"(.+)\.weight(?: from (\d+) on)?")


class Earlier(NamedTuple):
    """A schedule that holds up to a position.

    :ivar until: samples of the mixture, from the start of the run.
    """

    node: Node
    until: int


def schedule_at(
    earlier: Sequence[Earlier], node: Node, seed: int, state: NodeState
) -> tuple[ScheduleCursor, int | None]:
    """The schedule at a state, and the position at which the next one begins; None: there is none.

    :param node: the last one.
    """
    for place, (old, until) in enumerate(earlier):
        if state.at < until:
            begins = place > 0 and earlier[place - 1].until == state.at
            return ScheduleCursor(old, seed, adapted(state, old) if begins else state), until

    begins = bool(earlier) and earlier[-1].until == state.at
    return ScheduleCursor(node, seed, adapted(state, node) if begins else state), None


def adapted(state: NodeState, node: Node) -> NodeState:
    """The state with targets that begin anew, without children that the node does not have."""
    return _present(state, node).with_new_weights()


def _present(state: NodeState, node: Node) -> NodeState:
    names = {child.name.rpartition(".")[2]: child for child in node.children}
    nodes = {
        name: _present(inner, child)
        for name, inner in state.nodes.items()
        if (child := names.get(name)) is not None and not isinstance(child, Leaf)
    }
    return msgspec.structs.replace(
        state,
        counts={name: number for name, number in state.counts.items() if name in names},
        epochs={name: number for name, number in state.epochs.items() if name in names},
        begun=[name for name in state.begun if name in names],
        left=[name for name in state.left if name in names],
        away={name: until for name, until in state.away.items() if name in names},
        nodes=nodes,
    )


def node_of(settings: Mapping[str, Any], numbers: Mapping[str, int]) -> Node:
    """The tree of which a snapshot keeps the settings.

    :param numbers: the present numbers of its leaves, by name.
    :raises KeyError: if a leaf has none now.
    """
    names = [key.removesuffix(".when_done") for key in settings if key.endswith(".when_done")]
    return _node("", names, settings, numbers, "repeat", None)


def _node(
    name: str,
    names: list[str],
    settings: Mapping[str, Any],
    numbers: Mapping[str, int],
    when_done: str,
    max_epochs: int | None,
) -> Node:
    of = f"{name}." if name else ""
    own = sorted(full for full in names if full.startswith(of) and "." not in full[len(of) :])
    children: list[Leaf | Node] = []
    for child in own:
        ends = settings[f"{child}.when_done"]
        if f"{child}.by" in settings:
            children.append(_node(child, names, settings, numbers, *ends))
        else:
            children.append(Leaf(child, numbers[child], ends[0], ends[1], f"{child}.replay" in settings))
    weights: dict[int, dict[str, int]] = {}
    for key, weight in settings.items():
        found = _WEIGHT.fullmatch(key)
        if found and found[1] in own:
            weights.setdefault(int(found[2] or 0), {})[found[1]] = weight
    stages = tuple((start, tuple(weights[start][child] for child in own)) for start in sorted(weights))
    return Node(
        name, tuple(children), stages, settings[f"{of}by"], settings.get(f"{of}quota", 1000), when_done, max_epochs
    )
