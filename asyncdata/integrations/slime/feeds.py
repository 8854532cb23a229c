"""Feeds of new prompts: from this library's loader, from another dataset, or empty.

Each feed makes numbered groups, starting from a numbering, and reports the numbering after them, which the caller
stores. A dataset's methods decide which feed it gets: ``get_next_batch`` (the interface of slime's streaming datasets),
or ``samples`` and a length (slime's own dataset).
"""

from __future__ import annotations

import abc
import copy
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, NoSamplesError
from asyncdata.core.log import get_logger
from asyncdata.integrations.slime.checkpoint import refuse_change

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from asyncdata.delivery.outcomes.memory import RowReport
    from asyncdata.integrations.slime.checkpoint import Kind
    from asyncdata.integrations.slime.config import SlimeSettings
    from asyncdata.integrations.slime.rollout_ledger import Numbering

    Commit = Callable[[Numbering], object]

__all__ = ("AdapterFeed", "EmptyFeed", "Feed", "SequenceFeed", "feed_of", "leave_epoch", "refuse_beyond")

_log = get_logger(__name__)


class Feed(abc.ABC):
    """A source of fresh groups.

    :ivar kind: its name in a checkpoint.
    :ivar dataset: what ``AsyncDataSource.dataset`` is.
    """

    kind: Kind
    dataset: Any

    @abc.abstractmethod
    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        """The next ``number`` groups. ``commit`` is called with the numbering after them, unless this fails."""

    def state(self) -> Any:
        """The position, as plain data."""
        return None

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        """Continue from ``state``, or, if that is None, from slime's own ``numbering``.

        :param allow_changed: what may differ from the checkpoint.
        :return: the numbering that is valid from now on.
        """
        return numbering

    def report(self, reports: Iterable[RowReport]) -> int:
        """Count rewards of rows; return how many were new. 0 for a feed that remembers none."""
        return 0

    @abc.abstractmethod
    def go_to(self, numbering: Numbering) -> None:
        """Go to the position of ``numbering`` in its epoch.

        :raises ConfigError: if there is no such position; nothing has changed then.
        """

    def set_dp_size(self, dp_size: int) -> None:  # noqa: B027 - what is in memory has no read-ahead
        """The number of ranks that are fed: a hint for the read-ahead."""

    def close(self) -> None:  # noqa: B027 - what is in memory has nothing to close
        """Free everything."""


class AdapterFeed(Feed):
    """Prompts from a dataset that returns batches and stores its own position, as slime's streaming datasets do."""

    kind: Kind = "adapter"

    def __init__(self, dataset: Any, samples_per_group: int) -> None:
        self.dataset = dataset
        self._samples_per_group = samples_per_group

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        prompts = self.dataset.get_next_batch(number)
        if len(prompts) != number:
            raise NoSamplesError(
                f"AD401 {type(self.dataset).__name__}.get_next_batch({number}) gave {len(prompts)} samples; a rollout "
                "that gets too few would ask again for ever, so a dataset must wait for them, or raise"
            )

        groups = _numbered(prompts, self._samples_per_group, before)
        epoch = getattr(self.dataset, "epoch_id", before.epoch_id)
        offset = getattr(self.dataset, "consumed_count", before.sample_offset + number)
        commit(before.after(number, self._samples_per_group, epoch, offset))
        return groups

    def state(self) -> Any:
        return copy.deepcopy(self.dataset.get_checkpoint_state())  # a copy: the dataset may keep using this dict

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        place = {"epoch_id": numbering.epoch_id, "consumed_count": numbering.sample_offset}
        self.dataset.load_checkpoint_state(state or {**place, "global_consumed_count": numbering.sample_group_index})
        return numbering

    def go_to(self, numbering: Numbering) -> None:
        self.restore(None, numbering, ())

    def set_dp_size(self, dp_size: int) -> None:
        if hasattr(self.dataset, "set_train_parallel_config"):
            self.dataset.set_train_parallel_config({"dp_size": dp_size})

    def close(self) -> None:
        if hasattr(self.dataset, "close"):
            self.dataset.close()


