"""Tokenize functions that misbehave, or tell what a worker process is like; imported there by path."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from asyncdata.tokenization.encoders import idle_work

Row = dict[str, Any]

_kept_open: list[Any] = []
_at_rest: list[AtRest] = []

_PR_SET_PDEATHSIG = 1


def surroundings(row: Row) -> dict[str, Any]:
    """What the process looks like from inside."""
    return {
        "input_ids": [row["id"]],
        "pid": os.getpid(),
        "parent": os.getppid(),
        "grandparent": _parent_of(os.getppid()),
        "group": os.getpgid(0),
        "modules": sorted(name for name in sys.modules if "." not in name),
        "environment": {name: os.environ.get(name) for name in row.get("names", ())},
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "stdin": os.readlink("/proc/self/fd/0"),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "path": sys.path,
        "cwd": os.getcwd(),
    }


def _parent_of(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def tells_who(row: Row) -> dict[str, Any]:
    """Takes its time, and says which process it was."""
    time.sleep(row.get("sleep_s", 0))
    return {"input_ids": [row["id"]], "pid": os.getpid()}


def leaks(row: Row) -> list[int]:
    """Keeps eight megabytes for every row, for ever."""
    _kept_open.append(b"x" * (8 << 20))
    return [row["id"]]


def echoes(row: Row) -> dict[str, Any]:
    """The prompt, as it came."""
    return {"input_ids": [row["id"]], "prompt": row["prompt"]}


def talks(row: Row) -> list[int]:
    """Prints, as people do, and does not flush."""
    print("hello from row", row["id"])  # noqa: T201 - this is what is tested
    sys.stderr.write("a warning\n")
    return [row["id"]]


def noisy(row: Row) -> list[int]:
    """Writes far more than a pipe holds, to both descriptors, as C code does."""
    os.write(1, b"o" * 300_000 + b"\n")
    os.write(2, b"e" * 300_000 + b"\n")
    return [row["id"]]


def as_told(row: Row) -> Any:
    """Does what the row says in ``do``: returns nonsense, raises, or ends the process."""
    what = row.get("do", "id")
    if what == "raise":
        raise ValueError(f"row {row['id']} is not to my taste")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(3)
    if what == "print and die":
        print("farewell", flush=True)  # noqa: T201 - this is what is tested
        os._exit(3)
    return _RESULTS[what](row["id"])


_RESULTS: dict[str, Any] = {
    "id": lambda number: [number],
    "nothing": lambda number: None,
    "a reason": lambda number: "too dull",
    "a number": lambda number: 7,
    "bytes of text": lambda number: [b"seven"],
    "words": lambda number: ["seven"],
    "no input_ids": lambda number: {"ids": [7]},
    "text as input_ids": lambda number: {"input_ids": "seven"},
    "negative": lambda number: [7, -1],
    "too large": lambda number: [1 << 31],
    "fractions": lambda number: [0.5],
    "nested": lambda number: [[7]],
    "not JSON": lambda number: {"input_ids": [7], "label": object()},
}


def as_told_in_batches(rows: list[Row]) -> Any:
    """The same for many rows."""
    return [as_told(row) for row in rows]


as_told_in_batches.batched = True  # type: ignore[attr-defined]


def kills_several_workers(rows: list[Row]) -> list[list[int]]:
    """Kills as many workers as the first row says in ``deaths``; they count themselves in the file ``tally``."""
    with open(rows[0]["tally"], "ab", buffering=0) as tally:
        tally.write(b".")
        if tally.tell() <= rows[0]["deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
    return [[row["id"]] for row in rows]


kills_several_workers.batched = True  # type: ignore[attr-defined]


def waits(row: Row) -> list[int]:
    """Writes its process id into the file ``began``, and continues when the file ``gate`` exists."""
    if "began" in row:
        _announce(row["began"])
    while "gate" in row and not Path(row["gate"]).exists():
        time.sleep(0.005)
    return [row["id"]]


class AtRest:
    """Writes its process id into a file when there is a pause."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_pause(self) -> None:
        _announce(self.path)


