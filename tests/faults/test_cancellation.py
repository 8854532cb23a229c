"""Each public coroutine is cancelled at each of its awaits: nothing is lost or repeated, no task left, none hangs."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdata import AsyncDataLoader, Cache, DataLoader, SoftPacking
from asyncdata.errors import LoaderClosedError
from tests.support import loaders
from tests.support.examples import each_value
from tests.support.faults import num_rounds, record, until
from tests.support.loading import NEVER_S, id_and_text
from tests.support.parts import no_op

if TYPE_CHECKING:
    Call = Callable[[], Coroutine[Any, Any, Any]]

trio = pytest.importorskip("trio")
pytest.importorskip("uvloop")

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=4, full=40)
"""Cancelled calls at each point, moment and way."""
POINTS = (0, 1, 2, 5)
MOMENTS = ("when it begins to wait", "when it is about to go on")
WAYS = {
    "asyncio, task.cancel()": ("asyncio", {}),
    "uvloop, task.cancel()": ("asyncio", {"use_uvloop": True}),
    "asyncio, scope": ("asyncio", {}),
    "trio, scope": ("trio", {}),
}
"""How a call may be cancelled, and the backend that it takes."""
NUM_ROWS = 400


class Cut:
    """Awaits ``coroutine``, and calls ``cancel`` at one of its awaits.

    :param point: the number of the await, from 0; those that need not wait do not count.
    :param is_late: whether it is the second of :data:`MOMENTS`, when its result is there and it has not seen it yet:
        what was handed over then is lost if anybody takes it for received.
    :param on_wait: called at each await.
    :ivar num_awaits: so many there have been.
    """

    def __init__(self, coroutine: Any, point: int, on_wait: Callable[[], object], *, is_late: bool) -> None:
        self.num_awaits = 0
        self.cancel: Callable[[], object] = no_op
        self._coroutine, self._point, self._on_wait, self._is_late = coroutine, point, on_wait, is_late

    def __await__(self) -> Generator[Any, Any, Any]:
        result, error = None, None
        while True:
            try:
                wanted = self._coroutine.send(result) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return stop.value

            is_here = self.num_awaits == self._point
            self.num_awaits += 1
            self._on_wait()
            if is_here:
                self._cancel_at(wanted)
            result = error = None
            try:
                result = yield wanted
            except BaseException as raised:
                error = raised
            if is_here and self._is_late and not isinstance(wanted, asyncio.Future | None):  # trio
                self.cancel()

    def _cancel_at(self, wanted: Any) -> None:
        if not self._is_late:
            self.cancel()
        elif isinstance(wanted, asyncio.Future):
            wanted.add_done_callback(lambda _: self.cancel())  # before the task's own, which is added after it
        elif wanted is None:
            asyncio.get_running_loop().call_soon(self.cancel)


async def cancelled_at(point, moment, way, coroutine, on_wait=no_op):
    """Cancel the coroutine there; its result, whether it was cancelled, and whether it had fewer awaits than that."""
    cut = Cut(coroutine, point, on_wait, is_late=moment == MOMENTS[1])
    result, was_cut = None, True

    async def call() -> Any:
        return await cut

    if way.endswith("scope"):
        with anyio.fail_after(NEVER_S), anyio.CancelScope() as scope:
            cut.cancel = scope.cancel
            result, was_cut = await call(), False
    else:
        task = asyncio.ensure_future(call())
        cut.cancel = task.cancel
        done, _ = await asyncio.wait({task}, timeout=NEVER_S)
        assert done, "a cancelled call hangs"
        if not task.cancelled():
            result, was_cut = task.result(), False
    return result, was_cut, cut.num_awaits <= point


async def cut_everywhere(way: str, call: Call) -> int:
    """Cancel a fresh call at each of its awaits, one after the other; how often it was."""
    num_cut = 0
    for moment in MOMENTS:
        is_over, points = False, itertools.count()
        while not is_over:
            _, was_cut, is_over = await cancelled_at(next(points), moment, way, call())
            num_cut += was_cut
    return num_cut


def num_tasks(way: str) -> int:
    return trio.lowlevel.current_statistics().tasks_living if way.startswith("trio") else len(asyncio.all_tasks())


def run(way: str, main: Call) -> Any:
    backend, options = WAYS[way]
    return anyio.run(main, backend=backend, backend_options=options)


# The loader, and how it is called


def ids(samples: list[Any]) -> list[Any]:
    """Which samples they are; of packs, of groups and of samples."""
    return [ids(item) if isinstance(item, list) else (int(item.tokens[0]), len(item.tokens)) for item in samples]


def packed(across_epochs: bool, **knobs: Any) -> dict[str, Any]:
    packing = SoftPacking(max_length=256, window_samples=16, across_epochs=across_epochs)
    return {"batch_size": 3, "collate_fn": ids, "packing": packing, **knobs}


KNOBS: dict[str, dict[str, Any]] = {
    "get_next_batch": {},
    "get_samples": {"n_samples_per_prompt": 2},
    "async for": {"batch_size": 30, "collate_fn": ids},
    "async for, packed": packed(across_epochs=True),
    "async for, planned": packed(across_epochs=False, shuffle="full", cache={"folder": ""}, plan_packs=True),
}

ASKS = {
    "get_next_batch": lambda loader: loader.get_next_batch(60),
    "get_samples": lambda loader: loader.get_samples(30),
}


class Gate:
    """A tokenize function that gets on only while somebody waits, so that nearly every call has to."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __call__(self, row: dict[str, Any]) -> list[int]:
        assert self.is_open.wait(NEVER_S), "no call waits, and the loader was not closed"
        return id_and_text(row)


