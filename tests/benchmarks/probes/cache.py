"""The token cache: epochs of one loader, the first of which is tokenized and written down."""

from __future__ import annotations

import time
from typing import Any

from tests.benchmarks.probes.loading import BATCH, loader

__all__ = ("second_epoch",)


def second_epoch(path: str, tokenizer: str, cache: str, **knobs: Any) -> dict[str, float]:
    """Rows per second of the first epoch, the second and the third, each after its first batch."""
    rates = []
    with loader(path, tokenizer, token_cache=cache, epochs=3, batch_size=BATCH, buffer_size=8192, **knobs) as made:
        for _ in range(3):
            num_rows, began = 0, 0.0
            for batch in made:
                began = began or time.perf_counter()
                num_rows += len(batch)
            rates.append((num_rows - BATCH) / (time.perf_counter() - began))
    return dict(zip(("first_rows_per_s", "second_rows_per_s", "third_rows_per_s"), rates, strict=True))
