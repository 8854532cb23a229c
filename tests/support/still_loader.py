"""A loader whose service stands still: no thread, no process, no await. A test has each request answered itself."""

from collections import deque, namedtuple

import msgspec
import numpy as np

from asyncdata import JsonlSource, Position, Sample, Shuffle
from asyncdata.core.messages import Job, Tokenize, Tokenized
from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.ledger import Counters, DeliveryRules, Ledger, Request, Returned
from asyncdata.order.order import Order
from asyncdata.prefetch.canaries import Canaries
from asyncdata.prefetch.producer import Producer
from asyncdata.prefetch.windows.block_windows import BlockWindows
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.workers.base import MAX_LOSSES, Crashed, ExecutorStatistics
from asyncdata.workers.request_handler import Handler
from asyncdata.workers.slots import NUM_SLOTS, Slots
from tests.support.tokenize_fns import row_id

DIED = Crashed("AD423", "its worker died")
HUNG = Crashed("AD422", "no result in 60 s; its worker was killed")
NO_ROOM_LIMIT = 1 << 30


class WorkerKilled(Exception):  # noqa: N818 - it stands for a signal
    """What a tokenize function raises in place of bringing down its worker."""


Asked = namedtuple("Asked", ["request", "on_reply", "num_rows", "max_losses"])
"""A request to a worker without an answer yet; the answer is not wanted if ``on_reply`` is None."""


class FakeExecutor:
    """Keeps requests until a test has them answered, in the order it likes. The answers are a real worker's.

    :param row_s: how long the workers claim to take for a row; chunks grow by it.
    :param names_the_row: whether a lost worker has told which row it was at.
    """

    answers_with_samples = False

    def __init__(self, job, function, slot_bytes, *, num_workers=2, row_s=0.0, names_the_row=False):
        self.num_workers, self.row_s, self.names_the_row = num_workers, row_s, names_the_row
        self.slots = Slots(NUM_SLOTS, lambda: self._on_change())
        self._on_change = bool
        self.asked, self.num_rows_asked = [], []
        slots = [memoryview(bytearray(slot_bytes)) for _ in range(NUM_SLOTS)]
        self._handler = Handler(job, slots, open_tokenize_fn(function))

    def watch(self, on_change):
        self._on_change = on_change

    def submit(self, request, on_reply, max_losses=MAX_LOSSES):
        self.slots.use(request.slot)
        num_rows = len(request.lengths) // 4 if isinstance(request, Tokenize) else 0
        self.asked.append(Asked(request, on_reply, num_rows, max_losses))
        if isinstance(request, Tokenize):
            self.num_rows_asked.append(num_rows)

    def forget(self):
        """Every worker finishes its request and writes into its slot, although the answer is not wanted."""
        self.asked = [asked._replace(on_reply=None) for asked in self.asked]

    def set_num_workers(self, num_workers):
        self.num_workers = num_workers
        self._on_change()

    @property
    def num_wanted(self):
        return 2 * self.num_workers - len(self.asked)

    def statistics(self):
        return ExecutorStatistics(workers=[], num_queued=len(self.asked))

    def answer(self, number=0):
        """Do what request ``number`` asks for, and reply."""
        asked = self.asked.pop(number)
        self._reply(asked, self._work(asked))

    def lose(self, number=0, crashed=DIED):
        """Say that request ``number`` has brought down its workers."""
        self.reply(crashed, number)

    def reply(self, reply, number=0):
        """Answer request ``number`` with ``reply``."""
        self._reply(self.asked.pop(number), reply)

    def _work(self, asked):
        reply = self._handler(asked.request)
        if not isinstance(reply, Tokenized):
            return reply
        killers = [error.row for error in reply.errors if WorkerKilled.__name__ in error.reason]
        if killers:
            return DIED._replace(row=killers[0] if self.names_the_row else None)
        # No clock: a test takes the same course every time.
        return msgspec.structs.replace(reply, busy_s=self.row_s * asked.num_rows)

    def _reply(self, asked, reply):
        if not isinstance(reply, Crashed):
            self.slots.done(asked.request.slot)
        if asked.on_reply is not None:
            asked.on_reply(reply)
        if isinstance(reply, Crashed):
            self.slots.done(asked.request.slot)
        self._on_change()

    def close(self):
        self._handler.close()


