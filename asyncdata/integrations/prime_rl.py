"""asyncdata under prime-rl: a verifiers ``Taskset`` of rows in the loader's order, with its state in the checkpoints.

::

    class MathRows(Rows, vf.Taskset[MathTask, RowsConfig]):
        def task(self, row, idx):
            return MathTask(MathData(idx=idx, prompt=row["question"], answer=row["answer"]), self.config.task)

prime-rl's orchestrator saves how many tasks it has taken, and no more: tasks whose rollouts are running, or wait for
their batch, are lost at a restart. With these tasksets it saves the loader's state, in its own ``progress.pt``. A task
is done when its last rollout is sent to the trainer, or when prime-rl has dropped its group; all others come again.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.integrations.adapters import made_on_first_use, refuse
from asyncdata.loader.loader import DataLoader
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from asyncdata.core.types import Sample

__all__ = ("Rows", "RowsConfig", "TaskIterator", "check")  # noqa: F822 - RowsConfig is made below: it imports verifiers

_STATE = "asyncdata"
_ORCHESTRATOR = "prime_rl.orchestrator.orchestrator"

_REFUSED = {
    "n_samples_per_prompt": "Leave it out, and set group_size of the source: prime-rl repeats each task itself",
    "epochs": "Leave it out, and set max_steps: a run of prime-rl ends after its steps, not with its tasks",
    "commit": "Leave it out: a task is done when prime-rl has sent its rollouts to the trainer",
    "tokenize_fn": "Leave it out: prime-rl's renderer tokenizes the prompts",
    "packing": "Leave it out: prime-rl packs the rollouts itself",
}
"""Knobs of a loader that prime-rl decides -> the way out."""


def check(data_path: Any, settings: Mapping[str, Any]) -> None:
    """Refuse settings of ``env.taskset`` with which tasks would be lost or repeated.

    :raises ConfigError: AD464, naming the first one.
    """
    if not data_path:
        raise ConfigError("AD464 env.taskset.data_path is not set: a file, a glob, a folder, or a list of these")

    given = {name: repr(value) for name, value in settings.items()}
    refuse(given, _REFUSED, "AD464 env.taskset.asyncdata.{name}={value} is not followed. {reason}")


class Rows(ABC):
    """A base class before ``verifiers.v1.Taskset``: its tasks are rows in the loader's order, epoch after epoch.

    ``config.data_path`` and ``config.asyncdata``, as :class:`RowsConfig` declares them, are what a
    :class:`~asyncdata.DataLoader` reads and its settings; ``shuffle`` is ``"full"`` by default.
    """

    INFINITE = True
    config: Any
    system_prompt: str | None
    transform: Any

    @abstractmethod
    def task(self, row: dict[str, Any], idx: int) -> Any:
        """Make the task of a row.

        :param row: the row of the file.
        :param idx: the task's number in the run, from 0: the same after a restart. Put it into the task's data, so that
            a row has another ``Task.key`` in each epoch.
        """

    def load(self) -> TaskIterator:
        """The tasks, without an end."""
        return TaskIterator(self)

    def __iter__(self) -> Iterator[Any]:
        """The tasks; within prime-rl's orchestrator with their state in its checkpoints."""
        orchestrator = _orchestrator()
        if orchestrator is not None:
            _plug_in(orchestrator)
        tasks = self.load()
        return tasks if self.transform is None else self.transform(tasks)


class TaskIterator:
    """The tasks of one taskset, and which of them are not done.

    The loader starts with the first task or state.
    """

    def __init__(self, rows: Rows) -> None:
        check(rows.config.data_path, rows.config.asyncdata)
        self._rows = rows
        self._loader: DataLoader | None = None
        self._keeps_open = False
        self._open: dict[str, list[Sample]] = {}
        self._decided: list[_Group] = []
        self._cancelled: dict[str, str] = {}

    def __iter__(self) -> TaskIterator:
        return self

    def __next__(self) -> Any:
        [sample] = self.loader.get_next_batch(1)
        assert sample.group_index is not None
        task = self._rows.task(dict(sample.extra), sample.group_index)
        if self._rows.system_prompt is not None:
            task = task.with_system_prompt(self._rows.system_prompt)
        if self._keeps_open:
            self._open.setdefault(task.key, []).append(sample)
        return task

    @property
    def loader(self) -> DataLoader:
        """The loader of the rows."""
        if self._loader is None:
            config = self._rows.config
            knobs: dict[str, Any] = {"shuffle": "full", **config.asyncdata}
            commit: Any = "on_ack" if self._keeps_open else "on_delivery"
            self._loader = DataLoader(config.data_path, tokenize_fn=RowFn(), commit=commit, **knobs)
            weakref.finalize(self, self._loader.close)
        return self._loader

    def keep_open(self) -> None:
        """From now on a task is in the state until it is done. Call it before the first task."""
        self._keeps_open = True

    def cancelled(self, group: str, key: str) -> None:
        """Note that prime-rl drops a group: its task has this key."""
        self._cancelled[group] = key

    def decided(self, group: str, episodes: list[Any]) -> None:
        """Note a group of which prime-rl awaits no more: its rollouts wait for their batch, or are dropped."""
        key = self._cancelled.pop(group, None)
        if episodes:
            key = episodes[0].task.key
        if key is not None:
            traces = frozenset(trace.id for episode in episodes for trace in episode.traces)
            self._decided.append(_Group(key, traces))

    def sent(self, waiting: Collection[str]) -> None:
        """A batch was sent to the trainer: tasks are done whose rollouts do not wait for another one.

        :param waiting: ids of the traces that do.
        """
        waits = [not group.traces.isdisjoint(waiting) for group in self._decided]
        for group, is_waiting in zip(self._decided, waits, strict=True):
            samples = self._open.get(group.key)
            if samples and not is_waiting:
                self.loader.ack([samples.pop(0)])
                if not samples:
                    del self._open[group.key]
        self._decided = [group for group, is_waiting in zip(self._decided, waits, strict=True) if is_waiting]

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values: what comes next, and the tasks that are not done."""
        return {_STATE: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the tasks that were not done, and then with exactly the next one.

        :raises SnapshotError: if it is not the state of such tasks, or is of other data or settings.
        """
        if not isinstance(state.get(_STATE), str):
            raise SnapshotError(
                "AD602 this is not a state of a taskset of asyncdata: the checkpoint was saved with another taskset. "
                "Resume with that one, or set ckpt.skip_progress to begin at the first row"
            )

        self.loader.load_state_dict(json.loads(state[_STATE]))


