"""asyncdata in a loop of PyTorch's: batches as tensors, on the device in time, with a state for its checkpoints.

- :class:`StatefulDataLoader` is a :class:`~asyncdata.DataLoader` for a training loop, and the best way of the two.
- :class:`AsyncDataset` is for loops that insist on a ``torch.utils.data.DataLoader``, or on torchdata's.
- :class:`OrderView` and :class:`RowView` are map-style datasets, for frameworks that demand ``len()`` and an index.
- :func:`ranks` says which rank of how many this process is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.extras import made_on_first_use
from asyncdata.integrations.torch.dataset import LoaderDataset
from asyncdata.integrations.torch.loader import StatefulDataLoader
from asyncdata.integrations.torch.ranks import ranks
from asyncdata.integrations.torch.views import LoaderOrderView, LoaderRowView

__all__ = ("AsyncDataset", "OrderView", "RowView", "StatefulDataLoader", "ranks")

if TYPE_CHECKING:
    from torch.utils.data import Dataset, IterableDataset

    # Made below on first use, so that torch is not imported before.
    class AsyncDataset(LoaderDataset, IterableDataset[Any]): ...  # type: ignore[misc]

    class OrderView(LoaderOrderView, Dataset[Any]): ...  # type: ignore[misc]

    class RowView(LoaderRowView, Dataset[Any]): ...  # type: ignore[misc]


def _made(name: str, ours: type, base: str) -> type:
    from torch.utils import data

    return type(name, (ours, getattr(data, base)), {"__doc__": ours.__doc__})


_DATASETS = {
    "AsyncDataset": (LoaderDataset, "IterableDataset"),
    "OrderView": (LoaderOrderView, "Dataset"),
    "RowView": (LoaderRowView, "Dataset"),
}
"""Each dataset: its class without torch, and torch's base class."""

__getattr__ = made_on_first_use(
    __name__, "torch", {name: partial(_made, name, ours, base) for name, (ours, base) in _DATASETS.items()}
)
