"""The rollout buffer: checks the groups that the trainer gives back, and calls the filter that takes groups out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdata.core.errors import ConfigError, FilterError, InvalidGroupError
from asyncdata.core.plain_values import PACKED, packed
from asyncdata.core.settings import resolve_path
from asyncdata.core.types import Group, Sample, drop_media
from asyncdata.delivery.ledger import Returned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    T = TypeVar("T")
    BufferFilter = Callable[[list[Group], int], list[Group]]


def first_in_first_out(buffer: list[Group], num_groups: int) -> list[Group]:
    """The oldest groups: the default filter."""
    return buffer[:num_groups]


def filter_of(buffer_filter: BufferFilter | str | None) -> BufferFilter:
    """The filter of the loader's ``buffer_filter`` argument: a function, or its import path.

    :raises ConfigError: if it is not a function.
    """
    if buffer_filter is None:
        return first_in_first_out

    found: BufferFilter = resolve_path(buffer_filter) if isinstance(buffer_filter, str) else buffer_filter
    if not callable(found) or isinstance(found, type):
        what = f"the class {found.__name__}; make one of it" if isinstance(found, type) else type(found).__name__
        raise ConfigError(f"buffer_filter must be a function of (buffer, num_groups), got {what}")

    return found


def choose(buffer: Sequence[Returned], num_groups: int, buffer_filter: BufferFilter) -> list[Returned]:
    """At most ``num_groups`` groups of ``buffer``, chosen by ``buffer_filter``.

    The filter works on a copy, so it may or may not remove the groups that it returns. No group can be served twice or
    be lost: groups above ``num_groups`` stay in the buffer.

    :raises FilterError: if the filter raises, or returns something that is not a group of the buffer.
    """
    if not buffer or num_groups < 1:
        return []

    if buffer_filter is first_in_first_out:
        return list(buffer[:num_groups])

    try:
        wanted = buffer_filter([item.group for item in buffer], num_groups)
    except Exception as error:  # a user's function may raise anything
        raise FilterError(
            f"AD431 the buffer filter {_name(buffer_filter)} raised {error!r}; no group was taken"
        ) from error

    return _identify(buffer, wanted, buffer_filter)[:num_groups]


class Chooser:
    """Calls the filter, and refuses the filter's calls to its own loader.

    A change by such a call would be undone by the delivery in progress, and a call that waits would wait for ever.
    """

    def __init__(self, buffer_filter: BufferFilter) -> None:
        self._filter = buffer_filter
        self._is_choosing = False

    def choose(self, buffer: Sequence[Returned], num_groups: int) -> list[Returned]:
        """Choose groups by the filter; see :func:`choose`."""
        return self.calling(choose, buffer, num_groups, self._filter)

    def calling(self, function: Callable[..., T], *args: Any) -> T:
        """Call what calls a function of the user's."""
        self._is_choosing = True
        try:
            return function(*args)
        finally:
            self._is_choosing = False

    def refuse_calls(self) -> None:
        """Refuse a call from within the filter. The caller holds the loader's lock, so no other thread is refused.

        :raises ConfigError: if the filter is running.
        """
        if not self._is_choosing:
            return

        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - a KeyboardInterrupt may have left the mark
        while frame and not (frame.f_code is Chooser.calling.__code__ and frame.f_locals["self"] is self):
            frame = frame.f_back
        self._is_choosing = frame is not None
        if self._is_choosing:
            raise ConfigError(
                f"AD504 the buffer filter {_name(self._filter)} calls the loader that asks it; a filter only chooses "
                "among the groups it is given"
            )


def _identify(buffer: Sequence[Returned], wanted: Any, buffer_filter: BufferFilter) -> list[Returned]:
    if not isinstance(wanted, list | tuple):
        raise FilterError(
            f"AD430 the buffer filter {_name(buffer_filter)} returned {type(wanted).__name__}; need a list of groups"
        )

    by_identity = {id(item.group): item for item in buffer}
    chosen: dict[int, Returned] = {}
    for group in wanted:
        if id(group) not in by_identity:
            raise FilterError(
                f"AD430 the buffer filter {_name(buffer_filter)} returned something that is no group of the buffer "
                f"({type(group).__name__}); return the very lists it was given"
            )

        chosen[id(group)] = by_identity[id(group)]
    return list(chosen.values())


def _name(function: Any) -> str:
    return repr(getattr(function, "__qualname__", function))


def without(buffer: tuple[Returned, ...], chosen: Sequence[Returned]) -> tuple[Returned, ...]:
    """``buffer`` without the ``chosen`` groups, by identity."""
    if not chosen:
        return buffer

    gone = {id(item) for item in chosen}
    return tuple(item for item in buffer if id(item) not in gone)


def validate_groups(groups: Any, samples_per_group: int, buffer: Sequence[Returned]) -> list[Returned]:
    """``groups`` as the buffer keeps them: detached from their chunks, without media, with a record for the snapshot.

    :raises InvalidGroupError: naming the first group that cannot be kept; then no group is changed.
    """
    if not isinstance(groups, list | tuple):
        raise InvalidGroupError(f"AD432 add_samples takes a list of groups, got {type(groups).__name__}")

    for number, group in enumerate(groups):
        _check_shape(number, group, samples_per_group)
    were_in = any(sample.is_detached for group in groups for sample in group)
    present = {id(sample) for item in buffer if were_in for sample in item.opened or ()}
    returned = []
    for number, group in enumerate(groups):
        samples = set(map(id, group))
        if len(samples) < len(group) or not present.isdisjoint(samples):
            raise InvalidGroupError(
                f"AD432 group {number} is in the buffer already, or has a sample twice; it would be served twice"
            )

        present |= samples
        returned.append(Returned(group, _record(number, group)))
    for item in returned:
        for sample in item.group:
            drop_media(sample)
            sample.detach()
    return returned


def _check_shape(number: int, group: Any, samples_per_group: int) -> None:
    if not isinstance(group, list) or not all(isinstance(sample, Sample) for sample in group):
        way_out = "; a group of one sample is [sample]" if isinstance(group, Sample) else ""
        raise InvalidGroupError(f"AD432 group {number} must be a list of Sample, got {_shape(group)}{way_out}")

    if len(group) != samples_per_group:
        raise InvalidGroupError(
            f"AD432 group {number} has {len(group)} samples, and n_samples_per_prompt is {samples_per_group}"
        )


def _shape(group: Any) -> str:
    if isinstance(group, list):
        return "a list of " + ", ".join(sorted({type(sample).__name__ for sample in group}))

    return type(group).__name__


def record_of(group: Group) -> bytes | list[dict[str, Any]]:
    """What a snapshot keeps of a group.

    :raises TypeError: for a value that it cannot hold.
    """
    return packed([sample.to_dict(PACKED) for sample in group]) or [sample.to_dict() for sample in group]


def _record(number: int, group: Group) -> bytes | list[dict[str, Any]]:
    try:
        return record_of(group)
    except TypeError as error:
        raise InvalidGroupError(
            f"AD432 group {number}: {error}. Keep it elsewhere, or turn it into numbers, text, lists, "
            "dicts or numpy arrays"
        ) from error
