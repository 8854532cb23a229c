"""Feeds of new prompts: from this library's loader, from another dataset, or empty.

Each feed makes numbered groups from a numbering on, and tells the numbering after them; whoever calls keeps it. What a
dataset can do decides which feed it gets: ``get_next_batch`` (the interface of slime's streaming datasets), or
``samples`` and a length (slime's own dataset).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.core.errors import ConfigError, NoSamplesError
from asyncdata.integrations.slime.checkpoint import refuse_change
from asyncdata.integrations.slime.places import leave_epoch, refuse_beyond

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asyncdata.integrations.slime.checkpoint import Kind
    from asyncdata.integrations.slime.config import SlimeSettings
    from asyncdata.integrations.slime.rollout_ledger import Numbering

    Commit = Callable[[Numbering], object]

__all__ = ("AdapterFeed", "EmptyFeed", "Feed", "SequenceFeed", "feed_of")


class Feed(Protocol):
    """A source of fresh groups.

    :ivar kind: what a checkpoint calls it.
    """

    kind: Kind

    @property
    def dataset(self) -> Any:
        """What ``AsyncDataSource.dataset`` is."""
        ...

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        """The next ``number`` groups. ``commit`` is given the numbering after them, unless this fails."""
        ...

    def state(self) -> Any:
        """Where it is, as plain data."""
        ...

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        """Go on from ``state``, or, if that is None, from slime's own ``numbering``; the numbering that holds then."""
        ...

    def go_to(self, numbering: Numbering) -> None:
        """Go to where ``numbering`` is in its epoch.

        :raises ConfigError: if there is no such place; nothing has changed then.
        """
        ...

    def set_dp_size(self, dp_size: int) -> None:
        """How many ranks are fed: a hint for the read-ahead."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class AdapterFeed:
    """Prompts from a dataset that hands out batches and keeps its own place, as slime's streaming datasets do."""

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


class SequenceFeed:
    """Prompts from a list that is all in memory, as slime's own dataset has them in ``samples``."""

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

    def set_dp_size(self, dp_size: int) -> None:
        """Nothing is read ahead: all is in memory."""

    def close(self) -> None:
        """There is nothing to let go of."""


class EmptyFeed:
    """Empty prompts, numbered: for rollouts that make their own."""

    kind: Kind = "none"
    dataset = None

    def __init__(self, sample_type: type[Any], samples_per_group: int) -> None:
        self._sample_type = sample_type
        self._samples_per_group = samples_per_group

    def groups(self, number: int, before: Numbering, commit: Commit) -> list[Any]:
        groups = _numbered([self._sample_type() for _ in range(number)], self._samples_per_group, before)
        commit(before.after(number, self._samples_per_group, before.epoch_id, before.sample_offset))
        return groups

    def state(self) -> Any:
        return None

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> Numbering:
        return numbering

    def go_to(self, numbering: Numbering) -> None:
        """An empty feed has only one position."""

    def set_dp_size(self, dp_size: int) -> None:
        """Nothing is read ahead."""

    def close(self) -> None:
        """There is nothing to let go of."""


def feed_of(dataset: Any, settings: SlimeSettings, sample_type: type[Any]) -> Feed:
    """The feed for a dataset, by what it can do.

    :raises ConfigError: if it can do nothing of use.
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
