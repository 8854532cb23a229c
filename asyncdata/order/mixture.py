"""The schedule of a mixture: which part has the sample at which position.

By rows, a node's positions are cut into blocks of ``quota``. How many positions of a block a part gets is decided by
the earliest deadline: with target ``T = weight * n``, its sample number ``j`` may not come before ``T`` exceeds
``j - 1``, and must have come when ``T`` reaches ``j``. Then every count is within less than one sample of its target at
each block's end, and no part's count ever falls. A schedule that meets all these bounds exists (R. Tijdeman, "The
chairman assignment problem", 1980), and among unit jobs on equal machines the earliest deadline first finds it (G.
Steiner and S. Yeomans, "Level schedules for mixed-model, just-in-time processes", 1993). Largest remainders alone
would not do: where ``weight * quota < 1`` a part's count could have to fall. The places within a block are a keyed
permutation.

By tokens, the next sample is that of the part with the largest deficit ``weight * total - tokens``.

Targets begin anew, at zero, where weights change: at a stage, when a part leaves, or at a restart with other weights.
The state has a few numbers for each part. Arithmetic is exact.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.order.mixture_tree import Leaf
from asyncdata.order.permutation import order_keys, shuffled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.order.mixture_tree import Node

__all__ = ("NodeState", "ScheduleCursor", "next_counts", "targets_of")

Ids = np.ndarray[Any, np.dtype[np.int64]]


class NodeState(msgspec.Struct, frozen=True):
    """How far a node's schedule has come. All dicts are by the name of a child.

    :ivar at: samples that were taken.
    :ivar since: the position at which the present weights began.
    :ivar block: the position at which the current block began; by rows only.
    :ivar counts: samples of each child from ``since`` to ``block``; by tokens, its tokens from ``since`` to ``at``.
    :ivar epochs: epochs of each child that ended in the current epoch of the node, where their number is limited.
    :ivar begun: the children that had a sample in the current epoch of the node. The end of a child's epoch counts only
        after one: what was over before, and was not noticed, belongs to the epoch before.
    :ivar left: the children that have left for the rest of the epoch.
    :ivar away: the replays that had no row at their turn, each with the position from which on it is asked again.
    :ivar nodes: the states of children that are nodes.
    """

    at: int = 0
    since: int = 0
    block: int = 0
    counts: dict[str, int] = {}
    epochs: dict[str, int] = {}
    begun: list[str] = []
    left: list[str] = []
    away: dict[str, int] = {}
    nodes: dict[str, NodeState] = {}

    def with_new_weights(self) -> NodeState:
        """The state with targets that begin anew, in every node."""
        nodes = {name: node.with_new_weights() for name, node in self.nodes.items()}
        return msgspec.structs.replace(self, since=self.at, block=self.at, counts={}, nodes=nodes)


def targets_of(node: Node, state: NodeState, of: float = 1.0) -> dict[str, float]:
    """The share of each leaf now, by name: 0 for one that has left."""
    weights = [weights for start, weights in node.stages if start <= state.at][-1]
    names = [child.name.rpartition(".")[2] for child in node.children]
    left = [0 if name in state.left else weight for name, weight in zip(names, weights, strict=True)]
    targets: dict[str, float] = {}
    for child, name, weight in zip(node.children, names, left, strict=True):
        share = of * weight / max(1, sum(left))
        if isinstance(child, Leaf):
            targets[child.name] = share
        else:
            targets |= targets_of(child, state.nodes.get(name, NodeState()), share)
    return targets


def next_counts(weights: Sequence[int], counts: Sequence[int], total: int) -> list[int]:
    """The counts at position ``total``, after ``counts`` at an earlier block's end. Their sum is ``total``.

    Each is within less than one of ``weight / sum(weights) * total``, and none is below the one before.
    """
    whole = sum(weights)
    after = [max(count, weight * total // whole) for weight, count in zip(weights, counts, strict=True)]
    may_have_more = [child for child, weight in enumerate(weights) if weight * total > after[child] * whole]
    deadlines = {child: Fraction(after[child] + 1, weights[child]) for child in may_have_more}
    for child in sorted(may_have_more, key=deadlines.__getitem__)[: total - sum(after)]:
        after[child] += 1
    return after


@lru_cache(maxsize=256)
def _block(
    seed: int, name: str, first: int, size: int, since: int, weights: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[Ids, tuple[int, ...]]:
    """The child at each position of a block, and the counts at its end."""
    after = next_counts(weights, counts, first + size - since)
    numbers = np.repeat(np.arange(len(weights)), np.array(after) - np.array(counts))
    ids = numbers[shuffled_rows(size, order_keys(seed, first, f"mixture {name}")[0])]
    ids.flags.writeable = False
    return ids, tuple(after)


class _Place:
    """A place in the blocks of a node."""

    __slots__ = ("at", "block", "counts", "since")

    def __init__(self, at: int, since: int, block: int, counts: tuple[int, ...]) -> None:
        self.at, self.since, self.block, self.counts = at, since, block, counts


class ScheduleCursor:
    """A schedule at one position; it moves on as samples are taken.

    :param num_leaves: leaves of the whole tree, of which this node may be a part; None: it is the top.
    """

    def __init__(self, node: Node, seed: int, state: NodeState | None = None, num_leaves: int | None = None) -> None:
        state = state or NodeState()
        self.node = node
        self._seed = seed
        self._names = [child.name.rpartition(".")[2] for child in node.children]
        num_leaves = num_leaves if num_leaves is not None else 1 + max(leaf.number for leaf in node.leaves())
        self._child_of = np.full(num_leaves, -1, np.int64)
        self._leaf_of = np.full(len(node.children), -1, np.int64)
        self._nodes: dict[int, ScheduleCursor] = {}
        self._stages = [*(start for start, _ in node.stages), None]
        for number, (child, name) in enumerate(zip(node.children, self._names, strict=True)):
            if isinstance(child, Leaf):
                self._child_of[child.number] = number
                self._leaf_of[number] = child.number
            else:
                inner = ScheduleCursor(child, seed, state.nodes.get(name, NodeState()), num_leaves)
                self._nodes[number] = inner
                self._child_of[[leaf.number for leaf in child.leaves()]] = number
        self._away = {number: state.away[name] for number, name in enumerate(self._names) if name in state.away}
        self._left = {number for number, name in enumerate(self._names) if name in state.left}
        self._begun = {number for number, name in enumerate(self._names) if name in state.begun}
        self._epochs = [state.epochs.get(name, 0) for name in self._names]
        counts = tuple(state.counts.get(name, 0) for name in self._names)
        self._place = _Place(state.at, state.since, state.block, counts)
        self._weights = self._weights_at(state.at)

    @property
    def at(self) -> int:
        """Samples that were taken."""
        return self._place.at

    @property
    def weights(self) -> dict[str, int]:
        """The present weights; 0 for a child that has left."""
        return dict(zip(self._names, self._weights, strict=True))

    def state(self) -> NodeState:
        """The state, from which another cursor can begin."""
        place = self._place
        return NodeState(
            at=place.at,
            since=place.since,
            block=place.block,
            counts={name: number for name, number in zip(self._names, place.counts, strict=True) if number},
            epochs={name: number for name, number in zip(self._names, self._epochs, strict=True) if number},
            begun=sorted(self._names[number] for number in self._begun),
            left=sorted(self._names[number] for number in self._left),
            away={self._names[child]: until for child, until in sorted(self._away.items()) if until > place.at},
            nodes={self._names[number]: inner.state() for number, inner in self._nodes.items()},
        )

    def awaited(self, within: int) -> set[int]:
        """The leaves that may have a sample in the next ``within`` positions; the others need not be read."""
        at, found = self._place.at, set()
        stages = [self._weights, *(weights for start, weights in self.node.stages if at < start <= at + within)]
        for number in range(len(self._names)):
            if number in self._left or not any(weights[number] for weights in stages):
                continue

            if number in self._nodes:
                found |= self._nodes[number].awaited(within)
            else:
                found.add(int(self._leaf_of[number]))
        return found

    def plan(self, number: int) -> Ids:
        """The leaves of the next ``number`` positions, if no part leaves before: int64. Only if the tree is by rows.

        There are fewer if no part has a weight from some position on, and -1 where that is so in a node below.
        """
        place, pieces, weights = self._place, [], self._weights
        while number > 0 and any(weights):
            ids, after = self._block_at(place, weights)
            piece = ids[place.at - place.block : place.at - place.block + number]
            pieces.append(piece)
            number -= len(piece)
            place, weights = self._moved(place, len(ids), weights, after)
        children = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        leaves = self._leaf_of[children]
        for child, inner in self._nodes.items():
            here = np.flatnonzero(children == child)
            found = inner.plan(len(here))
            leaves[here[: len(found)]] = found
        return leaves

    def pick(self) -> int:
        """The leaf of the next position; -1 if no part of its node has a weight."""
        place = self._place
        if not any(self._weights):
            return -1

        if self.node.by == "rows":
            child = int(self._block_at(place, self._weights)[0][place.at - place.block])
        else:
            child = self._neediest(place)
        return self._nodes[child].pick() if child in self._nodes else int(self._leaf_of[child])

    def _neediest(self, place: _Place) -> int:
        total, whole, weights = sum(place.counts), sum(self._weights), self._weights
        deficits = [
            weight * total - whole * tokens if weight else None
            for weight, tokens in zip(weights, place.counts, strict=True)
        ]
        most = max(deficit for deficit in deficits if deficit is not None)
        best = [child for child, deficit in enumerate(deficits) if deficit == most]
        return best[0] if len(best) == 1 else min(best, key=self._tie)

    def _tie(self, child: int) -> int:
        return order_keys(self._seed, self._place.at, f"mixture {self.node.name} {self._names[child]}")[0]

    def took(self, leaves: Ids, num_tokens: Ids) -> None:
        """Samples of ``leaves`` were taken, in this order.

        :param num_tokens: tokens of each sample.
        """
        children = self._child_of[leaves]
        self._begun.update(np.flatnonzero(np.bincount(children)).tolist())
        for child, inner in self._nodes.items():
            here = children == child
            if here.any():
                inner.took(leaves[here], num_tokens[here])
        if self.node.by == "rows":
            self._took_rows(len(leaves))
        else:
            self._took_tokens(children, num_tokens)

    def _took_rows(self, number: int) -> None:
        place = self._place
        stop = place.at + number
        while stop >= self._end_of(place):
            ids, after = self._block_at(place, self._weights)
            place, self._weights = self._moved(place, len(ids), self._weights, after)
        self._place = _Place(stop, place.since, place.block, place.counts)

    def _took_tokens(self, children: Ids, num_tokens: Ids) -> None:
        while len(children):
            place = self._place
            stage = self._next_stage(place.at)
            number = len(children) if stage is None else min(len(children), stage - place.at)
            more = np.bincount(children[:number], num_tokens[:number], len(self._names)).astype(np.int64)
            counts = tuple((np.array(place.counts, np.int64) + more).tolist())
            at = place.at + number
            self._place = _Place(at, place.since, place.block, counts)
            if at == stage:
                self._begin_anew(at)
            children, num_tokens = children[number:], num_tokens[number:]

    def took_one(self, leaf: int, num_tokens: int) -> None:
        """The same for one sample; cheaper than an array of one."""
        child = int(self._child_of[leaf])
        self._begun.add(child)
        if child in self._nodes:
            self._nodes[child].took_one(leaf, num_tokens)
        if self.node.by == "rows":
            self._took_rows(1)
            return

        place = self._place
        counts = (*place.counts[:child], place.counts[child] + num_tokens, *place.counts[child + 1 :])
        self._place = _Place(place.at + 1, place.since, place.block, counts)
        if self._changes_at(self._place.at):
            self._begin_anew(self._place.at)

    def epoch_ended(self, leaf: int) -> bool:
        """An epoch of ``leaf`` has ended at its turn. Return whether the node's epoch is over, too."""
        number = int(self._child_of[leaf])
        inner = self._nodes.get(number)
        if inner is not None:
            if not inner.epoch_ended(leaf):
                return False

            inner.begin_epoch()
        return self._child_ended(number)

    def settle(self) -> bool:
        """End the epochs of nodes in which no part has a weight. Return whether that is so here."""
        for number, inner in self._nodes.items():
            if self._weights[number] and inner.settle():
                inner.begin_epoch()
                if self._child_ended(number):
                    return True
        return not any(self._weights)

    def _child_ended(self, number: int) -> bool:
        """An epoch of a child has ended. Return whether the node's epoch is over, too."""
        child = self.node.children[number]
        if child.epochs_left is None or number not in self._begun:
            return False

        self._epochs[number] += 1
        if self._epochs[number] < child.epochs_left:
            return False

        if child.when_done == "stop":
            return True

        self._left.add(number)
        self._begin_anew(self._place.at)
        others = zip(self._weights, self.node.children, strict=True)
        return not any(weight for weight, child in others if not (isinstance(child, Leaf) and child.is_replay))

    def sit_out(self, leaf: int) -> bool:
        """The replay ``leaf`` has no row at its turn: the others have its share up to the next multiple of ``quota``.

        :return: whether any of them has a weight.
        """
        number = int(self._child_of[leaf])
        if number in self._nodes:
            return self._nodes[number].sit_out(leaf)

        at, quota = self._place.at, self.node.quota
        self._away[number] = (at // quota + 1) * quota
        self._begin_anew(at)
        return any(self._weights)

    def begin_epoch(self) -> None:
        """Begin the next epoch: all parts are back. A part that is within an epoch of its own stays there."""
        self._epochs = [0] * len(self._names)
        self._begun = set()
        if self._left:
            self._left = set()
            self._begin_anew(self._place.at)
        for inner in self._nodes.values():
            inner.begin_epoch()

    def _begin_anew(self, at: int) -> None:
        """Other weights hold from ``at`` on."""
        self._place = _Place(at, at, at, (0,) * len(self._names))
        self._weights = self._weights_at(at)
        self._away = {child: until for child, until in self._away.items() if until > at}

    def _weights_at(self, at: int) -> tuple[int, ...]:
        weights = next(weights for start, weights in reversed(self.node.stages) if start <= at)
        out = self._left | {child for child, until in self._away.items() if until > at} if self._away else self._left
        return tuple(0 if child in out else weight for child, weight in enumerate(weights))

    def _next_stage(self, at: int) -> int | None:
        """The next position at which weights change: a stage, or replays that are asked again."""
        stage = next((start for start in self._stages if start is None or start > at), None)
        if not self._away:
            return stage

        return min((until for until in (*self._away.values(), stage) if until is not None and until > at), default=None)

    def _changes_at(self, at: int) -> bool:
        return at in self._stages or at in self._away.values()

    def _end_of(self, place: _Place) -> int:
        stop, stage = place.block + self.node.quota, self._next_stage(place.block)
        return stop if stage is None else min(stop, stage)

    def _block_at(self, place: _Place, weights: tuple[int, ...]) -> tuple[Ids, tuple[int, ...]]:
        size = self._end_of(place) - place.block
        return _block(self._seed, self.node.name, place.block, size, place.since, weights, place.counts)

    def _moved(
        self, place: _Place, size: int, weights: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[_Place, tuple[int, ...]]:
        """The start of the next block, and the weights there."""
        stop = place.block + size
        if self._changes_at(stop):
            return _Place(stop, stop, stop, (0,) * len(after)), self._weights_at(stop)

        return _Place(stop, place.since, stop, after), weights
