"""A loader as a dataset, for trainers that require torch's ``DataLoader``; and map-style views of it, also of
untokenized rows, for frameworks that index their dataset.

``torch.utils.data.DataLoader`` and its relatives ask a map-style dataset for the items of a batch by their indices.
:class:`LoaderOrderView` answers with the loader's next samples, and checks that the indices come from a sampler that
does not shuffle. :class:`LoaderRowView` goes to the row that an index names.
"""

from __future__ import annotations

import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from asyncdata.batching.torch_tensors import to_torch
from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.integrations.torch.process import (
    from_torch_state,
    ranks,
    refuse_async,
    refuse_in_torch_worker,
    to_torch_state,
)
from asyncdata.loader.config import LoaderConfig
from asyncdata.loader.loader import DataLoader
from asyncdata.order.order import row_of_epoch
from asyncdata.order.shuffle import RowShuffle
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from asyncdata.core.types import Sample
    from asyncdata.tokenization.base import TokenizeFn

    V = TypeVar("V", bound="LoaderOrderView | LoaderRowView")


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


_NEXT = "next_index"


def row_of(sample: Sample) -> Any:
    """The row of a sample of :class:`~asyncdata.RowFn`, and any other sample itself."""
    return sample.extra if not len(sample.tokens) and sample.extra else sample


class _View(ABC):
    """What both views have in common.

    :param loader: delivers single samples: no packing, ``world_size=1``, ``n_samples_per_prompt=1``.
    :param rows_per_epoch: the length of the view; None: the number of rows in the loader's row index.
    :param item: makes an item of a sample.
    """

    _way_out = "pass "

    def __init__(
        self, loader: DataLoader[Any, Any], rows_per_epoch: int | None = None, *, item: Callable[[Sample], Any] = row_of
    ) -> None:
        if rows_per_epoch is not None and rows_per_epoch < 1:
            raise ConfigError(f"rows_per_epoch must be 1 or more, got {rows_per_epoch}")

        refuse_async(loader, type(self).__name__)
        if loader.group_size != 1:
            raise ConfigError(
                f"{type(self).__name__} gives one item for each index, and the loader groups of "
                f"n_samples_per_prompt={loader.group_size}: leave that out, the framework repeats prompts itself"
            )

        self.loader = loader
        self._rows_per_epoch = rows_per_epoch
        self._item = item
        self._next = 0

    def __len__(self) -> int:
        """Items of an epoch. Without ``rows_per_epoch`` it waits until the loader's row index is complete.

        :raises TypeError: if the length is not known.
        """
        return self._rows_per_epoch or self._num_rows

    @cached_property
    def _num_rows(self) -> int:
        """Rows of the data."""
        try:
            return self.loader.num_rows()
        except ConfigError as error:
            if str(error).startswith("AD471"):  # of a mixture, for which there is no such shuffle
                raise

            raise TypeError(
                f"the length of this {type(self).__name__} is not known: {self._way_out}"
                'shuffle="full" to the loader, which counts the rows'
            ) from error

    def __getitem__(self, index: int) -> Any:
        """The item of one index."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch of indices; PyTorch's ``DataLoader`` calls this once for each batch."""
        refuse_in_torch_worker()
        wanted = [operator.index(index) for index in indices]
        if not wanted:
            return []

        length = len(self)
        outside = [index for index in wanted if not 0 <= index < length]
        if outside:
            raise IndexError(f"index {outside[0]} is not in 0..{length - 1}")

        return list(map(self._item, self._samples(wanted)))

    @abstractmethod
    def _samples(self, indices: list[int]) -> list[Sample]: ...

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item, as plain values that ``torch.save`` and JSON can store."""
        return {**to_torch_state(self.loader.state_dict()), _NEXT: self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the item that would have come next.

        :raises SnapshotError: if it is not the state of a view, or is of other data or settings.
        """
        if not isinstance(state.get(_NEXT), int):
            raise SnapshotError(f"AD602 this is not the state of a view of a loader: it has no {_NEXT!r}")

        self.loader.load_state_dict(from_torch_state({key: state[key] for key in state if key != _NEXT}))
        self._next = state[_NEXT]

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its loader owns a thread and processes. Pass "
            "num_workers=0 to the DataLoader of torch; asyncdata has its own workers"
        )


