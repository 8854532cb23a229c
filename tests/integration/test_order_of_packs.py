"""Which settings the order of packs depends on: with a length grouping the global batch is one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, LengthGrouping, Ranks, SoftPacking

if TYPE_CHECKING:
    from pathlib import Path

PLANNED = {"shuffle": "full", "plan_packs": True, "cache": {"folder": ""}}


def repeated(row: dict[str, Any]) -> dict[str, Any]:
    """As many tokens as the row asks for, all of them its number."""
    return {"input_ids": [row["id"]] * row["n"]}


repeated.version = "1"  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": row, "n": 1 + row * 7 % 23}) + "\n" for row in range(600)))
    return path


def packs(path: Path, batch_size: int, **given: Any) -> list[tuple[int, ...]]:
    """The rows of each pack of an epoch, in the order of delivery to all ranks."""
    given = {"packing": SoftPacking(max_length=64, window_samples=16), "num_workers": 0, "timeout_s": 240, **given}
    with DataLoader(path, tokenize_fn=repeated, batch_size=batch_size, **given) as loader:
        return [tuple(int(d.tokens[0]) for d in pack) for batch in loader for pack in batch]


@pytest.mark.parametrize("settings", [{}, PLANNED], ids=["as they come", "planned"])
def test_packs_that_are_not_grouped_come_in_one_order_whatever_the_batch_size(
    path: Path, settings: dict[str, Any]
) -> None:
    one = packs(path, 1, **settings)

    assert all(packs(path, size, **settings) == one for size in (2, 3, 5, 8))


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, PLANNED], ids=["as they come", "planned"])
def test_grouped_packs_come_in_one_order_for_each_global_batch(path: Path, settings: dict[str, Any]) -> None:
    grouped = {**settings, "length_grouping": LengthGrouping(window=8)}
    orders = {steps: packs(path, 1, ranks=Ranks(gradient_accumulation=steps), **grouped) for steps in (1, 2, 4, 6)}

    for batch_size, accumulation in ((2, 1), (2, 2), (4, 1), (2, 3), (3, 2), (6, 1)):
        found = packs(path, batch_size, ranks=Ranks(gradient_accumulation=accumulation), **grouped)
        assert found == orders[batch_size * accumulation]
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    ungrouped = sorted(packs(path, 1, **settings))
    assert all(sorted(order) == ungrouped for order in orders.values()), "the packs themselves are the same"
