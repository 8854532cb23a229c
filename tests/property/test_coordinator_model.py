"""Whatever happens in whatever order, a loader delivers what a model of two pages delivers."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdata import AsyncDataError, EndOfData, Position
from asyncdata.delivery.ledger import lease_key
from asyncdata.delivery.requests import Request
from tests.property.model import BAD, KEPT, POISON, Model, Place, Told, rows_of, windows_of
from tests.support.digests import Seen, digest_of
from tests.support.examples import in_ci
from tests.support.figures import record
from tests.support.still_loader import StillLoader, WorkerKilled, made_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import ClassVar

    from asyncdata import Group, Sample
    from asyncdata.delivery.ledger import Lease
    from tests.property.model import RawRow

pytestmark = pytest.mark.thorough

MAX_ROW_BYTES = 100
BAD_CODES = {"fails": "AD421", "garbled": "AD101", "long": "AD108", "kills": "AD423"}
GOOD = st.sampled_from(["kept", "kept", "kept", "kept", "short", "rude", "blank"])
MIXED = st.sampled_from([*["kept"] * 9, "short", "fails", "garbled", "long", "kills", "kills", "blank"])

# What a loader is made of

fates = st.one_of(
    st.lists(GOOD, min_size=10, max_size=30),
    st.lists(MIXED, min_size=1, max_size=8),
    st.lists(MIXED, min_size=10, max_size=30),
)
orders = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "seed": st.integers(-2, 2),
        "block_bytes": st.sampled_from([16, 64, 150]),
        "window_blocks": st.sampled_from([1, 4, 64, 64]),
        "slack_bytes": st.sampled_from([4, 40]),
    }
)
rules = st.fixed_dictionaries(
    {
        "samples_per_group": st.sampled_from([1, 1, 2]),
        "epochs": st.sampled_from([None, None, None, 1, 3]),
        "drop_last": st.booleans(),
        "bad_row_stops": st.sampled_from([False, False, False, False, True]),
        "max_bad_rows": st.sampled_from([None, None, None, 0, 5]),
        "commit_on_ack": st.booleans(),
        "digest": st.sampled_from(["positions", "tokens"]),
    }
)
elastic_knobs = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from([1, 5, 20, 200]),
        "max_ready_bytes": st.sampled_from([1, 40, 1 << 30, 1 << 30]),
        "num_workers": st.integers(1, 3),
        "row_s": st.sampled_from([0.0, 0.001, 0.01, 0.1]),
        "names_the_row": st.booleans(),
    }
)


def oldest(buffer: list[Any], num_groups: int) -> list[Any]:
    return buffer[:num_groups]


def newest(buffer: list[Any], num_groups: int) -> list[Any]:
    """Returns one group too many and each twice, does not remove what it returns, and spoils the list."""
    wanted = buffer[::-1][: num_groups + 1]
    buffer.clear()
    return wanted + wanted


def oldest_but_one(buffer: list[Any], num_groups: int) -> list[Any]:
    """Leaves groups in the buffer, which must stay there, and removes what it returns."""
    wanted = buffer[1 : 1 + num_groups]
    del buffer[1 : 1 + num_groups]
    return wanted


# What can happen to it


def event(name: str, **arguments: Any) -> Any:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


numbers = st.integers(0, 50)
sizes = st.integers(1, 9)
events = st.one_of(
    event(
        "train",
        num_groups=st.integers(1, 5),
        num_acked=st.integers(0, 5),
        num_given_back=st.sampled_from([0, 0, 1, 2]),
        save=st.booleans(),
    ),
    event("get", num_groups=sizes, whole_epochs=st.booleans()),
    event("ask", num_groups=sizes, whole_epochs=st.booleans()),
    event("give_up", number=numbers),
    event("is_interrupted", num_groups=sizes),
    event("give_back", number=numbers, count=st.integers(1, 3), response=st.sampled_from(["", "so far"])),
    event("add_what_is_made_by_hand"),
    event("acknowledge", number=numbers, count=sizes),
    event("acknowledge_all"),
    event("work", number=numbers, count=st.integers(1, 6)),
    event("lose_a_worker", number=numbers),
    event("tune", num_workers=st.integers(1, 4), capacity=st.sampled_from([1, 4, 40, 400])),
    event("snapshot"),
    event("load_state", number=numbers),
    event("crash_and_resume", number=numbers, knobs=elastic_knobs),
)


def by_fate(row: dict[str, Any]) -> Any:
    """A tokenize function that does with a row what the row says."""
    if row["fate"] == "fails":
        raise ValueError("as it was told to")
    if row["fate"] == "kills":
        raise WorkerKilled
    return tokens_of(row["id"]) if row["fate"] == "kept" else row["fate"]


def tokens_of(number: int) -> list[int]:
    return [number] * (1 + number % 3)


def raw_row(number: int, fate: str) -> bytes:
    if fate == "blank":
        return b" " * (number % 3)

    text = json.dumps({"id": number, "fate": fate, "pad": "x" * (80 if fate == "long" else number % 7 * 4)}).encode()
    return text[:-1] if fate == "garbled" else text


def place_of(row: RawRow) -> Place:
    """What the model is told of a row."""
    key = (row.file_id, row.offset)
    if len(row.data) > MAX_ROW_BYTES:
        return Place(key, BAD, code="AD108")

    if not row.data.endswith(b"}"):
        return Place(key, BAD, code="AD101")

    value = json.loads(row.data)
    if value["fate"] == "kept":
        return Place(key, KEPT, tuple(tokens_of(value["id"])))

    code = BAD_CODES.get(value["fate"], "")
    return Place(key, POISON if value["fate"] == "kills" else BAD if code else value["fate"], code=code)


def value_of(group: Group) -> Any:
    """A group as the model knows it; all its samples have the same tokens and the same response."""
    first = group[0]
    (tokens,) = {tuple(sample.tokens.tolist()) for sample in group}
    (response,) = {sample.response for sample in group}
    name = first.extra["name"] if first.group_index is None else first.group_index
    return name, tokens, response, tuple(sample.index for sample in group)


def names_of(lease: Lease) -> set[Any]:
    """The groups that are not acknowledged, by the names that the model knows them by."""
    return {key if isinstance(owed, Position) else value_of(owed.group)[0] for key, owed in lease.open}


class Waiting:
    """A request that waits, and what the model chose for it from the buffer."""

    def __init__(self, num_groups: int, last_epoch: int | None) -> None:
        self.request = Request(num_groups, last_epoch)
        self.request.wake = self._wake
        self.is_woken = True
        self.chosen: list[Any] | None = None

    def _wake(self) -> None:
        self.is_woken = True


class LoaderMachine(RuleBasedStateMachine):
    """The real source, order, producer, channel and coordinator, beside the model.

    :ivar held: groups that the trainer has, and has not given back.
    :ivar saved: snapshots: the loader's, and the model's.
    :ivar num_steps: of all examples.
    """

    num_steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loader: StillLoader | None = None
        self.waiting: list[Waiting] = []
        self.held: list[Group] = []
        self.saved: list[tuple[str, Any]] = []
        self.num_made = 0
        self.epochs_of_d: dict[int, list[list[Place]]] = {}

    def teardown(self) -> None:
        if self.loader is not None:
            self.loader.close()
        shutil.rmtree(self.folder)

    @initialize(
        files=st.lists(fates, min_size=1, max_size=2),
        order=orders,
        rules=rules,
        knobs=elastic_knobs,
        buffer_filter=st.sampled_from([None, newest, oldest_but_one]),
    )
    def begin(self, files: list[list[str]], order: Any, rules: Any, knobs: Any, buffer_filter: Any) -> None:
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
        self.max_demand = knobs["capacity"]
        return StillLoader(self.paths, by_fate, max_row_bytes=MAX_ROW_BYTES, **self.config, **knobs)

    def epoch_of_d(self, epoch: int) -> list[list[Place]]:
        if epoch not in self.epochs_of_d:
            self.epochs_of_d[epoch] = self.new_epoch_of_d(epoch)
        return self.epochs_of_d[epoch]

    def new_epoch_of_d(self, epoch: int) -> list[list[Place]]:
        block_bytes = self.config["block_bytes"]
        num_blocks = [-(-path.stat().st_size // block_bytes) for path in self.paths]

        def block_of(row: RawRow) -> int:
            return sum(num_blocks[: row.file_id]) + row.offset // block_bytes

        windows = windows_of(self.rows, self.loader.order, block_of, epoch)
        return [[place_of(row) for row in window] for window in windows]

    @rule(event=events)
    def step(self, event: tuple[str, dict[str, Any]]) -> None:
        """One rule for all events: with a rule each, hypothesis would leave out half of them in every example."""
        LoaderMachine.num_steps += 1
        name, arguments = event
        getattr(self, name)(**arguments)

    # The trainer asks.

    def train(self, num_groups: int, num_acked: int, num_given_back: int, save: bool) -> None:
        """A batch, of which some is done, some is given back, and some is neither."""
        self.get(num_groups, whole_epochs=False)
        if num_given_back:
            self.give_back(0, num_given_back, "so far")
        if num_acked:
            self.acknowledge(max(0, len(self.held) - num_acked), num_acked)
        if save:
            self.snapshot()

    def get(self, num_groups: int, whole_epochs: bool) -> None:
        """Ask, and wait until it is served; who asked before is served before."""
        self.ask(num_groups, whole_epochs)
        while self.waiting:
            self.loader.work_on()
            self.poll_who_is_woken()

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
            request, waiting.is_woken = waiting.request, False
            if waiting is self.waiting[0] and waiting.chosen is None:
                waiting.chosen = self.model.choose(request.num_groups)
            told = self.poll(request)
            if told is not None:
                assert waiting is self.waiting.pop(0), "served out of turn"
                self.check(told, self.model.serve(request.num_groups, waiting.chosen, request.last_epoch))

    def poll(self, request: Request) -> Told | None:
        try:
            samples = self.loader.coordinator.poll(request)
        except EndOfData as end:
            told = self.told(end.samples, "EndOfData")
        except AsyncDataError as error:
            told = Told([], type(error).__name__)
        else:
            return None if samples is None else self.told(samples)

        self.loader.coordinator.withdraw(request)
        return told

    def told(self, samples: list[Sample], error: str = "") -> Told:
        size = self.config["samples_per_group"]
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        self.held += groups
        return Told([value_of(group) for group in groups], error)

    def check(self, told: Told, expected: Told) -> None:
        assert told == expected
        self.agrees_with_the_model()

    def give_up(self, number: int) -> None:
        """One who waits goes away: a timeout, or a cancellation."""
        if self.waiting:
            self.loader.coordinator.withdraw(self.waiting.pop(number % len(self.waiting)).request)
            self.poll_who_is_woken()

    def is_interrupted(self, num_groups: int) -> None:
        """Served, and never told so: an interrupt between the commit and the caller."""
        if self.waiting:
            return

        self.max_demand = max(self.max_demand, num_groups)
        samples = self.loader.coordinator.take_ready(num_groups)
        if samples is not None:
            self.loader.coordinator.failed.append((None, samples))
            self.loader.coordinator.settle()
            return

        request = Request(num_groups)
        try:
            while self.loader.coordinator.poll(request) is None and self.loader.num_tasks:
                self.loader.work_off()
        except EndOfData as end:  # the groups are in the error: delivered
            self.check(
                self.told(end.samples, "EndOfData"),
                self.model.serve(num_groups, self.model.choose(num_groups), None),
            )
        except AsyncDataError:
            pass
        self.loader.coordinator.failed.append((request, None))
        self.loader.coordinator.settle()

    # The trainer gives back and acknowledges.

    def give_back(self, number: int, count: int, response: str) -> None:
        groups = [self.held.pop(number % len(self.held)) for _ in range(min(count, len(self.held)))]
        for group in groups:
            for sample in group:
                sample.response = response
        self.loader.coordinator.add_groups(groups)
        self.model.add([value_of(group) for group in groups])

    def add_what_is_made_by_hand(self) -> None:
        self.num_made += 1
        group = made_by_hand(7, 7, size=self.config["samples_per_group"], extra={"name": f"made {self.num_made}"})
        self.loader.coordinator.add_groups([group])
        self.model.add([value_of(group)])

    def acknowledge(self, number: int, count: int) -> None:
        start = number % max(1, len(self.held))
        groups = self.held[start : start + count]
        self.loader.coordinator.acknowledge([lease_key(list(group)) for group in groups])
        self.model.ack([value_of(group)[0] for group in groups])

    def acknowledge_all(self) -> None:
        self.loader.coordinator.acknowledge(None)
        self.model.leases.clear()

    # The service works, and workers die.

    def work(self, number: int, count: int) -> None:
        for _ in range(min(count, self.loader.num_tasks)):
            if self.loader.num_tasks:
                self.loader.work(number % self.loader.num_tasks)
        self.poll_who_is_woken()

    def lose_a_worker(self, number: int) -> None:
        """A second worker dies over some rows. A lone row would be blamed; other requests are sent again."""
        executor = self.loader.executor
        if not executor.asked or self.loader.producer.canaries.is_blocking:
            return

        number %= len(executor.asked)
        if executor.asked[number].num_rows > 1 and executor.asked[number].max_losses <= 2:
            executor.lose(number)
            self.poll_who_is_woken()

    def tune(self, num_workers: int, capacity: int) -> None:
        """Other workers, and another read-ahead; what is ready or under way beyond it stays."""
        self.max_demand = max(self.max_demand, capacity)
        self.loader.tune(num_workers, capacity)
        self.poll_who_is_woken()

    # Snapshots.

    def snapshot(self) -> None:
        self.saved.append((json.dumps(self.loader.snapshot()), self.model.snapshot()))

    def load_state(self, number: int) -> None:
        """Go back in a running loader; waiting calls keep waiting."""
        self.restore(number)
        self.poll_who_is_woken()

    def crash_and_resume(self, number: int, knobs: dict[str, Any]) -> None:
        """All is gone but the snapshots; the new run has other knobs."""
        if self.saved:
            self.loader.close()
            self.waiting.clear()
            self.loader = self.make_loader(knobs)
            self.restore(number)

    def restore(self, number: int) -> None:
        if self.saved:
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
        assert counters.num_groups == state.num_groups
        assert counters.num_samples == state.num_groups * self.config["samples_per_group"]
        assert counters.num_bad_rows == state.num_bad
        assert counters.num_tokens == state.num_tokens
        assert counters.drops == {reason: number for reason, number in state.drops.items() if number}
        assert counters.epoch_groups == self.model.num_kept(ledger.position.epoch, at)
        assert counters.digest == digest_of(self.seen_before(ledger.position), self.config["digest"])
        assert ledger.journal == self.model.journal
        assert [value_of(item.group) for item in ledger.buffer] == self.model.buffer
        assert [names_of(lease) for lease in ledger.leases] == [set(lease.open) for lease in self.model.leases]

    def seen_before(self, position: Position) -> Iterator[Seen]:
        """The samples of D before a position: whatever happened on the way, those and no others were seen."""
        for epoch in range(position.epoch + 1):
            for window, places in enumerate(self.epoch_of_d(epoch)):
                for row, place in enumerate(places):
                    here = (epoch, window, row)
                    if place.fate == KEPT and here < msgspec.structs.astuple(position):
                        yield Seen(here, place.tokens)

    @invariant()
    def the_channel_is_bounded(self) -> None:
        if self.loader is None:
            return

        channel = self.loader.coordinator.channel
        num_ready = channel.num_produced - self.loader.coordinator.ledger.taken
        assert num_ready >= 0
        assert num_ready + channel.num_rows_in_flight <= self.max_demand
        assert channel.num_ready_bytes >= 0
        position, _, acked = self.loader.coordinator.ledger.restart_point()
        assert all(place >= position for place in acked)


@pytest.fixture(scope="module", autouse=True)
def steps_are_counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Figure R14."""
    num_failed = request.session.testsfailed
    yield
    num_failed = request.session.testsfailed - num_failed
    record("R14", "the coordinator", steps=LoaderMachine.num_steps, counterexamples=num_failed)


# With the profile "long" that is more than a million steps.
TestLoader = LoaderMachine.TestCase
TestLoader.settings = settings(
    max_examples=in_ci(40).max_examples * 3 // 2, stateful_step_count=40, report_multiple_bugs=False
)