class _Group(NamedTuple):
    key: str
    traces: frozenset[str]


# prime-rl has no hook for the state of its tasks. Its orchestrator imports the taskset, which replaces these methods.


def _orchestrator() -> type | None:
    """prime-rl's class, if this is the process of its orchestrator."""
    for name in (_ORCHESTRATOR, "__main__"):
        found = getattr(sys.modules.get(name), "Orchestrator", None)
        if isinstance(found, type) and found.__module__ in (_ORCHESTRATOR, "__main__") and hasattr(found, "main_loop"):
            return found
    return None


def _plug_in(orchestrator: type) -> None:
    from prime_rl.orchestrator.curriculum import Curriculum
    from prime_rl.orchestrator.dispatcher import Dispatcher
    from prime_rl.orchestrator.train_sink import TrainSink

    for kind, name, ours in (
        (Curriculum, "__init__", _init_curriculum),
        (Dispatcher, "drop_group", _drop_group),
        (TrainSink, "process_group", _process_group),
        (orchestrator, "maybe_save_ckpt", _maybe_save_ckpt),
    ):
        theirs = getattr(kind, name, None)
        if theirs is None:
            raise ConfigError(
                f"AD464 this version of prime-rl has no {kind.__name__}.{name}, so that asyncdata cannot tell which "
                "tasks were trained on: use the version that docs/how-to/use-it-with-rl-trainers.md names"
            )

        if not isinstance(vars(kind).get(name), functools.partialmethod):
            setattr(kind, name, functools.partialmethod(ours, theirs))


def _init_curriculum(self: Any, theirs: Any, config: Any, tasks: Any) -> None:
    if isinstance(tasks, TaskIterator):
        kind = getattr(getattr(config, "sampler", None), "type", "standard")
        if kind != "standard":
            raise ConfigError(
                f"AD464 curriculum.sampler.type={kind!r} chooses among all tasks, which it needs in memory, and "
                "would replace the order of asyncdata. Leave curriculum.sampler out; gates may stay"
            )

        tasks.keep_open()
    theirs(self, config, tasks)
    if isinstance(tasks, TaskIterator):
        self.sampler = _sampler()(tasks)


async def _drop_group(self: Any, theirs: Any, group_id: Any, *, reason: Any) -> Any:
    group = self.groups.get(group_id)
    if group is not None and group.kind == "train":
        tasks = self.train_envs.get(group.env_name).tasks
        if isinstance(tasks, TaskIterator):
            tasks.cancelled(str(group_id), group.task.key)
    return await theirs(self, group_id, reason=reason)


async def _process_group(self: Any, theirs: Any, group_id: str) -> None:
    episodes = list(self.pending_groups.get(group_id, ()))
    cancellation = self.pending_group_cancellations.get(group_id)
    await theirs(self, group_id)
    if episodes or cancellation is not None:
        env_name = episodes[0].env.name if episodes else cancellation.env_name
        tasks = self.train_envs.get(env_name).tasks
        if isinstance(tasks, TaskIterator):
            tasks.decided(group_id, episodes)


async def _maybe_save_ckpt(self: Any, theirs: Any, step: int) -> Any:
    """The orchestrator calls it after each batch that it has sent, whether a checkpoint is due or not."""
    for env in self.train_envs:
        if isinstance(env.tasks, TaskIterator):
            env.tasks.sent(self.train_sink.pending_batch)
    return await theirs(self, step)


@functools.cache
def _sampler() -> type:
    from prime_rl.orchestrator.curriculum import TaskSampler

    class LoaderSampler(TaskSampler):  # type: ignore[misc]
        """Takes the tasks as they come, and has their state."""

        def __init__(self, tasks: TaskIterator) -> None:
            self._tasks = tasks

        def __next__(self) -> Any:
            return next(self._tasks)

        def state_dict(self) -> dict[str, Any]:
            return self._tasks.state_dict()

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            self._tasks.load_state_dict(state_dict)

    return LoaderSampler


def _config() -> type:
    import verifiers.v1 as vf

    fields: dict[str, Any] = {
        "__doc__": "Configuration of a taskset of rows: ``data_path``, and ``asyncdata``, the settings of the loader.",
        "__annotations__": {"data_path": str | list[str], "asyncdata": dict[str, Any]},
        "__module__": __name__,
        "data_path": "",
        "asyncdata": {},
    }
    made: type = type(vf.TasksetConfig)("RowsConfig", (vf.TasksetConfig,), fields)
    return made


__getattr__ = made_on_first_use(__name__, "verifiers", {"RowsConfig": _config})
