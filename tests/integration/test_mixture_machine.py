"""Whatever is asked of a mixture, and wherever it is resumed: it delivers what a model of one sample at a time does."""

from __future__ import annotations

import copy
import json
import tempfile
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncdata import DataLoader, Mix, Outcomes, Part, PassRate, Shuffle
from asyncdata.errors import EndOfData
from asyncdata.loader.mix import part_seed
from asyncdata.order.permutation import order_keys, shuffled_rows
from tests.support.examples import in_ci
from tests.support.loading import NEVER_S, order_of

SIZES = {"chat": 5, "code": 7, "math": 9}
NAMES = tuple(SIZES)
SEED = 42
SHUFFLE = Shuffle(block_bytes=64, window_blocks=3)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)
NUM_EPOCHS = 60


def tokens_of(row):
    """One to three tokens; every third row of the code is dropped."""
    return [row["id"]] * num_tokens_of(row["id"]) if is_kept(row["part"], row["id"]) else None


def num_tokens_of(row):
    return 1 + row % 3


def is_kept(name, row):
    return name != "code" or row % 3 != 1


def write(folder):
    for name, number in SIZES.items():
        (folder / f"{name}.jsonl").write_text("".join(line_of(name, row) for row in range(number)))


@cache
def own_order(name):
    """D of a part, an epoch after the other."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        rows = order_of(Path(folder, f"{name}.jsonl"), NUM_EPOCHS, seed=part_seed(SEED, name), shuffle=SHUFFLE)
    return [rows[first : first + SIZES[name]] for first in range(0, len(rows), SIZES[name])]


def line_of(name, row):
    return json.dumps({"id": row, "part": name, "pad": "x" * (7 * row % 20)}) + "\n"


class Setting(NamedTuple):
    """What a mixture is made of. Weights are in the order of NAMES."""

    by: Any
    quota: int
    weights: tuple[int, ...]
    stages: dict[int, tuple[int, ...]]
    ends: dict[str, tuple[Any, int | None]]
    epochs: int | None

    def epochs_left(self, name):
        """A part's epochs in one of the mixture."""
        when_done, max_epochs = self.ends.get(name, ("repeat", None))
        return 1 if max_epochs is None and when_done != "repeat" else max_epochs

    @property
    def has_end(self):
        ends = [self.epochs_left(name) is not None for name in SIZES]
        return all(ends) or any(self.ends[name][0] == "stop" for name in SIZES)

    def mix(self, folder):
        parts = {}
        for name, weight in zip(SIZES, self.weights, strict=True):
            when_done, max_epochs = self.ends[name]
            parts[name] = Part(folder / f"{name}.jsonl", weight=weight, when_done=when_done, max_epochs=max_epochs)
        stages = {start: dict(zip(NAMES, weights, strict=True)) for start, weights in self.stages.items()}
        return Mix(parts, by=self.by, quota=self.quota, stages=stages, on_mix_change="apply")


