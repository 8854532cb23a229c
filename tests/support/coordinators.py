"""Coordinators over loaders that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.delivery.requests import Request

if TYPE_CHECKING:
    from asyncdata import Sample
    from tests.support.still_loader import StillLoader


def ids(samples: list[Sample]) -> list[int]:
    return [int(sample.tokens[0]) for sample in samples]


def waiting(loader: StillLoader, num_groups: int, last_epoch: int | None = None) -> tuple[Request, list[bool]]:
    """A request that was polled, and the times that it was woken."""
    request, wakes = Request(num_groups, last_epoch), []
    request.wake = lambda: wakes.append(True)
    assert loader.coordinator.poll(request) is None
    return request, wakes