def leaves_work(row: Row) -> list[int]:
    """Leaves work for the next pause, once, that writes into the file ``mark``."""
    if not _at_rest:
        _at_rest.append(AtRest(row["mark"]))
        idle_work.wait_for_pause(_at_rest[0])
    return [row["id"]]


def writes_everywhere(row: Row) -> list[int]:
    """Writes what the row says in ``bytes`` to every socket of the process, as code does that closes what it does not
    own: the number of its descriptor is another's then."""
    if "bytes" in row:
        _write_to_every_socket(base64.b64decode(row["bytes"]))
    return [row["id"]]


def _write_to_every_socket(data: bytes) -> None:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(int(fd), data)


def takes_its_time(row: Row) -> list[int]:
    """Sleeps for ``sleep_s``."""
    time.sleep(row.get("sleep_s", 0))
    return [row["id"]]


def stuck_in_c(row: Row) -> list[int]:
    """Announces itself in ``began``, then never leaves C code that holds the GIL: no thread, no handler can run."""
    _announce(row["began"])
    ctypes.PyDLL(None).sleep(3600)
    return [row["id"]]


def stuck_in_c_and_orphaned(row: Row) -> list[int]:
    """The same, and the kernel no longer kills it with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    return stuck_in_c(row)


def _announce(path: str) -> None:
    """The file is there whole, or not at all."""
    mine = Path(f"{path}.{os.getpid()}")
    mine.write_text(str(os.getpid()), encoding="ascii")
    mine.rename(path)


class AddsWhatAFileSaid:
    """A description whose ids are those of rows, plus the number that a file had when it was opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def resolve(self) -> AddsWhatAFileSaid:
        """As the protocol says."""
        return self

    def fingerprints(self) -> dict[str, str]:
        """As the protocol says."""
        return {"tokenize_fn": "AddsWhatAFileSaid"}

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {"path": self.path}

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer

        more = int(Path(self.path).read_text())
        return FunctionTokenizer(lambda row: [row["id"] + more])


class Opening:
    """A description whose ``open()`` goes wrong in the way it is told."""

    def __init__(self, what: str = "well", folder: str = "", times: int = 0) -> None:
        self.what = what
        self.folder = folder
        self.times = times

    def resolve(self) -> Opening:
        """As the protocol says."""
        return self

    def fingerprints(self) -> dict[str, str]:
        """As the protocol says."""
        return {"tokenize_fn": f"Opening {self.what}"}

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {"what": self.what, "folder": self.folder, "times": self.times}

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer

        if self.what == "raises":
            raise FileNotFoundError("no tokenizer.json to be seen")
        if self.what == "exits":
            raise SystemExit("not today")
        if self.what == "dies" and self._number_of_this_start() <= self.times:
            print("what I wanted to say", flush=True)  # noqa: T201 - this is what is tested
            os._exit(5)
        while self.what in {"waits", "waits and raises"} and not Path(self.folder, "open").exists():
            time.sleep(0.005)
        if self.what == "waits and raises":
            raise FileNotFoundError("it was never there")
        if self.what in {"is counted", "lingers", "keeps a file open"} and self.folder:
            self._number_of_this_start()
        if self.what == "keeps a file open":
            _kept_open.append(Path(__file__).open("rb"))
        if self.what == "prints without a newline":
            sys.stdout.write("half a line of Python's ")
            ctypes.CDLL(None).printf(b"half a line of C's ")
        if self.what == "lingers":
            threading.Thread(target=time.sleep, args=(3600,)).start()
        return FunctionTokenizer(as_told)

    def _number_of_this_start(self) -> int:
        path = Path(self.folder, f"start {os.getpid()}")
        path.touch()
        return len(list(Path(self.folder).glob("start *")))


def _no_fork() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class LeavesNoRoom(Opening):
    """From here on the system has no room for one more process."""

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {}

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer

        os.fork = _no_fork
        return FunctionTokenizer(as_told)


class OpensLoudly(Opening):
    """Writes an answer to every socket of the process that opens it, so that the true ones come too late."""

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {}

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer
        from asyncdata.workers.pool.forkserver_messages import Loaded, framed

        _write_to_every_socket(bytes(framed(Loaded(""))))
        return FunctionTokenizer(as_told)


