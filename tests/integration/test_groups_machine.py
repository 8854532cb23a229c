"""Whatever becomes of groups while rows are excluded: what a model of plain lists says comes next."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from asyncdata import BadRows, Mix, Outcomes, PassRate, Shuffle
from asyncdata.errors import ConfigError
from tests.support.examples import in_ci
from tests.support.loaders import make
from tests.support.loading import ids, write_rows

NUM_ROWS, NUM_GROUPS, NUM_EXCLUDED = 16, 400, 8
MAX_EPOCHS = NUM_GROUPS // NUM_ROWS // 2
SMALL = Shuffle(block_bytes=256, window_blocks=2)
KINDS = ["one source", "one source", "a mixture", "with outcomes"]


class Stream:
    """What a loader delivers that leaves nothing out: the parts in their order, and the rows of each."""

    def __init__(self, loader):
        found = loader.get_samples(NUM_GROUPS)
        self.parts = [group[0].source_name for group in found]
        self.rows = {part: [] for part in self.parts}
        for group in found:
            self.rows[group[0].source_name].append((group[0].source_name, *ids(group[:1])))
        kept = {part: len(set(rows)) for part, rows in self.rows.items()}
        self.num_kept = min(kept.values())


class Model:
    """A group is its number and its row; what was served and is not over is in ``out``, in the order of serving."""

    def __init__(self, stream, *, remembers):
        self.stream, self.remembers = stream, remembers
        self.next, self.at, self.is_tracked = 0, dict.fromkeys(stream.rows, 0), False
        self.buffer, self.again, self.out = [], [], {}
        self.excluded, self.drops = set(), Counter()
        self.solved, self.skipped = set(), {0: frozenset()}

    def fresh(self, *, is_peek=False):
        part = self.stream.parts[self.next]
        while True:
            row, epoch = self.stream.rows[part][self.at[part]], self.at[part] // self.stream.num_kept
            if self.remembers and not is_peek:
                self.skipped.setdefault(epoch, frozenset(self.solved))
            self.at[part] += 1
            if row not in self.excluded and row not in self.skipped.get(epoch, ()):
                break
        self.next += 1
        return self.next - 1, row

    def get(self, number):
        from_buffer, self.buffer = self.buffer[:number], self.buffer[number:]
        again, self.again = self.again[: number - len(from_buffer)], self.again[number - len(from_buffer) :]
        fresh = [self.fresh() for _ in range(number - len(from_buffer) - len(again))]
        if self.is_tracked:
            self.out |= dict.fromkeys(from_buffer, True) | dict.fromkeys([*again, *fresh], False)
        return [*from_buffer, *again, *fresh]

    def peek(self, number):
        ahead = copy.copy(self)
        ahead.at = dict(self.at)
        return (self.again + [ahead.fresh(is_peek=True) for _ in range(number - len(self.again))])[:number]

    def end(self, groups):
        return sum(self.out.pop(group, None) is not None for group in groups)

    def give_back(self, groups):
        self.end(groups)
        self.drops["excluded"] += sum(row in self.excluded for _, row in groups)
        self.buffer += [group for group in groups if group[1] not in self.excluded]

    def exclude(self, rows):
        self.excluded |= rows
        kept = [group for group in self.buffer if group[1] not in self.excluded]
        self.drops["excluded"] += len(self.buffer) - len(kept)
        self.buffer, self.again = kept, [group for group in self.again if group[1] not in self.excluded]

    def go_to(self, epoch):
        self.at, self.again = {None: epoch * self.stream.num_kept}, []
        returned = [group for group, was_given_back in self.out.items() if was_given_back]
        self.out = dict.fromkeys((group for group in returned if group[1] not in self.excluded), True)

    def saved(self):
        state = copy.copy(self)
        served = [group for group in self.out if group[1] not in self.excluded]
        state.buffer = [group for group in served if self.out[group]] + self.buffer
        state.again = sorted([*self.again, *(group for group in served if not self.out[group])])
        state.at, state.out, state.is_tracked = dict(self.at), {}, False
        state.excluded, state.drops = set(self.excluded), Counter(self.drops)
        state.solved, state.skipped = set(self.solved), dict(self.skipped)
        return state


picks = st.lists(st.integers(0, 9), min_size=1, max_size=3)
events = st.one_of(
    st.tuples(st.just("get"), st.integers(1, 7)),
    st.tuples(st.just("get"), st.integers(1, 7)),
    st.tuples(st.just("peek"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["exclude", "exclude_rows"]), picks),
    st.tuples(st.sampled_from(["give_back", "give_back", "consume", "drop", "report"]), picks),
    st.tuples(st.sampled_from(["track", "save"]), st.none()),
    st.tuples(st.just("get_and_set_epoch"), st.booleans()),
    st.tuples(st.just("crash"), st.fixed_dictionaries({
        "state": st.integers(0, 3), "tracks": st.booleans(),
        "buffer_size": st.sampled_from([1, 3, 40]), "dp_size": st.integers(1, 2),
    })),
)  # fmt: skip


class GroupsMachine(RuleBasedStateMachine):
    """A loader in this process, beside the model.

    :ivar held: groups that the trainer has.
    """

    def __init__(self):
        super().__init__()
        self.folder, self.loader = Path(tempfile.mkdtemp()), None

    def teardown(self):
        if self.loader is not None:
            self.loader.close()
        shutil.rmtree(self.folder)

    @initialize(
        kind=st.sampled_from(KINDS),
        commit=st.sampled_from(["on_delivery", "on_delivery", "on_ack"]),
        shuffle=st.booleans(),
        size=st.integers(1, 2),
    )
    def begin(self, kind, commit, shuffle, size):
        special = {1: {"fate": "short"}, 6: {"fate": "fails"}, 9: {"fate": "short"}}
        self.paths = {name: write_rows(self.folder / f"{name}.jsonl", NUM_ROWS, special) for name in "ab"}
        self.source = (lambda: Mix(self.paths)) if kind == "a mixture" else (lambda: self.paths["a"])
        self.knobs = {"shuffle": SMALL if shuffle else False, "bad_rows": BadRows(policy="skip"), "commit": commit}
        self.knobs["n_samples_per_prompt"] = size
        with make(self.source(), by_fate, **self.knobs) as plain:
            stream = Stream(plain)
        self.remembers = kind == "with outcomes"
        if self.remembers:
            self.knobs["outcomes"] = Outcomes(policy=PassRate(drop_above=0.5))
        self.loader, self.model = make(self.source(), by_fate, **self.knobs), Model(stream, remembers=self.remembers)
        self.model.is_tracked = commit == "on_ack"
        self.held, self.states = {}, []

    @rule(event=events)
    def step(self, event):
        getattr(self, event[0])(event[1])
        now = self.loader.statistics()
        assert now.tracked_groups == len(self.model.out)
        assert now.buffered_groups == len(self.model.buffer)
        assert now.dropped_groups_total == +self.model.drops

    def get(self, number):
        if self.model.next < NUM_GROUPS // 3:
            groups = self.loader.get_samples(number)
            assert [known(group[0]) for group in groups] == self.model.get(number)
            self.held |= {known(group[0]): group for group in groups}

    def peek(self, number):
        if not self.remembers:  # the epochs that it comes to are not decided yet
            assert [known(sample) for sample in self.loader.peek(number)] == self.model.peek(number)

    def get_and_set_epoch(self, goes_back):
        """Not the present one: where rows are left out at an epoch's end, that may be over or not."""
        now = self.loader.epoch
        epoch = (
            0
            if goes_back and now > 1 and not self.model.buffer
            else self.model.at.get(None, 0) // self.model.stream.num_kept + 2
        )
        if None in self.model.at and not self.remembers and epoch < MAX_EPOCHS:
            self.get(1)
            self.loader.set_epoch(epoch)
            self.model.go_to(epoch)

    def chosen(self, picks):
        held = list(self.held)
        return [held[number] for number in sorted({number % len(held) for number in picks})] if held else []

    def exclude(self, picks):
        self.leave_out({group[1] for group in self.chosen(picks)}, [self.held[group] for group in self.chosen(picks)])

    def exclude_rows(self, picks):
        """By their places, also of rows that were not served yet, or never are."""
        rows = {(part, number + 5) for part in self.model.at for number in picks}
        self.leave_out(rows, [self.place(*row) for row in rows])

    def place(self, part, number):
        path = self.paths[part or "a"]
        byte_offset = sum(map(len, path.read_bytes().splitlines(keepends=True)[:number]))
        return {"source": part, "path": str(path), "byte_offset": byte_offset, "row_number": None}

    def leave_out(self, rows, given):
        after = Counter(part for part, _ in self.model.excluded | rows)
        if max(after.values(), default=0) <= NUM_EXCLUDED:
            assert self.loader.exclude(given) == len(self.model.excluded | rows)
            self.model.exclude(rows)

    def give_back(self, picks):
        chosen = self.chosen(picks)
        self.loader.add_samples([self.held.pop(group) for group in chosen])
        self.model.give_back(chosen)

    def consume(self, picks):
        chosen = self.chosen(picks)
        if self.model.is_tracked and all(group in self.model.out for group in chosen):
            self.loader.consume([self.held[group] for group in chosen])
            self.model.end(chosen)
        elif chosen:
            with pytest.raises(ConfigError, match="AD437"):
                self.loader.consume([self.held[group] for group in chosen])

    def drop(self, picks):
        chosen = self.chosen(picks)
        if self.model.is_tracked:
            number = self.model.end(chosen)
            assert self.loader.drop([self.held[group] for group in chosen], "stale") == number
            self.model.drops["stale"] += number

    def report(self, picks):
        if self.remembers:
            for group in self.chosen(picks):
                self.loader.report([self.held[group]], [1.0])
                self.model.solved.add(group[1])

    def track(self, _):
        self.loader.track()
        self.model.is_tracked = True

    def save(self, _):
        self.states.append((json.dumps(self.loader.state_dict()), self.model.saved()))

    def crash(self, knobs):
        self.save(None)
        state, model = self.states[-1 - knobs.pop("state") % len(self.states)]
        self.loader.close()
        tracks = knobs.pop("tracks")
        self.loader, self.model, self.held = make(self.source(), by_fate, **self.knobs, **knobs), model.saved(), {}
        self.loader.load_state_dict(json.loads(state))
        self.model.is_tracked = self.knobs["commit"] == "on_ack"
        if tracks:
            self.track(None)


def known(sample):
    return sample.group_index, (sample.source_name, *ids([sample]))


def by_fate(row):
    if row.get("fate") == "fails":
        raise ValueError("as it was told to")
    return row.get("fate") or [row["id"]]


test_groups_are_as_the_model_says = pytest.mark.thorough(GroupsMachine.TestCase)
GroupsMachine.TestCase.settings = in_ci(max_examples=60)
