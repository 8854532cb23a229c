"""The limits of coverage: which file is of which folder, and what is too little."""

from __future__ import annotations

import pytest

from tests.coverage_limits import folder_of, shortfalls
from tests.unit.test_architecture import FOLDERS, PACKAGE


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("core/errors.py", "core"),
        ("__init__.py", "asyncdata"),
        ("sources/__init__.py", "sources"),
        ("filters.py", "loader"),
        ("__main__.py", "__main__"),
    ],
)
def test_a_file_belongs_to_its_first_folder(path, folder):
    assert folder_of(PACKAGE / path) == folder


def test_every_file_belongs_to_a_folder_that_is_listed():
    assert {folder_of(path) for path in PACKAGE.rglob("*.py")} == set(FOLDERS)


def test_what_is_below_a_limit_is_named():
    assert shortfalls(94.99, {"core": 100.0, "order": 99.9, "sources": 50.0}) == [
        "overall 94.99 %, less than 95",
        "order 99.90 %, less than 100",
    ]


def test_what_reaches_its_limit_is_enough():
    assert shortfalls(95.0, {"core": 100.0, "order": 100.0, "sources": 50.0}) == []