class SequenceFeed(Feed):
    """Prompts from a list in memory, such as ``samples`` of slime's own dataset. Nothing is read ahead."""

    kind: Kind = "sequence"

    def __init__(self, dataset: Any, samples_per_group: int, shuffled: bool) -> None:
        self.dataset = dataset
        self._samples_per_group = samples_per_group
        self._shuffled = shuffled

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        if len(self.dataset) == 0:
            raise NoSamplesError("AD401 the dataset has no prompt")

        epoch, offset = before.epoch_id, before.sample_offset
        self._go_to(epoch)
        prompts: list[Any] = []
        while len(prompts) < number:
            if offset >= len(self.dataset):
                epoch, offset = epoch + 1, 0
                self._go_to(epoch)
            found = self.dataset.samples[offset : offset + number - len(prompts)]
            offset += len(found)
            prompts += found
        groups = _numbered(prompts, self._samples_per_group, before)
        commit(before.after(number, self._samples_per_group, epoch, offset))
        return groups

    def _go_to(self, epoch: int) -> None:
        if self._shuffled:
            self.dataset.shuffle(epoch)

    def state(self) -> Any:
        return {"num_samples": len(self.dataset)}

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        saved = numbering.sample_offset if state is None else state["num_samples"]
        is_other = saved > len(self.dataset) if state is None else saved != len(self.dataset)
        if is_other:
            refuse_change("data", f"{saved} rows", f"{len(self.dataset)} rows", allow_changed)
            return leave_epoch(numbering, "data", None if state is None else saved - numbering.sample_offset)

        return numbering

    def go_to(self, numbering: Numbering) -> None:
        refuse_beyond(numbering, len(self.dataset))


class EmptyFeed(Feed):
    """Empty prompts with numbers: for rollouts that make their own."""

    kind: Kind = "none"
    dataset = None

    def __init__(self, sample_type: type[Any], samples_per_group: int) -> None:
        self._sample_type = sample_type
        self._samples_per_group = samples_per_group

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        groups = _numbered([self._sample_type() for _ in range(number)], self._samples_per_group, before)
        commit(before.after(number, self._samples_per_group, before.epoch_id, before.sample_offset))
        return groups

    def go_to(self, numbering: Numbering) -> None:
        """An empty feed has only one position."""


def feed_of(dataset: Any, settings: SlimeSettings, sample_type: type[Any]) -> Feed:
    """The feed for a dataset, by its methods.

    :raises ConfigError: if it has none of those that a feed needs.
    """
    if dataset is None:
        return EmptyFeed(sample_type, settings.samples_per_group)

    if hasattr(dataset, "get_next_batch"):
        return AdapterFeed(dataset, settings.samples_per_group)

    if hasattr(dataset, "samples") and hasattr(dataset, "__len__"):
        return SequenceFeed(dataset, settings.samples_per_group, settings.shuffled)

    raise ConfigError(
        f"a dataset has get_next_batch(num_samples), or samples and a length; a {type(dataset).__name__} has neither"
    )


def _numbered(prompts: list[Any], samples_per_group: int, before: Numbering) -> list[Any]:
    """A group of copies for each prompt."""
    groups = []
    index = before.sample_index
    for number, prompt in enumerate(prompts, before.sample_group_index):
        group = [copy.deepcopy(prompt) for _ in range(samples_per_group)]
        for sample in group:
            sample.group_index, sample.index = number, index
            index += 1
        groups.append(group)
    return groups


def leave_epoch(numbering: Numbering, changed: str, num_left_out: int | None) -> Numbering:
    """The numbering at the next epoch's start, as its place in the current epoch is no longer valid; this is logged.

    An epoch that has not begun is not left.

    :param num_left_out: prompts of the epoch that are not delivered; None if that is not known.
    """
    if numbering.sample_offset == 0:
        return numbering

    if num_left_out != 0:
        _log.warning(
            "snapshot.rows_left_out",
            epoch=numbering.epoch_id,
            changed=[changed],
            num_delivered=numbering.sample_offset,
            num_left_out=num_left_out,
        )
    return numbering.after(0, 1, numbering.epoch_id + 1, 0)


def refuse_beyond(numbering: Numbering, num_prompts: int | None) -> None:
    """Refuse a place that an epoch does not have.

    :param num_prompts: of an epoch; None: fewer than that, however many they are.
    :raises ConfigError: saying so.
    """
    if num_prompts is None or numbering.sample_offset > num_prompts:
        found = "fewer" if num_prompts is None else num_prompts
        raise ConfigError(f"sample_offset is {numbering.sample_offset}, and an epoch has {found} prompts")
