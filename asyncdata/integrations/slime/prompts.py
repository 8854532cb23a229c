"""The loader of prompts, and a view of them by their numbers, like ``samples`` of slime's own dataset."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.core.errors import NoSamplesError
from asyncdata.loader.loader import DataLoader
from asyncdata.order.rank_share import row_of_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import TypeVar

    from asyncdata.core.types import Sample
    from asyncdata.delivery.outcomes.memory import RowReport
    from asyncdata.integrations.slime.config import SlimeSettings

    T = TypeVar("T")

__all__ = ("PromptLoader", "PromptView", "open_loader")

_TAKEN_AT_ONCE = 256


class PromptLoader(DataLoader):
    """A loader whose samples count as delivered only when groups are made of them."""

    def take(self, number: int, finish: Callable[[list[Sample]], T], timeout_s: float | None = None) -> T:
        """``finish`` of the next ``number`` samples; if it raises, they are delivered again."""
        return self._take(number, None, finish, timeout_s)

    def resume(self, state: Mapping[str, Any], allow_changed: Collection[str], *, same_rows: bool) -> bool:
        """As :meth:`load_state_dict`. Return whether it is at the saved position, and not at an epoch's start."""
        self._check()
        return self._restore(snapshots.from_state_dict(state), allow_changed, same_rows=same_rows)

    @property
    def remembers(self) -> bool:
        """Whether it has an outcome memory."""
        return self._engine.outcomes is not None

    def row_of(self, sample: Sample) -> list[Any]:
        """The epoch and the id of a sample's row in the outcome memory, and of a mixture the name of its part."""
        assert self._engine.outcomes is not None, "it remembers"
        return self._engine.outcomes.key_of(sample)

    def count(self, reports: Iterable[RowReport], attempts: int) -> int:
        """Count scores of rows, which have so many attempts in an epoch; return how many were new."""
        if self._engine.outcomes is None:
            return 0

        with self._engine.coordinator.lock:
            return self._engine.outcomes.count(reports, attempts)


def open_loader(settings: SlimeSettings, dp_size: int = 1) -> PromptLoader:
    """The loader for these settings, which must name data."""
    assert settings.source is not None and settings.tokenize_fn is not None
    knobs = {**settings.knobs, "dp_size": dp_size}
    return PromptLoader(settings.source, tokenize_fn=settings.tokenize_fn, **knobs)


class PromptView(Sequence[Any]):
    """The prompts of an epoch, in its order. Reading them does not affect what is delivered.

    A row that yields no sample has a number too: its number is an error, and slices and loops skip it, as rollouts do.
    A separate loader, opened at the first access, reads the rows.

    :param open_loader: opens that loader.
    :param make: converts its samples to slime's.
    :param epoch: returns the epoch.
    :param num_prompts: returns the number of prompts; raises TypeError if that is not known.
    """

    def __init__(
        self,
        open_loader: Callable[[], PromptLoader],
        make: Callable[[list[Sample]], list[Any]],
        epoch: Callable[[], int],
        num_prompts: Callable[[], int],
    ) -> None:
        self._open_loader = open_loader
        self._make = make
        self._epoch = epoch
        self._num_prompts = num_prompts
        self._lock = threading.Lock()
        self._loader: PromptLoader | None = None
        self._at: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self._num_prompts()

    def __getitem__(self, key: Any) -> Any:
        """The sample with that number, or the samples of a slice, as in a list. They are new at each call.

        :raises IndexError: if there is no such number.
        :raises NoSamplesError: if the row of that number yields no sample.
        :raises TypeError: in the stream order, where rows have no numbers.
        """
        numbers = range(len(self))[key]
        epoch = self._epoch()
        if isinstance(numbers, range):
            found = {} if len(numbers) == 0 else self._read(epoch, min(numbers), max(numbers) + 1)
            return [found[number] for number in numbers if number in found]

        found = self._read(epoch, numbers, numbers + 1)
        if not found:
            raise NoSamplesError(
                f"AD401 prompt {numbers} of epoch {epoch} is none: its row is bad, or was dropped; rollouts skip it"
            )

        return found[numbers]

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), _TAKEN_AT_ONCE):
            yield from self[first : first + _TAKEN_AT_ONCE]

    def _read(self, epoch: int, first: int, stop: int) -> dict[int, Any]:
        """The samples of the rows [first, stop), by their numbers."""
        found: dict[int, Any] = {}
        with self._lock:
            loader = self._go_to(epoch, first)
            while self._at is not None and first <= self._at[1] < stop and self._at[0] == epoch:
                samples = loader.take(min(stop - self._at[1], _TAKEN_AT_ONCE), list)
                places = [_place(sample) for sample in samples]
                self._at = places[-1][0], places[-1][1] + 1
                wanted = [n for n, place in enumerate(places) if place[0] == epoch and place[1] < stop]
                made = self._make([samples[n] for n in wanted])
                found |= zip((places[n][1] for n in wanted), made, strict=True)
        return found

    def _go_to(self, epoch: int, number: int) -> PromptLoader:
        if self._loader is None:
            self._loader = self._open_loader()
            self._closer = weakref.finalize(self, self._loader.close)
        if self._at != (epoch, number):
            self._at = None  # if this fails, the position is not known
            self._loader.seek(epoch, number)
            self._at = epoch, number
        return self._loader

    def close(self) -> None:
        """Stop reading."""
        if self._loader is not None:
            self._closer()


def _place(sample: Sample) -> tuple[int, int]:
    """The epoch of a sample, and its row's number there."""
    place = sample.position
    assert place is not None  # it comes from a row
    return place.epoch, row_of_epoch(place)
