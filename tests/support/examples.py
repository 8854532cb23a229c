"""How many cases are tried: examples of hypothesis, and some of all combinations of parameters."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import settings


def in_ci(max_examples):
    """So many with the profile ``ci``. With the others as many as of any property: with ``long`` 20,000."""
    return settings(max_examples=max_examples) if settings.get_current_profile_name() == "ci" else settings()


Kind = Mapping[str, Any] | Collection[Any]


def each_value(*kinds: Kind) -> list[Any]:
    """All combinations. As many are not slow as there are values of the largest kind: each value of each kind."""
    return _combinations(kinds, _diagonal(*map(len, kinds)))


def each_pair(*kinds: Kind) -> list[Any]:
    """All combinations. As many are not slow as have each value of each kind with each value of each other kind."""
    return _combinations(kinds, _pairs(*map(len, kinds)))


def _combinations(kinds: tuple[Kind, ...], chosen: set[tuple[int, ...]]) -> list[Any]:
    named = [kind if isinstance(kind, Mapping) else {str(value): value for value in kind} for kind in kinds]
    names = [list(kind) for kind in named]
    return [
        pytest.param(
            *(kind[name[number]] for kind, name, number in zip(named, names, place, strict=True)),
            id="-".join(name[number] for name, number in zip(names, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in itertools.product(*(range(len(kind)) for kind in named))
    ]


def _diagonal(*sizes: int) -> set[tuple[int, ...]]:
    return {tuple(number % size for size in sizes) for number in range(max(sizes))}


def _pairs(*sizes: int) -> set[tuple[int, ...]]:
    """Few places that have each pair of numbers: always the first of those with the most that are still missing."""
    places = list(itertools.product(*map(range, sizes)))
    pairs = {place: set(itertools.combinations(enumerate(place), 2)) for place in places}
    missing = set[Any]().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(places, key=lambda place: len(pairs[place] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
