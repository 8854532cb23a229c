"""A rank under torchrun, as a process: ``python -m tests.support.torch_rank ROWS REPORT ROOT``.

It uses the classes for torch, without a word of sharing. Its report has the batches, and how often rows were tokenized.
"""

from __future__ import annotations

import json
import sys

from asyncdata import PackedCollator, SoftPacking
from asyncdata.integrations.torch import AsyncDataset
from asyncdata.prefetch.node_share import folder
from tests.support.torch_loading import MAX_LENGTH, plain, tokenize

__all__ = ()


def main(rows: str, report: str, root: str) -> None:
    """Deliver an epoch; wait for the others, as trainers do at its end."""
    import torch
    import torch.distributed as dist

    folder.SHARED_MEMORY = root
    dist.init_process_group("gloo")
    calls: list[int] = []

    def counted(row: dict[str, object]) -> object:
        calls.append(int(str(row["number"])))
        return tokenize(row)

    counted.version = 1  # type: ignore[attr-defined]
    dataset = AsyncDataset(
        rows,
        tokenize_fn=counted,
        packing=SoftPacking(max_length=MAX_LENGTH, window_samples=16, window_tokens=2 * MAX_LENGTH),
        collate_fn=PackedCollator(max_length=MAX_LENGTH),
        batch_size=1,
        num_workers=0,
        epochs=1,
    )
    batches = [plain(batch) for batch in torch.utils.data.DataLoader(dataset, batch_size=None)]
    dist.barrier()
    dataset.close()
    dist.destroy_process_group()
    with open(report, "w", encoding="utf-8") as file:
        json.dump({"batches": batches, "calls": calls}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
