"""Prompts for a TransferQueue, the store of verl and ROLL between generation and training.

::

    with DataLoader("prompts.jsonl", tokenize_fn=tokenize_fn, commit="on_ack") as loader:
        feeder = QueueFeeder(loader, room=1024)
        feeder.fill()

A prompt's key is its place in the order, as ``0:3:128``; its rollouts' keys begin with that and ``_``. The trainer
clears the keys of a prompt that it has trained on, or drops. The queue also keeps up to which place prompts were put,
so that what it has and what the loader's state has can be brought together, whichever was saved later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncdata.core.errors import ConfigError, EndOfData
from asyncdata.core.settings import needing
from asyncdata.core.types import Group, Position, Sample
from asyncdata.integrations.torch.process import refuse_async
from asyncdata.loader.loader import DataLoader

__all__ = ("QueueFeeder", "fields_of")

_MARKS = "asyncdata"
"""The partition of the queue in which the last place that was put is, by the partition of the prompts."""


def fields_of(sample: Sample) -> dict[str, Any]:
    """What the queue has of a prompt: ``prompt``, ``prompt_ids``, ``label`` and ``extra``."""
    tokens = [int(token) for token in sample.tokens]
    return {"prompt": sample.prompt, "prompt_ids": tokens, "label": sample.label, "extra": sample.extra}


class QueueFeeder:
    """Keeps a queue filled with prompts. It has a lease of the loader for each prompt in the queue.

    The queue must be there: ``transfer_queue.init()``. One feeder fills a partition, from one thread.

    :param loader: it delivers the prompts, and is used through this object alone from now on.
    :param room: prompts in the queue at most, with those whose rollouts are there.
    :param partition: of the queue, for this feeder alone.
    :param fields: makes the fields of a sample; each value is kept as it is.
    :param tag: of each prompt, as for verl ``{"is_prompt": True, "status": "pending", "global_steps": 0}``.
    :raises ConfigError: AD466, if the loader does not remember what is acknowledged, or there is no room; or if the
        package cannot be imported.
    """

    def __init__(
        self,
        loader: DataLoader[Any, Any],
        room: int,
        *,
        partition: str = "train",
        fields: Callable[[Sample], Mapping[str, Any]] = fields_of,
        tag: Mapping[str, Any] | None = None,
    ) -> None:
        refuse_async(loader, "QueueFeeder")
        if loader.config.commit != "on_ack" or room < 1:
            raise ConfigError(
                f"AD466 QueueFeeder was given a loader with commit={loader.config.commit!r} and room={room}: prompts "
                'in the queue must come again if it is lost, so give DataLoader(commit="on_ack"), and room for one or '
                "more"
            )

        with needing("QueueFeeder", "TransferQueue"):
            import transfer_queue

        self.loader = loader
        self._queue: Any = transfer_queue
        self._room = room
        self._partition = partition
        self._fields = fields
        self._tag = dict(tag or {"status": "pending"})
        self._out: dict[str, Group] = {}
        self._taken: list[Group] = []  # of the loader, and not in the queue yet

    def fill(self) -> list[str]:
        """Acknowledge prompts that are not in the queue any more, and put as many new ones as there is room for.

        :return: the keys of the new ones; none after the end of the data.
        :raises PrefetchTimeoutError: if the loader has them not ready in time; the next call puts those that were.
        """
        self._acknowledge()
        while len(self._out) + len(self._taken) < self._room and (group := self._next()):
            self._taken.append(group)
        groups = self._taken[: self._room - len(self._out)]
        if groups:
            self._put(groups)
            self._taken = self._taken[len(groups) :]  # not before: they must not be lost if the queue fails
        return list(map(_key, groups))

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, in which prompts that are not in the queue any more are over."""
        self._acknowledge()
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, with the queue as it is now: restored before, alive, or empty.

        Prompts that the state has as over are cleared from the queue, and those in it stay there. Of the others, those
        that had been put when the queue was saved are over, and the rest is put by :meth:`fill`.

        :raises SnapshotError: if it is not such a state, or is of other data or settings.
        """
        self.loader.load_state_dict(state)
        self._out, self._taken = {}, []
        kept, until = self._keys(), self._until()
        while not self._taken and (group := self._next()):
            key, place = _key(group), _place(group)
            if key in kept:
                self._out[key] = group
            elif place <= until:
                self.loader.ack([group])
            else:
                self._taken.append(group)
        self._clear(name for key, names in kept.items() if key not in self._out for name in names)

    def _acknowledge(self) -> None:
        if self._out:
            kept = self._keys()
            self.loader.ack([self._out.pop(key) for key in [key for key in self._out if key not in kept]])

    def _next(self) -> Group | None:
        """The next group. It is asked for alone, as ``drop_last`` drops the end of the data if more are asked for."""
        try:
            return self.loader.get_samples(1)[0]
        except EndOfData:
            return None

    def _put(self, groups: list[Group]) -> None:
        """The prompts first: a queue that is saved in between has them, and a mark that is too early does no harm."""
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorData, NonTensorStack

        rows = [self._fields(group[0]) for group in groups]
        columns = {name: NonTensorStack(*[NonTensorData(row[name]) for row in rows]) for name in rows[0]}
        keys = [_key(group) for group in groups]
        self._queue.kv_batch_put(
            keys=keys,
            partition_id=self._partition,
            fields=TensorDict(columns, batch_size=len(keys)),
            tags=[dict(self._tag) for _ in keys],
        )
        self._queue.kv_put(key=self._partition, partition_id=_MARKS, tag={"until": keys[-1]})
        self._out.update(zip(keys, groups, strict=True))

    def _keys(self) -> dict[str, list[str]]:
        """The prompts in the queue: the keys of each, and of its rollouts."""
        found: dict[str, list[str]] = {}
        for name in self._queue.kv_list(self._partition).get(self._partition, ()):
            found.setdefault(name.partition("_")[0], []).append(name)
        return found

    def _until(self) -> Position:
        """The last place that was put; before the first one: none was."""
        marks = self._queue.kv_list(_MARKS).get(_MARKS, {})
        mark = marks.get(self._partition)
        return Position(-1) if mark is None else Position.parse(mark["until"])

    def _clear(self, names: Iterable[str]) -> None:
        keys = list(names)
        if keys:
            self._queue.kv_clear(keys=keys, partition_id=self._partition)


def _place(group: Group) -> Position:
    place = group[0].position
    assert place is not None, "a loader's samples have one"
    return place


def _key(group: Group) -> str:
    return str(_place(group))
