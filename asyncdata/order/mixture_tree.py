"""What a mixture consists of: a tree of parts, with weights. It does not change during a run."""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("Leaf", "Node", "has_end", "shares_of", "whole_weights")


class Leaf(msgspec.Struct, frozen=True):
    """A part of a mixture.

    :ivar number: its number among all leaves of the tree, from 0.
    :ivar when_done: ``repeat``, ``leave`` or ``stop``: what happens after ``max_epochs`` epochs.
    :ivar max_epochs: its epochs in one epoch of its node; None: one, or with ``repeat`` any number.
    :ivar is_replay: whether its rows are those of another part. It alone keeps no epoch of its node from ending.
    """

    name: str
    number: int
    when_done: str = "repeat"
    max_epochs: int | None = None
    is_replay: bool = False

    @property
    def epochs_left(self) -> int | None:
        """Its epochs in one epoch of its node; None: any number."""
        return 1 if self.max_epochs is None and self.when_done != "repeat" else self.max_epochs


class Node(msgspec.Struct, frozen=True):
    """A mixture, or a part that is one.

    :ivar name: the dotted name; empty at the top.
    :ivar children: sorted by name, so that the order in which a user lists them has no influence.
    :ivar stages: (position, weight of each child from there on), by position, the first at 0. Weights are whole.
    """

    name: str
    children: tuple[Leaf | Node, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    by: str = "rows"
    quota: int = 1000
    when_done: str = "repeat"
    max_epochs: int | None = None

    @property
    def epochs_left(self) -> int | None:
        """Its epochs in one epoch of the node above it; None: any number."""
        return 1 if self.max_epochs is None and self.when_done != "repeat" else self.max_epochs

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


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the same proportions. A float counts as the decimal number that is written."""
    parts = [weight if isinstance(weight, Fraction) else Fraction(repr(weight)) for weight in weights]
    whole = [int(part * lcm(*(part.denominator for part in parts))) for part in parts]
    common = gcd(*whole) or 1
    return tuple(weight // common for weight in whole)


def shares_of(node: Node, of: float = 1.0) -> list[float]:
    """The largest share of the samples that each leaf has at any stage, by number."""
    shares = []
    for number, child in enumerate(node.children):
        share = of * max(weights[number] / sum(weights) for _, weights in node.stages)
        shares += [share] if isinstance(child, Leaf) else shares_of(child, share)
    return shares


def has_end(node: Node) -> bool:
    """Whether an epoch of the node ever ends."""
    children = [child for child in node.children if isinstance(child, Node) or not child.is_replay]
    ends = [child.epochs_left is not None and (isinstance(child, Leaf) or has_end(child)) for child in children]
    stops = [end and child.when_done == "stop" for end, child in zip(ends, children, strict=True)]
    return any(stops) or all(ends)
