"""Wherever ``save`` is killed, interrupted or refused by the disk, the old snapshot or the new one is there, whole."""

import errno
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncdata.checkpoint.snapshot import load, save
from asyncdata.errors import SnapshotError
from tests.support.combinations import each_value
from tests.support.faults import Program
from tests.support.figures import record
from tests.support.parts import Snapshot

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

CALLS = ("open", "write", "fsync", "pread", "close", "link", "replace", "unlink")
PIECE_BYTES = 14  # of a write: a larger one is many places to die in
MOMENTS = ("before", "half way", "after")


def snapshot(number: int) -> Snapshot:
    return Snapshot(position=(number, 0, 0), buffer=[[{"response": f"{number}" * 200}]])


def number_of(path: str) -> int | None:
    """Which snapshot the file is; None if there is none. A damaged one is an error."""
    if not os.path.exists(path):
        return None

    found = load(path)
    assert found == snapshot(found.position[0])
    return found.position[0]


def intercept(act, *, links: bool):
    """Call ``act`` with the number of the call, its name and the moment, around each call to the system; a way back."""
    real = {name: getattr(os, name) for name in CALLS}
    numbers = itertools.count(1)

    def wrap(name: str):
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            act(number, name, "before")
            if name == "link" and not links:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            if name == "write":
                real["write"](args[0], args[1][: PIECE_BYTES // 2])
                act(number, name, "half way")
                result = PIECE_BYTES // 2 + real["write"](args[0], args[1][PIECE_BYTES // 2 : PIECE_BYTES])
                result = min(result, len(args[1]))
            else:
                result = real[name](*args, **kwargs)
            act(number, name, "after")
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    return lambda: [setattr(os, name, function) for name, function in real.items()] and None


def killed_at(write: Callable[[], object], place: int, moment: str, *, links: bool) -> bool:
    """Save in a process that ends without a word at that call; False if there is no such call."""
    child = os.fork()
    if child == 0:
        intercept(lambda number, _, now: (number, now) == (place, moment) and os._exit(1), links=links)
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def calls_of(write: Callable[[], object], *, links: bool) -> list[str]:
    """The calls a save makes that nothing happens to."""
    names: list[str] = []
    undo = intercept(lambda _, name, now: now == "before" and names.append(name), links=links)
    write()
    undo()
    return names


def fresh(folder: Path, num_older: int, write: Callable[[str, int], object]) -> str:
    """A folder with that many checkpoints, of those that are kept; made once and copied."""
    template = folder.parent / f"{folder.name}.{num_older}"
    if not template.exists():
        template.mkdir()
        for number in range(num_older):
            write(str(template), number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return str(folder)


def save_in(folder: str, number: int) -> None:
    save(f"{folder}/s", snapshot(number))


def die_everywhere(folder: Path) -> dict[str, int]:
    """Every call x moment x number of older snapshots x hard links or none, each from a fresh start."""
    num_deaths = num_gaps = 0
    for links, num_older in itertools.product((True, False), range(4)):
        path = f"{fresh(folder, num_older, save_in)}/s"
        write = partial(save, path, snapshot(num_older))
        for place, name in enumerate(calls_of(write, links=links), 1):
            for moment in MOMENTS if name == "write" else ("before", "after"):
                fresh(folder, num_older, save_in)
                num_deaths += killed_at(write, place, moment, links=links)
                num_gaps += verify(path, num_older, links=links)
                last = number_of(path)
                save(path, snapshot(9))  # over whatever the death has left
                assert (number_of(path), number_of(f"{path}.1")) in ((9, last), (9, num_older - 1))
    return {"deaths": num_deaths, "gaps": num_gaps}


def verify(path: str, new: int, *, links: bool) -> int:
    """1 if only ``path.1`` was whole, as may be without hard links."""
    found, older = number_of(path), [number_of(f"{path}.{place}") for place in (1, 2)]
    previous = new - 1 if new else None
    if found is None and previous is not None:
        assert not links
        assert older[0] == previous
        return 1

    assert found in (previous, new)
    ages = [number for number in (found, *older) if number is not None]
    assert ages == sorted(ages, reverse=True)
    assert found != new or older[0] == previous
    return 0


def test_killed_at_any_call_the_old_or_the_new_one_is_there(tmp_path):
    with Program(__file__, str(tmp_path / "work")) as program:  # this process has threads, and must not fork
        found = json.loads(program.said(600).splitlines()[-1])

    record("R4", "each call", deaths=found["deaths"], unreadable=0, too_old=0)
    assert found["deaths"] >= 1000
    assert found["gaps"] > 0, "without hard links there is a moment of path.1 alone: this test must have met it"


REFUSALS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)
FAULTS: dict[str, tuple[BaseException, Any]] = {
    **{errno.errorcode[code]: (OSError(code, os.strerror(code)), SnapshotError) for code in REFUSALS},
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize(("fault", "links"), each_value(FAULTS, [True, False]))
def test_refused_or_interrupted_at_any_call_the_old_or_the_new_one_is_there_and_nothing_half_written(
    tmp_path, fault, links
):
    error, raised = fault
    moments = ("before", "after") if raised is KeyboardInterrupt else ("before",)
    folder = tmp_path / "work"
    path = f"{fresh(folder, 2, save_in)}/s"
    total = len(calls_of(partial(save, path, snapshot(2)), links=links))
    for fatal in itertools.product(range(1, total + 1), moments):
        fresh(folder, 2, save_in)

        def act(number: int, name: str, now: str, fatal: tuple[int, str] = fatal) -> None:
            # What cannot be tidied up stays; the snapshot is whole all the same.
            if (number, now) == fatal and name not in ("unlink", "close"):
                raise error

        undo = intercept(act, links=links)
        try:
            save(path, snapshot(2))
        except raised:
            pass
        finally:
            undo()
        verify(path, 2, links=links)
        assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []
    assert total > 20


if __name__ == "__main__":
    sys.stdout.write(json.dumps(die_everywhere(Path(sys.argv[1]))))
