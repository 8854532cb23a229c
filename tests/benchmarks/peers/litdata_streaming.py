"""LitData: the rows converted to its chunks first, by as many processes, tokenized by the data loader's workers."""

from __future__ import annotations

from contest import BATCH, SEED, Stateful, encoded, lines, main  # isort: skip - the clock starts before anything else

from functools import partial
from typing import TYPE_CHECKING, Any

from litdata import StreamingDataLoader, StreamingDataset, optimize

if TYPE_CHECKING:
    from collections.abc import Iterator


def collated(rows: list[dict[str, Any]], tokenizer: str) -> list[Any]:
    """A batch of samples, made in a worker."""
    return encoded([row["input"] for row in rows], tokenizer)


def converted(path: str) -> Iterator[dict[str, str]]:
    """The rows of a part of the file."""
    for text in lines(path):
        yield {"input": text}


class LitData(Stateful):
    """The conversion counts: it comes before the first batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["mode"] != "resume":
            optimize(
                fn=converted,
                inputs=settings["parts"],
                output_dir=settings["folder"],
                chunk_bytes="16MB",
                num_workers=settings["num_workers"],
            )
        rows = StreamingDataset(settings["folder"], shuffle=True, seed=SEED)
        self.loader = StreamingDataLoader(
            rows,
            batch_size=BATCH,
            num_workers=settings["num_workers"],
            collate_fn=partial(collated, tokenizer=settings["tokenizer"]),
        )

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.loader)


if __name__ == "__main__":
    main(LitData)
