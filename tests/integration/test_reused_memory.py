"""Memory is used again only if nothing uses it, however an interpreter counts references."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.support.loaders import make
from tests.support.loading import ids, order_of, write_rows

COUNTS = sys.getrefcount


@pytest.mark.parametrize("fewer", [1, 2, 3])
def test_samples_that_are_kept_stay_as_they_are_where_references_are_borrowed(tmp_path, monkeypatch, fewer):
    """CPython 3.14 counts no reference of a local variable that it loads."""
    monkeypatch.setattr(sys, "getrefcount", lambda value: COUNTS(value) - fewer)
    path = write_rows(tmp_path / "rows.jsonl", 3000)
    with make(path, num_workers=1, epochs=2, buffer_size=64) as loader:
        kept = [loader.get_next_batch(50) for _ in range(100)]
    assert [number for batch in kept for number in ids(batch)] == order_of(path, 2)[:5000]
    assert all(sample.tokens.dtype == np.int32 for batch in kept for sample in batch)
