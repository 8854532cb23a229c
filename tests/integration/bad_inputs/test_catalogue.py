"""The catalogue of bad inputs is whole, and its page says what its tests hold."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.integration.bad_inputs.test_rows import ACCEPTED, CASES

NUM_INPUTS = 75
HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "reference" / "bad-inputs.md"
NOT_RAISED = {13: {"AD202"}}
"""Codes that the page names to say that they are not what comes."""


def numbers_of(name: str) -> set[int]:
    """``test_53_54_a_row...`` is of the inputs 53 and 54."""
    found = re.match(r"test((?:_\d\d)+)_", name)
    return set(map(int, found[1][1:].split("_"))) if found else set()


@functools.cache
def codes_by_test() -> dict[int, set[str]]:
    """The codes that the tests of each number name; also where it has none."""
    found: dict[int, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                codes = set(re.findall(r"\bAD\d{3}\b", _code_of(node)))
                for number, its_codes in shares(numbers_of(node.name), codes).items():
                    found.setdefault(number, set()).update(its_codes)
    for case in CASES:
        found.setdefault(case.number, set()).add(case.code)
    for accepted in ACCEPTED:
        found.setdefault(accepted.number, set())
    return found


def shares(numbers: set[int], codes: set[str]) -> dict[int, set[str]]:
    """The codes of a test by its numbers: of several, each has those that the page names for it, and none is left."""
    if len(numbers) < 2:
        return dict.fromkeys(numbers, codes)

    named = {number: codes & codes_of_page(number) for number in numbers}
    assert codes == set().union(*named.values()), numbers
    return named


def codes_of_page(number: int) -> set[str]:
    return set(re.findall(r"\bAD\d{3}\b", " ".join(rows_of_page()[number])))


def _code_of(node: ast.FunctionDef) -> str:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "\n".join(map(ast.unparse, [*node.decorator_list, *body]))


@functools.cache
def rows_of_page() -> dict[int, list[str]]:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(number): [cell.strip() for cell in rest.split(" | ")] for number, rest in rows}


def test_every_input_of_the_catalogue_has_a_test():
    assert sorted(codes_by_test()) == list(range(1, NUM_INPUTS + 1))


def test_every_input_of_the_catalogue_is_on_its_page_in_its_order():
    assert list(rows_of_page()) == list(range(1, NUM_INPUTS + 1))


def test_the_page_names_the_codes_that_the_tests_hold():
    for number in range(1, NUM_INPUTS + 1):
        assert codes_of_page(number) - NOT_RAISED.get(number, set()) == codes_by_test()[number]
