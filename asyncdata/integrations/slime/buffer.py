"""slime's rollout buffer, a plain list of groups: which ones it accepts, their records, rewards, and its filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncdata.core.errors import FilterError, InvalidGroupError, SnapshotError, get_logger
from asyncdata.integrations.adapters import KEY, Scored
from asyncdata.integrations.slime.checkpoint import SAMPLES, GroupRecord, Opened, Stored
from asyncdata.integrations.slime.rollout_ledger import Entry
from asyncdata.integrations.slime.samples import Process, containers_of, from_record, to_record

BufferFilter = Callable[[Any, None, list[Any], int], list[Any]]
Media = dict[str, list[Any]]

_log = get_logger(__name__)
_FINISHED = {"completed", "truncated"}


class BadGroupError(InvalidGroupError, AssertionError):
    """``add_samples`` got groups that slime's assertions refuse; nothing was added."""


def pop_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """The oldest groups: the default filter."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class GroupKeeper:
    """Converts groups to entries of the buffer, and records to groups.

    :param samples_per_group: ``n_samples_per_prompt``.
    :param process: makes ``multimodal_inputs`` of a row's media; None if rows have no media.
    :param refuse: whether a group that no checkpoint can store is an error. Otherwise it has no record; the first
        one is logged.
    :ivar num_without_record: the number of such groups.
    """

    def __init__(
        self, sample_type: type[Any], samples_per_group: int, process: Process | None = None, *, refuse: bool = True
    ) -> None:
        self._sample_type = sample_type
        self._samples_per_group = samples_per_group
        self._process = process
        self._refuse = refuse
        self.num_without_record = 0

    def entries(self, groups: Any, buffer: Iterable[Entry]) -> list[Entry]:
        """The entries of ``groups``.

        :raises BadGroupError: naming the first group that cannot be stored. Nothing has changed then.
        """
        if not isinstance(groups, list):
            raise BadGroupError(f"AD432 add_samples takes a list of groups, got {type(groups).__name__}")

        present = {id(entry.group) for entry in buffer}
        found = []
        for number, group in enumerate(groups):
            _refuse_no_list(group, f"group {number}")
            if len(group) != self._samples_per_group:
                raise BadGroupError(
                    f"AD432 group {number} has {len(group)} samples, and n_samples_per_prompt is "
                    f"{self._samples_per_group}"
                )

            if id(group) in present:
                raise BadGroupError(f"AD432 group {number} is in the buffer already; it would be served twice")

            present.add(id(group))
            found.append(self.entry(group, f"group {number}"))
        return found

    def entry(self, group: Any, name: str) -> Entry:
        """The group with its record.

        :param name: its name in errors.
        """
        _refuse_no_list(group, name)
        try:
            return self._recorded(group)
        except (TypeError, AttributeError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            if self._refuse:
                raise BadGroupError(
                    f"AD432 {name}: {reason}. Store it elsewhere, or convert it to numbers, text, lists, dicts, arrays "
                    "or tensors; or set asyncdata_unpersistable: serve_without_saving, and a restart loses such groups"
                ) from error

            return self._without_record(group, reason)

    def served(self, group: list[Any]) -> Entry:
        """The entry of a fresh group. One that no checkpoint can store has no record: it is trained all the same."""
        try:
            return self._recorded(group)
        except (TypeError, AttributeError, RecursionError) as error:
            return self._without_record(group, str(error))

    def _recorded(self, group: list[Any], folder: str = "", stored: Stored | None = None) -> Entry:
        record = GroupRecord([_record(item) for item in group], folder, stored)
        return Entry(group, record, group_index_of(group))

    def _without_record(self, group: list[Any], reason: str) -> Entry:
        number = group_index_of(group)
        if not self.num_without_record:
            _log.warning("buffer.not_saved", group_index=number, reason=reason)
        self.num_without_record += 1
        return Entry(group, None, number, reason)

    def restored(self, found: Opened) -> Entry:
        """The entry that had this record.

        :raises SnapshotError: if it is not a record.
        """
        made: dict[bytes, Any] = {}

        def process(media: Media) -> Any:
            """The inputs of a row's media, which the samples of the group share."""
            assert self._process is not None
            key = msgspec.msgpack.encode(media)
            if key not in made:
                made[key] = self._process(media)
            return containers_of(made[key])

        of_media = None if self._process is None else process
        try:
            group = [self._restored(item, of_media, found.blocks) for item in found.samples]
            return self._recorded(group, found.folder, found.stored)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error!r}") from error

    def _restored(self, record: dict[str, Any], process: Process | None, blocks: memoryview | None) -> Any:
        if SAMPLES in record:
            return [self._restored(item, process, blocks) for item in record[SAMPLES]]

        return from_record(record, self._sample_type, process, blocks)


