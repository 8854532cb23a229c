"""The schedule of a mixture: which part has the sample at which position.

By rows, a node's positions are cut into blocks of ``quota``. How many positions of a block a part gets is decided by
the earliest deadline: with target ``T = weight * n``, its sample number ``j`` may not come before ``T`` exceeds
``j - 1``, and must have come when ``T`` reaches ``j``. Then every count is within less than one sample of its target at
each block's end, and no part's count ever falls. A schedule that meets all these bounds exists (R. Tijdeman, "The
chairman assignment problem", 1980), and among unit jobs on equal machines the earliest deadline first finds it (G.
Steiner and S. Yeomans, "Level schedules for mixed-model, just-in-time processes", 1993). Largest remainders alone
would not do: where ``weight * quota < 1`` a part's count could have to fall. The places within a block are a keyed
permutation.

By tokens, the next sample is of the part with the largest deficit ``weight * total - tokens``.

A part that has no sample in an epoch of its own, as its rows are excluded, sits out: up to the next multiple of
``quota`` it has no weight, and at its first turn after that it is asked again. If it has none again, it sits out twice
as long: to ask it is to read all of it.

Targets begin anew, at zero, where weights change: at a stage, when a part leaves, sits out or is back, or at a restart
with other weights.
The state has a few numbers for each part. Arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.order.order import order_keys, shuffled_rows

Ids = np.ndarray[Any, np.dtype[np.int64]]


class _Child(msgspec.Struct, frozen=True):
    """A part of a mixture, which may be a mixture itself.

    :ivar name: the dotted name; empty at the top.
    :ivar when_done: ``repeat``, ``leave`` or ``stop``: what happens after ``max_epochs`` epochs.
    :ivar max_epochs: its epochs in one epoch of its node; None: one, or with ``repeat`` any number.
    """

    name: str
    when_done: str = "repeat"
    max_epochs: int | None = None

    @property
    def short(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def epochs_left(self) -> int | None:
        """Its epochs in one epoch of the node above it; None: any number."""
        return 1 if self.max_epochs is None and self.when_done != "repeat" else self.max_epochs


class Leaf(_Child, frozen=True, kw_only=True):
    """A part with samples of its own.

    :ivar number: its number among all leaves of the tree, from 0.
    """

    number: int


class Node(_Child, frozen=True, kw_only=True):
    """A mixture.

    :ivar children: sorted by name, so that the order in which a user lists them has no influence.
    :ivar stages: (position, weight of each child from there on), by position, the first at 0. Weights are whole.
    """

    children: tuple[Leaf | Node, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    by: str = "rows"
    quota: int = 1000

    def leaves(self) -> Iterator[Leaf]:
        """All parts below it."""
        for child in self.children:
            if isinstance(child, Leaf):
                yield child
            else:
                yield from child.leaves()

    @property
    def is_by_rows(self) -> bool:
        """Whether no schedule of the tree depends on the lengths of samples."""
        return self.by == "rows" and all(child.is_by_rows for child in self.children if isinstance(child, Node))

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, by dotted names, as builtins."""
        of = f"{self.name}." if self.name else ""
        settings: dict[str, Any] = {f"{of}by": self.by} | ({f"{of}quota": self.quota} if self.by == "rows" else {})
        for start, weights in self.stages:
            at = f" from {start} on" if start else ""
            settings |= {f"{child.name}.weight{at}": own for child, own in zip(self.children, weights, strict=True)}
        for child in self.children:
            settings[f"{child.name}.when_done"] = [child.when_done, child.max_epochs]
            settings |= child.description() if isinstance(child, Node) else {}
        return settings


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportions. A float counts as the decimal number that is written."""
    parts = [weight if isinstance(weight, Fraction) else Fraction(repr(weight)) for weight in weights]
    common = lcm(*(part.denominator for part in parts))
    whole = [int(part * common) for part in parts]
    divisor = gcd(*whole) or 1
    return tuple(weight // divisor for weight in whole)


def shares_of(node: Node, of: float = 1.0) -> list[float]:
    """The largest share of the samples that each leaf has at any stage, by number."""
    shares = []
    for number, child in enumerate(node.children):
        share = of * max(weights[number] / sum(weights) for _, weights in node.stages)
        shares += [share] if isinstance(child, Leaf) else shares_of(child, share)
    return shares


def has_end(node: Node) -> bool:
    """Whether an epoch of the node ever ends."""
    ends = [child.epochs_left is not None and (isinstance(child, Leaf) or has_end(child)) for child in node.children]
    stops = [end and child.when_done == "stop" for end, child in zip(ends, node.children, strict=True)]
    return any(stops) or all(ends)


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
    :ivar nodes: the states of children that are nodes.
    :ivar out: the children that sit out, or had no sample since they did: where each is back, and after how many
        multiples of ``quota``.
    """

    at: int = 0
    since: int = 0
    block: int = 0
    counts: dict[str, int] = {}
    epochs: dict[str, int] = {}
    begun: list[str] = []
    left: list[str] = []
    nodes: dict[str, NodeState] = {}
    out: dict[str, tuple[int, int]] = {}

    def with_new_weights(self) -> NodeState:
        """The state with targets that begin anew, in every node."""
        nodes = {name: node.with_new_weights() for name, node in self.nodes.items()}
        return msgspec.structs.replace(self, since=self.at, block=self.at, counts={}, nodes=nodes)


