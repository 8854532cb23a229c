"""Coordinators over loaders that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.still_loader import StillLoader
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def loader_of(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., StillLoader]]:
    """A function that makes a loader of so many rows; they come in the order of the file."""
    loaders = []

    def make(num_rows: int = 20, function: Any = row_id, **rules: Any) -> StillLoader:
        path = jsonl_file(({"id": number} for number in range(num_rows)), f"{len(loaders)}/rows.jsonl")
        loader = StillLoader(path, function, **rules)
        loader.start()
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()
