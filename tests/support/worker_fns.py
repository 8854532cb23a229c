"""Functions that misbehave or tell what a worker is like, and renderers; workers import them by path."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

_kept: list[Any] = []

_PR_SET_PDEATHSIG = 1


def surroundings(row: Row) -> dict[str, Any]:
    """What the process looks like from inside."""
    parents = Path("/proc", str(os.getppid()), "stat").read_text(encoding="utf-8")
    return {
        "input_ids": [row["id"]],
        "grandparent": int(parents.rpartition(")")[2].split()[1]),
        "group": os.getpgid(0),
        "modules": sorted(name for name in sys.modules if "." not in name),
        "environment": {name: os.environ.get(name) for name in row.get("names", ())},
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "stdin": os.readlink("/proc/self/fd/0"),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "path": sys.path,
        "cwd": os.getcwd(),
    }


def tells_who(row: Row) -> dict[str, Any]:
    time.sleep(row.get("sleep_s", 0))
    return {"input_ids": [row["id"]], "pid": os.getpid()}


def leaks(row: Row) -> list[int]:
    _kept.append(b"x" * (8 << 20))
    return [row["id"]]


def talks(row: Row) -> list[int]:
    print("hello from row", row["id"])  # noqa: T201 - this is what is tested
    sys.stderr.write("a warning\n")
    return [row["id"]]


def noisy(row: Row) -> list[int]:
    for fd in (1, 2):
        os.write(fd, b"o" * 300_000 + b"\n")
    return [row["id"]]


def as_told(row: Row) -> Any:
    """Does what the row says in ``do``: returns nonsense, raises, or ends the process."""
    what = row.get("do", "id")
    if what == "raise":
        raise ValueError(f"row {row['id']} is not to my taste")
    if what == "exit":
        sys.exit(3)
    if what == "print and die":
        print("farewell", flush=True)  # noqa: T201 - this is what is tested
    if what in ("die", "print and die"):
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
    return [as_told(row) for row in rows]


as_told_in_batches.batched = True  # type: ignore[attr-defined]


def waits(row: Row) -> list[int]:
    """Writes its process id into the file ``began``, and continues when the file ``gate`` exists."""
    if "began" in row:
        announce(row["began"])
    while "gate" in row and not Path(row["gate"]).exists():
        time.sleep(0.005)
    return [row["id"]]


def announce(path: str) -> None:
    """Write the process id; the file is there whole, or not at all."""
    mine = Path(f"{path}.{os.getpid()}")
    mine.write_text(str(os.getpid()), encoding="ascii")
    mine.rename(path)


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


def stuck_in_c(row: Row) -> list[int]:
    """Announces itself in ``began``, then never leaves C code that holds the GIL: no thread, no handler can run."""
    announce(row["began"])
    ctypes.PyDLL(None).sleep(3600)
    return [row["id"]]


def stuck_in_c_and_orphaned(row: Row) -> list[int]:
    """The same, and the kernel no longer kills it with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    return stuck_in_c(row)


def multiplies(row: Row) -> list[int]:
    """Announces itself, then works out a power for hours: C code that holds the GIL."""
    announce(row["began"])
    pow(7, 1 << 4_000_000, (1 << 400_000) - 1)
    return [row["id"]]


def keeps_a_thread(row: Row) -> list[int]:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return [row["id"]]


def meddles(row: Row) -> dict[str, Any]:
    """Changes all that belongs to the process: its folder, its environment, what signals do; and has a child."""
    os.chdir("/")
    os.environ["MEDDLED"] = "yes"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return tells_who(row)


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


class Opening:
    """A description whose ``open()`` does ``what`` it is told, or goes wrong so."""

    def __init__(self, what: str = "well", folder: str = "", times: int = 0) -> None:
        self.what = what
        self.folder = folder
        self.times = times

    def resolve(self) -> Opening:
        return self

    def fingerprints(self) -> dict[str, str]:
        return {"tokenize_fn": f"Opening {self.what}"}

    def settings(self) -> dict[str, Any]:
        return {"what": self.what, "folder": self.folder, "times": self.times}

    def open(self) -> Any:
        from asyncdata.tokenization.user_function import FunctionTokenizer

        act = _OPENINGS.get(self.what)
        return FunctionTokenizer((None if act is None else act(self)) or as_told)

    def number_of_this(self, name: str) -> int:
        """How many there were in the folder, with this one."""
        Path(self.folder, f"{name} {os.getpid()} {time.monotonic_ns()}").touch()
        return len(list(Path(self.folder).glob(f"{name} *")))


def _raises(error: BaseException) -> Any:
    raise error


def _dies(opening: Opening) -> None:
    if opening.number_of_this("start") <= opening.times:
        print("what I wanted to say", flush=True)  # noqa: T201 - this is what is tested
        os._exit(5)


def _waits(opening: Opening) -> None:
    while not Path(opening.folder, "open").exists():
        time.sleep(0.005)


def _is_counted(opening: Opening) -> None:
    opening.number_of_this("start")
    if opening.what == "keeps a file open":
        _kept.append(Path(__file__).open("rb"))
    if opening.what == "lingers":
        threading.Thread(target=time.sleep, args=(3600,)).start()


