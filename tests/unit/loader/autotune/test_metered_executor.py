"""What is counted of an executor on the way to it and back; and that nothing is changed on that way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.core.messages import Column, Permute, Permuted, Tokenize, Tokenized
from asyncdata.loader.autotune.metered_executor import MeteredExecutor
from asyncdata.workers.base import MAX_LOSSES, ExecutorStatistics
from asyncdata.workers.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Request
    from asyncdata.workers.base import OnReply

WHOLE = Permute(3, 1)


def rows(number: int) -> Tokenize:
    return Tokenize(0, bytes(4 * number), bytes(4 * number))


def tokenized(num_samples: int, work_s: float) -> Tokenized:
    column = Column(b"x" * num_samples, bytes(4 * num_samples))
    ends = bytes(4 * num_samples)
    return Tokenized(bytes(8 * num_samples), ends, b"", {"label": column}, {}, [], work_s)


class Inner:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.num_workers = 2
        self.num_wanted = 3
        self.slots = Slots(3)
        self.asked: list[tuple[Request, OnReply, int]] = []
        self.calls: list[Any] = []

    def submit(self, request: Request, on_reply: OnReply, max_losses: int = MAX_LOSSES) -> None:
        self.asked.append((request, on_reply, max_losses))

    def watch(self, on_change: Callable[[], object]) -> None:
        self.on_change = on_change

    def reply(self, reply: Any) -> None:
        self.asked.pop(0)[1](reply)
        self.on_change()

    def forget(self) -> None:
        self.asked.clear()
        self.calls.append("forget")

    def set_num_workers(self, num_workers: int) -> None:
        self.num_workers = min(num_workers, 5)

    def prepare(self, slot_bytes: int) -> None:
        self.calls.append(slot_bytes)

    async def run(self, job: Any) -> None:
        self.calls.append(job)

    def memory(self, slot: int) -> memoryview:
        return memoryview(bytes(slot))

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(workers=[], num_queued=7)


class Metered:
    """A metered executor, and a clock that a test sets."""

    def __init__(self) -> None:
        self.inner, self.now, self.is_full = Inner(), 0.0, False
        self.replies: list[Any] = []
        self.executor = MeteredExecutor(self.inner, clock=lambda: self.now)
        self.executor.lacks_room = lambda: self.is_full

    def ask(self, request: Request = WHOLE) -> None:
        self.executor.submit(request, self.replies.append)

    @property
    def times(self) -> tuple[float, float]:
        return self.executor.busy_s, self.executor.full_s


@pytest.fixture
def metered() -> Metered:
    return Metered()


@pytest.mark.asyncio
async def test_everything_is_passed_on(metered: Metered) -> None:
    executor, inner = metered.executor, metered.inner
    executor.submit(WHOLE, metered.replies.append, 1)
    executor.prepare(10)
    await executor.run("job")
    executor.forget()

    assert inner.calls == [10, "job", "forget"]
    assert (executor.num_wanted, executor.slots, len(executor.memory(4))) == (3, inner.slots, 4)
    assert executor.statistics().num_queued == 7


def test_requests_and_replies_are_passed_on_as_they_are(metered: Metered) -> None:
    metered.executor.submit(WHOLE, metered.replies.append, 2)
    request, _, max_losses = metered.inner.asked[0]
    reply = Permuted(b"")
    metered.inner.reply(reply)

    assert (request, max_losses) == (WHOLE, 2)
    assert metered.replies == [reply]


def test_what_is_tokenized_is_counted(metered: Metered) -> None:
    for number, samples in ((10, 9), (30, 30), (20, 0)):
        metered.ask(rows(number))
        metered.inner.reply(tokenized(samples, 0.25))
    metered.ask()
    metered.inner.reply(Permuted(b""))

    executor = metered.executor
    assert (executor.num_replies, executor.num_rows, executor.num_samples) == (4, 60, 39)
    assert (executor.num_bytes, executor.work_s) == (39 * 9, 0.75)


def test_a_worker_is_busy_while_it_has_a_request_and_all_of_them_are_no_more_than_there_are(metered: Metered) -> None:
    metered.now = 1.0
    metered.ask()
    metered.now = 3.0
    metered.ask()
    metered.ask()
    metered.now = 4.0
    metered.inner.reply(Permuted(b""))
    metered.now = 5.0
    metered.inner.reply(Permuted(b""))
    metered.now = 6.0
    metered.inner.reply(Permuted(b""))

    assert metered.times == (2 + 2 + 2 + 1, 0.0)


def test_forgotten_requests_keep_no_worker_busy(metered: Metered) -> None:
    metered.ask()
    metered.now = 1.0
    metered.executor.forget()
    metered.now = 9.0
    metered.ask()

    assert metered.times == (1.0, 0.0)


def test_time_without_room_lasts_until_more_is_asked_for(metered: Metered) -> None:
    metered.ask()
    metered.now, metered.is_full = 1.0, True
    metered.inner.reply(Permuted(b""))
    assert metered.times == (1.0, 1.0), "it was full before this reply"

    metered.now, metered.is_full = 8.0, False
    metered.ask()
    assert metered.times == (1.0, 8.0)

    metered.now = 9.0
    metered.inner.reply(Permuted(b""))
    assert metered.times == (2.0, 8.0)


def test_who_listens_is_called_when_the_reply_has_been_taken(metered: Metered) -> None:
    seen: list[int] = []
    metered.executor.on_reply = lambda: seen.append(len(metered.replies))
    metered.ask()
    metered.inner.reply(Permuted(b""))

    assert seen == [1]


def test_its_number_of_workers_is_what_the_executor_made_of_it(metered: Metered) -> None:
    metered.executor.set_num_workers(4)
    assert metered.executor.num_workers == 4

    metered.executor.set_num_workers(9)
    assert metered.executor.num_workers == 5
