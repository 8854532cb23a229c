"""A loader for a training loop in PyTorch: tensors, copied to the device while the trainer computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.stored_snapshot import save_at
from asyncdata.core.errors import ConfigError
from asyncdata.integrations.torch.lookahead import Lookahead
from asyncdata.integrations.torch.state import from_torch_state, to_torch_state
from asyncdata.integrations.torch.transfer import transfer_to

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.loader import DataLoader
    from asyncdata.loader.statistics import Statistics

__all__ = ("StatefulDataLoader", "over_all_epochs")


def over_all_epochs(loader: StatefulDataLoader) -> Iterator[Any]:
    """The batches of one epoch after another, until an epoch has none: without an end, or until ``epochs`` are over."""
    while True:
        num_batches = 0
        for batch in loader:
            num_batches += 1
            yield batch
        if not num_batches:
            return


class StatefulDataLoader:
    """Batches as tensors, with a state for ``torch.save`` and distributed checkpoints.

    ::

        loader = StatefulDataLoader(DataLoader(..., ranks=ranks()), device="cuda")
        for batch in loader: ...            # one epoch; the next `for` is the next one
        dcp.save({"model": ..., "loader": loader}, checkpoint_id=...)

    What ``collate_fn`` returns is yielded with a tensor for each array. The first batch is yielded at once. After that,
    the next batch is fetched, and its copy to the device started, before a batch is yielded; it is not in the state
    until it is yielded itself. Its error is raised when the next batch is requested.

    :param loader: must be used only through this object from now on, and is closed with it.
    :param device: the device of the batches; None: the CPU. To a CUDA device they are copied on a separate stream; the
        stream that is current when a batch is yielded waits for the copy.
    :param pin_memory: None: page-locked memory for a CUDA device. True without ``device``: the trainer copies the batch
        itself, with ``non_blocking=True``.
    :param trainer_lookahead: batches that the trainer fetches before it trains on them, such as 1 of Lightning's
        ``Trainer``. They are not delivered yet: a state does not contain them, and a new ``for`` yields them again.
    :param follows_set_epoch: False: :meth:`set_epoch` does nothing. For a trainer that counts its own epochs, such
        as transformers' ``Trainer`` with ``max_steps``, which starts at 0 again after each resume.
    :raises ConfigError: if there is no such device, or it cannot have pinned memory.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        device: Any = None,
        pin_memory: bool | None = None,
        trainer_lookahead: int = 0,
        follows_set_epoch: bool = True,
    ) -> None:
        if trainer_lookahead < 0:
            raise ConfigError(f"trainer_lookahead must be 0 or more, got {trainer_lookahead}")

        self._loader = loader
        self._follows_set_epoch = follows_set_epoch
        self._ahead = Lookahead(loader, transfer_to(device, pin_memory), trainer_lookahead)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ahead)

    def __len__(self) -> int:
        raise TypeError(
            "a StatefulDataLoader has no len(): the number of batches of an epoch is known at its end; count steps"
        )

    @property
    def dataset(self) -> Any:
        """Not there, as transformers' ``Trainer`` would skip batches in it.

        :raises AttributeError: always.
        """
        raise AttributeError(
            "a StatefulDataLoader has no dataset in which batches could be skipped after a resume: its own state does "
            "that. Pass ignore_data_skip=True to transformers' TrainingArguments, and load the state"
        )

    def state_dict(self) -> dict[str, Any]:
        """The current state: one text. It covers exactly the batches that were yielded. From any thread, at any time.

        See :meth:`asyncdata.DataLoader.state_dict`.
        """
        return to_torch_state(self._ahead.state())

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed: Collection[str] = (), same_rows: bool = False
    ) -> None:
        """Continue with exactly the next batch. The state may be that of any rank, and of a DataLoader.

        :param allow_changed: see :meth:`asyncdata.DataLoader.load_state_dict`.
        :param same_rows: see there.
        :raises SnapshotMismatchError: if it belongs to other data or settings.
        :raises SnapshotError: if it is not a state of a loader.
        """
        self._loader.load_state_dict(from_torch_state(state), allow_changed=allow_changed, same_rows=same_rows)
        self._ahead.drop()

    def save(self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] = {}) -> None:
        """Write the state to a file or object; see :meth:`asyncdata.DataLoader.save`."""
        save_at(path, snapshots.from_state_dict(self._ahead.state()), storage_options)

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        allow_changed: Collection[str] = (),
        same_rows: bool = False,
        storage_options: Mapping[str, Any] = {},
    ) -> None:
        """As :meth:`load_state_dict`, from a file or object that :meth:`save` or a DataLoader's wrote."""
        options: dict[str, Any] = {"same_rows": same_rows, "storage_options": storage_options}
        self._loader.restore(path, allow_changed=allow_changed, **options)
        self._ahead.drop()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is the current one: a run resumed in its middle stays there.

        :raises ConfigError: directly after a restore, for an epoch that was over by then; see ``follows_set_epoch``.
        """
        if epoch == self.epoch or not self._follows_set_epoch:
            return

        if self._ahead.has_fetched:  # the loader may be in that epoch already
            self._loader.load_state_dict(self._ahead.state())
        self._ahead.drop()
        self._loader.set_epoch(epoch)

    @property
    def config(self) -> LoaderConfig:
        """The wrapped loader's knobs."""
        return self._loader.config

    @property
    def is_packed(self) -> bool:
        """Whether a batch has packs, so that its number of rows varies."""
        return self._loader._engine.batching.is_packed  # noqa: SLF001 - a part of this library

    def num_rows(self, *, timeout_s: float | None = None) -> int:
        """Rows of an epoch; see :meth:`asyncdata.DataLoader.num_rows`."""
        return self._loader.num_rows(timeout_s=timeout_s)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._ahead.epoch

    def statistics(self) -> Statistics:
        """The loader's statistics; a batch that was fetched counts as delivered."""
        return self._loader.statistics()

    def close(self) -> None:
        """Stop the loader. May be called again, and from any thread."""
        self._loader.close()

    def __enter__(self) -> Self:
        self._loader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()
