"""A loader in plain Python: what it promises of delivery and states, and nothing of how it does that.

It reads nothing ahead, has no thread and no worker, and takes one row after the other. Which rows and packs there are
is in ``model_order.py``. A loader is a ``Model``, and all that it is at a moment a ``State``, which a snapshot copies.
It shares no code with the library.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.model_order import (
    BAD,
    GOLDEN,
    KEPT,
    MASK,
    Key,
    Mixing,
    Packer,
    Packing,
    Part,
    Piece,
    Row,
    Schedule,
    mixed,
)


def share_of(items: list[Any], rank: int, world_size: int, size: int, *, rounds_up: bool) -> list[Any]:
    """Of a batch of all ranks, each takes every ``world_size``-th item; a short one may be filled by repetition."""
    if rounds_up and items:
        return [items[number % len(items)] for number in range(rank, size, world_size)]

    return items[rank::world_size]


class Rules(NamedTuple):
    """What a loader is told."""

    size: int = 1  # samples of a group
    epochs: int | None = None
    drop_last: bool = False
    bad_row_stops: bool = False
    max_bad_rows: int | None = None
    is_tracked: bool = False  # commit="on_ack"
    drop_above: float | None = None  # the outcome memory's
    revisit_every: int | None = None
    packing: Packing | None = None
    max_lag: int | None = None  # max_policy_lag
    too_old: str = "reset"
    is_planned: bool = False  # an epoch's packs are known before its rows are read, and so is its last batch


class Group(NamedTuple):
    """``epoch`` is that of the loader, ``own_epoch`` that of the part. Made by hand, a group has no number."""

    number: int | None
    row: Row | None
    epoch: int
    own_epoch: int
    response: str = ""
    name: str = ""
    is_finished: bool = False
    version: int | None = None

    @property
    def ident(self) -> Any:
        return self.name if self.number is None else self.number

    @property
    def told(self) -> tuple[Any, ...]:
        """What a trainer sees of it: number or name, part, tokens, number of pictures, response, version."""
        part, tokens, pictures = (
            ("", (7, 7), 0) if self.row is None else (self.row.part, self.row.tokens, self.row.num_pictures)
        )
        return self.ident, part, tokens, pictures, self.response, self.version

    @property
    def has_response(self) -> bool:
        return bool(self.response or self.is_finished)


class Lease(NamedTuple):
    """A call whose groups are out: those that came from the buffer, and those of the stream."""

    from_buffer: tuple[Group, ...]
    fresh: tuple[Group, ...]


class Told(NamedTuple):
    """What a call comes to. Of an error with groups, such as EndOfData, these are delivered."""

    groups: list[Any]
    error: str = ""


class Stop(Exception):  # noqa: N818
    """A call fails, and nothing has happened."""


@dataclass
class State:
    """All that a loader is, at one moment.

    :ivar at: of each part, its epoch and the place there.
    :ivar again: groups of the stream that were out when the state was taken: they come again, with their numbers.
    :ivar memory: of each row, the last epoch in which it has scores, and these by attempt.
    :ivar left_out: of each part and epoch that has begun, the rows that the outcome memory leaves out.
    :ivar version: the policy's; ``too_old``: groups that were too old, by what was done.
    :ivar is_exact: whether no row is passed a second time, so that counters are known.
    :ivar digest: of the samples of a single source: their number, the sum that tells which positions were
        delivered, and the sum that tells in which order.
    """

    schedule: Schedule
    at: dict[str, tuple[int, int]]
    epoch: int = 0
    number: int = 0
    num_tokens: int = 0
    given: Counter[str] = field(default_factory=Counter)  # samples of each part in its epoch
    samples: Counter[str] = field(default_factory=Counter)
    in_epoch: Counter[int] = field(default_factory=Counter)  # groups of each epoch
    again: list[Group] = field(default_factory=list)
    buffer: list[Group] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    excluded: set[Key] = field(default_factory=set)
    memory: dict[Any, tuple[int, dict[int, float]]] = field(default_factory=dict)
    left_out: dict[tuple[str, int], frozenset[Any]] = field(default_factory=dict)
    num_bad: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    group_drops: Counter[str] = field(default_factory=Counter)
    tracks: bool = False
    version: int | None = None
    too_old: Counter[str] = field(default_factory=Counter)
    is_exact: bool = True
    digest: tuple[int, int, int] = (0, 0, 0)
    packer: Packer | None = None
    ready: list[list[Piece]] = field(default_factory=list)
    pack_epoch: int = 0
    num_packs: int = 0
    epoch_packs: int = 0
    is_alone: bool = False

    def copy(self) -> State:
        values = {name: copy.copy(value) for name, value in vars(self).items() if name != "schedule"}
        return State(copy.deepcopy(self.schedule), **values)


class Model:
    """A loader over ``parts``. Each method is a call of the public API."""

    def __init__(self, parts: dict[str, Part], mixing: Mixing, seed: int, rules: Rules, choose: Any = None) -> None:
        self.parts, self.mixing, self.rules = parts, mixing, rules
        self.choose = choose or (lambda buffer, number: buffer[:number])
        self.now = State(Schedule(mixing, seed), dict.fromkeys(parts, (0, 0)))
        self.is_tracked = rules.is_tracked
        if rules.packing is not None:
            self.now.packer = Packer(rules.packing)

    # The next group of the stream.

    def _turn(self, name: str) -> Row | None:
        """The next sample of a part; None, once, at the end of its epoch. Other rows are passed, and counted."""
        now, rules = self.now, self.rules
        epoch, place = now.at[name]
        rows = self.parts[name].epoch(epoch)
        left_out = self._left_out(name, epoch)
        for row in rows[place:]:
            place += 1
            now.at[name] = epoch, place
            if (row.key in now.excluded and rules.packing is None) or row.key in left_out:
                now.drops["excluded"] += 1
            elif row.fate == KEPT:
                return row
            elif row.fate == BAD:
                now.num_bad += 1
                if rules.bad_row_stops or (rules.max_bad_rows is not None and now.num_bad > rules.max_bad_rows):
                    raise Stop("BadRowError" if rules.bad_row_stops else "TooManyBadRowsError")

                now.drops[f"bad row {row.code}"] += 1
            else:
                now.drops[row.fate] += 1
        now.at[name] = epoch + 1, 0
        return None

    def _left_out(self, name: str, epoch: int) -> frozenset[Any]:
        """What an epoch leaves out is decided when its first sample is taken; later reports count for the next one."""
        now, rules = self.now, self.rules
        if rules.drop_above is not None and (name, epoch) not in now.left_out:
            known = {key: told for key, told in now.memory.items() if key[0] == name}
            is_due = {
                key: rules.revisit_every is None or epoch - of < rules.revisit_every for key, (of, _) in known.items()
            }
            solved = {
                key for key, (_, s) in known.items() if sum(s.values()) / len(s) >= rules.drop_above and is_due[key]
            }
            now.left_out[name, epoch] = frozenset(solved)
        return now.left_out.get((name, epoch), frozenset())

    def _next(self, end: int | None) -> Group | None:
        """The next group; None before epoch ``end``."""
        now = self.now
        if now.again:
            return now.again.pop(0) if end is None or now.again[0].epoch < end else None

        while end is None or now.epoch < end:
            name = now.schedule.pick()
            row = None if name is None else self._turn(name)
            if name is not None and row is not None:
                now.schedule.took(name, len(row.tokens))
                group = Group(now.number, row, now.epoch, now.at[name][0])
                now.number, now.num_tokens = now.number + 1, now.num_tokens + len(row.tokens)
                now.in_epoch[now.epoch] += 1
                now.given[name] += 1
                now.samples[name] += 1
                self._digest(name, *now.at[name])
                return group

            is_empty = name is not None and not now.given[name]
            now.given[name or ""] = 0
            if name is None or now.schedule.epoch_ended(name, is_empty=is_empty):
                if not now.in_epoch[now.epoch]:
                    raise Stop("NoSamplesError")

                now.epoch += 1
                now.schedule.begin_epoch()
        return None

    def _digest(self, name: str, epoch: int, place: int) -> None:
        window, row = 0, place - 1
        for size in map(len, self.parts[name].windows(epoch)):
            if row < size:
                break
            window, row = window + 1, row - size
        number, positions, order = self.now.digest
        positions += mixed(mixed(mixed(epoch + 1) + window & MASK) + row * GOLDEN & MASK)
        self.now.digest = number + 1, positions & MASK, order + positions & MASK

    # Calls that take.

    def take(
        self, number: int, last_epoch: int | None = None, enough: int | None = None, *, works: bool = False
    ) -> Told:
        """So many groups: the buffer's, those that come again, then the stream's. It happens wholly, or not at all.

        :param enough: so many were ready, and fewer were wanted; ``works``: only groups that need work.
        """
        before, self.now = self.now, self.now.copy()
        try:
            return self._take(number, last_epoch, number if enough is None else enough, works=works)
        except Stop as stop:
            self.now = before
            return Told([], str(stop))

    def _take(self, number: int, last_epoch: int | None, enough: int, *, works: bool) -> Told:
        rules, now = self.rules, self.now
        offered = [group for group in now.buffer if not (works and group.is_finished)]
        chosen = list(dict.fromkeys(self.choose(offered, number)))[:number]
        end = min((end for end in (rules.epochs, None if last_epoch is None else last_epoch + 1) if end), default=None)
        found: list[Group] = []
        while len(chosen) + len(found) < enough and (group := self._next(end)) is not None:
            found.append(group)
        is_short = len(chosen) + len(found) < enough
        if is_short and rules.drop_last:
            now.drops["drop_last"] += len(found)
            chosen, found = [], []
        now.buffer = [group for group in now.buffer if group not in chosen]
        if self.is_tracked and (chosen or found):
            now.leases.append(Lease(tuple(chosen), tuple(found)))
        is_end = is_short and rules.epochs is not None and (last_epoch is None or last_epoch >= rules.epochs)
        return Told([self._stamped(group) for group in (*chosen, *found)], "EndOfData" if is_end else "")

    def _stamped(self, group: Group) -> Group:
        """A response that begins now is of the present version."""
        has_none = self.now.version is None or group.has_response
        return group if has_none else group._replace(version=self.now.version)

    def work(self, number: int, max_out: int, max_finished: int | None) -> Told:
        """So many groups that need work, one by one. It is ``held`` where one has to wait; or at its ``end``."""
        self.track()
        found: list[Group] = []
        while len(found) < number:
            is_full = max_finished is not None and sum(group.is_finished for group in self.now.buffer) >= max_finished
            if is_full or len(self.out) >= max_out:
                return Told(found, "held")

            told = self.take(1, works=True)
            if told.error:
                return Told(found, told.error if told.error != "EndOfData" else "held" if self.out else "end")
            found += told.groups
        return Told(found)

    def take_finished(self, number: int) -> list[Group]:
        now = self.now
        found = [group for group in now.buffer if group.is_finished][:number]
        now.buffer = [group for group in now.buffer if group not in found]
        if self.is_tracked and found:
            now.leases.append(Lease(tuple(found), ()))
        return found

    def peek(self, number: int) -> list[Group]:
        """What comes next of the stream. With an outcome memory there may be fewer: nothing is delivered or decided."""
        before, self.now = self.now, self.now.copy()
        found: list[Group] = []
        try:
            while len(found) < number and (group := self._next(self.rules.epochs)) is not None:
                found.append(group)
        except Stop:
            pass
        self.now = before
        return found

    def loop(self, number: int, size: int, epoch: int, *, is_at_start: bool, runs_on: bool) -> Told:
        """So many batches of ``size`` groups of all ranks. A loop that finds nothing covers the next epoch."""
        found: list[list[Group]] = []
        while len(found) < number:
            is_at_start &= self.now.in_epoch[epoch] == sum(
                group.epoch == epoch for group in self.now.again
            )  # none is over
            before = self.now.copy()
            told = self.take(size, epoch)
            if told.groups:
                found.append(told.groups)
            if told.error not in ("", "EndOfData"):
                return Told(found, told.error)

            if told.error or (not told.groups and (found or not (runs_on or is_at_start))):
                break

            if not told.groups and is_at_start:
                self.now = before
                return Told(found, "NoSamplesError")

            if not told.groups:
                epoch, is_at_start = epoch + 1, True
        return Told(found)

    @property
    def epoch(self) -> int:
        """That of the next sample or pack."""
        now = self.now
        return now.again[0].epoch if now.again else now.epoch if self.rules.packing is None else now.pack_epoch

    # Calls that take packs.

    def loop_packs(self, number: int, size: int, *, runs_on: bool) -> Told:
        """So many batches of ``size`` packs of all ranks: each the first pack's number in its epoch, and the packs."""
        found: list[tuple[int, list[list[Piece]]]] = []
        epoch = self.now.pack_epoch
        while len(found) < number and (self.rules.epochs is None or epoch < self.rules.epochs):
            before, self.now = self.now, self.now.copy()
            try:
                packs = self._packs(size)
            except Stop as stop:
                self.now = before
                return Told(found, str(stop))

            if packs:
                found.append((before.epoch_packs, packs))
            if self.now.pack_epoch > epoch and (found or not runs_on):
                break
            epoch = self.now.pack_epoch
        return Told(found)

    def _packs(self, size: int) -> list[list[Piece]]:
        """The packs of the next batch. At an epoch's end there are fewer, or none."""
        now, rules = self.now, self.rules
        assert now.packer is not None and rules.packing is not None
        while (len(now.ready) < size or rules.is_planned) and now.epoch == now.pack_epoch:
            group = self._next(now.pack_epoch + 1)
            if group is not None and group.row is not None:
                now.ready += now.packer.push(group.row)
        num_before = now.num_packs if rules.packing.across_epochs else now.epoch_packs
        if len(now.ready) < size or rules.is_planned:
            is_last = rules.epochs is not None and now.pack_epoch >= rules.epochs - 1
            has_rest = bool(copy.copy(now.packer).flush())
            is_all = not now.epoch_packs and (not rules.drop_last or not now.num_packs) and has_rest
            now.is_alone = now.is_alone or is_last or not rules.packing.across_epochs or is_all
            if now.is_alone:
                if not (now.ready or has_rest or num_before):
                    raise Stop("ConfigError" if now.packer.open else "NoSamplesError")

                now.ready += now.packer.flush()
        is_short, is_end = len(now.ready) < size, len(now.ready) < size + rules.is_planned
        packs = now.ready[:size] if now.is_alone or not is_end else []
        if is_short and packs and rules.drop_last:
            if not num_before:
                raise Stop("NoSamplesError")

            now.ready, packs = now.ready[size:], []
        now.ready = now.ready[len(packs) :]
        now.num_packs, now.epoch_packs = now.num_packs + len(packs), now.epoch_packs + len(packs)
        if is_end:
            now.pack_epoch, now.epoch_packs, now.is_alone = now.pack_epoch + 1, 0, False
        return packs

    def delivered(self, pack: list[Piece]) -> list[list[int]]:
        """The documents of a pack: what is excluded is a gap. An empty pack keeps two tokens, which are not trained."""
        left = [piece for piece in pack if piece[0].key not in self.now.excluded]
        return [list(row.tokens[start:stop]) for row, start, stop in left] or [[0, 0]]

    # Groups after their delivery.

    @property
    def out(self) -> list[Group]:
        return [group for lease in self.now.leases for group in (*lease.from_buffer, *lease.fresh)]

    def track(self) -> None:
        self.is_tracked = self.now.tracks = True

    def begin_version(self, version: int) -> None:
        """What is too old in the buffer is a prompt again, or dropped."""
        self.now.version = version
        self._judge()

    def _judge(self) -> None:
        now, kept = self.now, list[Group]()
        oldest = None if self.rules.max_lag is None or now.version is None else now.version - self.rules.max_lag
        for group in now.buffer:
            if oldest is None or not group.has_response or group.version is None or group.version >= oldest:
                kept.append(group)
                continue

            now.too_old[self.rules.too_old] += 1
            if self.rules.too_old == "reset":
                kept.append(group._replace(response="", is_finished=False, version=None))
            else:
                now.group_drops["too_old"] += 1
        now.buffer = kept

    def end(self, groups: list[Group], reason: str = "") -> int:
        """Groups are over: trained, given back, or dropped for a reason; how many of them were out."""
        now, over = self.now, {group.ident for group in groups}
        number = len({group.ident for group in self.out} & over)
        left = [Lease(*(tuple(one for one in some if one.ident not in over) for some in lease)) for lease in now.leases]
        now.leases = [lease for lease in left if any(lease)]
        if reason:
            now.group_drops[reason] += number
        return number

    def give_back(self, groups: list[Group]) -> None:
        """A group of a row that is excluded is dropped."""
        self.end(groups)
        kept = [group for group in groups if group.row is None or group.row.key not in self.now.excluded]
        self.now.group_drops["excluded"] += len(groups) - len(kept)
        self.now.buffer += kept
        self._judge()

    def exclude(self, keys: set[Key]) -> int:
        """These rows come no more, from wherever. The others keep their order, and groups their numbers."""
        now = self.now
        now.excluded |= keys
        before, now.buffer = now.buffer, []
        self.give_back(before)
        now.in_epoch -= Counter(group.epoch for group in now.again if self._is_excluded(group))
        now.again = [group for group in now.again if not self._is_excluded(group)]
        return len(now.excluded)

    def report(self, scores: list[tuple[Group, int, float]]) -> int:
        """Scores of attempts. Each counts once in an epoch, and none of an earlier epoch than the row's last."""
        number = 0
        for group, attempt, score in scores:
            assert group.row is not None
            epoch, known = self.now.memory.get(group.row.key, (-1, {}))
            if group.own_epoch > epoch or (group.own_epoch == epoch and attempt not in known):
                known = known if group.own_epoch == epoch else {}
                self.now.memory[group.row.key] = group.own_epoch, known | {attempt: score}
                number += 1
        return number

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch of a single source. Numbers go on; the buffer's groups that are out stay so."""
        now = self.now
        now.at, now.epoch, now.in_epoch, now.again = {"": (epoch, 0)}, epoch, Counter(), []
        returned = tuple(
            g for lease in now.leases for g in lease.from_buffer if g.row is None or g.row.key not in now.excluded
        )
        now.leases = [Lease(returned, ())] if returned else []
        now.left_out = {key: rows for key, rows in now.left_out.items() if key[1] < epoch}
        if self.rules.packing is not None:
            now.packer, now.ready, now.pack_epoch = Packer(self.rules.packing), [], epoch
            now.epoch_packs, now.is_alone = 0, False

    def begin_with_other(self, epoch: int, *, is_data: bool) -> None:
        """After a restart with another seed or other data, of which the rows that were known are not known any more."""
        now, left_out = self.now, self.now.left_out
        now.buffer, now.is_exact = [group for group in now.buffer if not self._is_excluded(group)], False
        self.set_epoch(epoch)
        now.left_out = {} if is_data else left_out
        now.excluded, now.memory = (set(), {}) if is_data else (now.excluded, now.memory)

    # States.

    def saved(self) -> State:
        """What a snapshot has. After a restart, what was out comes again: the buffer's first, the stream's in order."""
        state, kept = self.now.copy(), [group for group in self.out if not self._is_excluded(group)]
        from_buffer = [group for lease in state.leases for group in lease.from_buffer]
        state.buffer = [group for group in kept if group in from_buffer] + state.buffer
        state.again = sorted([*state.again, *(group for group in kept if group not in from_buffer)])
        gone = [group for lease in state.leases for group in lease.fresh if group not in kept]
        state.in_epoch -= Counter(group.epoch for group in gone)
        state.is_exact, state.leases = state.is_exact and not state.leases, []
        return state

    def _is_excluded(self, group: Group) -> bool:
        return group.row is not None and group.row.key in self.now.excluded

    def passed(self) -> list[tuple[Any, State]]:
        """Where a single source may be: rows that are no samples may be passed before the next one is taken.

        Each place is (epoch, row), with the drops and bad rows that are counted by then.
        """
        before, found = self.now, list[tuple[Any, State]]()
        while True:
            now = self.now = self.now.copy()
            epoch, place = now.at[""]
            rows = self.parts[""].epoch(epoch)
            at = (now.epoch + 1, 0) if place == len(rows) or epoch > now.epoch else (epoch, place)
            found.append(((at, dict(+now.drops), now.num_bad), now.copy()))
            row = rows[place] if place < len(rows) and epoch == now.epoch else None
            if row is None or not self._is_passed(row, epoch):
                break
            now.at[""] = epoch, place + 1
            now.drops["excluded" if row.fate in (KEPT, BAD) or row.key in now.excluded else row.fate] += 1
        self.now = before
        return found

    def _is_passed(self, row: Row, epoch: int) -> bool:
        left_out = self.now.left_out.get((row.part, epoch), frozenset())
        return row.key in self.now.excluded or row.key in left_out or row.fate not in (KEPT, BAD)

    def restore(self, state: State) -> None:
        """Other weights hold from here on, and no part goes back or forward. What tracks goes on to track."""
        tracks, version, self.now = self.now.tracks, self.now.version, state.copy()
        self.now.tracks |= tracks
        self.is_tracked |= self.now.tracks
        self.now.version = version if state.version is None else state.version
        self._judge()
        if self.now.schedule.mixing != self.mixing:
            self.now.schedule.mixing = self.mixing
            self.now.schedule.begin_anew()