class RollsDice(Opening):
    """Says what the generators give that everybody uses."""

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {}

    def open(self) -> Any:
        """As the protocol says."""
        import random

        import numpy as np

        from asyncdata.tokenization.user_function import FunctionTokenizer

        np.random.random()  # or its generator is not made before the fork, but by each worker

        def rolls(row: Row) -> dict[str, Any]:
            time.sleep(row.get("sleep_s", 0))
            numbers = {"python": random.random(), "numpy": float(np.random.random())}
            return {"input_ids": [row["id"]], "pid": os.getpid(), **numbers}

        return FunctionTokenizer(rolls)


class ReadsThenEncodes(Opening):
    """Reads row by row, and tells so; then encodes all at once, and dies or hangs if the row with id 13 is there."""

    def open(self) -> Any:
        """As the protocol says."""
        return self._run

    def _run(self, rows: Any, out: Any) -> None:
        numbers = []
        for row, raw in enumerate(rows):
            out.progress(row)
            numbers.append(json.loads(bytes(raw))["id"])
        out.progress(None)
        if 13 in numbers and self.what == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        while 13 in numbers:
            time.sleep(3600)
        for row, number in enumerate(numbers):
            out.keep(row, [number])


class Shifted(Opening):
    """Adds to every id what a file says that no fingerprint knows of."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def settings(self) -> dict[str, Any]:
        """As the protocol says."""
        return {"path": self.path}

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer

        path = Path(self.path)
        shift = int(path.read_text(encoding="ascii")) if path.exists() else 0
        return FunctionTokenizer(lambda row: [row["id"] + shift])


def meddles(row: Row) -> dict[str, Any]:
    """Changes all that belongs to the process: its folder, its environment, what signals do; and has a child."""
    os.chdir("/")
    os.environ["MEDDLED"] = "yes"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return {"input_ids": [row["id"]], "pid": os.getpid()}


def killed_once(row: Row) -> list[int]:
    """Is killed at the row that has a ``mark``, as by the system where memory is short, unless the mark is there."""
    mark = row.get("mark")
    if mark is not None and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [row["id"]]


def label_of(row: Row) -> list[int]:
    """The row's label as its token; raises for 13."""
    if row["label"] == 13:
        raise KeyError("thirteen")

    return [row["label"]]


class RunsShort(Opening):
    """At row 13, the first ``times`` times, the system has no more of ``what``. ``folder`` has a file for each time."""

    def open(self) -> Any:
        """As the protocol says."""
        from asyncdata.tokenization.user_function import FunctionTokenizer

        return FunctionTokenizer(self._run)

    def _run(self, row: Row) -> list[int]:
        if row["id"] == 13 and self._number_of_this_try() <= self.times:
            _SHORTAGES[self.what]()
        return [row["id"]]

    def _number_of_this_try(self) -> int:
        number = len(os.listdir(self.folder)) + 1
        Path(self.folder, f"try {number}").touch()
        return number


# Raised, not provoked by a limit: inline, a limit would be that of the test's own process, and of all its threads.


def _no_memory() -> None:
    bytearray(1 << 62)


def _no_memory_for_a_thread() -> None:
    raise RuntimeError("can't start new thread")


def _no_files() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), __file__)


def _no_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def _no_disk_and_another_error() -> None:
    try:
        _no_disk()
    except OSError as error:
        raise ValueError("the helper file is not to be had") from error


def _no_process() -> None:
    raise ExceptionGroup("two helpers", [BlockingIOError(errno.EAGAIN, "no"), OSError(errno.ENOMEM, "no")])


def _panic() -> None:
    kind = type("PanicException", (BaseException,), {})
    raise kind('called unwrap(): Os { code: 11, kind: WouldBlock, message: "Resource temporarily unavailable" }')


def _abort() -> None:
    sys.stderr.write("memory allocation of 8589934592 bytes failed\n")
    sys.stderr.flush()
    os.abort()


_SHORTAGES = {
    "memory": _no_memory,
    "threads": _no_memory_for_a_thread,
    "files": _no_files,
    "disk": _no_disk,
    "disk, and another error": _no_disk_and_another_error,
    "processes": _no_process,
    "a panic": _panic,
    "an abort": _abort,
}
