"""MosaicML Streaming: the rows converted to its shards first, tokenized by the data loader's workers.

Its package imports its data sets of pictures, and these a torchvision that goes with torch's build for GPUs; they are
stood in for.
"""

from __future__ import annotations

from contest import BATCH, SEED, Stateful, encoded, lines, main  # isort: skip - the clock starts before anything else

import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

sys.modules["streaming.vision"] = ModuleType("streaming.vision")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator


def collated(rows: list[dict[str, Any]], tokenizer: str) -> dict[str, list[Any]]:
    """A batch of samples, made in a worker; a dict, or its loader would take the first sample's tokens for rows."""
    return {"tokens": encoded([row["input"] for row in rows], tokenizer)}


class Mosaic(Stateful):
    """The conversion counts: it comes before the first batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["mode"] != "resume":
            with MDSWriter(out=settings["folder"], columns={"input": "str"}) as writer:
                for text in lines(settings["path"]):
                    writer.write({"input": text})
        rows = StreamingDataset(local=settings["folder"], shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
        self.loader = StreamingDataLoader(
            rows,
            batch_size=BATCH,
            num_workers=settings["num_workers"],
            collate_fn=partial(collated, tokenizer=settings["tokenizer"]),
        )

    def __iter__(self) -> Iterator[list[Any]]:
        return (batch["tokens"] for batch in self.loader)


if __name__ == "__main__":
    main(Mosaic)