class StillLoader:
    """Source, order, producer and coordinator of a loader, over real files.

    :ivar pumps: what the service's loop would be asked to do: one entry each time there is room again.
    :ivar quarantined: the bad rows that were passed.
    """

    def __init__(
        self,
        path,
        function=row_id,
        *,
        shuffle=False,
        block_bytes=64,
        window_blocks=4,
        seed=0,
        num_workers=2,
        row_s=0.0,
        names_the_row=False,
        slack_bytes=16,
        max_row_bytes=1 << 16,
        buffer_filter=None,
        outcomes=None,
        **rules,
    ):
        if isinstance(shuffle, bool):
            shuffle = Shuffle(enabled=shuffle, block_bytes=block_bytes, window_blocks=window_blocks)
        paths = [str(item) for item in path] if isinstance(path, list | tuple) else str(path)
        self.files = JsonlSource(paths, max_row_bytes=max_row_bytes).open(shuffle.block_bytes)
        self.order = Order(shuffle, seed, self.files.num_blocks)
        job = Job(
            files=self.files.files,
            tokenize=None,
            max_row_bytes=max_row_bytes,
            block_bytes=shuffle.block_bytes,
            slack_bytes=slack_bytes,
            with_token_sums=rules.get("digest") == "tokens",
        )
        slot_bytes = self.order.max_window_blocks * job.stride
        told = {"num_workers": num_workers, "row_s": row_s, "names_the_row": names_the_row}
        executor = self.executor = FakeExecutor(job, function, slot_bytes, **told)
        self.quarantined, self.pumps = [], deque()
        chosen = {} if buffer_filter is None else {"buffer_filter": buffer_filter}
        stops, most = rules.pop("bad_row_stops", True), rules.pop("max_bad_rows", None)
        bad_rows = BadRowPolicy(is_raised=stops, max=most, pass_over=self.quarantined.append)
        self.coordinator = Coordinator(
            DeliveryRules(**{"capacity": 64, "max_ready_bytes": NO_ROOM_LIMIT, "bad_rows": bad_rows, **rules}),
            outcomes=outcomes,
            on_room=lambda: self.on_room(),
            **chosen,
        )
        self.producer = Producer(
            BlockWindows(self.files, self.order, executor, job.stride),
            Canaries(self.files, executor, job.stride, self.order.max_window_blocks),
            executor,
            self.coordinator,
            epochs=self.coordinator.rules.epochs,
        )

    def on_room(self):
        """There is room in the channel again."""
        self.pumps.append(self.producer.pump)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.executor.close()

    def start(self, canaries=None):
        self.producer.start(self.coordinator.ledger, canaries)

    @property
    def num_tasks(self):
        """How much there is to do."""
        return len(self.pumps) + len(self.executor.asked)

    def work(self, number=0):
        """Do one thing of what there is to do."""
        if number < len(self.pumps):
            self.pumps[number]()
            del self.pumps[number]
        else:
            self.executor.answer(number - len(self.pumps))
        if not self.pumps:
            self._check_that_all_is_sent()

    def _check_that_all_is_sent(self):
        """What could be sent must not wait for another event, which may never come."""
        before = sent_by(self.producer), len(self.executor.asked)
        self.producer.pump()
        assert (sent_by(self.producer), len(self.executor.asked)) == before, "a wake-up was lost"

    def work_on(self):
        """Do the next thing; somebody waits for it."""
        assert self.num_tasks, "a request waits, and nothing is being done for it"
        self.work()

    def work_off(self, limit=10_000):
        """Do all there is to do; the channel is full then, or the data is at its end."""
        for _ in range(limit):
            if not self.num_tasks:
                return
            self.work()
        raise AssertionError(f"the workers are still busy after {limit} requests")

    def take(self, num_groups, last_epoch=None):
        """As a loader does it: a request, work until it is served, and a withdrawal if anything is raised."""
        request, wakes = Request(num_groups, last_epoch), deque([True])
        request.wake = lambda: wakes.append(True)
        try:
            while (samples := self.coordinator.poll(request) if wakes else None) is None:
                wakes.clear()
                self.work_on()
        except BaseException:
            self.coordinator.withdraw(request)
            raise

        return samples

    def ids(self, num_groups, last_epoch=None):
        """The first tokens of what :meth:`take` gives: the rows' ids."""
        return [int(sample.tokens[0]) for sample in self.take(num_groups, last_epoch)]

    def groups(self, num_groups, last_epoch=None):
        samples, size = self.take(num_groups, last_epoch), self.coordinator.rules.samples_per_group
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def snapshot(self):
        ledger = self.coordinator.ledger
        position, counters, acked = ledger.restart_point()
        return {
            "position": msgspec.structs.astuple(position),
            "counters": msgspec.to_builtins(counters),
            "acked": [msgspec.structs.astuple(place) for place in sorted(acked)],
            "journal": sorted(ledger.journal),
            "buffer": [item.record for item in ledger.buffer],
            "leases": [item.record for item in ledger.leased_groups()],
            "canaries": list(self.producer.canaries.digests),
        }

    def restore(self, saved):
        """Go on from ``saved``, and start."""
        ledger = Ledger(
            position=Position(*saved["position"]),
            counters=msgspec.convert(saved["counters"], Counters),
            buffer=tuple(returned(record) for record in (*saved["leases"], *saved["buffer"])),
            acked=frozenset(Position(*place) for place in saved["acked"]),
            journal=frozenset(map(tuple, saved["journal"])),
        )
        self.coordinator.restart(lambda _: ledger)
        self.start(saved["canaries"])


def returned(record):
    """A group in the buffer, from what a snapshot keeps of it."""
    return Returned([Sample.from_dict(values) for values in record], record)


def made_by_hand(*tokens, size=1, **fields):
    """A group that did not come from D."""
    return [Sample(tokens=np.array(tokens, np.int32), **fields) for _ in range(size)]


def sent_by(producer):
    """All that a :meth:`Producer.pump` which sends something changes."""
    lists = producer._windows, producer._channel._entries  # noqa: SLF001
    place = *producer._current, producer._row, producer._is_finished, producer.canaries._slot  # noqa: SLF001
    return *place, producer._channel.num_produced, *([id(each) for each in found] for found in lists)  # noqa: SLF001
