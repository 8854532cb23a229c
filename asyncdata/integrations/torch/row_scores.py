"""Scores of rows that a framework has carried through its own batches: a row is known there by a key in its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.delivery.outcomes.memory import MAX_SCORE, RowReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader

__all__ = ("key_of", "report_keys")


def key_of(loader: DataLoader, sample: Sample) -> list[Any] | None:
    """The key of a sample's row, of numbers and text; None if the loader remembers no scores."""
    outcomes = loader._engine.outcomes  # noqa: SLF001 - a part of this library
    return None if outcomes is None else outcomes.key_of(sample)


def report_keys(loader: DataLoader, keys: Iterable[Any], scores: Iterable[float]) -> int:
    """Remember the scores of a batch; return how many were new. Scores that are no finite numbers are left out.

    :param keys: of each score; a row comes once for each of its rollouts, which all are in the batch.
    """
    outcomes, coordinator = loader._engine.outcomes, loader._engine.coordinator  # noqa: SLF001
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for key, score in zip(keys, scores, strict=True):
        attempts = found.setdefault(tuple(key), [])
        attempts.append((len(attempts), float(score)))
    if outcomes is None or not found:
        return 0

    reports = [
        RowReport(row_id, epoch, [(attempt, score) for attempt, score in scored if abs(score) <= MAX_SCORE], *part)
        for (epoch, row_id, *part), scored in found.items()
    ]
    with coordinator.lock:
        return outcomes.count(reports, max(map(len, found.values())))
