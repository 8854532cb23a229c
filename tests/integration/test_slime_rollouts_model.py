"""slime's data source beside a small model: whatever rollouts do, and wherever a run ends, no group is lost or twice.

A checkpoint for rollout r has what the source had when the first later rollout began; and, of the groups that were out
then, those that have come back since, as they were when they first came back. Where groups are tracked, it has instead
each group that was served and is neither trained by rollout r nor dropped.
"""

import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncdata.errors import FilterError, SnapshotError
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.samples import SlimeSample
from tests.support import slime_source
from tests.support.examples import in_ci
from tests.support.slime_source import HOOKS, args_for, labels, set_rollout_id, source_of, write_prompts

NUM_ROWS = 7
SIZE = 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where checkpoints are: to sync hundreds of them to a disk takes a minute."""

FILTERS = (
    "newest_first", "keeps_everything", "returns_too_many", "drops_the_oldest", "turns_round", "spoils_and_raises"
)  # fmt: skip


class Group(NamedTuple):
    """A group by its number, its row's label, and what rollouts have written into it."""

    number: int
    label: str
    text: str = ""

    def samples(self):
        """The samples that it must have."""
        row = int(self.label)
        more = {"status": SlimeSample.Status.ABORTED} if self.text else {}
        return [
            SlimeSample(
                group_index=self.number, index=self.number * SIZE + place, prompt=f"prompt {row}", label=self.label,
                metadata={"row": row, "tags": ["a", "b"]}, response=self.text, tokens=[7] * len(self.text), **more,
            )
            for place in range(SIZE)
        ]  # fmt: skip

    def longer(self):
        """After a rollout has worked on it and not finished it."""
        return self._replace(text=f"{self.text}x")


class State(NamedTuple):
    """What the source has, and what is out."""

    epoch: int = 0
    offset: int = 0
    num_groups: int = 0
    num_dropped: int = 0
    buffer: tuple[Group, ...] = ()
    out: tuple[Group, ...] = ()
    notes: tuple[int, ...] = ()


class Step(NamedTuple):
    """What a rollout did: the state after it, and the groups that it gave back."""

    rollout_id: int
    after: State
    back: tuple[Group, ...] = ()


def wanted(steps, rollout_id):
    """The content of a checkpoint for ``rollout_id``. The first step is the start."""
    split = next((place for place, step in enumerate(steps) if step.rollout_id > rollout_id), len(steps))
    state, late = steps[split - 1].after, []
    missing = {group.number for group in state.out}
    for group in (group for step in steps[split:] for group in step.back):
        if group.number in missing:
            missing.remove(group.number)
            late.append(group)
    return state._replace(buffer=(*state.buffer, *late))


