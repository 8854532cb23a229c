"""Sources, functions and settings as a user's code gives them; checked by mypy --strict and pyright, never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata import (
    AsyncDataLoader,
    BadRows,
    ByReward,
    Cache,
    Chain,
    ChatTokenizeFn,
    DataLoader,
    FixedLengthTokenizeFn,
    HuggingFaceSource,
    IterableSource,
    JsonArraySource,
    JsonlSource,
    Mix,
    Outcomes,
    ParquetSource,
    Part,
    PassRate,
    RayExecutor,
    Replay,
    RowFn,
    RowShuffle,
    Shuffle,
    Telemetry,
    XTunerTokenizeFn,
    first_in_first_out,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

chat = ChatTokenizeFn("path/to/tokenizer", max_length=4096)


def rows(epoch: int) -> Iterator[dict[str, Any]]:
    yield {"epoch": epoch}


def sources() -> None:
    for source in (JsonlSource("a"), JsonArraySource(["a"]), ParquetSource("a"), HuggingFaceSource("a")):
        DataLoader(source, tokenize_fn=chat)
    DataLoader(IterableSource(rows), tokenize_fn=chat)
    for paths in (Path("a"), [Path("a")], ["a", "b"]):
        DataLoader(paths, tokenize_fn=chat)
    parts = Mix({"a": Part("a", weight=2, tokenize_fn=chat), "b": "b", "c": Mix({"d": "d"})}, temperature=2)
    DataLoader(parts, tokenize_fn=chat)
    DataLoader(Mix({"a": "a", "again": Replay("a", PassRate(0.1))}), tokenize_fn=chat, outcomes=Outcomes())


def settings() -> None:
    DataLoader("a", tokenize_fn=RowFn(), executor=RayExecutor(num_workers=2), cache=Cache(tokens=True))
    DataLoader("a", tokenize_fn=XTunerTokenizeFn("a:b"), shuffle=Shuffle(window_blocks=3))
    DataLoader("a", tokenize_fn=chat, bad_rows=BadRows(policy="skip"), telemetry=Telemetry(folder="a"))
    DataLoader("a", tokenize_fn=chat, outcomes=Outcomes(policy=PassRate(drop_above=0.9)))
    fixed = FixedLengthTokenizeFn.babilong("path/to/tokenizer", 4096)
    DataLoader("a", tokenize_fn=fixed, shuffle=RowShuffle(part="train"))
    Shuffle(window=3)  # type: ignore[call-arg]
    ChatTokenizeFn("path/to/tokenizer", max_len=4096)  # type: ignore[call-arg]
    Mix(["a", "b"])  # type: ignore[arg-type]


async def rollouts() -> None:
    async with AsyncDataLoader("a", tokenize_fn=chat, buffer_filter=Chain((ByReward(), first_in_first_out))) as loader:
        groups = await loader.get_samples(4)
        loader.report(groups, [1.0] * 4)
        async for batch in loader:
            del batch