def _prints_without_a_newline(_: Opening) -> None:
    sys.stdout.write("half a line of Python's ")
    ctypes.CDLL(None).printf(b"half a line of C's ")


def _leaves_no_room_for_a_process(_: Opening) -> None:
    os.fork = lambda: _raises(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))


def _answers_everywhere(_: Opening) -> None:
    """To every socket of the process that opens it, so that the true answers come too late."""
    from asyncdata.core.messages import frame
    from asyncdata.workers.base import Loaded

    _write_to_every_socket(bytes(frame(0, Loaded(""))))


def _rolls_dice(_: Opening) -> Any:
    """Says what the generators give that everybody uses."""
    import random

    import numpy as np

    np.random.random()  # or its generator is not made before the fork, but by each worker

    def rolls(row: Row) -> dict[str, Any]:
        return {**tells_who(row), "python": random.random(), "numpy": float(np.random.random())}

    return rolls


def _shifts(opening: Opening) -> Any:
    """Adds to every id what a file says that no fingerprint knows of."""
    path = Path(opening.folder)
    shift = int(path.read_text(encoding="ascii")) if path.exists() else 0
    return lambda row: [row["id"] + shift]


def _shifts_once_let_in(opening: Opening) -> Any:
    """The same with a file in a folder. The second one of all processes waits after it has read it."""
    path = Path(opening.folder, "told")
    shift = int(path.read_text(encoding="ascii"))
    if opening.number_of_this("start") == 2:
        _waits(opening)
    return lambda row: [row["id"] + shift]


_OPENINGS: dict[str, Any] = {
    "raises": lambda _: _raises(FileNotFoundError("no tokenizer.json to be seen")),
    "exits": lambda _: _raises(SystemExit("not today")),
    "dies": _dies,
    "waits": _waits,
    "is counted": _is_counted,
    "lingers": _is_counted,
    "keeps a file open": _is_counted,
    "prints without a newline": _prints_without_a_newline,
    "leaves no room": _leaves_no_room_for_a_process,
    "answers everywhere": _answers_everywhere,
    "dice": _rolls_dice,
    "shifts": _shifts,
    "shifts once let in": _shifts_once_let_in,
}

Shifted = partial(Opening, "shifts")


class ReadsThenEncodes(Opening):
    """Reads row by row, and tells so; then encodes all at once, and dies or hangs if the row with id 13 is there."""

    def open(self) -> Any:
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


class RunsShort(Opening):
    """At row 13, the first ``times`` times, the system has no more of ``what``. ``folder`` has a file for each time.

    It is raised, not provoked: inline, a limit would be that of the test's own process, and of all its threads.
    """

    def open(self) -> Any:
        from asyncdata.tokenization.user_function import FunctionTokenizer

        return FunctionTokenizer(self._run)

    def _run(self, row: Row) -> list[int]:
        if row["id"] == 13 and self.number_of_this("try") <= self.times:
            raise _SHORTAGES[self.what]()
        return [row["id"]]


def _no_disk() -> Any:
    Path("/dev/full").write_bytes(b"x")


def _no_disk_and_another_error() -> Any:
    try:
        _no_disk()
    except OSError as error:
        raise ValueError("the helper file is not to be had") from error


def _abort() -> Any:
    sys.stderr.write("memory allocation of 8589934592 bytes failed\n")
    sys.stderr.flush()
    os.abort()


PanicException = type("PanicException", (BaseException,), {})
_PANIC = 'called unwrap(): Os { code: 11, kind: WouldBlock, message: "Resource temporarily unavailable" }'
_SHORTAGES: dict[str, Any] = {
    "memory": lambda: bytearray(1 << 62),
    "threads": lambda: RuntimeError("can't start new thread"),
    "files": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE), __file__),
    "disk": _no_disk,
    "disk, and another error": _no_disk_and_another_error,
    "processes": lambda: ExceptionGroup(
        "two helpers", [BlockingIOError(errno.EAGAIN, "no"), OSError(errno.ENOMEM, "no")]
    ),
    "a panic": lambda: PanicException(_PANIC),
    "an abort": _abort,
}


STOP = 9
ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 5}


class Rendered(NamedTuple):
    token_ids: list[int]
    sampled_mask: list[bool]
    message_indices: list[int]


class Characters:
    """``offset`` moves all characters; with ``ends=False`` no message has an end."""

    def __init__(self, folder: str, *, offset: int = 0, ends: bool = True) -> None:
        self.folder, self._offset, self._ends = folder, offset, ends

    def render(self, messages, *, tools=None, add_generation_prompt=False):
        found: list[tuple[int, bool, int]] = [(100 + len(tool["name"]), False, -1) for tool in tools or ()]
        for number, message in enumerate(messages):
            is_sampled = message["role"] == "assistant"
            body = [ord(char) + self._offset for char in message["content"]] + [STOP] * self._ends
            found.append((ROLES[message["role"]], False, number))
            found += [(one, is_sampled, number) for one in body]
        if add_generation_prompt:
            found.append((ROLES["assistant"], False, -1))
        return Rendered(*map(list, zip(*found, strict=True)))

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]


class Maskless(Characters):
    """As a renderer of a template, which does not know what is sampled."""

    def render(self, *args: Any, **more: Any) -> Rendered:
        return super().render(*args, **more)._replace(sampled_mask=[])


characters, maskless = Characters, Maskless