@cache
def stream_order():
    """The shuffled order of the stream, from a run that nothing interrupts."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_prompts(Path(folder, "prompts.jsonl"), NUM_ROWS)
        with source_of(path, asyncdata_order="stream", rollout_shuffle=True) as source:
            return labels(source.get_samples(NUM_ROWS * 60))


def label_at(order, epoch, offset):
    if order == "stream":
        return stream_order()[NUM_ROWS * epoch + offset]

    rows = list(range(NUM_ROWS))
    random.Random(42 + epoch).shuffle(rows)  # as slime does it
    return str(rows[offset])


class Runs(RuleBasedStateMachine):
    """Processes that go on, one after another, from checkpoints; a model knows what each must find."""

    def __init__(self):
        super().__init__()
        sys.modules.pop(HOOKS, None)
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = write_prompts(Path(self.folder.name, "prompts.jsonl"), NUM_ROWS)
        self.order = "legacy"
        self.source: Any = None
        self.filter_name: str | None = None
        self.state = State()
        self.live: dict[int, list[Any]] = {}
        self.saved: dict[int, State] = {}

    def open(self, **elastic):
        if self.source is not None:
            self.source.close()
        where = None if self.filter_name is None else f"{slime_source.__name__}.{self.filter_name}"
        given = {"asyncdata_order": self.order, "rollout_shuffle": True, "n_samples_per_prompt": SIZE, **elastic}
        places = {"save": self.folder.name, "load": self.folder.name, "buffer_filter_path": where}
        self.source = AsyncDataSource(args_for(self.path, **given, **places))

    def resume(self, rollout_id, state):
        """The source loads a checkpoint; what was out is lost."""
        self.source.load(rollout_id)
        self.state = state._replace(out=())
        self.live = {group.number: live for group, live in zip(self.state.buffer, self.source.buffer, strict=True)}

    def fresh(self, number):
        """The state after so many fresh groups, which are out then."""
        state = self.state
        for _ in range(number):
            epoch, offset = (state.epoch, state.offset) if state.offset < NUM_ROWS else (state.epoch + 1, 0)
            group = Group(state.num_groups, label_at(self.order, epoch, offset))
            place = {"epoch": epoch, "offset": offset + 1, "num_groups": state.num_groups + 1}
            state = state._replace(**place, out=(*state.out, group))
        return state

    def served(self, groups, expected):
        """The source has served these: fresh ones, and of those that were given back the very objects."""
        expected = list(expected)
        assert groups == [group.samples() for group in expected]
        assert all(live is self.live.setdefault(g.number, live) for g, live in zip(expected, groups, strict=True))

    def worked_on(self, groups):
        found = [group.longer() for group in groups]
        for group in found:
            for sample in self.live[group.number]:
                sample.response, sample.tokens = group.text, [7] * len(group.text)
                sample.status = SlimeSample.Status.ABORTED
        return found

    @invariant()
    def the_source_is_as_the_model_says(self):
        if self.source is None:
            return

        source, state = self.source, self.state
        place = (source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index)
        assert place == (state.epoch, state.offset, state.num_groups, state.num_groups * SIZE)
        assert source.buffer == [group.samples() for group in state.buffer]
        assert source.statistics()["asyncdata_dropped_groups_total"] == state.num_dropped

    def teardown(self):
        if self.source is not None:
            self.source.close()
        sys.modules.pop(HOOKS, None)
        self.folder.cleanup()


class Rollouts(Runs):
    """Rollouts as ``train.py`` and ``train_async.py`` run them, and plugins."""

    @initialize(
        order=st.sampled_from(["legacy", "stream"]),
        filter_name=st.none() | st.sampled_from(FILTERS),
        teller=st.sampled_from(["driver", "driver", "function", "nobody"]),
    )
    def start(self, order, filter_name, teller):
        self.order, self.filter_name, self.teller = order, filter_name, teller
        self.open()
        self.begin_anew(0)

    def begin_anew(self, rollout_id):
        self.begun = self.last_saved = -1
        self.has_seen_plugins = True
        self.steps = [Step(-1, self.state)]
        self.begin(rollout_id)

    def begin(self, rollout_id):
        self.current = rollout_id
        if self.teller == "driver":
            set_rollout_id(rollout_id)
        elif self.teller == "function":
            self.source.begin_rollout(rollout_id)
            self.did(self.state)

    def did(self, after, back=()):
        """The present rollout did something; if it is its first deed, it has begun before it."""
        if self.teller != "nobody":
            self.begun = max(self.begun, self.current)
        self.changed(after, back)
        self.has_seen_plugins = True

    def changed(self, after, back=()):
        """A plugin did something, which counts to the latest rollout that has begun. The next call notices it."""
        self.has_seen_plugins = False
        self.state = after
        self.steps.append(Step(self.begun, after, tuple(back)))

    @rule()
    def next_rollout(self):
        self.begin(self.current + 1)

    @rule(numbers=st.lists(st.integers(1, 6), min_size=1, max_size=5))
    def take_in_turn(self, numbers):
        for number in numbers:
            self.take(number)

    def take(self, number):
        left = list(self.state.buffer)
        chosen: list[Group] = []
        if left and self.filter_name is None:
            chosen, left = left[:number], left[number:]
        elif left:
            try:
                chosen = getattr(slime_source, self.filter_name or "")(None, None, left, number)
            except (KeyError, IndexError):
                with pytest.raises(FilterError):
                    self.source.get_samples(number)
                self.did(self.state)
                return

        before, again = self.state, chosen[:number]
        left = [group for group in chosen[number:] if group not in left] + [g for g in left if g not in again]
        fresh = self.fresh(number - len(again))
        self.served(self.source.get_samples(number), [*again, *fresh.out[len(before.out) :]])
        num_dropped = before.num_dropped + len(before.buffer) - len(left) - len(again)
        self.did(fresh._replace(buffer=tuple(left), out=(*fresh.out, *again), num_dropped=num_dropped))

    @rule()
    @precondition(lambda self: self.teller == "driver" and self.current > 0)
    def evaluate(self):
        """The driver tells the number of an earlier rollout meanwhile; what is taken belongs to the later one."""
        last, self.current = self.current, self.current - 1
        set_rollout_id(self.current)
        self.take(2)
        self.current = last
        set_rollout_id(last)

    @rule(data=st.data())
    @precondition(lambda self: self.state.out)
    def give_back(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.state.out), min_size=1, max_size=4, unique=True))
        back = self.worked_on(chosen)
        self.source.add_samples([self.live[group.number] for group in back])
        self.did(self.returned(chosen, back), back)

    def returned(self, chosen, back):
        out = tuple(group for group in self.state.out if group not in chosen)
        return self.state._replace(out=out, buffer=(*self.state.buffer, *back))

    @rule(data=st.data())
    @precondition(lambda self: self.state.out and self.has_seen_plugins)
    def a_plugin_gives_back(self, data):
        group = data.draw(st.sampled_from(self.state.out))
        self.source.buffer.append(self.live[group.number])
        self.changed(self.returned([group], [group]), [group])

    @rule()
    @precondition(lambda self: self.state.buffer and self.has_seen_plugins)
    def a_plugin_takes_one_and_turns_the_rest_round(self):
        self.source.buffer.pop()
        self.source.buffer.reverse()
        *rest, last = self.state.buffer
        self.changed(self.state._replace(buffer=tuple(rest[::-1]), out=(*self.state.out, last)))

    @rule(note=st.integers())
    def note(self, note):
        self.source.update_metadata({note: [note]})
        self.changed(self.state._replace(notes=(*self.state.notes, note)))

    @rule(epoch=st.integers(0, 3), offset=st.integers(0, NUM_ROWS))
    def go_to(self, epoch, offset):
        self.source.epoch_id = epoch
        self.did(self.state._replace(epoch=epoch))
        self.source.sample_offset = offset
        self.did(self.state._replace(offset=offset))

    @rule(ago=st.sampled_from([0, 0, 1, 1, 2, 3, 4]))
    def save(self, ago):
        rollout_id = max(self.current - ago, 0)
        expected = wanted(self.steps, rollout_id)._replace(num_dropped=self.state.num_dropped)
        try:
            self.source.save(rollout_id)
        except SnapshotError as error:
            assert f"AD601 rollout {rollout_id} cannot be saved any more" in str(error)
            assert rollout_id < max(self.begun - 1, self.last_saved), "only what drivers do not ask for"
            return

        self.last_saved = max(self.last_saved, rollout_id)
        self.saved[rollout_id] = expected

    @rule(data=st.data(), dp_size=st.integers(1, 3), room=st.sampled_from([1, 5, 1000]), same=st.booleans())
    @precondition(lambda self: self.saved)
    def start_again(self, data, dp_size, room, same):
        """In another process, or in the same one."""
        rollout_id = data.draw(st.sampled_from(sorted(self.saved)))
        if not same:
            self.open(asyncdata_buffer_size=room)
            self.source.set_train_parallel_config({"dp_size": dp_size})
        self.resume(rollout_id, self.saved[rollout_id])
        assert self.source.metadata == {note: [note] for note in self.state.notes}
        self.begin_anew(rollout_id + 1)

    @rule(data=st.data())
    @precondition(lambda self: self.saved and self.order == "legacy")
    def start_again_from_slimes_own_file(self, data):
        """As if slime had written it: it has no buffer."""
        pytest.importorskip("torch")
        rollout_id = data.draw(st.sampled_from(sorted(self.saved)))
        Path(self.folder.name, "rollout", f"global_dataset_state_dict_{rollout_id}.asyncdata").unlink()
        self.open()
        self.resume(rollout_id, self.saved.pop(rollout_id)._replace(buffer=(), num_dropped=0))
        assert self.source.metadata == {note: [note] for note in self.state.notes}
        self.begin_anew(rollout_id + 1)


class TrackedRollouts(Runs):
    """Rollouts that run without end, and say where each group ends."""

    def __init__(self):
        super().__init__()
        self.open()
        self.track(0)

    def track(self, rollout_id):
        self.source.track_groups()
        self.rollout_id = rollout_id
        self.last_saved = -1
        self.trained: list[tuple[int, Group]] = []

    @rule(number=st.integers(1, 6))
    def take(self, number):
        again = self.state.buffer[:number]
        fresh = self.fresh(number - len(again))
        self.served(self.source.get_samples(number), [*again, *fresh.out[len(self.state.out) :]])
        self.state = fresh._replace(buffer=fresh.buffer[number:], out=(*fresh.out, *again))

    @rule(data=st.data(), end=st.sampled_from(["trained", "trained", "given back", "dropped"]), as_copy=st.booleans())
    @precondition(lambda self: self.state.out)
    def end_a_group(self, data, end, as_copy):
        """A copy of its list is known by its number."""
        group = data.draw(st.sampled_from(self.state.out))
        state = self.state._replace(out=tuple(each for each in self.state.out if each != group))
        if as_copy:
            self.live[group.number] = list(self.live[group.number])
        live = self.live[group.number]
        if end == "trained":
            self.trained.append((self.rollout_id, group))
            self.worked_on([group])
            self.source.consume_group(live)
        elif end == "given back":
            state = state._replace(buffer=(*state.buffer, *self.worked_on([group])))
            self.source.add_samples([live])
        else:
            self.source.drop_group(live, "stale")
            self.source.drop_group(live, "stale")  # it is gone already
            state = state._replace(num_dropped=state.num_dropped + 1)
        self.state = state

    @rule(is_told=st.booleans())
    def end_the_batch(self, is_told):
        self.source.end_rollout()
        self.rollout_id += 1
        if is_told:
            self.source.begin_rollout(self.rollout_id)
            self.source.begin_rollout(max(self.rollout_id - 1, 0))  # an evaluation

    @rule(ago=st.sampled_from([0, 1, 1, 1, 2, 3, 4]))
    def save(self, ago):
        rollout_id = max(self.rollout_id - ago, -1)
        later = [group for rollout, group in self.trained if rollout > rollout_id]
        left = sorted([*later, *self.state.out])
        try:
            self.source.save(rollout_id)
        except SnapshotError as error:
            assert str(error).startswith(f"AD601 rollout {rollout_id} cannot be saved")
            assert ago not in (1, 2) or rollout_id < self.last_saved, "only what drivers do not ask for"
            return

        assert ago > 0, "a batch that is not complete cannot be saved"
        self.last_saved = max(self.last_saved, rollout_id)
        self.saved[rollout_id] = self.state._replace(buffer=(*left, *self.state.buffer))

    @rule(data=st.data(), same=st.booleans())
    @precondition(lambda self: self.saved)
    def start_again(self, data, same):
        rollout_id = data.draw(st.sampled_from(sorted(self.saved)))
        if not same:
            self.open()
        self.resume(rollout_id, self.saved[rollout_id])
        self.track(rollout_id + 1)

    @invariant()
    def what_is_out_is_counted(self):
        assert self.source.statistics()["asyncdata_tracked_groups"] == len(self.state.out)


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(in_ci(30), stateful_step_count=25)
TestTrackedRollouts = TrackedRollouts.TestCase
TestTrackedRollouts.settings = settings(in_ci(20), stateful_step_count=25)
