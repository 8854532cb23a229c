"""The limits of coverage: which file is of which level, and what is too little."""

from __future__ import annotations

import pytest

from tests.coverage_limits import level_of, shortfalls
from tests.unit.test_architecture import LEVELS, PACKAGE


@pytest.mark.parametrize(
    ("path", "module"),
    [("errors.py", "errors"), ("__init__.py", "asyncdata"), ("sources/__init__.py", "sources"), ("cli/main.py", "cli")],
)
def test_a_file_has_the_level_of_its_module_or_folder(path, module):
    assert level_of(PACKAGE / path) == LEVELS[module]


def test_every_file_has_a_level():
    assert {level_of(path) for path in PACKAGE.rglob("*.py")} == set(LEVELS.values())


def test_what_is_below_a_limit_is_named():
    assert shortfalls(94.99, {0: 100.0, 1: 99.9, 2: 50.0}) == [
        "overall 94.99 %, less than 95",
        "level 1 99.90 %, less than 100",
    ]


def test_what_reaches_its_limit_is_enough():
    assert shortfalls(95.0, {0: 100.0, 1: 100.0, 2: 50.0}) == []
