"""A loader as RL frameworks had it first: all rows into memory, tokenized one after the other, then shuffled."""

from __future__ import annotations

from contest import BATCH, SEED, main  # isort: skip - the clock starts before anything else

import copy
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sample:
    """A prompt with its tokens."""

    def __init__(self, row: dict[str, Any], tokens: list[int]) -> None:
        self.prompt, self.label, self.metadata, self.tokens = row["input"], row["label"], row["metadata"], tokens


class Legacy:
    """What is delivered is a copy, since a rollout writes into it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        encode = Tokenizer.from_file(str(Path(settings["tokenizer"]) / "tokenizer.json")).encode
        with open(settings["path"], "rb") as file:
            rows = [json.loads(line) for line in file]
        self._samples = [Sample(row, encode(row["input"], add_special_tokens=False).ids) for row in rows]
        random.Random(SEED).shuffle(self._samples)
        self._offset = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for start in range(self._offset, len(self._samples), BATCH):
            yield [copy.deepcopy(sample) for sample in self._samples[start : start + BATCH]]

    def states(self, stops: list[int]) -> Iterator[Any]:
        yield from stops

    def restore(self, state: Any) -> None:
        self._offset = state


if __name__ == "__main__":
    main(Legacy)