def adapted(state: NodeState, node: Node) -> NodeState:
    """The state for a tree with other weights: targets begin anew, and children that it does not have are gone."""
    return _present(state, node).with_new_weights()


def _present(state: NodeState, node: Node) -> NodeState:
    names = {child.short: child for child in node.children}
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
        nodes=nodes,
        out={name: until for name, until in state.out.items() if name in names},
    )


def targets_of(node: Node, state: NodeState, of: float = 1.0) -> dict[str, float]:
    """The share of each leaf now, by name: 0 for one that has left."""
    weights = [weights for start, weights in node.stages if start <= state.at][-1]
    gone = {*state.left, *(name for name, (back, _) in state.out.items() if back > state.at)}
    left = [0 if child.short in gone else own for child, own in zip(node.children, weights, strict=True)]
    targets: dict[str, float] = {}
    for child, weight in zip(node.children, left, strict=True):
        share = of * weight / max(1, sum(left))
        if isinstance(child, Leaf):
            targets[child.name] = share
        else:
            targets |= targets_of(child, state.nodes.get(child.short, NodeState()), share)
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


class _Place(NamedTuple):
    """A place in the blocks of a node; see :class:`NodeState`."""

    at: int
    since: int
    block: int
    counts: tuple[int, ...]


class ScheduleCursor:
    """A schedule at one position; it moves on as samples are taken.

    :param num_leaves: leaves of the whole tree, of which this node may be a part; None: it is the top.
    """

    def __init__(self, node: Node, seed: int, state: NodeState | None = None, num_leaves: int | None = None) -> None:
        state = state or NodeState()
        self.node = node
        self._seed = seed
        self._names = [child.short for child in node.children]
        num_leaves = num_leaves if num_leaves is not None else 1 + max(leaf.number for leaf in node.leaves())
        self._child_of = np.full(num_leaves, -1, np.int64)
        self._leaf_of = np.full(len(node.children), -1, np.int64)
        self._nodes: dict[int, ScheduleCursor] = {}
        self._stages = [start for start, _ in node.stages]
        for number, (child, name) in enumerate(zip(node.children, self._names, strict=True)):
            if isinstance(child, Leaf):
                self._child_of[child.number] = number
                self._leaf_of[number] = child.number
            else:
                inner = ScheduleCursor(child, seed, state.nodes.get(name, NodeState()), num_leaves)
                self._nodes[number] = inner
                self._child_of[[leaf.number for leaf in child.leaves()]] = number
        self._left = {number for number, name in enumerate(self._names) if name in state.left}
        self._out = {number: state.out[name] for number, name in enumerate(self._names) if name in state.out}
        self._begun = {number for number, name in enumerate(self._names) if name in state.begun}
        self._epochs = [state.epochs.get(name, 0) for name in self._names]
        counts = tuple(state.counts.get(name, 0) for name in self._names)
        self._place = _Place(state.at, state.since, state.block, counts)
        self._weights = self._weights_at(state.at)

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
            nodes={self._names[number]: inner.state() for number, inner in self._nodes.items()},
            out={self._names[number]: until for number, until in sorted(self._out.items())},
        )

    def awaited(self, within: int) -> set[int]:
        """The leaves that may have a sample in the next ``within`` positions; the others need not be read."""
        at, found = self._place.at, set()
        stages = [self._weights, *(weights for start, weights in self.node.stages if at < start <= at + within)]
        if any(at < back <= at + within for back in self._backs):
            stages.append(self._weights_at(at + within))
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

    def expected(self, number: int) -> list[int]:
        """The leaves of about the next ``number`` positions: exact by rows; by tokens, if all samples were as long."""
        if self.node.is_by_rows:
            return [leaf for leaf in self.plan(number).tolist() if leaf >= 0]

        ahead, leaves = ScheduleCursor(self.node, self._seed, self.state(), len(self._child_of)), list[int]()
        while len(leaves) < number and (leaf := ahead.pick()) >= 0:
            ahead.took_one(leaf, 1)
            leaves.append(leaf)
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
        self._had_samples(np.flatnonzero(np.bincount(children)).tolist())
        for child, inner in self._nodes.items():
            here = children == child
            if here.any():
                inner.took(leaves[here], num_tokens[here])
        if self.node.by == "rows":
            self._took_rows(len(leaves))
        else:
            self._took_tokens(children, num_tokens)

    def _had_samples(self, children: list[int]) -> None:
        self._begun.update(children)
        if self._out:
            self._out = {child: until for child, until in self._out.items() if child not in children}

    def _took_rows(self, number: int) -> None:
        place = self._place
        stop = place.at + number
        while stop >= place.block + self._before_stage(place.block, self.node.quota):
            ids, after = self._block_at(place, self._weights)
            place, self._weights = self._moved(place, len(ids), self._weights, after)
        self._place = place._replace(at=stop)

    def _took_tokens(self, children: Ids, num_tokens: Ids) -> None:
        while len(children):
            place = self._place
            number = self._before_stage(place.at, len(children))
            more = np.bincount(children[:number], num_tokens[:number], len(self._names)).astype(np.int64)
            self._have_tokens(place.at + number, (np.array(place.counts, np.int64) + more).tolist())
            children, num_tokens = children[number:], num_tokens[number:]

    def took_one(self, leaf: int, num_tokens: int) -> None:
        """The same for one sample; cheaper than an array of one."""
        child = int(self._child_of[leaf])
        self._had_samples([child])
        if child in self._nodes:
            self._nodes[child].took_one(leaf, num_tokens)
        if self.node.by == "rows":
            self._took_rows(1)
            return

        counts = list(self._place.counts)
        counts[child] += num_tokens
        self._have_tokens(self._place.at + 1, counts)

    def _have_tokens(self, at: int, counts: list[int]) -> None:
        self._place = self._place._replace(at=at, counts=tuple(counts))
        if self._changes_at(at):
            self._begin_anew(at)

    def epoch_ended(self, leaf: int, *, is_empty: bool = False) -> bool:
        """An epoch of ``leaf`` has ended at its turn. Return whether the node's epoch is over, too.

        :param is_empty: it had no sample, so that the part sits out.
        """
        number = int(self._child_of[leaf])
        inner = self._nodes.get(number)
        if inner is not None:
            if not inner.epoch_ended(leaf, is_empty=is_empty):
                return False

            is_empty = not inner._begun  # noqa: SLF001 - a cursor, too
            inner.begin_epoch()
        return self._child_ended(number, is_empty=is_empty)

    def settle(self) -> bool:
        """End the epochs of nodes in which no part has a weight. Return whether that is so here."""
        for number, inner in self._nodes.items():
            if self._weights[number] and inner.settle():
                inner.begin_epoch()
                if self._child_ended(number):
                    return True
        return not any(self._weights)

    def _child_ended(self, number: int, *, is_empty: bool = False) -> bool:
        """An epoch of a child has ended. Return whether the node's epoch is over, too."""
        child = self.node.children[number]
        counts = child.epochs_left is not None and (is_empty or number in self._begun)
        self._epochs[number] += counts
        if counts and self._epochs[number] >= (child.epochs_left or 0):
            if child.when_done == "stop":
                return True

            self._left.add(number)
        elif is_empty:
            times = 2 * self._out[number][1] if number in self._out else 1
            self._out[number] = (self._place.at // self.node.quota + times) * self.node.quota, times
        else:
            return False

        self._begin_anew(self._place.at)
        return not any(self._weights)

    def begin_epoch(self) -> None:
        """Begin the next epoch: all parts are back. A part that is within an epoch of its own stays there."""
        self._epochs = [0] * len(self._names)
        self._begun = set()
        if self._left or self._out:
            self._left, self._out = set(), {}
            self._begin_anew(self._place.at)
        for inner in self._nodes.values():
            inner.begin_epoch()

    def _begin_anew(self, at: int) -> None:
        """Other weights hold from ``at`` on."""
        self._place = _Place(at, at, at, (0,) * len(self._names))
        self._weights = self._weights_at(at)

    def _weights_at(self, at: int) -> tuple[int, ...]:
        weights = next(weights for start, weights in reversed(self.node.stages) if start <= at)
        gone = {*self._left, *(child for child, (back, _) in self._out.items() if back > at)}
        return tuple(0 if child in gone else weight for child, weight in enumerate(weights))

    @property
    def _backs(self) -> list[int]:
        """The positions at which children are back."""
        return [back for back, _ in self._out.values()]

    def _changes_at(self, at: int) -> bool:
        return at in self._stages or at in self._backs

    def _before_stage(self, at: int, number: int) -> int:
        """How many of the next ``number`` positions have the present weights."""
        return min([number, *(start - at for start in (*self._stages, *self._backs) if start > at)])

    def _block_at(self, place: _Place, weights: tuple[int, ...]) -> tuple[Ids, tuple[int, ...]]:
        size = self._before_stage(place.block, self.node.quota)
        return _block(self._seed, self.node.name, place.block, size, place.since, weights, place.counts)

    def _moved(
        self, place: _Place, size: int, weights: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[_Place, tuple[int, ...]]:
        """The start of the next block, and the weights there."""
        stop = place.block + size
        if self._changes_at(stop):
            return _Place(stop, stop, stop, (0,) * len(after)), self._weights_at(stop)

        return _Place(stop, place.since, stop, after), weights
