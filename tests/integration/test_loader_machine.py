"""Whatever is asked of a loader in whatever order, it delivers what a model of two pages delivers."""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdata import BadRows, DataLoader, JsonlSource, Limits, Position, Sample, Shuffle
from asyncdata.core.plain_values import unpacked
from asyncdata.errors import AsyncDataError, EndOfData
from asyncdata.order.order import Order
from tests.property.model import BAD, KEPT, Model, Place, Rules, Told, rows_of, windows_of
from tests.support.digests import Seen, digest_of
from tests.support.examples import in_ci
from tests.support.figures import record
from tests.support.loading import NEVER_S

MAX_ROW_BYTES = 100
BAD_CODES = {"fails": "AD421", "garbled": "AD101", "long": "AD108"}
GOOD = st.sampled_from(["kept", "kept", "kept", "kept", "short", "rude", "blank"])
MIXED = st.sampled_from([*["kept"] * 9, "short", "fails", "garbled", "long", "blank"])

# What a loader is made of

fates = st.one_of(
    *(st.lists(kind, min_size=n, max_size=m) for kind, n, m in ((GOOD, 10, 30), (MIXED, 1, 8), (MIXED, 10, 30)))
)
orders = st.builds(
    Shuffle,
    enabled=st.booleans(),
    block_bytes=st.sampled_from([16, 64, 150]),
    window_blocks=st.sampled_from([1, 4, 64, 64]),
)
rules = st.builds(
    Rules,
    n_samples_per_prompt=st.sampled_from([1, 1, 2]),
    epochs=st.sampled_from([None, None, None, 1, 3]),
    drop_last=st.booleans(),
    bad_row_stops=st.sampled_from([False, False, False, False, True]),
    max_bad_rows=st.sampled_from([None, None, None, 0, 5]),
    commit=st.sampled_from(["on_delivery", "on_ack"]),
)
limits = st.sampled_from([40, 1 << 30, 1 << 30]).map(lambda most: Limits(max_ready_bytes=most))
elastic_knobs = st.fixed_dictionaries(
    {
        "buffer_size": st.sampled_from([1, 5, 20, 200]),
        "batch_groups": st.integers(1, 7),
        "dp_size": st.integers(1, 3),
        "limits": limits,
    }
)


def oldest(buffer, num_groups):
    return buffer[:num_groups]


def newest(buffer, num_groups):
    """Returns one group too many and each twice, does not remove what it returns, and spoils the list."""
    wanted = buffer[::-1][: num_groups + 1]
    buffer.clear()
    return wanted + wanted


def oldest_but_one(buffer, num_groups):
    """Leaves groups in the buffer, which must stay there, and removes what it returns."""
    wanted = buffer[1 : 1 + num_groups]
    del buffer[1 : 1 + num_groups]
    return wanted


# What can happen to it


def event(name, **arguments):
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


numbers = st.integers(0, 50)
sizes = st.integers(1, 9)
trained = {
    "num_groups": st.integers(1, 5),
    "num_acked": st.integers(0, 5),
    "num_given_back": st.sampled_from([0, 0, 1, 2]),
    "save": st.booleans(),
}
events = st.one_of(
    event("train", **trained),
    event("get", num_groups=sizes),
    event("loop", num_batches=sizes),
    event("give_back", number=numbers, count=st.integers(1, 3), response=st.sampled_from(["", "so far"])),
    event("add_what_is_made_by_hand"),
    event("acknowledge", number=numbers, count=sizes),
    event("acknowledge_all"),
    event("save"),
    event("load_state", number=numbers),
    event("crash_and_resume", number=numbers, knobs=elastic_knobs),
)


def by_fate(row):
    """A tokenize function that does with a row what the row says."""
    if row["fate"] == "fails":
        raise ValueError("as it was told to")
    return tokens_of(row["id"]) if row["fate"] == "kept" else row["fate"]


def tokens_of(number):
    return [number] * (1 + number % 3)


def raw_row(number, fate):
    if fate == "blank":
        return b" " * (number % 3)

    text = json.dumps({"id": number, "fate": fate, "pad": "x" * (80 if fate == "long" else number % 7 * 4)}).encode()
    return text[:-1] if fate == "garbled" else text


def place_of(row):
    """What the model is told of a row."""
    if len(row.data) > MAX_ROW_BYTES:
        return Place(BAD, code="AD108")

    if not row.data.endswith(b"}"):
        return Place(BAD, code="AD101")

    value = json.loads(row.data)
    code = BAD_CODES.get(value["fate"], "")
    tokens = tuple(tokens_of(value["id"])) if value["fate"] == "kept" else ()
    return Place(BAD if code else value["fate"], tokens, code)


