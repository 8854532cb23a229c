"""A taskset for prime-rl: which tasks come again after a restart. Its orchestrator is stood in for."""

import asyncio
import json
from contextlib import closing
from types import SimpleNamespace

import pytest

from asyncdata.errors import ConfigError
from asyncdata.integrations.prime_rl import TaskIterator
from tests.support.adapters import Numbered
from tests.support.frameworks.stand_ins import stand_in_module


@pytest.fixture
def rows(jsonl_file):
    path = jsonl_file({"number": number} for number in range(10))
    return Numbered(str(path), shuffle=False, num_workers=0, timeout_s=240)


@pytest.fixture
def tasks(rows):
    opened = TaskIterator(rows)
    opened.keep_open()
    with closing(opened.loader):
        yield opened


def group_of(task, *traces):
    env = SimpleNamespace(name="math")
    return [SimpleNamespace(env=env, task=task, traces=[SimpleNamespace(id=name)]) for name in traces]


def resumed(tasks, rows, num):
    after = TaskIterator(rows)
    after.keep_open()
    with closing(after.loader):
        after.load_state_dict(json.loads(json.dumps(tasks.state_dict())))
        return [next(after).idx for _ in range(num)]


def test_tasks_that_were_not_sent_come_again_in_their_order(tasks, rows):
    taken = [next(tasks) for _ in range(5)]
    for number in (3, 1, 2):
        tasks.decided(f"group {number}", group_of(taken[number], f"{number}a", f"{number}b"))
    tasks.sent({"2a", "2b"})
    assert resumed(tasks, rows, 5) == [0, 2, 4, 5, 6]


def test_a_task_of_which_a_part_waits_for_the_next_batch_comes_again(tasks, rows):
    """prime-rl takes a batch out of its sink before it waits for the trainer, and may be killed there."""
    tasks.decided("group", group_of(next(tasks), "a", "b"))
    assert resumed(tasks, rows, 2) == [0, 1], "it was not sent"
    tasks.sent({"b"})
    assert resumed(tasks, rows, 2) == [0, 1]
    tasks.sent(set())
    assert resumed(tasks, rows, 2) == [1, 2]


def test_a_dropped_group_is_done_also_without_a_rollout(tasks, rows):
    first, second, _ = (next(tasks) for _ in range(3))
    tasks.cancelled("group 0", first.key)
    tasks.cancelled("group 1", second.key)
    tasks.decided("group 0", [])
    tasks.decided("group 1", group_of(second, "a"))
    tasks.sent(set())
    assert resumed(tasks, rows, 2) == [2, 3]


def test_rows_alone_have_no_end_and_keep_nothing(rows):
    opened = iter(rows)
    assert isinstance(opened, TaskIterator)
    with closing(opened.loader):
        assert [next(opened).row["number"] for _ in range(12)] == [*range(10), 0, 1]
        assert opened.loader.state_dict()["position"] == [1, 0, 2]


def test_a_view_of_verifiers_and_a_system_prompt_are_applied(rows):
    rows.transform = lambda tasks: (next(tasks) for _ in range(3))
    rows.system_prompt = "Be brief."
    assert list(rows) == [(0, "Be brief."), (1, "Be brief."), (2, "Be brief.")]


class Curriculum:
    def __init__(self, config, tasks):
        self.sampler = tasks


class Dispatcher:
    """As much as drops a group."""

    def __init__(self, envs):
        self.train_envs, self.groups = envs, {}

    async def drop_group(self, group_id, *, reason):
        del self.groups[group_id]
        return reason


class TrainSink:
    """As much as takes a group whose rollouts have ended, or that was cancelled."""

    def __init__(self, envs):
        self.train_envs, self.pending_batch = envs, {}
        self.pending_groups, self.pending_group_cancellations = {}, {}

    async def process_group(self, group_id):
        for each in self.pending_groups.pop(group_id, ()):
            self.pending_batch |= {trace.id: trace for trace in each.traces}
        self.pending_group_cancellations.pop(group_id, None)


