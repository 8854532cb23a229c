"""asyncdata's own mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncdata
from asyncdata import DataLoader, EndOfData, Mix, Part

if TYPE_CHECKING:
    from mixture_checks import Setup


def tokens_of(row: dict[str, Any]) -> dict[str, Any]:
    """A sample of as many tokens as the row says."""
    return {"input_ids": [0] * row["tokens"], "row": row["row"]}


class _Rows:
    def __init__(self, setup: Setup) -> None:
        parts = {
            name: Part(path, weight=setup.weights[name], when_done=setup.end)  # type: ignore[arg-type]
            for name, path in setup.files.items()
        }
        mix = Mix(parts, by="tokens" if setup.by_tokens else "rows", on_mix_change="apply")
        function = "mixture_asyncdata:tokens_of"
        self._loader = DataLoader(mix, tokenize_fn=function, num_workers=0, epochs=None if setup.end == "repeat" else 1)

    def __next__(self) -> tuple[str, int]:
        try:
            (sample,) = self._loader.get_next_batch(1)
        except EndOfData as end:
            raise StopIteration from end

        assert sample.source_name is not None
        return sample.source_name, sample.extra["row"]

    def state(self) -> Any:
        return self._loader.state_dict()

    def restore(self, state: Any) -> None:
        self._loader.load_state_dict(state)


class AsyncData:
    name = "asyncdata"
    version = asyncdata.__version__
    ends = ("repeat", "leave", "stop")
    unable: dict[str, str] = {}

    def open(self, setup: Setup) -> _Rows:
        return _Rows(setup)


LIBRARY = AsyncData()