class Schedule:
    """Which part is next, in the words of the documentation: no arrays, and nothing is planned beyond a block."""

    def __init__(self, setting):
        self.setting = setting
        self.at = 0
        self.epochs, self.begun, self.left = dict.fromkeys(NAMES, 0), set[str](), set[str]()
        self.back, self.times = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
        self.begin_anew()

    def begin_anew(self):
        """Other weights hold from here on: what each part has had is forgotten."""
        self.since, self.block, self.counts = self.at, list[str](), dict.fromkeys(NAMES, 0)
        starts = [start for start in self.setting.stages if start <= self.at]
        weights = self.setting.stages[max(starts)] if starts else self.setting.weights
        gone = {name for name in NAMES if name in self.left or self.back[name] > self.at}
        self.weights = {name: 0 if name in gone else weight for name, weight in zip(NAMES, weights, strict=True)}

    @property
    def changes(self):
        return [at for at in (*self.setting.stages, *self.back.values()) if at > self.at]

    def pick(self):
        """The part of the next sample; None if no part has a weight."""
        if not any(self.weights.values()):
            return None

        if self.setting.by == "tokens":
            return self.neediest()

        if not self.block:
            self.block = self.next_block()
        return self.block[0]

    def neediest(self):
        total, whole = sum(self.counts.values()), sum(self.weights.values())
        deficits = {n: weight * total - whole * self.counts[n] for n, weight in self.weights.items() if weight}
        most = [name for name, deficit in deficits.items() if deficit == max(deficits.values())]
        return min(most, key=lambda name: order_keys(SEED, self.at, f"mixture  {name}")[0])

    def next_block(self):
        """Each part has its share of the samples until the block's end, to within one; the earliest deadline first."""
        size = min([self.at + self.setting.quota, *self.changes]) - self.at
        total, whole = self.at + size - self.since, sum(self.weights.values())
        shares = {name: Fraction(weight * total, whole) for name, weight in self.weights.items()}
        after = {name: max(self.counts[name], int(share)) for name, share in shares.items()}
        while sum(after.values()) < total:
            due = [name for name, share in shares.items() if share > after[name]]
            after[min(due, key=lambda name: Fraction(after[name] + 1, self.weights[name]))] += 1
        members = [name for name in NAMES for _ in range(after[name] - self.counts[name])]
        self.counts = after
        return [members[place] for place in shuffled_rows(size, order_keys(SEED, self.at, "mixture ")[0])]

    def took(self, name, num_tokens):
        self.begun.add(name)
        self.back[name] = self.times[name] = 0
        changes = self.changes
        self.at += 1
        if self.setting.by == "tokens":
            self.counts[name] += num_tokens
        else:
            self.block = self.block[1:]
        if self.at in changes:
            self.begin_anew()

    def epoch_ended(self, name, is_empty):
        """A part came to the end of its epoch at its turn. Whether that of the mixture is over, too."""
        limit, is_counted = self.setting.epochs_left(name), is_empty or name in self.begun
        self.epochs[name] += is_counted
        if is_counted and limit is not None and self.epochs[name] >= limit:
            if self.setting.ends[name][0] == "stop":
                return True

            self.left.add(name)
        elif is_empty:
            self.times[name] = 2 * self.times[name] or 1
            self.back[name] = (self.at // self.setting.quota + self.times[name]) * self.setting.quota
        else:
            return False

        self.begin_anew()
        return not any(self.weights[name] for name in SIZES)

    def begin_epoch(self):
        self.epochs, self.begun = dict.fromkeys(NAMES, 0), set()
        if self.left or any(self.back.values()):
            self.left, self.back, self.times = set(), dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
            self.begin_anew()


class Known(NamedTuple):
    """What is remembered of a row."""

    epoch: int
    score: float


class Entry(NamedTuple):
    """A sample: its part, the part's epoch, its row, and the mixture's epoch."""

    name: str
    epoch: int
    row: int
    mixture_epoch: int


class Model:
    """One sample at a time, one score at a time, and nothing is read ahead."""

    def __init__(self, setting):
        self.schedule = Schedule(setting)
        self.epoch = 0
        self.at = dict.fromkeys(SIZES, (0, 0))
        self.num_samples = dict.fromkeys(NAMES, 0)
        self.known: dict[str, dict[int, Known]] = {name: {} for name in SIZES}
        self.excluded: dict[tuple[str, int], set[int]] = {}

    def next(self):
        """None at the end of the last epoch."""
        while self.schedule.setting.epochs is None or self.epoch < self.schedule.setting.epochs:
            name = self.schedule.pick()
            found = None if name is None else self.own(name)
            if name is not None and found is not None:
                self.schedule.took(name, num_tokens_of(found[1]))
                self.num_samples[name] += 1
                return Entry(name, *found, self.epoch)
            if name is None or self.schedule.epoch_ended(name, self.is_empty(name)):
                self.epoch += 1
                self.schedule.begin_epoch()
        return None

    def own(self, name):
        """The next row of a part; None, once, at the end of its epoch."""
        epoch, place = self.at[name]
        rows = own_order(name)[epoch]
        if (name, epoch) not in self.excluded:
            known = self.known[name].items()
            self.excluded[name, epoch] = {row for row, told in known if told.score >= 0.9 and epoch - told.epoch < 3}
        left = [n for n in range(place, len(rows)) if self.is_sample(name, epoch, rows[n])]
        self.at[name] = (epoch, left[0] + 1) if left else (epoch + 1, 0)
        if not left:
            return None

        return epoch, rows[left[0]]

    def is_empty(self, name):
        """Whether the epoch of the part that has just ended had no sample."""
        epoch = self.at[name][0] - 1
        return not any(self.is_sample(name, epoch, row) for row in own_order(name)[epoch])

    def is_sample(self, name, epoch, row):
        return is_kept(name, row) and row not in self.excluded[name, epoch]

    def report(self, entry, score):
        name, epoch, row, _ = entry
        told = self.known[name].get(row)
        if told is None or epoch > told.epoch:
            self.known[name][row] = Known(epoch, score)


weights = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
ends = st.tuples(st.sampled_from(["repeat", "leave", "stop"]), st.sampled_from([None, None, 1, 2]))
endless = st.just(dict.fromkeys(SIZES, ("repeat", None)))
mixtures = st.builds(
    Setting,
    by=st.sampled_from(["rows", "tokens"]),
    quota=st.integers(1, 7),
    weights=weights,
    stages=st.dictionaries(st.integers(1, 40), weights, max_size=2),
    ends=endless | st.fixed_dictionaries(dict.fromkeys(SIZES, ends)),
    epochs=st.sampled_from([None, None, 3]),
)
scores = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8) | st.just([1.0] * 8)
sizes = st.integers(1, 8)
events = st.one_of(
    *2 * [st.tuples(st.just("train"), sizes, scores)],
    st.tuples(st.just("look"), st.integers(0, 20), st.none()),
    *(st.tuples(st.just(name), st.integers(0, 5), st.integers(1, 20)) for name in ("resume", "change_the_weights")),
)


