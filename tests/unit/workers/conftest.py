"""Rows for executors, whose tokens are their ids, and a gate that some of them wait for."""

from typing import Any

import pytest


@pytest.fixture
def rows(jsonl_file):
    """A function that writes rows 0 to n-1, each with its special fields."""

    def write(number: int, special: dict[int, dict[str, Any]] | None = None):
        return jsonl_file([{"id": i, **(special or {}).get(i, {})} for i in range(number)])

    return write


class Gate:
    """Of a row whose ``special`` fields are for ``worker_fns.waits``: it has ``began``, and waits for ``open``."""

    def __init__(self, folder) -> None:
        self.began, self._path = folder / "began", folder / "gate"
        self.special = {"began": str(self.began), "gate": str(self._path)}

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path)
