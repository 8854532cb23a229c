"""Rewards of slime's groups, reported to the loader: with ``asyncdata_outcomes`` (see ``config.Options``).

A sample carries its row in its metadata, so that it is known in whatever process, copy or checkpoint the sample is.
:func:`report_outcomes` is for ``--rollout-all-samples-process-path``: slime calls it with all finished groups of a
rollout, also those that its dynamic filter dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.delivery.outcomes.memory import MAX_SCORE, RowReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncdata.core.types import Sample

__all__ = ("KEY", "report_outcomes", "reports_of", "tagged")

KEY = "asyncdata_row"
"""In the metadata: the epoch and the id of the sample's row, and of a mixture the name of its part."""

_FINISHED = {"completed", "truncated"}


def tagged(sample: Sample, key: list[Any]) -> Sample:
    """The sample with its row in its metadata, if that is a dict."""
    if sample.position is not None and isinstance(sample.metadata, dict):
        sample.metadata = {**sample.metadata, KEY: key}
    return sample


def reports_of(groups: Iterable[list[Any]], samples_per_group: int, reward_key: str | None) -> Iterator[RowReport]:
    """The rewards of finished samples that have a finite one; of a fan-out, that of its last sample."""
    for group in groups:
        found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
        for item in group:
            sample = item[-1] if isinstance(item, list) and item else item
            row = (getattr(sample, "metadata", None) or {}).get(KEY)
            score = _score(sample, reward_key)
            if row is not None and score is not None and sample.index is not None:
                found.setdefault(tuple(row), []).append((sample.index % samples_per_group, score))
        for (epoch, row_id, *part), scores in found.items():
            yield RowReport(row_id, epoch, scores, *part)


def _score(sample: Any, reward_key: str | None) -> float | None:
    status = getattr(sample, "status", None)
    if getattr(status, "value", status) not in _FINISHED:
        return None

    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(reward_key)
    try:
        score = float(reward)
    except (TypeError, ValueError):
        return None

    return score if abs(score) <= MAX_SCORE else None  # NaN is not


def report_outcomes(args: Any, all_samples: list[list[Any]], data_source: Any) -> None:
    """Report all finished groups of a rollout: ``--rollout-all-samples-process-path`` names this function.

    :param data_source: an :class:`~asyncdata.integrations.slime.AsyncDataSource`, or its ``get_samples``, which is what
        slime's own rollout passes.
    :raises ConfigError: for another data source.
    """
    source = getattr(data_source, "__self__", data_source)
    if not hasattr(source, "report"):
        raise ConfigError(
            f"report_outcomes needs asyncdata's data source, got {type(source).__name__}: give --data-source-path "
            "asyncdata.integrations.slime.AsyncDataSource"
        )

    source.report(all_samples)
