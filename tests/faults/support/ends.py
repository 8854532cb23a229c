"""A program that has a loader, with this or that loaded, and ends in one of the ways.

``python -m tests.faults.support.ends SETTINGS`` runs it.
"""

import asyncio
import code
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from asyncdata import AsyncDataLoader, DataLoader, PromptTokenizeFn, Ranks
from tests.support.faults import GONE_S, is_alive, until
from tests.support.loading import NEVER_S, SHUFFLE

KEPT: list[Any] = []
"""What stays alive to the interpreter's end."""


def no_op(*_: object) -> None: ...


class Program:
    """What all ways of ending share: what is loaded, and from where; a tokenizer, for the function that is proven; a
    folder for telemetry, and for when it began to end; the socket that ranks meet at; and how a child starts."""

    def __init__(self, loads, place, folder, tokenizer="", peer="", world_size=1, rank=0, method=""):
        self.loads, self.place, self.folder, self.tokenizer = loads, place, Path(folder), tokenizer
        self.peer, self.world_size, self.rank, self.method = peer, world_size, rank, method

    def settings(self) -> dict[str, Any]:
        """What a loader is made with."""
        settings: dict[str, Any] = {"shuffle": SHUFFLE, "timeout_s": NEVER_S, "batch_size": 2}
        settings["num_workers"] = 2 if "workers" in self.loads else 0
        settings["tokenize_fn"] = "tests.support.loading:row_id"
        if "busy" in self.loads:
            settings["tokenize_fn"] = "tests.support.worker_fns:stuck_in_c"
        if "prover" in self.loads:
            settings["tokenize_fn"] = PromptTokenizeFn(self.tokenizer, prompt_key="pad")
        if "telemetry" in self.loads:
            settings["telemetry"] = str(self.folder / "run")
        if self.world_size > 1:
            settings["ranks"] = Ranks(rank=self.rank, world_size=2, exchange=self.exchange())
        return settings

    def exchange(self) -> Callable[[bytes], list[bytes]]:
        """Calls of two ranks, over a socket."""
        name = f"\0{self.peer}"
        if self.rank == 0:
            with Listener(name, "AF_UNIX") as listener:
                other = listener.accept()
        else:
            other = connected(name)

        def call(data: bytes) -> list[bytes]:
            other.send_bytes(data)
            found = other.recv_bytes()
            return [data, found] if self.rank == 0 else [found, data]

        return call

    def reads(self) -> DataLoader:
        """A loader that has read, with all that is loaded at work."""
        loader = DataLoader(self.place, **self.settings())
        if "busy" in self.loads:
            loader.start()
            until(lambda: any(worker.state == "busy" for worker in loader.statistics().workers))
        else:
            assert len(next(iter(loader))) == 2
        if "prover" in self.loads:
            until(lambda: any(is_prover(child.pid) for child in psutil.Process().children()))
        return loader

    def is_over(self) -> None:
        """It ends from here on."""
        (self.folder / "over").write_text(str(time.monotonic()), encoding="ascii")


def is_prover(pid: int) -> bool:
    try:
        return b"asyncdata.loader.proving" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def connected(name: str) -> Any:
    """Rank 1 may be there first."""
    deadline = time.monotonic() + NEVER_S
    while True:
        try:
            return Client(name, "AF_UNIX")
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


# The ways


def closed(it: Program) -> None:
    with it.reads():
        it.is_over()


def garbage(it: Program) -> None:
    loader = it.reads()
    it.is_over()
    del loader


def unclosed(end: Callable[[], object] = no_op) -> Callable[[Program], None]:
    """The loader is open when the program ends."""

    def way(it: Program) -> None:
        KEPT.append(it.reads())
        it.is_over()
        end()

    return way


def fails() -> None:
    raise ValueError("the trainer's own fault")


def killed_by(number: int) -> Callable[[], None]:
    def end() -> None:
        os.kill(os.getpid(), number)
        signal.pause()

    return end


def fails_in_with(it: Program) -> None:
    with it.reads():
        it.is_over()
        fails()


def in_a_thread(way: Callable[[Program], None]) -> Callable[[Program], None]:
    def main(it: Program) -> None:
        thread = threading.Thread(target=way, args=(it,))
        thread.start()
        thread.join()

    return main


def waits() -> None:
    def forever() -> None:
        while True:
            list(KEPT[-1])

    threading.Thread(target=forever, daemon=True).start()


def interrupted_awaiting(it: Program) -> None:
    async def main() -> None:
        KEPT.append(AsyncDataLoader(it.place, **it.settings()))
        is_first = True
        while True:
            async for _ in KEPT[-1]:
                if is_first:
                    is_first = it.is_over() is not None
                    asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)

    asyncio.run(main())


def restarted(it: Program) -> None:
    """A notebook: a cell is interrupted, and run again; the traceback of the first one stays in ``sys``."""
    kernel = code.InteractiveInterpreter({"it": it, "signal": signal})
    cell = "loader = it.reads()\nfor number, batch in enumerate(loader):\n    number == 3 and signal.raise_signal(2)"
    try:
        kernel.runsource(cell, symbol="exec")
    except KeyboardInterrupt:
        kernel.showtraceback()
    assert kernel.locals["number"] == 3
    kernel.runsource("first = loader.position()\nloader = it.reads()\nassert loader.position() < first", symbol="exec")
    it.is_over()


def in_a_child(way: str) -> Callable[[Program], None]:
    """The loader is that of a child; the program has the child's status."""

    def parent(it: Program) -> None:
        child = multiprocessing.get_context(it.method).Process(target=end_so, args=(way, it), daemon=True)
        child.start()
        child.join(NEVER_S)
        assert child.exitcode is not None
        if child.exitcode < 0:
            os.kill(os.getpid(), -child.exitcode)
        sys.exit(child.exitcode)

    return parent


