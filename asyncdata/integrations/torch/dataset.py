"""A loader as a dataset, for trainers that require torch's ``DataLoader``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from asyncdata.batching.torch_tensors import to_torch
from asyncdata.core.errors import ConfigError
from asyncdata.integrations.torch.process import from_torch_state, ranks, refuse_in_torch_worker, to_torch_state
from asyncdata.loader.config import LoaderConfig
from asyncdata.loader.loader import DataLoader


class LoaderDataset:
    """An ``IterableDataset`` of ready batches, for ``torch.utils.data.DataLoader(dataset, batch_size=None)``.

    Iterating it gives one epoch, as tensors. With torchdata's ``StatefulDataLoader`` it resumes exactly. Torch must
    not use its own workers (``num_workers=0``): asyncdata has its own.

    The loader is opened when it is first needed, so that a dataset can be pickled: as its settings and its state.

    :param source: as for :class:`~asyncdata.DataLoader`.
    :param settings: as for :class:`~asyncdata.DataLoader`. Without ``ranks``, or with a dict that has neither ``rank``
        nor ``world_size``, these two are those of :func:`~asyncdata.integrations.torch.ranks`.
    """

    def __init__(self, source: Any, **settings: Any) -> None:
        self._source = source
        self._settings = settings
        self._state: Mapping[str, Any] | None = None  # restored when the loader is made
        self._loader: DataLoader | None = None
        self._world_size = 1
        self._is_fetched_early = False

    def __iter__(self) -> Iterator[Any]:
        loader = self._open()
        if self._world_size > 1:
            _refuse_second_sharing(self)
        self._is_fetched_early = _is_called_from("accelerate.")
        return map(to_torch, loader)

    def state_dict(self) -> dict[str, Any]:
        """The current state: one text. See :meth:`asyncdata.DataLoader.state_dict`.

        :raises ConfigError: AD442, in a loader of accelerate, which holds a batch that is not trained on.
        """
        if self._is_fetched_early and not _is_called_from("torchdata."):
            raise ConfigError(
                "AD442 accelerate fetches a batch before the trainer has asked for it, so this state is ahead of the "
                "training, and a resume would skip that batch. Use StatefulDataLoader, which accelerate leaves as it "
                "is: accelerator.register_for_checkpointing(loader)"
            )

        return to_torch_state(self._open().state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which may also be a DataLoader's.

        :raises SnapshotError: if it is not of these data and settings; see :meth:`DataLoader.load_state_dict`.
        """
        self._open().load_state_dict(from_torch_state(state))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is the current one."""
        self._open().set_epoch(epoch)

    def close(self) -> None:
        """Stop the workers and the thread. They also stop when the dataset is deleted, or Python ends."""
        if self._loader is not None:
            self._loader.close()

    def _open(self) -> DataLoader:
        if self._loader is None:
            refuse_in_torch_worker()
            settings = self._settings
            given = settings.get("ranks", {})
            if isinstance(given, Mapping) and not given.keys() & {"rank", "world_size"}:
                settings = {**settings, "ranks": ranks(**given)}
            self._world_size = LoaderConfig.of({"ranks": settings["ranks"]}).ranks.world_size
            loader = DataLoader(self._source, **settings)
            if self._state is not None:
                loader.load_state_dict(self._state)
            self._loader = loader
            weakref.finalize(self, loader.close)
        return self._loader

    def __getstate__(self) -> dict[str, Any]:
        state = self._state if self._loader is None else self._loader.state_dict()
        return {
            "_source": self._source,
            "_settings": self._settings,
            "_state": state,
            "_loader": None,
            "_world_size": 1,
            "_is_fetched_early": False,
        }


def _refuse_second_sharing(dataset: LoaderDataset) -> None:
    """Refuse accelerate's sharing of an iterable dataset between the ranks: each would get a part of its own part.

    accelerate wraps the dataset without telling it, so the wrapper is searched for in the current call stack.

    :raises ConfigError: if it is found.
    """
    for asking in _callers():
        is_shard = getattr(asking, "dataset", None) is dataset and getattr(asking, "num_processes", 1) > 1
        if is_shard or type(asking).__name__ == "DataLoaderDispatcher":
            raise ConfigError(
                f"AD442 {type(asking).__name__} of accelerate shares out these batches between the ranks, and the "
                "dataset does so too: most rows would never be trained. Pass ranks=Ranks() to AsyncDataset, so "
                "that accelerate alone does it; or use StatefulDataLoader, which accelerate leaves as it is"
            )


def _is_called_from(package: str) -> bool:
    return any(type(asking).__module__.startswith(package) for asking in _callers())


def _callers() -> Iterator[Any]:
    """The objects whose methods are running."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to find accelerate
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back
