"""StatefulDataLoader over Hugging Face streaming: the file cut into parts by hand, or all workers but one were idle."""

from __future__ import annotations

from contest import BATCH, SEED, Stateful, encoded, main  # isort: skip - the clock starts before anything else

from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import load_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator


def collated(rows: list[dict[str, Any]], tokenizer: str) -> list[Any]:
    """A batch of samples, made in a worker."""
    ids = encoded([row["input"] for row in rows], tokenizer)
    return [(tokens, row["label"], row["metadata"]) for row, tokens in zip(rows, ids, strict=True)]


class TorchData(Stateful):
    """A part of the file for each worker, with a shuffle buffer of 10,000 rows each."""

    def __init__(self, settings: dict[str, Any]) -> None:
        rows = load_dataset("json", data_files=settings["parts"], split="train", streaming=True)
        rows = rows.shuffle(seed=SEED, buffer_size=10_000, max_buffer_input_shards=1)
        self.loader = StatefulDataLoader(
            rows,
            batch_size=BATCH,
            num_workers=settings["num_workers"],
            collate_fn=partial(collated, tokenizer=settings["tokenizer"]),
        )

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.loader)


if __name__ == "__main__":
    main(TorchData)
