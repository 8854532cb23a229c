"""Which combinations of parameters CI runs, and that the slow ones are all others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.combinations import each_pair, each_value

KINDS = (["a", "b", "c"], {"two": 2, "three": 3}, [False, True], range(5))
ALL = list(itertools.product("abc", [2, 3], [False, True], range(5)))


def in_ci(params: list[Any]) -> list[tuple[Any, ...]]:
    return [param.values for param in params if not param.marks]


def parts(combinations: list[tuple[Any, ...]], number: int) -> set[Any]:
    return {part for each in combinations for part in itertools.combinations(enumerate(each), number)}


@pytest.mark.parametrize(("select", "number", "most"), [(each_value, 1, 5), (each_pair, 2, 17)])
def test_ci_has_whatever_values_are_asked_for_in_few_combinations_and_the_others_are_slow(select, number, most):
    params = select(*KINDS)

    assert [param.values for param in params] == ALL
    assert parts(in_ci(params), number) == parts(ALL, number)
    assert len(in_ci(params)) <= most
    assert {mark.name for param in params for mark in param.marks} == {"slow"}
    assert len({param.id for param in params}) == len(ALL)


def test_a_combination_is_named_by_its_values_or_by_their_keys():
    assert [param.id for param in each_value(["a"], {"none": None, "one": 1})] == ["a-none", "a-one"]
