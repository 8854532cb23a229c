"""A streaming dataset of Hugging Face: its examples, and the state from which it resumes."""

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

    A state is ``{"number": index of the next example, "dataset": the dataset's state_dict()}``. If the dataset has no
    state, or JSON cannot store it, a restart skips the delivered examples from the start of the epoch.

    With shuffle, the dataset's shards have another order in each epoch: its ``set_epoch`` gets a number that depends
    on seed and epoch.

    :param columns: the columns of an example; None: all.
    :raises ConfigError: for a dataset with a shuffle buffer: its ``state_dict()`` does not contain the rows in the
        buffer, so a restart would lose them.
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
        """The description of the dataset: its name, features, shards and transformations.

        The content is not read; when a run resumes, the first row is compared.
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
    """The class names of the transformations of an example, from the last to the first."""
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
