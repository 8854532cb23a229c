"""A worker of a pool, in a process, an actor or a thread: its requests, and what it is doing. Each request is a call;
calls that no worker has are the backlog. Timers of the event loop decide when to retry after a failure, and when to
give up.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

import anyio

from asyncdata.core.errors import WorkerError, get_logger, is_shortage
from asyncdata.core.messages import Failed, Reply, Request, Short
from asyncdata.workers.base import Crashed, Slots, WorkerState
from asyncdata.workers.changes import Promise

_log = get_logger(__name__)
MAX_WAIT_S = 1.0
_FIRST_WAIT_S = 0.05
_MAX_TRIES, _SHORTAGE_S = 3, 5.0
"""A request that runs into a shortage fails after this many tries, but not before this time."""
_MAX_STARTS = 3
"""A process that ends by itself this often while it starts is not started again."""
_PATIENCE_S = 30.0
"""How long kills from outside, or a shortage of a system resource, may last."""
_MAX_LOST, _MAX_LOST_OF_EACH = 11, 3
"""The limit of consecutive worker deaths without a finished request: a base, and an addend for each worker."""


class Patience:
    """Counts consecutive failures, and decides when to give up.

    After ``max_failures`` permanent failures it gives up. Transient failures, such as a kill from outside or a shortage
    of memory, also need ``limit_s`` to have passed since the first one.

    :ivar num_failures: consecutive failures so far.
    :ivar max_failures: may be changed at any time.
    """

    def __init__(self, max_failures: float, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures = 0
        self._num_own = 0
        self.max_failures = max_failures
        self._limit_s = limit_s
        self._clock = clock
        self._since = 0.0

    def succeeded(self) -> None:
        """Start counting from zero again."""
        self.num_failures = self._num_own = 0

    def failed(self, *, may_pass: bool) -> float | None:
        """Count one more failure: seconds to wait before the next try, or None to give up."""
        now = self._clock()
        if self.num_failures == 0:
            self._since = now
        self.num_failures += 1
        self._num_own += not may_pass
        is_over = self.num_failures >= self.max_failures and now - self._since >= self._limit_s
        if is_over or self._num_own >= self.max_failures:
            return None

        if self.num_failures == 1:  # most failures happen once
            return 0.0

        return min(MAX_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.num_failures - 2, 10))


async def pause(seconds: float) -> None:
    """Wait, while other tasks run."""
    with anyio.move_on_after(seconds):
        await anyio.Event().wait()


def new_patience(max_failures: float | None = None) -> Patience:
    """For the start of a process."""
    return Patience(_MAX_STARTS if max_failures is None else max_failures, _PATIENCE_S)


def given_up(short: Short, num_tries: int) -> Failed:
    """The error of a request that failed because the system has run out of a resource."""
    message = (
        f"AD426 the system ran out of a resource in {num_tries} tries: {short.reason}. The machine is the cause, not a "
        "row: no row is lost. Raise the limit (ulimit -a; pids.max and memory.max of a container) or free what "
        "is used up, and resume from the last state"
    )
    return Failed("WorkerError", message, short.traceback, short.row, short.excerpt, short.place)


class Lost(NamedTuple):
    """How a worker was lost.

    :ivar code: ``AD422`` if it hung, and ``AD423`` if it died.
    :ivar how: the signal or the exit status with which it ended; empty if it has none.
    :ivar output: the end of what it wrote.
    :ivar may_pass: whether the cause is transient: it was killed from outside, or the system had run out of a resource.
    :ivar shortage: the resource, if that was the cause.
    :ivar request_id: the request that it processed; 0 if it had none, or is not to be blamed.
    :ivar row: the row of that request; -1 if that is not known.
    """

    code: str
    reason: str
    how: str = ""
    output: str = ""
    may_pass: bool = True
    shortage: str = ""
    request_id: int = 0
    row: int = -1


def died_starting(num_times: int, how: str, output: str) -> WorkerError:
    """The error when no worker starts successfully."""
    return WorkerError(f"AD426 a worker died {num_times} times while starting ({how})\n{output}")


class Health:
    """Decides after each lost worker whether the pool starts another one, or gives up.

    :ivar has_started: whether any worker was ever ready. Before that, errors are raised at once.
    """

    def __init__(self) -> None:
        self.has_started = False
        self._losses = Patience(_MAX_LOST, _PATIENCE_S)

    def succeeded(self) -> None:
        """A request was answered."""
        self._losses.succeeded()

    def wait_for_another(self, lost: Lost, starts: Patience | None, num_workers: int) -> float:
        """A worker was lost: seconds to wait before the next one starts.

        :param starts: counts the failed starts of workers with this number; None if this worker had been ready.
        :param num_workers: how many workers the pool has.
        :raises WorkerError: if the pool gives up.
        """
        self._losses.max_failures = _MAX_LOST + _MAX_LOST_OF_EACH * num_workers
        wait_s = starts.failed(may_pass=lost.may_pass) if starts is not None else 0.0
        if starts is not None and wait_s is None:
            raise died_starting(starts.num_failures, lost.how, lost.output)

        if self._losses.failed(may_pass=lost.may_pass) is None:
            number, last = self._losses.num_failures, lost.how or lost.reason
            raise WorkerError(
                f"AD426 {number} workers died without finishing one request; the last {last}\n{lost.output}"
            )

        return wait_s or 0.0

    def wait_for_room(self, error: WorkerError, rooms: Patience, *, is_any_ready: bool) -> float:
        """The system has no room for one more process: seconds to wait before the next try. There is no limit on tries
        while another worker is ready.

        :param rooms: counts the tries.
        :raises WorkerError: ``error``, if there is no further try, or if its cause is no shortage.
        """
        if not is_shortage(error):
            raise error

        wait_s = rooms.failed(may_pass=True)
        if rooms.num_failures.bit_count() == 1:  # tries 1, 2, 4, 8 ...: the shortage may last long
            _log.warning("worker.not_started", reason=str(error), num_tries=rooms.num_failures)
        if not self.has_started or (wait_s is None and not is_any_ready):
            raise error

        return MAX_WAIT_S if wait_s is None else wait_s


class Call(Promise["Reply | Crashed"]):
    """A request under way: await its reply, or have a function called with it.

    :ivar is_wanted: whether its reply is.
    :ivar num_losses: workers that were lost while they processed it.
    :ivar suspect: the row that was processed when its last worker was lost.
    :ivar shortages: counts its failures because of a shortage of a system resource.
    """

    is_wanted, num_losses = True, 0
    suspect: int | None = None

    def __init__(self, request_id: int, request: Request, max_losses: int) -> None:
        self.request_id, self.request, self.max_losses = request_id, request, max_losses
        self.shortages = Patience(_MAX_TRIES, _SHORTAGE_S)  # of a system resource


class Backlog:
    """The requests that no worker has: a queue, and requests that return to its front at a given time.

    :param on_due: called when a request has returned to the queue.
    :ivar num_open: requests that are not answered, here or with a worker, and count, as :meth:`count` says.
    """

    def __init__(self, slots: Slots, on_due: Callable[[], object]) -> None:
        self._slots = slots
        self._on_due = on_due
        self._counts: Callable[[Request], bool] = lambda _: True
        self.num_open = 0
        self._last_id = 0
        self._queue: deque[Call] = deque()
        self._later: list[tuple[float, Call]] = []
        self._wake: anyio.Event | None = None  # belongs to the loop that runs it

    def __len__(self) -> int:
        return len(self._queue) + len(self._later)

    def calls(self) -> list[Call]:
        """All of them."""
        return [*self._queue, *(call for _, call in self._later)]

    def count(self, counts: Callable[[Request], bool]) -> None:
        """Count the requests for which ``counts`` is true; no worker has one yet."""
        self._counts = counts
        self.num_open = sum(counts(call.request) for call in self.calls())

    def submit(self, request: Request, max_losses: int) -> Call:
        """Append a new call to the queue; it uses its slot until it ends."""
        self._slots.use(request.slot)
        self._last_id += 1
        call = Call(self._last_id, request, max_losses)
        self._queue.append(call)
        self.num_open += self._counts(request)
        return call

    def add_first(self, call: Call) -> None:
        """Put it at the front of the queue."""
        self._queue.appendleft(call)

    def take(self, takes: Callable[[Request], bool]) -> Call | None:
        """Remove and return the next one of those whose request is taken; None if there is none."""
        for number, call in enumerate(self._queue):
            if takes(call.request):
                del self._queue[number]
                return call

        return None

    def _take_all(self) -> list[Call]:
        """Remove and return all of them."""
        calls = self.calls()
        self._queue.clear()
        self._later.clear()
        return calls

    def hand_over(self, call: Call, reply: Reply) -> None:
        """Pass the reply to the caller; after a shortage, try the request again, as another worker may succeed."""
        if isinstance(reply, Short):
            wait_s = call.shortages.failed(may_pass=True) if call.is_wanted else None
            if wait_s is not None:
                self._add_later(call, wait_s)
                return

            reply = given_up(reply, call.shortages.num_failures)
        self.end(call, reply)

    def _add_later(self, call: Call, wait_s: float) -> None:
        """Put it at the front of the queue after ``wait_s`` seconds."""
        self._later.append((anyio.current_time() + wait_s, call))
        if self._wake is not None:
            self._wake.set()

    def end(self, call: Call, outcome: Reply | Crashed) -> None:
        """Pass the outcome to the caller, unless it is no longer needed."""
        self.num_open -= self._counts(call.request)
        if call.is_wanted:
            call.keep(outcome)
        self._slots.done(call.request.slot)  # after that: the caller may have requested the same rows again

    def drop(self, call: Call) -> None:
        """It has no caller any more, and is over."""
        self.num_open -= self._counts(call.request)
        self._slots.done(call.request.slot)

    def end_all(self, sent: Iterable[Call], reason: Failed) -> None:
        """End these calls and all of the backlog with ``reason``: no worker will answer them."""
        for call in [*sent, *self._take_all()]:
            self.end(call, reason)

    def forget(self) -> None:
        """Drop all of them; their replies are no longer needed."""
        for call in self._take_all():
            self.drop(call)

    async def run(self) -> None:
        """Return requests to the queue when they are due, until cancelled."""
        while True:
            self._wake = anyio.Event()
            with anyio.CancelScope(deadline=min((due for due, _ in self._later), default=math.inf)):
                await self._wake.wait()
            self._bring_back(anyio.current_time())

    def _bring_back(self, now: float) -> None:
        due = [call for when, call in self._later if when <= now]
        if not due:
            return

        self._later = [entry for entry in self._later if entry[0] > now]
        self._queue.extendleft(reversed(due))
        self._on_due()


_LOOKS = 4
"""Checks of the progress within the row timeout. With one check, a worker that hangs after its first row would be
detected only after twice that time."""


class Worker(ABC):
    """What the pool needs of every worker. It answers its requests in their order.

    :param row_timeout_s: seconds that a row may take.
    :ivar look_s: seconds from one check of its progress to the next.
    :ivar pid: its process; None if it is no process of this machine.
    :ivar lacks: what it needs to start and does not get; empty if that is not known, or it has started.
    :ivar is_dismissed: whether it gets no more requests, and ends.
    :ivar is_spent: whether to replace it after it has answered its requests.
    :ivar is_outdated: whether later workers have opened the tokenize function anew.
    :ivar patience: the cancel scope in which replies are received; its deadline is the next check of the progress.
    :ivar conversation: the cancel scope of all that is done with it.
    :ivar ended: set when it has ended.
    """

    pid: int | None = None
    is_spent = False
    is_outdated = False

    def __init__(self, number: int, row_timeout_s: float) -> None:
        self.number = number
        self.calls: deque[Call] = deque()
        self.lacks = ""
        self.is_ready = self.is_dismissed = False
        self.row_timeout_s, self.look_s = row_timeout_s, row_timeout_s / _LOOKS
        self.patience = anyio.CancelScope()
        self.conversation = anyio.CancelScope()
        self.ended = anyio.Event()
        self._busy_since = 0.0
        self._seen_progress = (0, 0)
        self._num_looks = 0  # consecutive checks without progress
        self._waited_s = math.inf  # at the first of them

    # How it runs

    def tasks(self) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        """What is to run as long as the pool uses it."""
        return []

    @abstractmethod
    async def begin(self, has_started: Callable[[], bool]) -> None:
        """Wait until it takes requests.

        :param has_started: whether another one has: then a failure may pass. Asked when it fails.
        :raises EOFError: if it is lost.
        :raises AsyncDataError: if none will ever serve.
        """

    @abstractmethod
    def send(self, call: Call) -> None:
        """Send it a request, without waiting. If it is lost, :meth:`receive` says so."""

    @abstractmethod
    async def receive(self) -> tuple[int, Reply]:
        """The next reply, and the id of its request. May be cancelled, and called again.

        :raises EOFError: if it is lost; the message, if there is one, is the reason.
        """

    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """The id of the request that it is working on (0: none), and the row (-1: all rows at once)."""

    async def ask_progress(self) -> None:  # noqa: B027 - a worker that shares memory need not be asked
        """Bring what :meth:`progress` returns up to date."""

    def waited_s(self) -> float:
        """How long it could have run, and had no core, since it started; 0 where that is not known."""
        return 0.0

    @abstractmethod
    async def end(self, lost: Lost | None) -> Lost | None:
        """Kill it, and wait until it has ended. Until then, it could still write into a slot that is reused.

        :param lost: how it was lost; None if it was dismissed.
        :return: ``lost``, with what is known after its end.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill it; block until it has ended, if it shares memory. Calling this again does nothing."""

    # Its progress

    def be_patient(self) -> None:
        """Start the timer for the first of its calls; no timer if it has none."""
        self._busy_since = time.monotonic()
        self._look_anew()

    def _look_anew(self) -> None:
        self._seen_progress = self.progress() if self.calls else (0, 0)
        self._num_looks, self._waited_s = 0, math.inf
        self.look_later()

    def look_later(self) -> None:
        """Set the deadline of :attr:`patience` to the next check of its progress."""
        self.patience.deadline = anyio.current_time() + self.look_s if self.calls else math.inf

    def is_at_work(self) -> bool:
        """Whether it has made progress within the row timeout, in which time that it waited for a core does not count.
        Called whenever :attr:`patience` ends.
        """
        waited_s = self.waited_s()
        if self.progress() != self._seen_progress:
            self._look_anew()
        else:
            self._num_looks += 1
        self._waited_s = min(self._waited_s, waited_s)
        num_looks = self._num_looks - (waited_s - self._waited_s) / self.look_s
        return num_looks < _LOOKS - 0.1  # also one that hangs waits for a core for an instant

    def state(self) -> WorkerState:
        """What it is doing."""
        if not self.calls:
            state, lacks = ("idle", "") if self.is_ready else ("starting", self.lacks)
            return WorkerState(state=state, pid=self.pid, lacks=lacks)

        busy_s = time.monotonic() - self._busy_since
        return WorkerState(state="busy", pid=self.pid, busy_s=busy_s, num_rows_done=max(0, self.progress()[1]))
