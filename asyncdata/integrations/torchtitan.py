"""asyncdata as a dataloader of torchtitan.

::

    from asyncdata.integrations.torchtitan import AsyncDataLoader

    config.dataloader = AsyncDataLoader.Config(
        dataset="chats/*.jsonl",
        make_tokenize_fn=lambda tokenizer, length: ChatTokenizeFn(tokenizer, max_length=length),
    )

torchtitan reads its command line after this. So the tokenize function is made when the loader is built.

The state is in torchtitan's distributed checkpoints. It is the same on all ranks, so that a run may continue with
another number of data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from asyncdata.batching.collators import Document
from asyncdata.batching.packed_collator import PackedCollator
from asyncdata.batching.packers import SoftPacking
from asyncdata.core.errors import ConfigError
from asyncdata.integrations.adapters import made_on_first_use, need
from asyncdata.integrations.torch.loader import StatefulDataLoader, over_all_epochs
from asyncdata.loader.config import Ranks
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix import Mix
from asyncdata.tokenization.base import resolved
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles

__all__ = ("AsyncDataLoader",)  # noqa: F822 - made below on first use, so that torchtitan is not imported before


class _Loader:
    """Packs for torchtitan, with the positions of each document.

    :param config: ``dataset`` and ``tokenize_fn`` are those of a :class:`~asyncdata.DataLoader`, and so is ``packing``;
        None is :class:`~asyncdata.SoftPacking`, which drops a sample that fits no batch, and counts it. ``seed``,
        ``num_workers`` and what is in ``knobs`` are its knobs. ``make_tokenize_fn`` makes the tokenize function of the
        folder of torchtitan's tokenizer and the length of its contexts, whatever options of the command line they have.
    :raises ConfigError: for settings that cannot work; AD640, for a tokenizer or a length that is not torchtitan's.
    """

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        seq_len: int = 0,  # this and the next one are torchtitan 0.3's, whose batches have rows
        local_batch_size: int = 1,
        **_: Any,
    ) -> None:
        length, context = num_tokens_per_batch or seq_len, max_context_length or seq_len
        packing = config.packing or SoftPacking(max_length=length)
        if packing.max_length != length:
            raise ConfigError(
                f"AD640 packing has max_length={packing.max_length}, and a batch of torchtitan has rows of {length} "
                "tokens: give both the same length, or leave packing out"
            )

        loader = DataLoader(
            config.dataset,
            tokenize_fn=_tokenize_fn(config, _folder_of(tokenizer), context),
            packing=packing,
            collate_fn=_Collator(length, context, is_flat=num_tokens_per_batch is not None),
            batch_size=local_batch_size,
            ranks=Ranks(rank=dp_rank, world_size=dp_world_size),
            **{"seed": config.seed, "num_workers": config.num_workers, **config.knobs},
        )
        self._batches = StatefulDataLoader(loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches without an end, or until ``epochs`` are over.

        A batch is ``({"input": ..., "positions": ...}, labels)``, int64 of shape (num_tokens_per_batch,) each; with
        torchtitan 0.3 (local_batch_size, seq_len). Labels are shifted: ``labels[i]`` is what ``input[i]`` is to
        predict, -100 for nothing.
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


def _folder_of(tokenizer: Any) -> Any:
    """The folder of torchtitan's tokenizer; None for none, and for one of the user's own."""
    is_own = type(tokenizer).__module__.partition(".")[0] != "torchtitan"
    return getattr(tokenizer, "tokenizer_path", None) if is_own else need(tokenizer, "tokenizer_path")


def _tokenize_fn(config: Any, tokenizer: str | None, length: int) -> Any:
    """The loader's tokenize function.

    :param tokenizer: the folder of torchtitan's tokenizer; None: it has none, and nothing is compared.
    :param length: of torchtitan's contexts.
    :raises ConfigError: AD640, if one that was made earlier has another tokenizer or length.
    """
    if config.make_tokenize_fn is not None and config.tokenize_fn is not None:
        raise ConfigError("AD640 tokenize_fn and make_tokenize_fn are both set: leave one out")

    parts = [part.tokenize_fn for _, part in config.dataset.leaves()] if isinstance(config.dataset, Mix) else []
    for given in (config.tokenize_fn, *parts):
        _compare(given, tokenizer, length)
    return config.tokenize_fn if config.make_tokenize_fn is None else config.make_tokenize_fn(tokenizer, length)


def _compare(given: Any, tokenizer: str | None, length: int) -> None:
    found: Any = None if given is None else resolved(given)
    if not isinstance(found, OfTokenizer):
        return

    way_out = (
        "torchtitan reads its command line after the configuration: pass make_tokenize_fn=lambda tokenizer, length: "
        f"{type(found).__name__}(...) in place of it, which gets torchtitan's values and is not compared"
    )
    if tokenizer is not None and TokenizerFiles(tokenizer).digest() != found.files().digest():
        raise ConfigError(
            f"AD640 tokenize_fn has the tokenizer in {found.tokenizer}, and torchtitan (hf_assets_path) the other one "
            f"in {tokenizer}; {way_out}"
        )

    own = getattr(found, "max_length", None)
    if own not in (None, length):
        raise ConfigError(
            f"AD640 tokenize_fn has max_length={own}, and torchtitan's contexts have {length} tokens "
            f"(training.max_context_length, or training.seq_len in torchtitan 0.3); {way_out}"
        )


class _Collator:
    """Packs as torchtitan's batch. Positions begin again after the length of a context, as with its own packing.

    :param is_flat: a batch is one pack, without a dimension for it.
    """

    def __init__(self, num_tokens: int, max_context_length: int, *, is_flat: bool) -> None:
        self._collate = PackedCollator(max_length=num_tokens, shift="document")
        self._max_context_length = max_context_length
        self._is_flat = is_flat

    def __call__(self, packs: Sequence[Sequence[Document]]) -> Any:
        batch = self._collate(packs)
        arrays = (batch["input_ids"], batch["position_ids"] % self._max_context_length, batch["shifted_labels"])
        tokens, positions, labels = (array[0] for array in arrays) if self._is_flat else arrays
        return {"input": tokens, "positions": positions}, labels


def _made() -> type:
    """The class, with the nested ``Config`` that torchtitan builds it from."""
    import tyro

    try:
        from torchtitan.components.data.loader import BaseDataLoader
    except ImportError:  # torchtitan 0.3
        from torchtitan.components.dataloader import BaseDataLoader

    hidden = Annotated[Any, tyro.conf.Suppress]  # not on torchtitan's command line
    config = dataclasses.make_dataclass(
        "Config",
        [
            ("dataset", hidden),
            ("tokenize_fn", hidden, None),
            ("make_tokenize_fn", hidden, None),
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
