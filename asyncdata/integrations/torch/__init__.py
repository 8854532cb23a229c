"""asyncdata in a loop of PyTorch's: batches as tensors, on the device in time, with a state for its checkpoints.

- :class:`StatefulDataLoader` is a :class:`~asyncdata.DataLoader` for a training loop, and the best way of the two.
- :class:`AsyncDataset` is for loops that insist on a ``torch.utils.data.DataLoader``, or on torchdata's.
- :class:`OrderView` and :class:`RowView` are map-style datasets, for frameworks that demand ``len()`` and an index.
- :func:`to_torch` makes tensors of a batch's arrays, for a loop of your own over a :class:`~asyncdata.DataLoader`.
- :func:`ranks` says which rank of how many this process is; :func:`exchange` lets ranks share what they count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.batching.torch_tensors import to_torch
from asyncdata.integrations.adapters import made_on_first_use
from asyncdata.integrations.torch.datasets import LoaderDataset, LoaderOrderView, LoaderRowView
from asyncdata.integrations.torch.loader import StatefulDataLoader
from asyncdata.integrations.torch.process import exchange, ranks

__all__ = ("AsyncDataset", "OrderView", "RowView", "StatefulDataLoader", "exchange", "ranks", "to_torch")

if TYPE_CHECKING:
    from torch.utils.data import Dataset, IterableDataset

    # Made below on first use, so that torch is not imported before.
    class AsyncDataset(LoaderDataset, IterableDataset[Any]): ...  # type: ignore[misc]

    class OrderView(LoaderOrderView, Dataset[Any]): ...  # type: ignore[misc]

    class RowView(LoaderRowView, Dataset[Any]): ...  # type: ignore[misc]


__getattr__ = made_on_first_use(
    __name__,
    "torch",
    {
        "AsyncDataset": (LoaderDataset, "torch.utils.data:IterableDataset"),
        "OrderView": (LoaderOrderView, "torch.utils.data:Dataset"),
        "RowView": (LoaderRowView, "torch.utils.data:Dataset"),
    },
)
