"""MosaicML Streaming from S3: the rows converted to its shards and uploaded first, no tokenizer.

``store`` of the settings has the ``bucket``, the ``direct`` address for the upload, and the ``slow`` one for reads.
"""

from __future__ import annotations

from contest import BATCH, SEED, Stateful, lines, main  # isort: skip - the clock starts before anything else

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

sys.modules["streaming.vision"] = ModuleType("streaming.vision")  # see mosaic_streaming

import boto3  # noqa: E402 - as above
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402 - as above
from streaming.base.util import clean_stale_shared_memory  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARD = "2mb"


def collated(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """A batch, made in a worker."""
    return {"input": [row["input"] for row in rows]}


class MosaicFromS3(Stateful):
    """The conversion and the upload count: they come before the first batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        clean_stale_shared_memory()  # of a run before, whose processes were not waited for
        store, shards = settings["store"], f"{settings['folder']}/shards"
        login = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= login | {"S3_ENDPOINT_URL": store["slow"]}
        with MDSWriter(out=shards, columns={"input": "str"}, size_limit=SHARD) as writer:
            for text in lines(settings["path"]):
                writer.write({"input": text})
        client = boto3.client("s3", endpoint_url=store["direct"])
        for path in Path(shards).iterdir():
            client.upload_file(str(path), store["bucket"], f"shards/{path.name}")
        rows = StreamingDataset(
            remote=f"s3://{store['bucket']}/shards",
            local=f"{settings['folder']}/local",
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=BATCH,
        )
        workers = {"num_workers": settings["num_workers"], "collate_fn": collated}
        self.loader = StreamingDataLoader(rows, batch_size=BATCH, **workers)

    def __iter__(self) -> Iterator[list[str]]:
        return (batch["input"] for batch in self.loader)


if __name__ == "__main__":
    main(MosaicFromS3)
