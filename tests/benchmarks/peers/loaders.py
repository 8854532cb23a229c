"""The peers' loaders. Each imports its library when it is made: it is installed in an environment of its own.

Where rows are converted first, the conversion counts: it comes before the first batch.
"""

from __future__ import annotations

from contest import BATCH, SEED, Peer, encoded, lines, main, row_offsets  # isort: skip - the clock starts first

import copy
import json
import os
import queue
import random
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Rows = list[dict[str, Any]]
ROWS_AT_ONCE, QUEUE_ROWS, BUFFER_ROWS = 256, 1000, 10_000


def samples(rows: Rows, tokenizer: str, backend: str = "hf") -> list[Any]:
    """Rows, tokenized; in a worker, where there are some."""
    ids = encoded([row["input"] for row in rows], tokenizer, backend)
    return [(tokens, row["label"], row["metadata"]) for row, tokens in zip(rows, ids, strict=True)]


def tokens_only(rows: Rows, tokenizer: str) -> dict[str, list[Any]]:
    """A dict, or the loader would take the first sample's tokens for rows."""
    return {"tokens": encoded([row["input"] for row in rows], tokenizer)}


def texts_only(rows: Rows) -> dict[str, list[Any]]:
    return {"tokens": [row["input"] for row in rows]}


def as_rows(path: str) -> Iterator[dict[str, str]]:
    """The texts of a file, to be converted."""
    for text in lines(path):
        yield {"input": text}


class HfStreaming(Peer):
    """As slime's users were offered it: a shuffle buffer of 10,000 rows, one thread, one queue.

    The thread tokenizes 256 rows at a time, which the tokenizer may do on as many cores as ours has workers.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from datasets import load_dataset

        self._tokenizer = settings["tokenizer"], settings["backend"]
        rows = load_dataset("json", data_files=settings["path"], split="train", streaming=True)
        self._rows = rows.shuffle(seed=SEED, buffer_size=BUFFER_ROWS)
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_ROWS)

    def _fill(self) -> None:
        rows = []
        for row in self._rows:
            rows.append(row)
            if len(rows) == ROWS_AT_ONCE:
                self._put(rows)
                rows = []
        self._put(rows)
        self._queue.put(None)

    def _put(self, rows: Rows) -> None:
        for sample in samples(rows, *self._tokenizer):
            self._queue.put(sample)

    def __iter__(self) -> Iterator[list[Any]]:
        threading.Thread(target=self._fill, daemon=True).start()
        batch = []
        while (sample := self._queue.get()) is not None:
            batch.append(sample)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def states(self, stops: list[int]) -> Iterator[Any]:
        """The rows to skip. A state of its own it has as well, but what is in the shuffle buffer is not in it: 10,000
        rows would be lost, and in the last of a file all that is left."""
        yield from stops

    def restore(self, state: Any) -> None:
        self._rows = self._rows.skip(state)


class TorchData(Peer):
    """StatefulDataLoader over Hugging Face streaming, with a shuffle buffer of 10,000 rows for each worker.

    The file is cut into parts by hand, or all workers but one were idle.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from datasets import load_dataset
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows = load_dataset("json", data_files=settings["parts"], split="train", streaming=True)
        rows = rows.shuffle(seed=SEED, buffer_size=BUFFER_ROWS, max_buffer_input_shards=1)
        collate = partial(samples, tokenizer=settings["tokenizer"])
        workers = {"num_workers": settings["num_workers"], "collate_fn": collate}
        self.loader = StatefulDataLoader(rows, batch_size=BATCH, **workers)