class MixtureMachine(RuleBasedStateMachine):
    """A loader over a mixture that remembers scores, beside the model.

    :ivar saved: snapshots: the loader's, and the model's.
    """

    loader = None

    def teardown(self):
        if self.loader is not None:
            self.loader.close()
            self.folder.cleanup()

    @initialize(setting=mixtures)
    def begin(self, setting):
        self.folder = tempfile.TemporaryDirectory()
        write(Path(self.folder.name))
        if not setting.has_end:
            setting = setting._replace(epochs=None)
        self.model = Model(setting)
        self.open(setting, buffer_size=8)
        self.saved = [self.state()]

    def open(self, setting, buffer_size):
        settings: dict[str, Any] = {
            "tokenize_fn": tokens_of,
            "shuffle": SHUFFLE,
            "num_workers": 0,
            "timeout_s": NEVER_S,
        }
        self.loader = DataLoader(
            setting.mix(Path(self.folder.name)),
            **settings | {"epochs": setting.epochs, "buffer_size": buffer_size, "outcomes": Outcomes(policy=SOLVED)},
        )

    def state(self):
        return json.dumps(self.loader.state_dict()), copy.deepcopy(self.model)

    @rule(event=events)
    def step(self, event):
        """One rule for all events: with a rule each, hypothesis would leave out half of them in every example."""
        getattr(self, event[0])(*event[1:])

    def train(self, number, scores):
        wanted = [self.model.next() for _ in range(number)]
        try:
            samples, is_end = self.loader.get_next_batch(number), False
        except EndOfData as end:
            samples, is_end = end.samples, True
        found = [Entry(s.source_name or "", s.source_epoch or 0, int(s.tokens[0]), s.position.epoch) for s in samples]
        assert (found, is_end) == ([entry for entry in wanted if entry is not None], None in wanted)

        scores = [score if self.may_be_solved(entry) else 0.0 for entry, score in zip(found, scores, strict=False)]
        self.loader.report(samples, scores)
        for entry, score in zip(found, scores, strict=True):
            self.model.report(entry, score)
        self.saved = [*self.saved[-5:], self.state()]

    def may_be_solved(self, entry):
        """Some parts may be solved as a whole, but not those without which an epoch of the mixture may be empty."""
        return entry.row > 0 or (entry.name != "math" and self.model.schedule.setting.ends[entry.name][0] != "stop")

    def look(self, number, _):
        """It changes nothing, and may see less than comes: what a part's next epoch leaves out is not decided yet."""
        coming = [(s.source_name, s.source_epoch, int(s.tokens[0])) for s in self.loader.peek(number)]
        wanted = copy.deepcopy(self.model)
        assert coming == [wanted.next()[:3] for _ in coming]

    def resume(self, number, buffer_size):
        """All is gone but the last snapshots."""
        state, model = self.saved[number % len(self.saved)]
        self.model = copy.deepcopy(model)
        self.reopen(state, buffer_size)

    def change_the_weights(self, number, buffer_size):
        """At a restart: the new weights hold from there on, and no part goes back or forward."""
        state, model = self.saved[number % len(self.saved)]
        self.model = copy.deepcopy(model)
        schedule = self.model.schedule
        chat, code, math = schedule.setting.weights
        schedule.setting = schedule.setting._replace(weights=(chat + 1, code, math))
        schedule.begin_anew()
        self.reopen(state, buffer_size)
        self.saved = [self.state()]

    def reopen(self, state, buffer_size):
        self.loader.close()
        self.open(self.model.schedule.setting, buffer_size)
        self.loader.load_state_dict(json.loads(state))

    @invariant()
    def each_part_has_had_its_samples(self):
        found = self.loader.statistics().by_source
        assert {name: part.samples for name, part in found.items()} == self.model.num_samples


TestMixture = MixtureMachine.TestCase
TestMixture.settings = settings(
    max_examples=in_ci(20).max_examples, stateful_step_count=25, report_multiple_bugs=False, deadline=None
)