class LoaderOrderView(_View):
    """A map-style ``torch.utils.data.Dataset`` whose item ``i`` is sample ``i`` of the current epoch, in D's order.

    It is for frameworks that demand ``len()`` and indices, and bring their own sampler, such as verl, and a
    ``StatefulDataLoader`` of torchdata. Their sampler must not shuffle, and their ``DataLoader`` must have
    ``num_workers=0``: the loader shuffles, and reads ahead in its own workers. Each index must be the one after the
    last; index 0 begins the next epoch. torchdata's ``StatefulDataLoader`` stores the view's state in its own.

    Epochs of the view are consecutive: where a framework leaves out the last, short batch of an epoch, the next epoch
    begins with those samples, and none is lost.

    :param loader: delivers single samples. It is used through this object alone from now on.
    :param rows_per_epoch: the length. It may be the whole training, as one epoch, for a framework that does not restore
        its loader at an epoch's end. None: the number of rows; then the loader needs a row index, as ``shuffle="full"``
        has, and no row may be dropped.
    :param item: makes an item of a sample; by default the row of :class:`~asyncdata.RowFn`, else the sample.
    :raises ConfigError: for a loader of groups.
    """

    _way_out = "pass rows_per_epoch=, or "

    def _samples(self, indices: list[int]) -> list[Sample]:
        first = indices[0]
        is_in_order = all(after == (before + 1) % len(self) for before, after in pairwise(indices))
        if not is_in_order or (first != self._next and first != 0):
            raise ConfigError(
                f"AD445 an index of {indices[:8]} is not the one after the last, which would be {self._next}: the "
                "framework's sampler shuffles or skips. Turn its shuffle off (asyncdata shuffles), load the view's "
                "state instead of skipping batches, and let one process alone read it"
            )

        found = self.loader.get_next_batch(len(indices))
        self._next = indices[-1] + 1
        return found

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch`` of the data, unless it is the current one; with ``rows_per_epoch``, nothing.

        :raises ConfigError: directly after a restore, for an epoch that was over by then.
        """
        if self._rows_per_epoch is not None:
            return

        if epoch != self.loader.epoch:
            self._next = 0
        self.loader.set_epoch(epoch)


class LoaderRowView(_View):
    """A map-style ``torch.utils.data.Dataset`` whose item ``i`` is row ``i`` of an epoch, in any order of indices.

    It is for frameworks that shuffle, shard or skip by their own sampler, and restore that: an unmodified ``Trainer``
    of transformers resumes exactly with no saved state of ours. The loader needs a row index (``shuffle="full"``, or
    another :class:`~asyncdata.RowShuffle`), and a row may not be dropped.

    Indices in ascending order cost no more than a plain loop, also with gaps up to the loader's read-ahead: the rows of
    a gap are read and left out. Any other index restarts the reading at its row.

    :param loader: see :class:`LoaderOrderView`.
    :param rows_per_epoch: the length, where it is not the data's. Item ``i`` is row ``i % n`` of the epoch
        ``i // n`` epochs later, for data of ``n`` rows.
    :param epoch: the epoch of the loader's order that index 0 refers to.
    :param max_gap: rows between two indices that are read and left out; a larger gap restarts the reading.
    """

    def __init__(
        self,
        loader: DataLoader[Any, Any],
        rows_per_epoch: int | None = None,
        *,
        epoch: int = 0,
        item: Callable[[Sample], Any] = row_of,
        max_gap: int = 256,
    ) -> None:
        super().__init__(loader, rows_per_epoch, item=item)
        self._epoch = epoch
        self._max_gap = max_gap
        self._place: int | None = None  # the loader's next row; None: not known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a view; the next item is for the next index, whatever the state's row.

        :raises SnapshotError: if it is not the state of a view, or is of other data or settings.
        """
        self._place = None
        super().load_state_dict(state)

    def _samples(self, indices: list[int]) -> list[Sample]:
        ascending = sorted(set(indices))
        found = dict(zip(ascending, self._in_order(ascending), strict=True))
        return [found[index] for index in indices]

    def _in_order(self, indices: list[int]) -> list[Sample]:
        """The samples of ascending indices, read in runs."""
        found: list[Sample] = []
        start = 0
        while start < len(indices):
            stop = start + 1
            while stop < len(indices) and indices[stop] - indices[stop - 1] <= self._max_gap:
                stop += 1
            found += self._run(indices[start:stop])
            start = stop
        return found

    def _run(self, indices: list[int]) -> list[Sample]:
        first, last = indices[0], indices[-1]
        if self._place is None or not 0 <= first - self._place <= self._max_gap:
            self.loader.seek(*self._row(first))
            self._place = first
        place, self._place = self._place, None  # an error leaves the place unknown
        samples = self.loader.get_next_batch(last + 1 - place)
        chosen = [samples[index - place] for index in indices]
        for index, sample in zip(indices, chosen, strict=True):
            self._check(index, sample)
        self._place = last + 1
        return chosen

    def _row(self, index: int) -> tuple[int, int]:
        """The epoch and the row that an index refers to."""
        epochs, row = divmod(index, self._num_rows)
        return self._epoch + epochs, row

    def _check(self, index: int, sample: Sample) -> None:
        position = sample.position
        assert position is not None
        wanted, found = self._row(index), (position.epoch, row_of_epoch(position))
        if found != wanted:
            came = f"row {found[1]}" if found[0] == wanted[0] else f"row {found[1]} of epoch {found[0]}"
            raise ConfigError(
                f"AD446 row {wanted[1]} of epoch {wanted[0]} gave no sample: it was dropped or is bad, and the sample "
                f"of {came} came in its place. A RowView needs a sample of each row: use RowFn, or OrderView"
            )


