"""``interleave_datasets`` of Hugging Face, over streaming datasets that were shuffled before: these have a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets

if TYPE_CHECKING:
    from mixture_checks import Setup


class _Rows:
    def __init__(self, setup: Setup) -> None:
        parts = [
            datasets.load_dataset("json", data_files=path, split="train", streaming=True).shuffle(42, buffer_size=100)
            for path in setup.files.values()
        ]
        end = setup.end
        if end == "repeat":
            parts, end = [part.repeat(None) for part in parts], "first_exhausted"
        total = sum(setup.weights.values())
        shares = [setup.weights[name] / total for name in setup.files]
        self._mixed = datasets.interleave_datasets(parts, probabilities=shares, seed=42, stopping_strategy=end)
        self._rows = iter(self._mixed)

    def __next__(self) -> tuple[str, int]:
        row = next(self._rows)
        return row["part"], row["row"]

    def state(self) -> Any:
        return self._mixed.state_dict()

    def restore(self, state: Any) -> None:
        self._mixed.load_state_dict(state)
        self._rows = iter(self._mixed)


class HuggingFace:
    name = "HF `interleave_datasets`"
    version = f"datasets {datasets.__version__}"
    ends = ("repeat", "first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
    unable = {"tokens": "no"}

    def open(self, setup: Setup) -> _Rows:
        return _Rows(setup)


LIBRARY = HuggingFace()
