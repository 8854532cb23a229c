"""Reads a source as a user does: by a loader, in the order in which its rows lie."""

from typing import Any

import pytest

from asyncdata import DataLoader, RowFn, Sample
from asyncdata.errors import SourceError
from tests.support.loading import NEVER_S

AS_IT_LIES = {"tokenize_fn": RowFn(), "shuffle": False, "epochs": 1, "batch_size": 50, "num_workers": 0}


def samples_of(source: Any, **knobs: Any) -> list[Sample]:
    """A sample for each row of the epochs; ``extra`` is the row."""
    settings = AS_IT_LIES | {"timeout_s": NEVER_S} | knobs
    with DataLoader(source, **settings) as loader:
        return [sample for _ in range(settings["epochs"]) for batch in loader for sample in batch]


def rows_of(source: Any, **knobs: Any) -> list[Any]:
    return [sample.extra for sample in samples_of(source, **knobs)]


def read_until_fault(source: Any, **knobs: Any) -> tuple[list[Any], SourceError]:
    """The rows that come before an error, and the error."""
    found: list[Any] = []
    with pytest.raises(SourceError) as caught, DataLoader(source, **AS_IT_LIES | {"batch_size": 1} | knobs) as loader:
        for batch in loader:
            found += [sample.extra for sample in batch]
    return found, caught.value


def refusal_of(source: Any, **knobs: Any) -> str:
    with pytest.raises(SourceError) as caught:
        DataLoader(source, **AS_IT_LIES | knobs).close()

    return str(caught.value)
