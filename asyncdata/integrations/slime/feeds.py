"""Feeds of new prompts from datasets that are not this library's loader; and from none, whose prompts are empty.

A feed makes numbered groups, and knows its position in slime's four numbers. A dataset's methods decide which feed it
gets: ``get_next_batch`` (the interface of slime's streaming datasets), or ``samples`` and a length (slime's own
dataset).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, NoSamplesError, get_logger
from asyncdata.integrations.slime.checkpoint import Kind, refuse_change
from asyncdata.integrations.slime.rollout_ledger import Numbering

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from asyncdata.integrations.adapters import Scored
    from asyncdata.integrations.slime.config import SlimeSettings

_log = get_logger(__name__)


class Feed:
    """A source of fresh groups. By itself it gives empty prompts with numbers, for rollouts that make their own.

    :ivar kind: its name in a checkpoint.
    :ivar dataset: what ``AsyncDataSource.dataset`` is.
    :ivar numbering: the position after the last group.
    """

    kind: Kind = "none"
    numbering = Numbering()

    def __init__(self, dataset: Any, settings: SlimeSettings, sample_type: type[Any]) -> None:
        self.dataset = dataset
        self._settings = settings
        self._sample_type = sample_type

    def groups(self, number: int) -> list[Any]:
        """The next ``number`` groups. If it fails, the position has not changed."""
        before, size = self.numbering, self._settings.samples_per_group
        prompts, epoch, offset = self._next(number)
        groups = []
        for place, prompt in enumerate(prompts):
            group = [copy.deepcopy(prompt) for _ in range(size)]
            for index, sample in enumerate(group, before.sample_index + place * size):
                sample.group_index, sample.index = before.sample_group_index + place, index
            groups.append(group)
        self.numbering = before.after(number, size, epoch, offset)
        return groups

    def _next(self, number: int) -> tuple[list[Any], int, int]:
        """The next prompts, the epoch of the last one, and the prompts of that epoch that were given by then."""
        return [self._sample_type() for _ in range(number)], self.numbering.epoch_id, self.numbering.sample_offset

    def state(self) -> Any:
        """The position, as plain data."""
        return None

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> None:
        """Continue from ``state``, or, if that is None, from slime's own ``numbering``.

        :param allow_changed: what may differ from the checkpoint.
        """
        self.numbering = numbering

    def go_to(self, numbering: Numbering) -> None:
        """Go to the position of ``numbering`` in its epoch.

        :raises ConfigError: if there is no such position; nothing has changed then.
        """
        self.numbering = numbering

    def set_dp_size(self, dp_size: int) -> None:
        """The number of ranks that are fed: a hint for the read-ahead."""

    def report(self, scored: Iterable[Scored], attempts: int) -> int:
        """Count scores of rows; return how many were new."""
        return 0

    def statistics(self) -> dict[str, Any]:
        """Flat numbers."""
        return {}

    def close(self) -> None:
        """Free everything."""


class _AdapterFeed(Feed):
    """Prompts from a dataset that returns batches and stores its own position, as slime's streaming datasets do."""

    kind: Kind = "adapter"

    def _next(self, number: int) -> tuple[list[Any], int, int]:
        prompts = self.dataset.get_next_batch(number)
        if len(prompts) != number:
            raise NoSamplesError(
                f"AD401 {type(self.dataset).__name__}.get_next_batch({number}) gave {len(prompts)} samples; a rollout "
                "that gets too few would ask again for ever, so a dataset must wait for them, or raise"
            )

        epoch = getattr(self.dataset, "epoch_id", self.numbering.epoch_id)
        return prompts, epoch, getattr(self.dataset, "consumed_count", self.numbering.sample_offset + number)

    def state(self) -> Any:
        return copy.deepcopy(self.dataset.get_checkpoint_state())  # a copy: the dataset may keep using this dict

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> None:
        place = {"epoch_id": numbering.epoch_id, "consumed_count": numbering.sample_offset}
        self.dataset.load_checkpoint_state(state or {**place, "global_consumed_count": numbering.sample_group_index})
        self.numbering = numbering

    def go_to(self, numbering: Numbering) -> None:
        self.restore(None, numbering, ())

    def set_dp_size(self, dp_size: int) -> None:
        if hasattr(self.dataset, "set_train_parallel_config"):
            self.dataset.set_train_parallel_config({"dp_size": dp_size})

    def close(self) -> None:
        if hasattr(self.dataset, "close"):
            self.dataset.close()


class _SequenceFeed(Feed):
    """Prompts from a list in memory, such as ``samples`` of slime's own dataset. Nothing is read ahead."""

    kind: Kind = "sequence"

    def _next(self, number: int) -> tuple[list[Any], int, int]:
        if len(self.dataset) == 0:
            raise NoSamplesError("AD401 the dataset has no prompt")

        epoch, offset = self.numbering.epoch_id, self.numbering.sample_offset
        self._shuffle_for(epoch)
        prompts: list[Any] = []
        while len(prompts) < number:
            if offset >= len(self.dataset):
                epoch, offset = epoch + 1, 0
                self._shuffle_for(epoch)
            found = self.dataset.samples[offset : offset + number - len(prompts)]
            offset += len(found)
            prompts += found
        return prompts, epoch, offset

    def _shuffle_for(self, epoch: int) -> None:
        if self._settings.shuffled:
            self.dataset.shuffle(epoch)

    def state(self) -> Any:
        return {"num_samples": len(self.dataset)}

    def restore(self, state: Any, numbering: Numbering, allow_changed: Collection[str]) -> None:
        saved = numbering.sample_offset if state is None else state["num_samples"]
        is_other = saved > len(self.dataset) if state is None else saved != len(self.dataset)
        if is_other:
            refuse_change("data", f"{saved} rows", f"{len(self.dataset)} rows", allow_changed)
            numbering = leave_epoch(numbering, "data", None if state is None else saved - numbering.sample_offset)
        self.numbering = numbering

    def go_to(self, numbering: Numbering) -> None:
        refuse_beyond(numbering, len(self.dataset))
        self.numbering = numbering


def feed_of(dataset: Any, settings: SlimeSettings, sample_type: type[Any]) -> Feed:
    """The feed for a dataset, by its methods.

    :raises ConfigError: if it has none of those that a feed needs.
    """
    if dataset is None:
        return Feed(dataset, settings, sample_type)

    if hasattr(dataset, "get_next_batch"):
        return _AdapterFeed(dataset, settings, sample_type)

    if hasattr(dataset, "samples") and hasattr(dataset, "__len__"):
        return _SequenceFeed(dataset, settings, sample_type)

    raise ConfigError(
        f"a dataset has get_next_batch(num_samples), or samples and a length; a {type(dataset).__name__} has neither"
    )


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
