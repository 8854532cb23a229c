"""Whatever happens in whatever order, the coordinator delivers what a model of a page delivers."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdata.errors import AsyncDataError, EndOfData
from asyncdata.ledger import lease_key
from asyncdata.request import Request
from asyncdata.wire import Scan
from tests.support.model import BAD, KEPT, POISON, Model, Place, Told, rows_of, windows_of
from tests.support.still_loader import StillLoader, WorkerKilled, made_by_hand

if TYPE_CHECKING:
    from asyncdata.types import Group
    from tests.support.model import RawRow

MAX_ROW_BYTES = 100
FATES = ("kept", "kept", "kept", "kept", "short", "rude", "fails", "garbled", "long", "kills", "blank")
BAD_CODES = {"fails": "AD421", "garbled": "AD101", "long": "AD108", "kills": "AD423"}

fates = st.lists(st.sampled_from(FATES), min_size=1, max_size=16)
numbers = st.integers(0, 50)
knobs = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from([1, 3, 8, 64]),
        "num_workers": st.integers(1, 3),
        "row_s": st.sampled_from([0.0, 0.005, 0.02, 0.1]),
        "max_ready_bytes": st.sampled_from([1, 40, 1 << 30]),
    }
)
order_knobs = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(-2, 2),
        "block_bytes": st.sampled_from([16, 64, 150]),
        "window_blocks": st.sampled_from([1, 3, 64]),
        "slack_bytes": st.sampled_from([4, 40]),
    }
)
rules = st.fixed_dictionaries(
    {
        "samples_per_group": st.sampled_from([1, 1, 2]),
        "epochs": st.sampled_from([None, None, 1, 3]),
        "drop_last": st.booleans(),
        "bad_row_stops": st.sampled_from([False, False, True]),
        "max_bad_rows": st.sampled_from([None, 0, 5]),
        "commit_on_ack": st.booleans(),
    }
)


def by_fate(row: dict[str, Any]) -> Any:
    """A tokenize function that does with a row what the row says."""
    if row["fate"] == "fails":
        raise ValueError("as it was told to")
    if row["fate"] == "kills":
        raise WorkerKilled
    return [row["id"]] * (1 + row["id"] % 3) if row["fate"] == "kept" else row["fate"]


def raw_row(number: int, fate: str) -> bytes:
    if fate == "blank":
        return b" " * (number % 3)

    text = json.dumps({"id": number, "fate": fate, "pad": "x" * (80 if fate == "long" else number % 7 * 4)}).encode()
    return text[:-1] if fate == "garbled" else text


def oldest(buffer: list[Any], num_groups: int) -> list[Any]:
    return buffer[:num_groups]


def newest(buffer: list[Any], num_groups: int) -> list[Any]:
    """Returns one group too many, does not remove what it returns, and spoils the list."""
    wanted = buffer[::-1][: num_groups + 1]
    buffer.clear()
    return wanted


def oldest_of_a_copy(buffer: list[Any], num_groups: int) -> list[Any]:
    return newest_last(list(buffer), num_groups)


def newest_last(buffer: list[Any], num_groups: int) -> list[Any]:
    return buffer[-num_groups:]


def told_of(groups: list[Group], error: str = "") -> Told:
    return Told([value_of(group) for group in groups], error)


def value_of(group: Group) -> Any:
    """A group as the model knows it; all its samples have the same tokens and the same response."""
    first = group[0]
    (tokens,) = {tuple(sample.tokens.tolist()) for sample in group}
    (response,) = {sample.response for sample in group}
    name = first.extra["name"] if first.group_index is None else first.group_index
    return (name, tokens, response, tuple(sample.index for sample in group))


class Waiting:
    """A request of ours that waits, and what the model says it was given from the buffer."""

    def __init__(self, num_groups: int, last_epoch: int | None) -> None:
        self.request = Request(num_groups, last_epoch)
        self.request.wake = self._wake
        self.is_woken = True
        self.chosen: list[Any] | None = None

    def _wake(self) -> None:
        self.is_woken = True


class LoaderMachine(RuleBasedStateMachine):
    """The real source, order, producer, channel and coordinator, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loader: StillLoader | None = None
        self.waiting: list[Waiting] = []
        self.held: list[Group] = []  # delivered to the trainer, not given back
        self.saved: list[tuple[Any, Any]] = []
        self.num_made = 0

    def teardown(self) -> None:
        if self.loader is not None:
            self.loader.close()
        shutil.rmtree(self.folder)

    @initialize(
        files=st.lists(fates, min_size=1, max_size=2),
        order=order_knobs,
        rules=rules,
        knobs=knobs,
        buffer_filter=st.sampled_from([None, newest, oldest_of_a_copy]),
    )
    def begin(
        self, files: list[list[str]], order: dict[str, Any], rules: dict[str, Any], knobs: Any, buffer_filter: Any
    ) -> None:
        assume(any(fate != "blank" for file in files for fate in file))
        self.paths, self.rows, number = [], [], 0
        for file_id, file in enumerate(files):
            self.paths.append(self.folder / f"{file_id}.jsonl")
            data = b"\n".join(raw_row(number + i, fate) for i, fate in enumerate(file))
            self.paths[-1].write_bytes(data)
            self.rows += rows_of(data, file_id, MAX_ROW_BYTES)
            number += len(file)
        self.config = {**order, **rules, "buffer_filter": buffer_filter}
        self.loader = self.make_loader(knobs)
        self.model = Model(self.epoch_of_d, self.loader.coordinator.rules, buffer_filter or oldest)
        self.loader.start()

    def make_loader(self, knobs: dict[str, Any]) -> StillLoader:
        self.max_demand, self.num_scans_lost = knobs["capacity"], 0
        return StillLoader(self.paths, by_fate, max_row_bytes=MAX_ROW_BYTES, **self.config, **knobs)

    def epoch_of_d(self, epoch: int) -> list[list[Place]]:
        block_bytes = self.config["block_bytes"]
        num_blocks = [-(-path.stat().st_size // block_bytes) for path in self.paths]

        def block_of(row: RawRow) -> int:
            return sum(num_blocks[: row.file_id]) + row.offset // block_bytes

        windows = windows_of(self.rows, self.loader.order, block_of, epoch)
        return [[self.place_of(row) for row in window] for window in windows]

    @staticmethod
    def place_of(row: RawRow) -> Place:
        key = (row.file_id, row.offset)
        if len(row.data) > MAX_ROW_BYTES:
            return Place(key, BAD, code="AD108")
        if not row.data.endswith(b"}"):
            return Place(key, BAD, code="AD101")

        value = json.loads(row.data)
        fate = value["fate"]
        if fate == "kept":
            return Place(key, KEPT, (value["id"],) * (1 + value["id"] % 3))
        return Place(key, POISON if fate == "kills" else BAD if fate in BAD_CODES else fate, code=BAD_CODES.get(fate, ""))

    # The trainer asks.

    @rule(num_groups=st.integers(1, 9), whole_epochs=st.booleans())
    def get(self, num_groups: int, whole_epochs: bool) -> None:
        """Ask, and wait until it is served; who asked before is served before."""
        self.ask(num_groups, whole_epochs)
        while self.waiting:
            self.loader.work_on()
            self.poll_who_is_woken()

    @rule(num_groups=st.integers(1, 9), whole_epochs=st.booleans())
    def ask(self, num_groups: int, whole_epochs: bool) -> None:
        """Ask, and do not wait."""
        self.max_demand = max(self.max_demand, num_groups)
        last_epoch = self.loader.coordinator.ledger.position.epoch if whole_epochs else None
        samples = self.loader.coordinator.take_ready(num_groups, last_epoch)
        if samples is not None:
            self.check(self.told(samples), self.model.serve(num_groups, [], last_epoch))
            return

        self.waiting.append(Waiting(num_groups, last_epoch))
        self.poll_who_is_woken()

    def poll_who_is_woken(self) -> None:
        while any(waiting.is_woken for waiting in self.waiting):
            waiting = next(waiting for waiting in self.waiting if waiting.is_woken)
            waiting.is_woken = False
            if waiting is self.waiting[0] and waiting.chosen is None:
                waiting.chosen = self.model.choose(waiting.request.num_groups)
            told = self.poll(waiting.request)
            if told is not None:
                assert waiting is self.waiting.pop(0), "served out of turn"
                self.check(
                    told, self.model.serve(waiting.request.num_groups, waiting.chosen, waiting.request.last_epoch)
                )

    def poll(self, request: Request) -> Told | None:
        try:
            samples = self.loader.coordinator.poll(request)
        except EndOfData as end:
            self.held += end.groups
            told = told_of(end.groups, "EndOfData")
        except AsyncDataError as error:
            told = Told([], type(error).__name__)
        else:
            return None if samples is None else self.told(samples)

        self.loader.coordinator.withdraw(request)
        return told

    def told(self, samples: list[Any]) -> Told:
        size = self.config["samples_per_group"]
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        self.held += groups
        return told_of(groups)

    def check(self, told: Told, expected: Told) -> None:
        assert told == expected
        self.agrees_with_the_model()

    @precondition(lambda self: self.waiting)
    @rule(number=numbers)
    def give_up(self, number: int) -> None:
        """One who waits goes away: a timeout, or a cancellation."""
        waiting = self.waiting.pop(number % len(self.waiting))
        self.loader.coordinator.withdraw(waiting.request)
        self.poll_who_is_woken()

    @precondition(lambda self: not self.waiting)
    @rule(num_groups=st.integers(1, 9))
    def is_interrupted(self, num_groups: int) -> None:
        """Served, and never told so: an interrupt between the commit and the caller."""
        self.max_demand = max(self.max_demand, num_groups)
        request = Request(num_groups)
        try:
            while self.loader.coordinator.poll(request) is None and self.loader.num_tasks:
                self.loader.work_off()
        except EndOfData as end:
            self.held += end.groups
            self.check(
                told_of(end.groups, "EndOfData"), self.model.serve(num_groups, self.model.choose(num_groups), None)
            )
        except AsyncDataError:
            pass
        self.loader.coordinator.withdraw(request)

    # The trainer gives back and acknowledges.

    @precondition(lambda self: self.held)
    @rule(number=numbers, count=st.integers(1, 3), response=st.sampled_from(["", "so far", "more"]))
    def give_back(self, number: int, count: int, response: str) -> None:
        groups = [self.held.pop(number % len(self.held)) for _ in range(min(count, len(self.held)))]
        for group in groups:
            for sample in group:
                sample.response = response
        self.loader.coordinator.add_groups(groups)
        self.model.add([value_of(group) for group in groups])

    @rule()
    def add_what_is_made_by_hand(self) -> None:
        self.num_made += 1
        name = f"made {self.num_made}"
        group = made_by_hand(7, 7, size=self.config["samples_per_group"], extra={"name": name})
        self.loader.coordinator.add_groups([group])
        self.model.add([value_of(group)])

    @precondition(lambda self: self.held)
    @rule(number=numbers, count=st.integers(1, 9))
    def acknowledge(self, number: int, count: int) -> None:
        start = number % len(self.held)
        groups = self.held[start : start + count]
        self.loader.coordinator.acknowledge([lease_key(list(group)) for group in groups])
        self.model.ack([value_of(group)[0] for group in groups])

    @rule()
    def acknowledge_all(self) -> None:
        self.loader.coordinator.acknowledge(None)
        self.model.leases.clear()

    # The service works, and workers die.

    @precondition(lambda self: self.loader.num_tasks)
    @rule(number=numbers, count=st.integers(1, 6))
    def work(self, number: int, count: int) -> None:
        for _ in range(count):
            if self.loader.num_tasks:
                self.loader.work(number % self.loader.num_tasks)
        self.poll_who_is_woken()

    @precondition(lambda self: self.loader.executor.asked)
    @rule(number=numbers)
    def lose_a_worker(self, number: int) -> None:
        """A second worker dies over a request. A lone row would be blamed, and a scan cannot die for ever."""
        executor = self.loader.executor
        number %= len(executor.asked)
        asked = executor.asked[number]
        is_scan = isinstance(asked.request, Scan)
        if self.loader.producer.canaries.is_blocking or (self.num_scans_lost >= 4 if is_scan else asked.num_rows < 2):
            return

        self.num_scans_lost += is_scan
        executor.lose(number)
        self.poll_who_is_woken()

    # Snapshots.

    @rule()
    def snapshot(self) -> None:
        self.saved.append((json.dumps(self.loader.snapshot()), self.model.snapshot()))

    @precondition(lambda self: self.saved)
    @rule(number=numbers)
    def load_state(self, number: int) -> None:
        """Go back in a running loader; who waits goes on waiting."""
        self.restore(number)
        self.poll_who_is_woken()

    @precondition(lambda self: self.saved)
    @rule(number=numbers, knobs=knobs)
    def crash_and_resume(self, number: int, knobs: dict[str, Any]) -> None:
        """All is gone but the snapshots; the new run has other knobs."""
        self.loader.close()
        self.waiting.clear()
        self.loader = self.make_loader(knobs)
        self.restore(number)

    def restore(self, number: int) -> None:
        state, model_state = self.saved[number % len(self.saved)]
        self.held.clear()
        self.model.restore(model_state)
        for waiting in self.waiting:
            waiting.chosen = None
        self.loader.restore(json.loads(state))

    # What holds at all times.

    @invariant()
    def agrees_with_the_model(self) -> None:
        if self.loader is None:
            return

        ledger = self.loader.coordinator.ledger
        at = self.model.ordinal(ledger.position)
        assert self.model.state.at <= at <= self.model.next_turn()
        state, counters = self.model.passed(at), ledger.counters
        size = self.config["samples_per_group"]
        assert counters.num_groups == state.num_groups
        assert counters.num_samples == state.num_groups * size
        assert counters.num_bad_rows == state.num_bad
        assert counters.num_tokens == state.num_tokens
        assert counters.drops == {reason: number for reason, number in state.drops.items() if number}
        assert counters.epoch_groups == self.model.num_kept(ledger.position.epoch, at)
        assert ledger.journal == self.model.journal
        assert [value_of(item.group) for item in ledger.buffer] == self.model.buffer
        assert [list(lease.open) for lease in ledger.leases if not ledger.leases[0].open] == []

    @invariant()
    def the_channel_is_bounded(self) -> None:
        if self.loader is None:
            return

        channel = self.loader.coordinator.channel
        num_ready = channel.num_produced - self.loader.coordinator.ledger.taken
        assert 0 <= num_ready
        assert num_ready + channel.num_rows_in_flight <= self.max_demand
        assert channel.num_ready_bytes >= 0


TestLoader = LoaderMachine.TestCase
TestLoader.settings = settings(stateful_step_count=40, report_multiple_bugs=False)
