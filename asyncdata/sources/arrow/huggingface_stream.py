"""A streaming dataset of Hugging Face: its examples, and the state from which it goes on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.digest import canonical, digest
from asyncdata.core.errors import ConfigError
from asyncdata.sources.iterable import ExampleStream, plain_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import datasets

    from asyncdata.sources.stream import Rows, StreamOrder

__all__ = ("DatasetStream",)


class DatasetStream(ExampleStream):
    """The examples of an ``IterableDataset``, as Python objects, with images and the like left undecoded.

    A state is ``{"number": of the next example, "dataset": what the dataset's state_dict() gives}``. Where that is
    nothing that JSON can hold, or the dataset has none, a restart passes over the epoch's examples from its start.

    Shuffled, the dataset's shards come in another order in each epoch: its ``set_epoch`` is given a number that
    follows from seed and epoch.

    :param columns: which columns an example has; None: all.
    :raises ConfigError: for a dataset with a shuffle buffer: its ``state_dict()`` knows nothing of the rows in it, and
        they would be lost at a restart.
    """

    def __init__(
        self, dataset: datasets.IterableDataset, title: str, columns: Sequence[str] | None, max_row_bytes: int
    ) -> None:
        super().__init__(title, max_row_bytes)
        self._pipeline = _pipeline(getattr(dataset, "_ex_iterable", None))
        if "BufferShuffledExamplesIterable" in str(self._pipeline):
            raise ConfigError(
                f"{title} was shuffled with a buffer, whose rows its state does not hold: they would be lost at a "
                "restart. Take .shuffle() away; shuffle=True mixes the rows of each window"
            )

        dataset = dataset if columns is None else dataset.select_columns(list(columns))
        self._dataset = _undecoded(dataset)

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """As the base class says."""
        dataset = self._dataset.with_format(None)  # a dataset object has one place and one epoch: this is ours
        dataset.set_epoch(order.key(epoch))
        state = {"number": 0, "dataset": None} if state is None else state
        if state["dataset"] is not None:
            dataset.load_state_dict(state["dataset"])
        yield from self.rows(iter(dataset), state["number"], state, partial(_state_now, dataset), check)

    def fingerprint(self) -> dict[str, Any]:
        """What the dataset says of itself: its name, its features, its shards, and what is done to it.

        The content is not looked at; where a run goes on, the row is.
        """
        info, features = self._dataset.info, self._dataset.features
        what = {
            "name": [info.dataset_name, info.config_name, str(info.version), str(self._dataset.split)],
            "features": repr(sorted(features.items())) if features is not None else None,
            "num_shards": self._dataset.num_shards,
            "pipeline": self._pipeline,
        }
        return {"digest": digest(canonical(what)), **what}


def _state_now(dataset: datasets.IterableDataset, number: int) -> dict[str, Any] | None:
    state_dict = getattr(dataset, "state_dict", None)  # older releases have none
    state = plain_state(state_dict()) if state_dict is not None else None
    return None if state is None else {"number": number, "dataset": state}


def _pipeline(node: Any) -> list[Any]:
    """What examples go through, from the last step to the first, by the names of its classes."""
    steps: list[Any] = []
    while node is not None:
        steps.append(type(node).__name__)
        several = getattr(node, "ex_iterables", None)
        if several is not None:
            steps.append([_pipeline(inner) for inner in several])
        node = getattr(node, "ex_iterable", None)
    return steps


def _undecoded(dataset: datasets.IterableDataset) -> datasets.IterableDataset:
    """The dataset with images, audio and the like as they are stored: path and bytes."""
    features = dataset.features
    decode = getattr(dataset, "decode", None)
    if features is None or decode is None:
        return dataset

    undecoded: datasets.IterableDataset = decode(False)
    return undecoded
