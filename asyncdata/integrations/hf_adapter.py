"""slime's interface of streaming datasets, implemented with this library's loader.

slime never merged the adapter for which this interface was designed (``--use-hf-datasets``), but data sources and
datasets were written for it. Prompts are returned one after the other; there is neither a length nor access by number,
as a stream does not know which rows filters drop. Known problems of that adapter are solved:

- *A queue that times out, and a short batch*: a batch is complete, or PrefetchTimeoutError says which stage is slow.
- *A dataset that is exhausted while it skips what was consumed*: with asyncdata's state nothing is skipped, and a state
  that cannot belong to this dataset is a SnapshotMismatchError.
- *A dataset that was never initialised*: it is opened at its first use, with or without ``dp_size``.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.slime.config import settings_of
from asyncdata.integrations.slime.loader_feed import LoaderFeed, media_process
from asyncdata.integrations.slime.rollout_ledger import Numbering
from asyncdata.integrations.slime.samples import resolve_sample_type

__all__ = ("AsyncDatasetAdapter", "HFDatasetAdapterBase")


class HFDatasetAdapterBase(abc.ABC):
    """A dataset that returns prompts in order and stores its own position."""

    @abc.abstractmethod
    def get_next_batch(self, num_samples: int) -> list[Any]:
        """The next ``num_samples`` prompts, exactly; over as many epochs as needed."""

    @abc.abstractmethod
    def shuffle(self, new_epoch_id: int) -> None:
        """Go to the start of an epoch, unless it is the current one."""

    @abc.abstractmethod
    def get_checkpoint_state(self) -> dict[str, Any]:
        """The position, with the keys ``epoch_id``, ``consumed_count`` and ``global_consumed_count``."""

    @abc.abstractmethod
    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`get_checkpoint_state` returned."""


class AsyncDatasetAdapter(HFDatasetAdapterBase):
    """A loader's prompts as slime's samples, one of each.

    The loader is opened at the first use, or when the number of ranks is set. May be called from any thread.

    :param args: slime's arguments, as for :class:`~asyncdata.integrations.slime.AsyncDataSource`; the order is
        asyncdata's own unless ``asyncdata_order`` says otherwise.
    :raises ConfigError: for a setting that cannot work, and if there is no data.
    """

    def __init__(self, args: Any) -> None:
        self._settings = settings_of(args, order="stream", samples_per_group=1)
        if self._settings.source is None:
            raise ConfigError("a dataset needs data: give --prompt-data, without --disable-rollout-global-dataset")

        self._lock = threading.RLock()
        self._feed = LoaderFeed(self._settings, resolve_sample_type(), media_process(args, self._settings), args)

    def set_train_parallel_config(self, config: Mapping[str, Any]) -> None:
        """Read ``dp_size`` times as much ahead from now on, for that many ranks."""
        with self._lock:
            self._feed.set_dp_size(config.get("dp_size") or 1)

    @property
    def epoch_id(self) -> int:
        """The epoch of the last prompt."""
        return self._feed.numbering.epoch_id

    @property
    def consumed_count(self) -> int:
        """Prompts of that epoch that were returned."""
        return self._feed.numbering.sample_offset

    @property
    def global_consumed_count(self) -> int:
        """Prompts of all epochs that were returned."""
        return self._feed.numbering.sample_group_index

    def get_next_batch(self, num_samples: int) -> list[Any]:
        """Exactly ``num_samples`` of slime's samples, which share no mutable object.

        :raises ConfigError: for a negative number.
        :raises PrefetchTimeoutError: if rows are not ready in time; none is consumed then.
        :raises AsyncDataError: for any other error of the stream; at this call and at every later one.
        """
        if num_samples < 0:
            raise ConfigError(f"AD440 num_samples must be a whole number from 0 on, got {num_samples}")

        with self._lock:
            return [sample for [sample] in self._feed.groups(num_samples)] if num_samples else []

    def shuffle(self, new_epoch_id: int) -> None:
        """Go to the start of an epoch, unless it is the current one. Without a call, each epoch follows the last."""
        with self._lock:
            if new_epoch_id != self.epoch_id:
                self._feed.go_to_epoch(self._feed.numbering.after(0, 1, new_epoch_id, 0))

    def get_checkpoint_state(self) -> dict[str, Any]:
        """The position as three counts, and the loader's own state under ``loader``: plain data."""
        with self._lock:
            return {
                "epoch_id": self.epoch_id,
                "consumed_count": self.consumed_count,
                "global_consumed_count": self.global_consumed_count,
                "loader": self._feed.state(),
            }

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Continue from a state. The three counts are enough, but then prompts of the epoch are read again.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``asyncdata_allow_changed`` does
            not name, or an epoch has fewer prompts than were consumed of it.
        :raises SnapshotError: if it is not a state.
        """
        numbering = Numbering(
            epoch_id=state.get("epoch_id", 0),
            sample_offset=state.get("consumed_count", 0),
            sample_group_index=state.get("global_consumed_count", 0),
            sample_index=state.get("global_consumed_count", 0),
        )
        allowed, loader = set(self._settings.options.allow_changed), state.get("loader")
        with self._lock:
            if loader is not None or self._settings.order == "legacy":
                self._feed.restore(loader, numbering, allowed)
            else:
                self._feed.skip_to(numbering)

    def close(self) -> None:
        """Stop the workers."""
        with self._lock:
            self._feed.close()