class Orchestrator:
    def __init__(self, envs, sink):
        self.train_envs, self.train_sink = envs, sink

    def main_loop(self): ...

    async def maybe_save_ckpt(self, step):
        return step


@pytest.fixture
def prime_rl(monkeypatch):
    """The classes of prime-rl's orchestrator. It imports the taskset, which changes them then."""
    kinds = (Curriculum, Dispatcher, TrainSink, Orchestrator)
    made = {kind.__name__: type(kind.__name__, (kind,), {}) for kind in kinds}
    made["Orchestrator"].__module__ = "prime_rl.orchestrator.orchestrator"
    made["TaskSampler"] = type("TaskSampler", (), {"__iter__": lambda self: self})
    for module, names in {
        "orchestrator": ["Orchestrator"],
        "curriculum": ["Curriculum", "TaskSampler"],
        "dispatcher": ["Dispatcher"],
        "train_sink": ["TrainSink"],
    }.items():
        stand_in_module(monkeypatch, f"prime_rl.orchestrator.{module}", **{name: made[name] for name in names})
    return SimpleNamespace(**made)


class Envs(list):
    """prime-rl's environments; those of other tasksets are left alone."""

    def get(self, name):
        return next(env for env in self if env.name == name)


def test_the_orchestrators_checkpoint_has_the_tasks_that_were_not_sent(prime_rl, rows):
    tasks = iter(rows)
    assert isinstance(tasks, TaskIterator)
    iter(rows)  # a second taskset changes nothing
    envs = Envs([SimpleNamespace(name="math", tasks=tasks), SimpleNamespace(name="other", tasks=iter([]))])
    sampler = prime_rl.Curriculum(SimpleNamespace(), tasks).sampler
    other = prime_rl.Curriculum(SimpleNamespace(), [1, 2])
    dispatcher, sink = prime_rl.Dispatcher(envs), prime_rl.TrainSink(envs)
    running = prime_rl.Orchestrator(envs, sink)

    async def a_step():
        taken = [next(sampler) for _ in range(5)]
        for number, task in enumerate(taken):
            dispatcher.groups[f"group {number}"] = SimpleNamespace(kind="train", env_name="math", task=task)
        dispatcher.groups["evaluation"] = SimpleNamespace(kind="eval", env_name="math", task=taken[4])
        for number in (0, 1):  # 0 is sent; of 1 a rollout waits
            sink.pending_groups[f"group {number}"] = group_of(taken[number], f"{number}a", f"{number}b")
            await sink.process_group(f"group {number}")
        assert await dispatcher.drop_group("group 2", reason="stale") == "stale"
        sink.pending_group_cancellations["group 2"] = SimpleNamespace(env_name="math")
        await sink.process_group("group 2")
        await dispatcher.drop_group("evaluation", reason="stale")
        await sink.process_group("unknown")
        sink.pending_batch = {"1b": None}
        assert await running.maybe_save_ckpt(3) == 3

    with closing(tasks.loader):
        asyncio.run(a_step())
        state = json.loads(json.dumps(sampler.state_dict()))
    again = iter(rows)
    after = prime_rl.Curriculum(SimpleNamespace(sampler=SimpleNamespace(type="standard")), again)
    after.sampler.load_state_dict(state)
    with closing(again.loader):
        assert [next(after.sampler).idx for _ in range(5)] == [1, 3, 4, 5, 6]
    assert other.sampler == [1, 2]


def test_a_sampler_that_needs_all_tasks_is_refused(prime_rl, rows):
    config = SimpleNamespace(sampler=SimpleNamespace(type="difficulty_pool"))
    with pytest.raises(ConfigError, match=r"AD464 curriculum.sampler.type='difficulty_pool' chooses among all tasks"):
        prime_rl.Curriculum(config, iter(rows))


def test_a_version_of_prime_rl_that_does_not_tell_what_was_sent_is_refused(prime_rl, rows, monkeypatch):
    monkeypatch.delattr(Orchestrator, "maybe_save_ckpt")
    with pytest.raises(ConfigError, match="AD464 this version of prime-rl has no Orchestrator.maybe_save_ckpt, so"):
        iter(rows)