class RowsByNumber:
    """Rows out of the raw file, whose offsets are found first."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets = row_offsets(path)
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
        start, stop = self._offsets[number], self._offsets[number + 1]
        return json.loads(os.pread(self._file, stop - start, start))


class Grain(Peer):
    """Its dataset API: a global shuffle, and workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import grain
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # grain's worker processes ask for them
        rows = grain.MapDataset.source(RowsByNumber(settings["path"])).shuffle(seed=SEED)
        batches = rows.batch(BATCH, drop_remainder=False, batch_fn=list)
        batches = batches.map(partial(samples, tokenizer=settings["tokenizer"]))
        options = grain.MultiprocessingOptions(num_workers=settings["num_workers"])
        self.loader = iter(batches.to_iter_dataset().mp_prefetch(options))

    def state(self) -> Any:
        return self.loader.get_state()

    def restore(self, state: Any) -> None:
        self.loader.set_state(state)


def streaming() -> Any:
    """MosaicML's. It imports its data sets of pictures, and these a torchvision that goes with torch's build for GPUs;
    they are stood in for."""
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")
    import streaming

    return streaming


class Mosaic(Peer):
    """MosaicML Streaming: the rows converted to its shards first, tokenized by the data loader's workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["mode"] != "resume":
            self.convert(settings["path"], settings["folder"])
        collate = partial(tokens_only, tokenizer=settings["tokenizer"])
        self.open(settings["num_workers"], collate, local=settings["folder"])

    def convert(self, path: str, folder: str, **more: Any) -> None:
        with streaming().MDSWriter(out=folder, columns={"input": "str"}, **more) as writer:
            for row in as_rows(path):
                writer.write(row)

    def open(self, num_workers: int, collate: Any, **places: str) -> None:
        rows = streaming().StreamingDataset(shuffle=True, shuffle_seed=SEED, batch_size=BATCH, **places)
        workers = {"num_workers": num_workers, "collate_fn": collate}
        self.loader = streaming().StreamingDataLoader(rows, batch_size=BATCH, **workers)

    def __iter__(self) -> Iterator[list[Any]]:
        return (batch["tokens"] for batch in self.loader)


class MosaicFromS3(Mosaic):
    """The same from S3, uploaded first, and without a tokenizer.

    ``store`` of the settings has the ``bucket``, the ``direct`` address for the upload, and the ``slow`` one for reads.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        streaming()
        import boto3
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # of a run before, whose processes were not waited for
        store, shards = settings["store"], f"{settings['folder']}/shards"
        login = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= login | {"S3_ENDPOINT_URL": store["slow"]}
        self.convert(settings["path"], shards, size_limit="2mb")
        client = boto3.client("s3", endpoint_url=store["direct"])
        for path in Path(shards).iterdir():
            client.upload_file(str(path), store["bucket"], f"shards/{path.name}")
        places = {"remote": f"s3://{store['bucket']}/shards", "local": f"{settings['folder']}/local"}
        self.open(settings["num_workers"], texts_only, **places)


class LitData(Peer):
    """The rows converted to its chunks first, by as many processes, tokenized by the data loader's workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import litdata

        folder, workers = settings["folder"], {"num_workers": settings["num_workers"]}
        if settings["mode"] != "resume":
            litdata.optimize(fn=as_rows, inputs=settings["parts"], output_dir=folder, chunk_bytes="16MB", **workers)
        rows = litdata.StreamingDataset(folder, shuffle=True, seed=SEED)
        collate = partial(samples_without_labels, tokenizer=settings["tokenizer"])
        self.loader = litdata.StreamingDataLoader(rows, batch_size=BATCH, collate_fn=collate, **workers)


def samples_without_labels(rows: Rows, tokenizer: str) -> list[Any]:
    return encoded([row["input"] for row in rows], tokenizer)


class Sample:
    """A prompt with its tokens."""

    def __init__(self, row: dict[str, Any], tokens: list[int]) -> None:
        self.prompt, self.label, self.metadata, self.tokens = row["input"], row["label"], row["metadata"], tokens


class Legacy(Peer):
    """A loader as RL frameworks had it first: all rows into memory, tokenized one after the other, then shuffled.

    What is delivered is a copy, since a rollout writes into it.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

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
    main({kind.__name__: kind for kind in (HfStreaming, TorchData, Grain, Mosaic, MosaicFromS3, LitData, Legacy)})
