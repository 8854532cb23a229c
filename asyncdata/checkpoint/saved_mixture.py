"""What a snapshot keeps of a mixture, and of a source that is read from front to back."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncdata.batching.packers.base import Count, Number  # noqa: TC001 - msgspec reads the annotations
from asyncdata.delivery.mixture import PartCursor  # noqa: TC001
from asyncdata.delivery.outcomes.state import OutcomeState  # noqa: TC001
from asyncdata.order.mixture import NodeState  # noqa: TC001

__all__ = ("EarlierMixture", "SavedMixture", "SavedPart", "StreamState")


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source that is read from front to back has a window's first row.

    :ivar window: number of the window in its epoch.
    :ivar at: what the source takes to begin there, as builtins; None for the epoch's start.
    :ivar skip: rows to pass over from there.
    :ivar row: digest of the first row, by which another row in its place is noticed.
    """

    window: Number
    at: dict[str, Any] | None = None
    skip: Count = 0
    row: str


class SavedPart(msgspec.Struct, frozen=True, kw_only=True):
    """How far one part of a mixture was delivered, and what it must agree with.

    :ivar outcomes: what was reported of its rows, or where that is stored; unset where nothing is remembered.
    """

    cursor: PartCursor
    order: dict[str, Any] = {}
    fingerprints: dict[str, Any] = {}
    stream: StreamState | msgspec.UnsetType = msgspec.UNSET
    outcomes: OutcomeState | msgspec.UnsetType = msgspec.UNSET


class EarlierMixture(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that hold up to a sample: they were changed at a restart, while samples waited to be packed."""

    settings: dict[str, Any]
    until: Count


class SavedMixture(msgspec.Struct, frozen=True, kw_only=True):
    """How far a mixture was delivered.

    :ivar settings: weights and all else that decides its schedule.
    :ivar at: samples that were taken, also those that wait to be packed and are not in ``schedule``.
    :ivar earlier: other settings that hold before.
    :ivar parked: parts of earlier runs that the mixture does not have now; they continue if they come back.
    """

    settings: dict[str, Any]
    schedule: NodeState
    parts: dict[str, SavedPart]
    parked: dict[str, SavedPart] = {}
    at: Count | None = None
    earlier: list[EarlierMixture] = []