def value_of(group):
    """A group as the model knows it; all its samples have the same tokens and the same response."""
    first = group[0]
    (tokens,) = {tuple(sample.tokens.tolist()) for sample in group}
    (response,) = {sample.response for sample in group}
    name = first.extra["name"] if first.group_index is None else first.group_index
    return name, tokens, response, tuple(sample.index for sample in group)


class LoaderMachine(RuleBasedStateMachine):
    """A loader in this process, beside the model.

    :ivar held: groups that the trainer has, and has not given back.
    :ivar saved: snapshots: the loader's, and the model's.
    :ivar num_steps: of all examples.
    """

    num_steps = 0

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loader = None
        self.held, self.saved, self.num_made = [], [], 0

    def teardown(self):
        if self.loader is not None:
            self.loader.close()
        shutil.rmtree(self.folder)

    @initialize(
        files=st.lists(fates, min_size=1, max_size=2),
        order=orders,
        seed=st.integers(-2, 2),
        rules=rules,
        knobs=elastic_knobs,
        digest=st.sampled_from(["positions", "tokens"]),
        buffer_filter=st.sampled_from([None, newest, oldest_but_one]),
    )
    def begin(self, files, order, seed, rules, knobs, **settings):
        assume(any(fate != "blank" for file in files for fate in file))
        self.paths, self.rows = [], []
        number = 0
        for file_id, file in enumerate(files):
            data = b"\n".join(raw_row(number + i, fate) for i, fate in enumerate(file))
            self.paths.append(self.folder / f"{file_id}.jsonl")
            self.paths[-1].write_bytes(data)
            self.rows += rows_of(data, file_id, MAX_ROW_BYTES)
            number += len(file)
        self.shuffle, self.rules = order, rules
        self.settings = {"seed": seed, **settings}
        self.model = Model(self.epoch_of_d, rules, settings["buffer_filter"] or oldest)
        self.open(knobs)

    def open(self, knobs):
        self.batch_groups = knobs["batch_groups"]
        knobs = {name: value for name, value in knobs.items() if name != "batch_groups"}
        knobs["batch_size"] = self.batch_groups * self.rules.n_samples_per_prompt
        knobs["bad_rows"] = BadRows(policy="raise" if self.rules.bad_row_stops else "skip", max=self.rules.max_bad_rows)
        kept = {name: value for name, value in self.rules._asdict().items() if "bad_row" not in name}
        source = JsonlSource([str(path) for path in self.paths], max_row_bytes=MAX_ROW_BYTES)
        settings = {"shuffle": self.shuffle, "num_workers": 0, "timeout_s": NEVER_S, **kept, **self.settings, **knobs}
        self.loader = DataLoader(source, tokenize_fn=by_fate, **settings)

    def epoch_of_d(self, epoch):
        num_blocks = [-(-path.stat().st_size // self.shuffle.block_bytes) for path in self.paths]

        def block_of(row):
            return sum(num_blocks[: row.file_id]) + row.offset // self.shuffle.block_bytes

        order = Order(self.shuffle, self.settings["seed"], sum(num_blocks))
        return [[place_of(row) for row in window] for window in windows_of(self.rows, order, block_of, epoch)]

    @rule(event=events)
    def step(self, event):
        """One rule for all events: with a rule each, hypothesis would leave out half of them in every example."""
        LoaderMachine.num_steps += 1
        name, arguments = event
        getattr(self, name)(**arguments)

    # The trainer asks.

    def train(self, num_groups, num_acked, num_given_back, save):
        """A batch, of which some is done, some is given back, and some is neither."""
        self.get(num_groups)
        if num_given_back:
            self.give_back(0, num_given_back, "so far")
        if num_acked:
            self.acknowledge(max(0, len(self.held) - num_acked), num_acked)
        if save:
            self.save()

    def get(self, num_groups):
        expected = self.model.serve(num_groups, self.model.choose(num_groups), None)
        error = ""
        try:
            groups = self.loader.get_samples(num_groups)
        except EndOfData as end:
            groups, error = end.groups, "EndOfData"
        except AsyncDataError as stop:
            groups, error = [], type(stop).__name__
        self.receive(groups)
        assert Told([value_of(group) for group in groups], error) == expected

    def receive(self, groups):
        self.held += groups
        assert len({id(sample) for group in groups for sample in group}) == sum(map(len, groups))

    def loop(self, num_batches):
        """A loop over an epoch that is left after some batches."""
        expected, wanted_error = self.looped(num_batches)
        found, error = [], ""
        try:
            for samples in islice(self.loader, num_batches):
                size = self.rules.n_samples_per_prompt
                groups = [samples[first : first + size] for first in range(0, len(samples), size)]
                self.receive(groups)
                found.append([value_of(group) for group in groups])
        except AsyncDataError as stop:
            error = type(stop).__name__
        assert (found, error) == (expected, wanted_error)

    def looped(self, num_batches):
        """The model's batches. One that is resumed after the last batch of an epoch continues with the next one."""
        found = []
        position = self.loader.position()
        epoch, from_start = position.epoch, (position.window, position.row) == (0, 0)
        while len(found) < num_batches:
            before = self.model.state._replace(drops=self.model.state.drops.copy())
            told = self.model.serve(self.batch_groups, self.model.choose(self.batch_groups), epoch)
            if told.groups:
                found.append(told.groups)
            if told.error not in ("", "EndOfData"):
                return found, told.error
            if told.error or (not told.groups and found):
                break
            if not told.groups and from_start:
                self.model.state = before  # what is left of the epoch is not passed by
                return found, "NoSamplesError"
            if not told.groups:
                epoch, from_start = epoch + 1, True
        return found, ""

    # The trainer gives back and acknowledges.

    def give_back(self, number, count, response):
        groups = [self.held.pop(number % len(self.held)) for _ in self.held[:count]]
        for group in groups:
            for sample in group:
                sample.response = response
        self.add(groups)

    def add_what_is_made_by_hand(self):
        self.num_made += 1
        name, size = f"made {self.num_made}", self.rules.n_samples_per_prompt
        self.add([[Sample(tokens=np.array([7, 7], np.int32), extra={"name": name}) for _ in range(size)]])

    def add(self, groups):
        self.loader.add_samples(groups)
        self.model.add([value_of(group) for group in groups])

    def acknowledge(self, number, count):
        start = number % max(1, len(self.held))
        groups = self.held[start : start + count]
        self.loader.ack(groups)
        self.model.ack([value_of(group)[0] for group in groups])

    def acknowledge_all(self):
        self.loader.ack()
        self.model.leases.clear()

    # Snapshots

    def save(self):
        self.saved.append((json.dumps(self.loader.state_dict()), self.model.snapshot()))

    def load_state(self, number):
        """Go back in a running loader."""
        if self.saved:
            state, model_state = self.saved[number % len(self.saved)]
            self.held.clear()
            self.model.restore(model_state)
            self.loader.load_state_dict(json.loads(state))

    def crash_and_resume(self, number, knobs):
        """All is gone but the snapshots; the new run has other knobs."""
        if self.saved:
            self.loader.close()
            self.open(knobs)
            self.load_state(number)

    # What holds at all times

    @invariant()
    def the_statistics_agree_with_the_model(self):
        found = self.loader.statistics()
        at = self.model.ordinal(Position(found.epoch, found.window, found.row))
        assert self.model.state.at <= at <= self.model.next_turn()
        state = self.model.passed(at)
        assert found.groups_total == state.num_groups
        assert found.samples_total == state.num_groups * self.rules.n_samples_per_prompt
        assert found.tokens_total == state.num_tokens
        assert found.bad_rows_total == state.num_bad
        assert found.dropped_total == {reason: number for reason, number in state.drops.items() if number}
        assert found.buffered_groups == len(self.model.buffer)
        assert found.leased_requests == len(self.model.leases)

    @invariant()
    def the_state_agrees_with_the_model(self):
        saved = self.loader.state_dict()
        (state, buffer, done), position = self.model.snapshot(), Position(*saved["position"])
        at = self.model.ordinal(position)
        assert at >= state.at
        assert saved["counters"].get("num_bad_rows", 0) == state.num_bad
        records = map(unpacked, saved["leases"] + saved["buffer"])
        groups = [[Sample.from_dict(values) for values in group] for group in records]
        assert [value_of(group) for group in groups] == buffer
        acked = {self.model.ordinal(Position(*place)) for place in saved["acked"]}
        assert acked == {place for place in done if place >= at}
        digest = digest_of(self.seen_before(position), self.settings["digest"])
        assert saved["counters"]["digest"] == msgspec.to_builtins(digest)

    def seen_before(self, position):
        """The samples of D before a position: whatever happened on the way, those and no others were seen."""
        for epoch in range(position.epoch + 1):
            for window, places in enumerate(self.model.epoch(epoch)):
                for row, place in enumerate(places):
                    here = (epoch, window, row)
                    if place.fate == KEPT and here < msgspec.structs.astuple(position):
                        yield Seen(here, place.tokens)


@pytest.fixture(scope="module", autouse=True)
def steps_are_counted(request):
    """Figure R14, of a long run."""
    num_failed = request.session.testsfailed
    yield
    num_failed = request.session.testsfailed - num_failed
    if settings.get_current_profile_name() == "long":
        record("R14", "the loader", steps=LoaderMachine.num_steps, counterexamples=num_failed)


# With the profile "long" that is up to a million steps.
TestLoader = LoaderMachine.TestCase
TestLoader.settings = settings(
    max_examples=in_ci(15).max_examples, stateful_step_count=50, report_multiple_bugs=False, deadline=None
)