def _refuse_no_list(group: Any, name: str) -> None:
    if not isinstance(group, list):
        raise BadGroupError(f"AD432 {name} must be a list of samples, got {type(group).__name__}")


def _record(item: Any) -> dict[str, Any]:
    if isinstance(item, list):  # one prompt that became several conversations
        return {SAMPLES: [_record(sample) for sample in item]}

    return to_record(item)


def group_index_of(group: Sequence[Any]) -> int | None:
    """The number of a group, which its samples have; None if they have none."""
    first = next(iter(group), None)
    while isinstance(first, list):
        first = next(iter(first), None)
    number = getattr(first, "group_index", None)
    return number if isinstance(number, int) else None


# Rewards


def scores_of(groups: Iterable[list[Any]], samples_per_group: int, reward_key: str | None) -> Iterator[Scored]:
    """The rewards of finished samples, with the keys of their rows; of a fan-out, the reward of its last sample.

    A sample has the key of its row in its metadata, so that it is known in whatever process, copy or checkpoint the
    sample is.
    """
    for item in (item for group in groups for item in group):
        sample = item[-1] if isinstance(item, list) and item else item
        key = (getattr(sample, "metadata", None) or {}).get(KEY)
        status = getattr(sample, "status", None)
        if key is None or sample.index is None or getattr(status, "value", status) not in _FINISHED:
            continue

        reward: Any = sample.reward.get(reward_key) if isinstance(sample.reward, dict) else sample.reward
        try:
            score = float(reward)
        except (TypeError, ValueError):
            continue

        yield key, sample.index % samples_per_group, score


# Filters


class Taken(NamedTuple):
    """The groups that a filter took out of the buffer.

    :ivar groups: to be served.
    :ivar num_dropped: groups that it removed and did not return.
    """

    groups: list[Any]
    num_dropped: int


def take(buffer: list[Any], num_groups: int, buffer_filter: BufferFilter, args: Any) -> Taken:
    """Take at most ``num_groups`` groups out of ``buffer``, chosen by ``buffer_filter``.

    The filter gets the list itself, as slime's filters expect. It may or may not remove the groups that it returns:
    none is served twice. Groups beyond ``num_groups`` are put back, at the head of the buffer if they had been removed.
    The filter may reorder the rest, and drop groups.

    :raises FilterError: if it raises, or returns anything but groups of the buffer, each once. The buffer is unchanged
        then.
    """
    if not buffer or num_groups < 1:
        return Taken([], 0)

    before = list(buffer)
    try:
        wanted = _call(buffer_filter, args, buffer, num_groups)
        originals = {_identity(group): group for group in before}
        chosen = _identified(wanted, originals, buffer_filter)
    except BaseException:
        buffer[:] = before
        raise

    groups, surplus = chosen[:num_groups], chosen[num_groups:]
    gone = set(map(id, groups))
    # A filter may have copied the lists; the samples in them identify the group.
    here = {id(group): group for group in (originals.get(_identity(group), group) for group in buffer)}
    left = [group for key, group in here.items() if key not in gone]
    buffer[:] = [group for group in surplus if id(group) not in here] + left
    now = set(map(id, buffer))
    return Taken(groups, sum(id(group) not in now and id(group) not in gone for group in before))


def _call(buffer_filter: BufferFilter, args: Any, buffer: list[Any], num_groups: int) -> list[Any]:
    try:
        wanted = buffer_filter(args, None, buffer, num_groups)
    except Exception as error:  # a user's function may raise anything
        raise FilterError(
            f"AD431 the buffer filter {_name(buffer_filter)} raised {error!r}; no group was taken"
        ) from error

    if not isinstance(wanted, list | tuple):
        raise FilterError(
            f"AD430 the buffer filter {_name(buffer_filter)} returned {type(wanted).__name__}; need a list of groups"
        )

    return list(wanted)


def _identified(wanted: list[Any], originals: dict[Any, Any], buffer_filter: BufferFilter) -> list[Any]:
    chosen: dict[Any, Any] = {}
    for group in wanted:
        key = _identity(group)
        if key not in originals:
            raise FilterError(
                f"AD430 the buffer filter {_name(buffer_filter)} returned something that is no group of the buffer "
                f"({type(group).__name__}); return the same lists that it was given"
            )

        if key in chosen:
            raise FilterError(f"AD430 the buffer filter {_name(buffer_filter)} returned a group twice; return it once")

        chosen[key] = originals[key]
    return list(chosen.values())


def _identity(group: Any) -> tuple[int, ...]:
    """The identity of a group's samples, whichever list they are in."""
    return tuple(map(id, group)) if isinstance(group, list | tuple) else (id(group),)


def _name(function: Any) -> str:
    return repr(getattr(function, "__qualname__", function))
