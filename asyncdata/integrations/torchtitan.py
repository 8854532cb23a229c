"""asyncdata as a dataloader of torchtitan.

::

    from asyncdata.integrations.torchtitan import AsyncDataLoader

    config.dataloader = AsyncDataLoader.Config(
        dataset="chats/*.jsonl",
        tokenize_fn=ChatTokenizeFn(tokenizer=config.hf_assets_path, max_length=config.training.max_context_length),
    )

Its state is in torchtitan's distributed checkpoints. It is the same on all ranks, so that a run may continue with
another number of data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from asyncdata.batching.collators.packed import PackedCollator
from asyncdata.batching.packers.soft import SoftPacking
from asyncdata.core.extras import made_on_first_use
from asyncdata.integrations.torch.loader import StatefulDataLoader, over_all_epochs
from asyncdata.loader.config import Ranks
from asyncdata.loader.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncdata.batching.collators.base import Document

__all__ = ("AsyncDataLoader",)  # noqa: F822 - made below on first use, so that torchtitan is not imported before


class _Loader:
    """Packs of ``num_tokens_per_batch`` tokens, one a batch, with the positions of each document in it.

    :param config: ``dataset`` and ``tokenize_fn`` are those of a :class:`~asyncdata.DataLoader`, and so is ``packing``;
        None is :class:`~asyncdata.SoftPacking`, which drops a sample that fits no batch, and counts it. ``seed``,
        ``num_workers`` and what is in ``knobs`` are its knobs.
    :raises ConfigError: for settings that cannot work.
    """

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        max_context_length: int,
        num_tokens_per_batch: int,
        **_: Any,
    ) -> None:
        loader = DataLoader(
            config.dataset,
            tokenize_fn=config.tokenize_fn,
            packing=config.packing or SoftPacking(max_length=num_tokens_per_batch, overlong="drop"),
            collate_fn=_Collator(num_tokens_per_batch, max_context_length),
            batch_size=1,
            ranks=Ranks(rank=dp_rank, world_size=dp_world_size),
            **{"seed": config.seed, "num_workers": config.num_workers, **config.knobs},
        )
        self._batches = StatefulDataLoader(loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches without an end, or until ``epochs`` are over.

        A batch is ``({"input": ..., "positions": ...}, labels)``, int64 of shape (num_tokens_per_batch,) each. Labels
        are shifted: ``labels[i]`` is what ``input[i]`` is to predict, -100 for nothing.
        """
        return over_all_epochs(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch, the same on all ranks."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with exactly the batch that would have come next; an empty state changes nothing.

        :raises SnapshotError: if it is of other data or settings, or not a state of this loader.
        """
        if state_dict:
            self._batches.load_state_dict(state_dict)

    def close(self) -> None:
        """Close the loader."""
        self._batches.close()


class _Collator:
    """One pack as torchtitan's batch. Positions begin again after ``max_context_length``, as with its own packing."""

    def __init__(self, num_tokens_per_batch: int, max_context_length: int) -> None:
        self._collate = PackedCollator(max_length=num_tokens_per_batch, shift="document")
        self._max_context_length = max_context_length

    def __call__(self, packs: Sequence[Sequence[Document]]) -> Any:
        batch = self._collate(packs)
        positions = batch["position_ids"][0] % self._max_context_length
        return {"input": batch["input_ids"][0], "positions": positions}, batch["shifted_labels"][0]


def _made() -> type:
    """The class, with the nested ``Config`` that torchtitan builds it from."""
    import tyro
    from torchtitan.components.data.loader import BaseDataLoader

    hidden = Annotated[Any, tyro.conf.Suppress]  # not on torchtitan's command line
    config = dataclasses.make_dataclass(
        "Config",
        [
            ("dataset", hidden),
            ("tokenize_fn", hidden),
            ("packing", hidden, None),
            ("num_workers", int | None, None),
            ("seed", int, 42),
            ("knobs", hidden, dataclasses.field(default_factory=dict)),
        ],
        bases=(BaseDataLoader.Config,),
        kw_only=True,
        slots=True,
    )
    config.__module__, config.__qualname__ = __name__, "AsyncDataLoader.Config"
    return type("AsyncDataLoader", (_Loader, BaseDataLoader), {"Config": config, "__doc__": _Loader.__doc__})


__getattr__ = made_on_first_use(__name__, "torchtitan", {"AsyncDataLoader": _made})