# Of rows that a framework tokenizes itself


def view_of_rows(
    kind: type[V],
    source: Any,
    settings: Mapping[str, Any],
    *,
    item: Callable[[Sample], Any],
    stop: int | None = None,
    tokenize_fn: TokenizeFn | None = None,
    only_kept: bool = False,
    **more: Any,
) -> V:
    """The view of a loader of untokenized rows; the loader is closed with it.

    :param kind: of the view; for any order of indices the loader needs a row index.
    :param settings: ``rows_per_epoch``, and settings of a :class:`~asyncdata.DataLoader`. ``shuffle`` is ``"full"`` by
        default; without it the rows come in the order of the files, and are counted where that is needed.
    :param item: makes the item of a row's sample.
    :param stop: only the first ``stop`` rows.
    :param tokenize_fn: another function than :class:`~asyncdata.RowFn`, for one that drops rows.
    :param only_kept: rows that it drops have no number in an order that counts its rows.
    :param more: for the view.
    :raises ConfigError: for settings that cannot work.
    :raises SourceError: for files that cannot be read.
    """
    rows_per_epoch = settings.get("rows_per_epoch")
    knobs: dict[str, Any] = {"shuffle": "full", **settings}
    knobs.pop("rows_per_epoch", None)
    needs_index = kind is LoaderRowView or not rows_per_epoch
    knobs["shuffle"] = _shuffle(knobs["shuffle"], stop, needs_index=needs_index, only_kept=only_kept)
    loader = DataLoader(source, tokenize_fn=tokenize_fn or RowFn(), **knobs)
    return kind(loader, rows_per_epoch, item=item, **more)


def _shuffle(shuffle: Any, stop: int | None, *, needs_index: bool, only_kept: bool) -> Any:
    """The shuffle, with what is needed."""
    shuffle = msgspec.to_builtins(shuffle) if isinstance(shuffle, RowShuffle) else shuffle
    if isinstance(shuffle, Mapping) and "method" in shuffle:
        last = shuffle.get("stop") if stop is None else stop
        return {**shuffle, "stop": last, "only_kept": only_kept or bool(shuffle.get("only_kept"))}

    is_shuffled = bool(shuffle)
    if stop is not None or (needs_index and not is_shuffled) or (only_kept and shuffle == "full"):
        return RowShuffle(method="keyed" if is_shuffled else "none", stop=stop, only_kept=only_kept)

    return shuffle


# Of a sampler that shuffles


class SamplerPlaces:
    """The places of indices in the first epoch of a ``DistributedSampler`` that shuffles with its default seed.

    So a dataset can undo a shuffle that a framework has no setting for.

    A rank's first place is its number, and each later one is as many places on as there are ranks.

    :param length: items of the dataset.
    :ivar first: this rank's first place; None before it.
    :ivar last: its last place so far.
    :ivar gap: places between two of them; None before the second one.
    """

    def __init__(self, length: int) -> None:
        import torch

        order = torch.randperm(length, generator=torch.Generator().manual_seed(0), device="cpu")
        self._place_of = torch.empty_like(order)
        self._place_of[order] = torch.arange(length, device="cpu")
        self.first: int | None = None
        self.last: int | None = None
        self.gap: int | None = None

    def of(self, indices: Sequence[int]) -> list[int] | None:
        """The places of the next indices, which :meth:`took` takes; None if they are not this rank's next ones.

        :raises IndexError: for an index that no epoch has.
        """
        import torch

        outside = [index for index in indices if not 0 <= index < len(self._place_of)]
        if outside:
            raise IndexError(f"index {outside[0]} is not in 0..{len(self._place_of) - 1}")

        places: list[int] = self._place_of[torch.as_tensor(indices, dtype=torch.int64, device="cpu")].tolist()
        gaps = self._gaps(places)
        first = places[0] if self.first is None else self.first
        is_next = len(gaps) <= 1 and all(gap > first for gap in gaps)
        return places if is_next else None

    def took(self, places: Sequence[int]) -> None:
        """These places of :meth:`of` were delivered."""
        self.gap = next(iter(self._gaps(places)), None)
        self.first = places[0] if self.first is None else self.first
        self.last = places[-1]

    def _gaps(self, places: Sequence[int]) -> set[int]:
        before = () if self.last is None else (self.last,)
        known = () if self.gap is None else (self.gap,)
        return {*known, *(after - place for place, after in pairwise((*before, *places)))}

    def state_dict(self) -> dict[str, int | None]:
        """The state after the last place."""
        return {"first": self.first, "last": self.last, "gap": self.gap}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Demand the place after the last one of the state."""
        self.first, self.last, self.gap = state["first"], state["last"], state["gap"]
