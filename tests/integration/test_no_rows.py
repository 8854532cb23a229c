"""Data of which an order leaves no row: an error at once that names what is empty, and never a loop."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRows,
    DataLoader,
    HardPacking,
    Mix,
    Outcomes,
    Part,
    PassRate,
    Ranks,
    RowShuffle,
    Shuffle,
    SoftPacking,
)
from asyncdata.errors import NoSamplesError, SourceError
from tests.support.combinations import each_value
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import all_dropped, row_id

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "rows": "".join(json.dumps({"id": n}) + "\n" for n in range(50)),
    "blank": "\n\n\n",
    "bad": "1\n2\n",
    "empty": "",
}
SKIP = {"bad_rows": BadRows(policy="skip")}
NONE_KEPT = {"tokenize_fn": all_dropped}
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "no bytes": ("empty", "full", {}),
    "blocks of blank lines": ("blank", Shuffle(), {}),
    "blank lines": ("blank", "full", {}),
    "blank lines in slime's order": ("blank", RowShuffle(method="slime"), {}),
    "a slice from the end on": ("rows", RowShuffle(first=50), {}),
    "a slice from the end on, as they lie": ("rows", RowShuffle(method="none", first=50), {}),
    "a slice up to the start": ("rows", RowShuffle(stop=0), {}),
    "a slice up to the start, as they lie": ("rows", RowShuffle(method="none", stop=0), {}),
    "a slice of no row": ("rows", RowShuffle(first=-5, stop=3), {}),
    "a split without eval": ("rows", RowShuffle(part="eval", train_ratio=1.0), {}),
    "a split without train": ("rows", RowShuffle(part="train", train_ratio=0.0), {}),
    "only kept rows, and none is": ("rows", RowShuffle(only_kept=True), NONE_KEPT),
    "only kept rows, as they lie": ("rows", RowShuffle(method="none", only_kept=True), NONE_KEPT),
    "only bad rows": ("bad", "full", SKIP),
    "only bad rows without a number": ("bad", RowShuffle(first=0), SKIP),
    "all dropped": ("rows", "full", NONE_KEPT),
    "all dropped in blocks": ("rows", Shuffle(), NONE_KEPT),
}
OTHERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "outcomes": {"outcomes": Outcomes(policy=PassRate(drop_above=0.9))},
    "soft packs": {"packing": SoftPacking(max_length=16)},
    "hard packs": {"packing": HardPacking(max_length=16)},
    "acknowledged": {"commit": "on_ack"},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def take(source: Any, **knobs: Any) -> None:
    """Ask for samples one at a time, so that much is read ahead."""
    settings = {"tokenize_fn": row_id, "num_workers": 0, "timeout_s": NEVER_S, "buffer_size": 200, "batch_size": 1}
    with DataLoader(source, **settings | knobs) as loader:
        for _ in loader:
            pass


@pytest.mark.parametrize(("way", "other"), each_value(list(WAYS), list(OTHERS)))
def test_a_loader_whose_order_has_no_row_says_so_and_a_part_is_named(data: Path, way: str, other: str) -> None:
    name, shuffle, settings = WAYS[way]
    path = data / f"{name}.jsonl"

    with pytest.raises(SourceError, match="AD401|AD201"):
        take(path, shuffle=shuffle, **settings, **OTHERS[other])
    for weight in (1, 99):
        parts = {"none": Part(path, shuffle=shuffle, **settings), "all": Part(data / "rows.jsonl", weight=weight)}
        with pytest.raises(SourceError, match="AD201|AD407 part 'none'"):
            take(Mix(parts), **OTHERS[other])


@pytest.mark.parametrize("way", ["blank lines", "a slice from the end on"])
def test_a_part_of_a_nested_mixture_is_named_with_its_mixture(data: Path, way: str) -> None:
    name, shuffle, settings = WAYS[way]
    inner = Mix({"none": Part(data / f"{name}.jsonl", shuffle=shuffle, **settings), "all": Part(data / "rows.jsonl")})

    with pytest.raises(NoSamplesError, match=r"AD407 part 'inner\.none'"):
        take(Mix({"inner": Part(inner), "all": Part(data / "rows.jsonl")}))


@pytest.mark.parametrize("way", ["blank lines", "a slice from the end on", "only kept rows, and none is"])
def test_a_rank_of_an_order_without_a_row_says_so(data: Path, way: str) -> None:
    name, shuffle, settings = WAYS[way]

    with pytest.raises(NoSamplesError, match="AD401"):
        take(data / f"{name}.jsonl", shuffle=shuffle, ranks=Ranks(rank=1, world_size=2), **settings)
