"""The adapter of asyncdata itself. It passes every check."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from asyncdata import DataLoader, Mix, Outcomes, Part, PassRate, Shuffle, __version__
from tests.conformance.lab import EpochByEpoch, Knobs, Rows, Seen


def every_1(rows: list[dict[str, Any]], keep_every: int = 1) -> list[dict[str, Any] | None]:
    """Samples whose only token is the row's number, but of rows that are no multiple of it. Raises for a bad row."""
    if any(row["bad"] for row in rows):
        raise ValueError("a bad row")

    made = ({"input_ids": [row["row"]], "metadata": {"worker": os.getpid()}} for row in rows)
    return [None if row["row"] % keep_every else sample for row, sample in zip(rows, made, strict=True)]


def every_2(rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    return every_1(rows, 2)


def every_3(rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    return every_1(rows, 3)


every_1.batched = every_2.batched = every_3.batched = True  # type: ignore[attr-defined]


class AsyncData:
    """A ``DataLoader`` with small windows, so that a few rows fill many of them."""

    name, version = "asyncdata", __version__
    lacks: Mapping[str, str] = {}

    def open(self, rows: Rows, knobs: Knobs) -> EpochByEpoch:
        """A loader over the files of ``rows``."""
        weighed = zip(rows.paths, knobs.weights, strict=False)
        parts = {f"part {number}": Part(path, weight=weight) for number, (path, weight) in enumerate(weighed)}
        loader = DataLoader(
            Mix(parts, on_mix_change="apply") if parts else rows.paths,  # a resume may come with other weights
            tokenize_fn=f"{__name__}:every_{knobs.keep_every}",
            batch_size=knobs.batch_size,
            num_workers=knobs.num_workers,
            seed=knobs.seed,
            shuffle=Shuffle(enabled=knobs.shuffle, block_bytes=128, window_blocks=4),
            buffer_size=knobs.read_ahead,
            bad_rows="skip" if knobs.passes_bad_rows else "raise",
            outcomes=Outcomes(policy=PassRate(drop_above=0.5)) if knobs.skips_solved else None,
            timeout_s=60,
        )
        return _Loader(loader)


class _Loader(EpochByEpoch):
    """As :class:`~tests.conformance.lab.Loader`."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def begin(self) -> Iterator[Any]:
        return iter(self._loader)

    def next_batch(self) -> list[Seen]:
        self._batch = super().next_batch()
        return [Seen(int(sample.tokens[0]), sample.metadata["worker"]) for sample in self._batch]

    def report(self, solved: Mapping[int, bool]) -> None:
        self._loader.report(self._batch, [solved[int(sample.tokens[0])] for sample in self._batch])

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        self._loader.close()
