"""slime's fully asynchronous rollout: ``--rollout-function-path``.

::

    --data-source-path asyncdata.integrations.slime.AsyncDataSource
    --rollout-function-path asyncdata.integrations.slime.generate_fully_async

It is slime's own rollout, and tells the data source where each group ends. slime saves nothing of it, so groups that
are being generated, and those that are finished and not trained, are in the checkpoints of the data source.
"""

from __future__ import annotations

from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.imports import resolve_path
from asyncdata.integrations.slime.data_source import AsyncDataSource

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