class Caller:
    def __init__(self, loader: Any, what: str) -> None:
        self._loader = loader
        self._what = what
        self._loop: Any = None

    async def call(self) -> Any:
        """What is compared of a call that wants more than is read ahead."""
        if self._what in ASKS:
            return ids(await ASKS[self._what](self._loader))

        if self._loop is None:
            self._loop = aiter(self._loader)
        try:
            return [await self._loop.__anext__()]
        except StopAsyncIteration:
            self._loop = None
            return [None]


def make(face: type[Any], path: Path, what: str = "get_next_batch", **knobs: Any) -> Any:
    return loaders.make(path, face=face, **{"tokenize_fn": id_and_text, "buffer_size": 20} | knobs | KNOBS[what])


def expected(path: Path, what: str, number: int) -> list[Any]:
    """The first ``number`` things from a loader without cancelled calls, by the sync interface."""
    found: list[Any] = []
    with make(DataLoader, path, what) as loader:
        while len(found) < number:
            found += ids(ASKS[what](loader)) if what in ASKS else [*loader, None]
    return found[:number]


@pytest.mark.parametrize(("what", "way"), each_value(list(KNOBS), list(WAYS)))
def test_cancelled_at_any_await_a_call_has_consumed_nothing(path, what, way):
    async def main() -> tuple[list[Any], int, int]:
        found: list[Any] = []
        gate, num_cut = Gate(), 0
        async with make(AsyncDataLoader, path, what, tokenize_fn=gate) as loader:
            caller, before = Caller(loader, what), num_tasks(way)
            for point, moment, _ in itertools.product(POINTS, MOMENTS, range(ROUNDS)):
                result, was_cut, _ = await cancelled_at(point, moment, way, caller.call(), gate.is_open.set)
                gate.is_open.clear()
                num_cut += was_cut
                found += result or []
            leaked = num_tasks(way) - before
            gate.is_open.set()
            found += await caller.call()
        return found, num_cut, leaked

    found, num_cut, leaked = run(way, main)
    assert found == expected(path, what, len(found))
    assert leaked == 0
    assert num_cut >= ROUNDS // 2, "hardly any call was cancelled: this tests nothing"
    record("R8", f"{what}, {way}", cancels=num_cut, lost=0, repeated=0, leaked_tasks=leaked, hangs=0)


QUICK_WAYS = ("asyncio, task.cancel()", "trio, scope")
each_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in QUICK_WAYS else pytest.mark.slow) for way in WAYS]
)


@each_way
def test_cancelled_at_any_await_of_the_close_it_is_closed_all_the_same(path, way):
    async def open_and_close(how: str) -> None:
        loader = make(AsyncDataLoader, path)
        try:
            if how == "aclose":
                loader.start()
                await loader.aclose()
            else:
                async with loader:
                    pass
        finally:
            with pytest.raises(LoaderClosedError, match="AD502"):
                loader.start()

    async def main() -> int:
        before = num_tasks(way)
        num_cut = sum([await cut_everywhere(way, lambda how=how: open_and_close(how)) for how in ("aclose", "with")])
        assert num_tasks(way) == before
        return num_cut

    num_cut = run(way, main)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "asyncdata-service"])
    record("R8", f"aclose, {way}", cancels=num_cut, leaked_tasks=0, hangs=0)


@each_way
def test_cancelled_at_any_await_of_num_rows_the_rows_are_counted_all_the_same(path, way):
    async def main() -> int:
        num_cut = 0
        for moment in MOMENTS:
            is_over, points = False, itertools.count()
            while not is_over:
                async with make(AsyncDataLoader, path, shuffle="full", cache=Cache(folder="")) as loader:
                    _, was_cut, is_over = await cancelled_at(next(points), moment, way, loader.num_rows())
                    num_cut += was_cut
                    assert await loader.num_rows() == NUM_ROWS
                    assert len(await loader.get_next_batch(NUM_ROWS)) == NUM_ROWS
        return num_cut

    num_cut = run(way, main)
    assert num_cut > 0
    record("R8", f"num_rows, {way}", cancels=num_cut, lost=0, repeated=0, hangs=0)