def end_so(way: str, it: Program) -> None:
    WAYS[way].end(it)


def beside_a_child(it: Program) -> None:
    """A child has all that its parent had, and must not disturb it."""
    loader = it.reads()
    child = multiprocessing.get_context("fork").Process(target=print, args=("a child",))
    child.start()
    child.join(NEVER_S)
    assert child.exitcode == 0
    assert len(list(loader)) > 100
    KEPT.append(loader)
    it.is_over()


METHODS = ("fork", "forkserver", "spawn")
WITH, EXIT = "the loader was closed at the end of its `with`", "the interpreter ended"
FAULT = ": ValueError: the trainer's own fault"
GARBAGE = "the loader was garbage"
KILLED = ""
"""Nothing is left to write a last line."""


class Way(NamedTuple):
    """A way to end, and what is seen of it: the status, negative: the signal that killed it; whether a ResourceWarning
    tells of the loader that nothing closed; and the last line of each loader's telemetry, with the error that ended the
    run."""

    end: Callable[[Program], None]
    status: int
    warns: bool
    told: tuple[str, ...]


WAYS = {
    "`close()`, or the end of `with`": Way(closed, 0, False, (WITH,)),
    "return": Way(unclosed(), 0, True, (EXIT,)),
    "the loader is garbage": Way(garbage, 0, True, (GARBAGE,)),
    "an exception": Way(unclosed(fails), 1, True, (EXIT + FAULT,)),
    "an exception leaves the `with`": Way(fails_in_with, 1, False, (WITH + FAULT,)),
    "`sys.exit(3)`": Way(unclosed(partial(sys.exit, 3)), 3, True, (EXIT,)),
    "`sys.exit(3)` in a thread": Way(in_a_thread(unclosed(partial(sys.exit, 3))), 0, True, (EXIT,)),
    "an exception in a thread": Way(in_a_thread(unclosed(fails)), 0, True, (EXIT,)),
    "return, while a thread waits for data": Way(unclosed(waits), 0, False, (EXIT,)),
    "`KeyboardInterrupt`": Way(unclosed(partial(signal.raise_signal, signal.SIGINT)), -2, True, (EXIT,)),
    "`KeyboardInterrupt` in `asyncio.run`": Way(interrupted_awaiting, -2, True, (EXIT,)),
    "a notebook's cell is interrupted, and run again": Way(restarted, 0, True, (GARBAGE, EXIT)),
    "`os._exit(4)`": Way(unclosed(partial(os._exit, 4)), 4, False, (KILLED,)),
    "SIGTERM": Way(unclosed(killed_by(signal.SIGTERM)), -15, False, (KILLED,)),
    "SIGKILL, also of a notebook's kernel": Way(unclosed(killed_by(signal.SIGKILL)), -9, False, (KILLED,)),
    "a child of `multiprocessing` ends beside the loader": Way(beside_a_child, 0, True, (EXIT,)),
    "in a child of `multiprocessing`: return": Way(in_a_child("return"), 0, False, (EXIT,)),
    "in a child of `multiprocessing`: an exception": Way(in_a_child("an exception"), 1, False, (EXIT + FAULT,)),
    "in a child of `multiprocessing`: SIGTERM": Way(in_a_child("SIGTERM"), -15, False, (KILLED,)),
}


# Ray


class Actor:
    """A trainer that has a loader."""

    def reads(self, settings: dict[str, Any]) -> list[int]:
        """The processes that it has."""
        self.loader = Program(**settings).reads()
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    def fails(self) -> None:
        fails()

    def exits(self) -> None:
        sys.modules["ray"].actor.exit_actor()


def failed(actor: Any, _: int) -> None:
    """A method has failed; then the actor is not needed any more."""
    with contextlib.suppress(ValueError):
        sys.modules["ray"].get(actor.fails.remote())


def killed(actor: Any, pid: int) -> None:
    """Until then its last handle must not go, which would end it, too."""
    sys.modules["ray"].kill(actor)
    until(lambda: not is_alive(pid), GONE_S, f"{pid} is left")


STAYS = "the driver of a Ray actor ends"
RAY_WAYS: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "`ray.kill(actor)`": (killed, KILLED),
    "SIGKILL of a Ray actor": (lambda _, pid: os.kill(pid, signal.SIGKILL), KILLED),
    "`ray.actor.exit_actor()`": (lambda actor, _: actor.exits.remote(), GARBAGE),
    "the last handle of a Ray actor is gone": (no_op, GARBAGE),
    "a method of a Ray actor raises, and its last handle is gone": (failed, GARBAGE),
    STAYS: (no_op, KILLED),
}
"""How an actor ends, and what is told."""


def on_ray(settings: dict[str, Any]) -> None:
    """An actor ends in each of the ways; another one lives when this process ends."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    for way, (end, _) in RAY_WAYS.items():
        folder = Path(settings["folder"], way)
        folder.mkdir()
        actor = ray.remote(num_cpus=1)(Actor).remote()
        family = ray.get(actor.reads.remote({**settings, "folder": str(folder)}))
        if way == STAYS:
            KEPT.append(actor)
            return

        end(actor, family[0])
        del actor
        until(lambda family=family: not any(map(is_alive, family)), GONE_S, f"{way}: some of {family} are left")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    given = json.loads(sys.argv[1])
    warnings.simplefilter(given.pop("policy", "always"), ResourceWarning)
    way = given.pop("way")
    if way == "ray":
        on_ray(given)
    else:
        WAYS[way].end(Program(**given))
