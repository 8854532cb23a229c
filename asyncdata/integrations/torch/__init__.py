"""asyncdata in a loop of PyTorch's: batches as tensors, on the device in time, with a state for its checkpoints.

- :class:`StatefulDataLoader` is a :class:`~asyncdata.DataLoader` for a training loop, and the best way of the two.
- :class:`AsyncDataset` is for loops that insist on a ``torch.utils.data.DataLoader``, or on torchdata's.
- :func:`ranks` says which rank of how many this process is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.extras import missing_package
from asyncdata.integrations.torch.dataset import LoaderDataset
from asyncdata.integrations.torch.loader import StatefulDataLoader
from asyncdata.integrations.torch.ranks import ranks

__all__ = ("AsyncDataset", "StatefulDataLoader", "ranks")

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    class AsyncDataset(LoaderDataset, IterableDataset[Any]):  # type: ignore[misc]
        """Made below on first use, so that torch is not imported before."""


def __getattr__(name: str) -> Any:
    if name != "AsyncDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    try:
        from torch.utils.data import IterableDataset
    except ImportError as error:
        raise missing_package("AsyncDataset", "torch", error) from error

    names = {"__doc__": LoaderDataset.__doc__, "__module__": __name__}
    kind = type(name, (LoaderDataset, IterableDataset), names)
    return globals().setdefault(name, kind)  # one class, also for two threads: pickle looks it up here
