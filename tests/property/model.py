"""What a loader promises, in the simplest words: D written out, a pointer into it, a buffer, and leases."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata import Position
    from asyncdata.order.order import Order

KEPT, BAD = "kept", "bad"


class RawRow(NamedTuple):
    file_id: int
    offset: int
    data: bytes


def rows_of(data: bytes, file_id: int = 0, max_row_bytes: int = 1 << 30) -> list[RawRow]:
    """The rows of a whole file, as Python splits it."""
    start, rows = 3 * data.startswith(b"\xef\xbb\xbf"), []
    for line in data[start:].split(b"\n"):
        if len(line) > max_row_bytes or line.strip(b" \t\r\v\f"):
            rows.append(RawRow(file_id, start, line))
        start += len(line) + 1
    return rows


def windows_of(rows: list[RawRow], order: Order, block_of: Callable[[RawRow], int], epoch: int) -> list[list[RawRow]]:
    """The rows of each window, in the order of D."""
    windows = []
    for window in range(order.num_windows):
        held = [row for block in order.blocks(epoch, window) for row in rows if block_of(row) == block]
        windows.append([held[number] for number in order.rows(epoch, window, len(held))])
    return windows


class Place(NamedTuple):
    """A row's turn in D, and what comes of it: ``fate`` is KEPT, BAD, or why it is dropped."""

    fate: str
    tokens: tuple[int, ...] = ()
    code: str = ""


class Rules(NamedTuple):
    """What may not change at a restart."""

    n_samples_per_prompt: int = 1
    epochs: int | None = None
    drop_last: bool = False
    bad_row_stops: bool = False
    max_bad_rows: int | None = None
    commit: str = "on_delivery"


class Told(NamedTuple):
    """What a request comes to: groups, or an error, with the groups it carries."""

    groups: list[Any]
    error: str = ""


class Lease(NamedTuple):
    before: State
    open: dict[Any, Any]  # a group's name -> its place in D, or the group itself, which is from the buffer
    acked: set[int]


class State(NamedTuple):
    at: int = 0
    num_groups: int = 0
    num_bad: int = 0
    num_tokens: int = 0
    drops_to: int = 0
    drops: Counter[str] = Counter()


class Model:
    """A loader. ``at`` counts the rows of D that had their turn; a group is (name, tokens, response, indices)."""

    def __init__(self, epochs_of_d: Callable[[int], list[list[Place]]], rules: Rules, choose: Any) -> None:
        self.epoch = cache(epochs_of_d)
        self._rules = rules
        self._choose = choose
        self.epoch_rows = sum(map(len, self.epoch(0)))
        self.can_yield = any(place.fate == KEPT for window in self.epoch(0) for place in window)
        self.state = State(drops=Counter())
        self.buffer: list[Any] = []
        self.leases: list[Lease] = []
        self.done: set[int] = set()  # acknowledged before a restart

    # D

    def place(self, at: int) -> Place:
        epoch, row = divmod(at, self.epoch_rows)
        return next(islice(chain.from_iterable(self.epoch(epoch)), row, None))

    def ordinal(self, position: Position) -> int:
        """How many rows of D come before a position."""
        windows = self.epoch(position.epoch)[: position.window]
        return position.epoch * self.epoch_rows + sum(map(len, windows)) + position.row

    def next_turn(self) -> int:
        """The next row of D that is delivered or stops a delivery; the others before it may pass at any time."""
        at = self.state.at
        end = None if self.can_yield else at - at % self.epoch_rows + self.epoch_rows
        while at != end and (self.place(at).fate not in {KEPT, BAD} or at in self.done):
            at += 1
        return at

    def passed(self, at: int) -> State:
        """The state once the rows before row ``at`` of D have passed, none of which is delivered."""
        state = self.state
        for number in range(state.drops_to, at):
            place = self.place(number)
            if place.fate != KEPT:
                state.drops[f"bad row {place.code}" if place.fate == BAD else place.fate] += 1
        self.state = state._replace(drops_to=max(at, state.drops_to))
        acked = [self.place(number) for number in range(state.at, at) if number in self.done]
        return self.state._replace(
            num_groups=state.num_groups + len(acked),
            num_tokens=state.num_tokens + sum(len(place.tokens) for place in acked),
        )

    # A request

    def choose(self, num_groups: int) -> list[Any]:
        return list(dict.fromkeys(self._choose(list(self.buffer), num_groups)))[:num_groups]

    def serve(self, num_groups: int, chosen: list[Any], last_epoch: int | None) -> Told:
        rules, before, epochs = self._rules, self.state, self._rules.epochs
        limit = min((end for end in (epochs, None if last_epoch is None else last_epoch + 1) if end), default=None)
        found: list[tuple[Any, int]] = []
        at, num_groups_now, num_bad, num_tokens = before[:4]
        while len(chosen) + len(found) < num_groups and (limit is None or at < limit * self.epoch_rows):
            place = self.place(at)
            if place.fate == KEPT:
                if at not in self.done:
                    found.append((self._group(num_groups_now, place), at))
                num_groups_now, num_tokens = num_groups_now + 1, num_tokens + len(place.tokens)
            elif place.fate == BAD:
                num_bad += 1
                if rules.bad_row_stops:
                    return Told([], "BadRowError")
                if rules.max_bad_rows is not None and num_bad > rules.max_bad_rows:
                    return Told([], "TooManyBadRowsError")
            at += 1
            if at % self.epoch_rows == 0 and not self.can_yield:
                return Told([], "NoSamplesError")
        is_short = len(chosen) + len(found) < num_groups
        if is_short and rules.drop_last:
            before.drops["drop_last"] += len(found)
            chosen, found = [], []
        if rules.commit == "on_ack" and (chosen or found):
            lease = {group[0]: group for group in chosen} | {group[0]: place for group, place in found}
            self.leases.append(Lease(before._replace(drops=before.drops.copy()), lease, set()))
        self.state = State(at, num_groups_now, num_bad, num_tokens, before.drops_to, before.drops)
        self.buffer = [group for group in self.buffer if group not in chosen]
        is_end = is_short and epochs is not None and (last_epoch is None or last_epoch >= epochs)
        return Told([*chosen, *(group for group, _ in found)], "EndOfData" if is_end else "")

    def _group(self, number: int, place: Place) -> Any:
        first = number * self._rules.n_samples_per_prompt
        return (number, place.tokens, "", tuple(range(first, first + self._rules.n_samples_per_prompt)))

    # Given back, acknowledged

    def add(self, groups: list[Any]) -> None:
        self.ack([group[0] for group in groups])
        self.buffer += groups

    def ack(self, names: list[Any]) -> None:
        for lease in self.leases:
            for name in names:
                place = lease.open.pop(name, None)
                if isinstance(place, int):
                    lease.acked.add(place)
        while self.leases and not self.leases[0].open:
            del self.leases[0]

    # Snapshots

    def snapshot(self) -> Any:
        state = self.leases[0].before if self.leases else self.state
        leased = [group for lease in self.leases for group in lease.open.values() if not isinstance(group, int)]
        done = self.done.union(*(lease.acked for lease in self.leases))
        return state._replace(drops=state.drops.copy()), leased + self.buffer, done

    def restore(self, saved: Any) -> None:
        state, self.buffer, self.done = saved[0], list(saved[1]), set(saved[2])
        self.state = state._replace(drops=state.drops.copy())
        self.leases = []
