"""Fully asynchronous rollouts, of which slime and miles save nothing themselves.

slime, by its own rollout, which tells the data source where each group ends::

    --data-source-path asyncdata.integrations.slime.AsyncDataSource
    --rollout-function-path asyncdata.integrations.slime.generate_fully_async

miles, by ``AsyncDataBuffer``: its own buffer, with its filters, capacity and metrics, which tells that too::

    --fully-async
    --data-source-path asyncdata.integrations.slime.AsyncDataSource
    --custom-async-data-buffer-path asyncdata.integrations.slime.AsyncDataBuffer

So groups that are being generated, and those that are finished and not trained, are in the checkpoints of the data
source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import resolve_path
from asyncdata.integrations.adapters import made_on_first_use
from asyncdata.integrations.slime.data_source import AsyncDataSource, source_with

_PREFIX = "rollout/asyncdata/"
_THEIRS = "slime.rollout.fully_async_rollout:generate_rollout_fully_async"


def generate_fully_async(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """The groups of a rollout, as slime's function of this name returns them.

    :param data_buffer: an :class:`~asyncdata.integrations.slime.AsyncDataSource`.
    :raises ConfigError: for another data source, or if slime has no such rollout (AD420).
    """
    if not isinstance(data_buffer, AsyncDataSource):
        raise ConfigError(
            f"generate_fully_async keeps its groups in the checkpoints of the data source, and that is a "
            f"{type(data_buffer).__name__}: pass --data-source-path asyncdata.integrations.slime.AsyncDataSource too"
        )

    data_buffer.track_groups()
    data_buffer.begin_rollout(rollout_id)
    groups = resolve_path(_THEIRS)(args, rollout_id, data_buffer, evaluation=evaluation)
    for group in groups:
        data_buffer.consume_group(group)
    data_buffer.end_rollout()
    return groups


class TrackingBuffer:
    """What ``AsyncDataBuffer`` adds to miles' ``DefaultDataBuffer``. To be inherited from before a data buffer.

    :param input: miles' ``DataBufferConstructorInput``. Its ``args`` must be those of an
        :class:`~asyncdata.integrations.slime.AsyncDataSource`.
    :raises ConfigError: if there is no such data source, or miles' buffer has another layout.
    """

    _buffer: list[Any]

    def __init__(self, input: Any) -> None:
        source = source_with(input.args)
        if source is None:
            raise ConfigError(
                f"{type(self).__name__} keeps its groups in the checkpoints of the data source: pass "
                "--data-source-path asyncdata.integrations.slime.AsyncDataSource too"
            )

        self._source = source
        self._handle: Callable[[list[Any]], None] = input.unused_handler_fn
        self._arriving: dict[int, list[Any]] = {}
        super().__init__(dataclasses.replace(input, unused_handler_fn=self._unused))  # type: ignore[call-arg]
        if not isinstance(getattr(self, "_buffer", None), list):
            raise ConfigError(
                f"the data buffer of this version of miles has no list of its groups: {type(self).__name__} cannot see "
                "which ones it drops. Use miles' own, without --custom-async-data-buffer-path"
            )

        source.track_groups()

    def _unused(self, prompt_group: list[Any]) -> None:
        """``--async-unused-samples-handler``: ``retry`` gives the group back, and ``drop`` does nothing."""
        is_arriving = self._arriving.pop(id(prompt_group), None) is not None
        self._handle(prompt_group)
        self._source.drop_group(prompt_group, "aborted" if is_arriving else "stale")

    async def put(self, input: Any) -> None:
        """Store a finished group, or hand it to the handler of unused groups, or drop it."""
        key = id(input.prompt_group)
        self._arriving[key] = input.prompt_group
        try:
            await super().put(input)  # type: ignore[misc]
        finally:
            is_judged = self._arriving.pop(key, None) is None
        # Nothing else has run since the buffer has stored it.
        if not is_judged and not any(entry is input for entry in self._buffer):
            self._source.drop_group(input.prompt_group, "dynamic_filter")

    async def get(self, **context: Any) -> Any:
        """The next group to train on, which from now on belongs to the current rollout."""
        entry = await super().get(**context)  # type: ignore[misc]
        self._source.consume_group(entry.prompt_group)
        return entry

    def get_metrics(self) -> dict[str, float]:
        """miles' own metrics, and the numbers of groups tracked and dropped. miles calls it after each batch."""
        metrics: dict[str, float] = super().get_metrics()  # type: ignore[misc]
        self._source.end_rollout()
        shown = ("asyncdata_tracked_groups", "asyncdata_dropped_groups_")
        numbers = self._source.statistics().items()
        ours = {f"{_PREFIX}{name.removeprefix('asyncdata_')}": n for name, n in numbers if name.startswith(shown)}
        return {**metrics, **ours}


__getattr__ = made_on_first_use(
    __name__, "miles", {"AsyncDataBuffer": (TrackingBuffer, "miles.rollout.fully_async_data_buffer:DefaultDataBuffer")}
)
