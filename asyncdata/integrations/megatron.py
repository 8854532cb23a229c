"""asyncdata under Megatron-Bridge: an iterator for ``dataloader_type="external"``, with its state in the checkpoints.

::

    @dataclass
    class Rows(DatasetProvider):
        dataloader_type: str = "external"

        def build_datasets(self, context):
            ranks = ranks_of(context.pg_collection)
            loader = DataLoader("rows.jsonl", tokenize_fn=..., collate_fn=..., batch_size=MICRO_BATCH, ranks=ranks)
            return MegatronIterator(loader, context.pg_collection), None, None

The state is in ``energon/iter_N/train_dataloader_dprank000.pt`` beside the checkpoints, a file for each data-parallel
rank. All of them are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.batching.collators.torch_tensors import to_torch
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.integrations.torch.process import from_torch_state, to_torch_state
from asyncdata.loader.config import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdata.loader.loader import DataLoader

__all__ = ("MegatronIterator", "ranks_of")


def ranks_of(pg_collection: Any) -> Ranks:
    """The place of this process among those that read other rows: its data-parallel rank.

    Tensor-, pipeline- and context-parallel processes of one data-parallel rank get the same rows.

    :param pg_collection: ``context.pg_collection`` of ``build_datasets``, with a process group ``dp``.
    """
    return Ranks(world_size=pg_collection.dp.size(), rank=pg_collection.dp.rank())


class MegatronIterator:
    """The micro-batches of a loader, epoch after epoch, with the two methods by which Megatron-Bridge keeps a state.

    :param loader: its ``batch_size`` is the micro-batch size, with ``ranks=ranks_of(pg_collection)``. It is used
        through this object alone from now on; closing it is up to the caller.
    :param pg_collection: ``context.pg_collection``; what the loader is checked against.
    :raises ConfigError: AD461, for a loader of other ranks.
    """

    def __init__(self, loader: DataLoader, pg_collection: Any) -> None:
        given, wanted = loader.config.ranks, ranks_of(pg_collection)
        if (given.world_size, given.rank) != (wanted.world_size, wanted.rank):
            raise ConfigError(
                f"AD461 the loader is rank {given.rank} of {given.world_size}, and this process data-parallel rank "
                f"{wanted.rank} of {wanted.world_size}: pass ranks=ranks_of(context.pg_collection) to the loader. The "
                "tensor-, pipeline- and context-parallel processes of one data-parallel rank need the same rows"
            )

        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> MegatronIterator:
        return self

    def __next__(self) -> Any:
        """The next micro-batch, as tensors.

        :raises StopIteration: if an epoch has no batch at all.
        """
        for _ in range(2):  # the end of an epoch, and the first batch of the next
            if self._batches is None:
                self._batches = iter(self._loader)
            for batch in self._batches:
                return to_torch(batch)
            self._batches = None
        raise StopIteration

    def save_state(self) -> dict[str, Any]:
        """The state after the last micro-batch, the same on every rank, as plain values."""
        return to_torch_state(self._loader.state_dict())

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the micro-batch that would have come next, also with another number of ranks.

        :raises SnapshotError: if it is not the state of a loader, or is of other data or settings.
        """
        if not isinstance(state, dict) or set(state) != set(to_torch_state({})):
            raise SnapshotError(
                "AD602 this is not the state of a MegatronIterator: the checkpoint was saved with another data set. "
                "Set dataset.dataloader_load to the folder of one that has it, or to '' to begin at the first row"
            )

        self._loader.load_state_dict(from_torch_state(state))
        self._batches = None
