"""Whatever rollouts do, a snapshot for rollout r is what one gets by replaying the history up to the next rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncdata import SnapshotError
from asyncdata.integrations.slime.rollout_ledger import Entry, Numbering, RolloutLedger

pytestmark = pytest.mark.thorough


class Event(NamedTuple):
    """Something that happened under a rollout: groups left the stream, left the buffer, or came back with a text."""

    rollout_id: int
    kind: str
    groups: tuple[tuple[int, str], ...]


class State(NamedTuple):
    """What a replay knows: prompts delivered, the buffer, and what is out."""

    num_delivered: int = 0
    buffer: tuple[tuple[int, str], ...] = ()
    out: frozenset[int] = frozenset()


def replayed(events: list[Event]) -> State:
    state = State()
    for event in events:
        numbers = {number for number, _ in event.groups}
        if event.kind == "fresh":
            state = State(state.num_delivered + len(numbers), state.buffer, state.out | numbers)
        elif event.kind == "served":
            left = tuple(item for item in state.buffer if item[0] not in numbers)
            state = State(state.num_delivered, left, state.out | numbers)
        else:
            state = State(state.num_delivered, state.buffer + event.groups, state.out - numbers)
    return state


def wanted(events: list[Event], rollout_id: int) -> State:
    """The state when the first later rollout began; and, of what was out then, the first return of each."""
    split = next((i for i, event in enumerate(events) if event.rollout_id > rollout_id), len(events))
    state = replayed(events[:split])
    buffer, out = list(state.buffer), set(state.out)
    for event in events[split:]:
        for number, text in event.groups if event.kind == "back" else ():
            if number in out:
                out.discard(number)
                buffer.append((number, text))
    return State(state.num_delivered, tuple(buffer), frozenset(out))


class Rollouts(RuleBasedStateMachine):
    """A driver and its rollouts, in any order that threads may give them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = RolloutLedger()
        self.events: list[Event] = []
        self.current = 0
        self.saved = -1
        self.out: set[int] = set()
        self.num_texts = 0

    def begin(self) -> None:
        if self.ledger.begins(self.current):
            self.ledger = self.ledger.marked(self.current, self.ledger.numbering.sample_group_index, {})

    def note(self, kind: str, groups: list[tuple[int, str]]) -> None:
        self.events.append(Event(self.current, kind, tuple(groups)))

    @rule()
    def next_rollout(self) -> None:
        self.current += 1

    @rule(number=st.integers(1, 4))
    def deliver(self, number: int) -> None:
        self.begin()
        first = self.ledger.numbering.sample_group_index
        self.ledger = self.ledger.delivered(self.ledger.numbering.after(number, 2, 0, first + number))
        self.out.update(range(first, first + number))
        self.note("fresh", [(index, "") for index in range(first, first + number)])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        self.begin()
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.out)), min_size=1, max_size=4, unique=True))
        self.num_texts += 1
        groups = [(number, f"text {self.num_texts}") for number in numbers]
        entries = [Entry([object()], [text], number) for number, text in groups]
        self.ledger = self.ledger.with_buffer([*self.ledger.entries, *entries])
        self.out.difference_update(numbers)
        self.note("back", groups)

    @precondition(lambda self: self.ledger.entries)
    @rule(data=st.data())
    def serve(self, data: Any) -> None:
        self.begin()
        numbers = set(range(len(self.ledger.entries)))
        taken = data.draw(st.lists(st.sampled_from(sorted(numbers)), min_size=1, unique=True))
        served = [self.ledger.entries[i] for i in taken]
        self.ledger = self.ledger.with_buffer(self.ledger.entries[i] for i in sorted(numbers - set(taken)))
        self.out.update(entry.group_index for entry in served if entry.group_index is not None)
        self.note("served", [(entry.group_index or 0, "") for entry in served])

    @rule(ago=st.integers(0, 1))
    def save(self, ago: int) -> None:
        if self.current - ago >= self.saved:
            self.saved = self.current - ago
            self.ledger = self.ledger.saved(self.saved)

    @invariant()
    def every_snapshot_that_a_driver_may_ask_for_is_right(self) -> None:
        for rollout_id in range(max(0, self.current - 1), self.current + 2):
            if rollout_id < self.saved:
                continue

            moment = self.ledger.start_after(rollout_id)
            expected = wanted(self.events, rollout_id)
            entries = self.ledger.entries if moment is None else moment.entries
            numbering = self.ledger.numbering if moment is None else moment.numbering
            assert [(entry.group_index, entry.record[0]) for entry in entries] == list(expected.buffer)
            assert numbering == Numbering(
                sample_offset=expected.num_delivered,
                sample_group_index=expected.num_delivered,
                sample_index=2 * expected.num_delivered,
            )
            assert moment is None or moment.dataset == expected.num_delivered

    @invariant()
    def what_cannot_be_known_any_more_is_refused_and_never_guessed(self) -> None:
        for rollout_id in range(self.current - 1):
            try:
                moment = self.ledger.start_after(rollout_id)
            except SnapshotError:
                continue

            entries = self.ledger.entries if moment is None else moment.entries
            assert [(entry.group_index, entry.record[0]) for entry in entries] == list(
                wanted(self.events, rollout_id).buffer
            )


TestRollouts = Rollouts.TestCase
