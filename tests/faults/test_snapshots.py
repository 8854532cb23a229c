"""Wherever a save dies or is refused, the old or new one is there; what is damaged is refused; a restore is quick."""

import errno
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader, Shuffle
from asyncdata.checkpoint.snapshot import load, load_fields, save
from asyncdata.errors import SnapshotError
from asyncdata.integrations.slime import checkpoint, torch_data
from asyncdata.integrations.slime.rollout_ledger import Entry
from tests.faults.support import damage
from tests.faults.support.streaming import entry
from tests.support.examples import each_value
from tests.support.faults import Program, num_rounds, record
from tests.support.loading import NEVER_S, in_batches
from tests.support.parts import Moment, Numbering, Snapshot, change

pytestmark = [pytest.mark.faults, pytest.mark.thorough, pytest.mark.timeout(0)]

CALLS = ("open", "write", "fsync", "pread", "close", "link", "replace", "unlink")


class Snapshots:
    """What ``save`` writes into a folder."""

    numbers_older: Iterable[int] = range(4)
    links = (True, False)
    piece_bytes = 14  # of a write: a larger one is many places to die in

    def snapshot(self, number: int) -> Snapshot:
        return Snapshot(position=(number, 0, 0), buffer=[[{"response": f"{number}" * 200}]])

    def write(self, folder: Path, number: int) -> None:
        save(f"{folder}/s", self.snapshot(number))

    def number_of(self, folder: Path, end: str = "") -> int | None:
        """Which one the file is; None if there is none. A damaged one is an error."""
        if not os.path.exists(f"{folder}/s{end}"):
            return None

        found = load(f"{folder}/s{end}")
        assert found == self.snapshot(found.position[0])
        return found.position[0]

    def files(self, folder: Path) -> tuple[set[str], set[str]]:
        """Files of groups, and those of them that are named."""
        return set(), set()


class Checkpoints(Snapshots):
    """Those of slime's data source, whose groups have files of their own."""

    numbers_older = 0, 1, 3
    links = (True,)
    piece_bytes = 300

    def moment(self, number: int) -> Moment:
        """Groups that are always there, of this checkpoint and the one before, and of this one."""
        names = "always", f"{number // 2} pair", f"{number} own"
        groups = [[{"response": name * 40, "tokens": [1, 2]}] for name in names]
        entries = tuple(Entry([object()], checkpoint.GroupRecord(group)) for group in groups)
        return Moment(Numbering(sample_group_index=number), entries, None, {})

    def write(self, folder: Path, number: int) -> None:
        checkpoint.write(str(folder), 0, self.moment(number), kind="none", samples_per_group=1, drops={})

    def path_of(self, folder: Path, end: str = "") -> str:
        return f"{folder}/rollout/global_dataset_state_dict_0.asyncdata{end}"

    def number_of(self, folder: Path, end: str = "") -> int | None:
        if not os.path.exists(self.path_of(folder, end)):
            return None

        snapshot, fields = load_fields(self.path_of(folder, end))
        number = fields["slime"]["numbering"]["sample_group_index"]
        store = checkpoint.GroupStore(str(folder))
        found = [store.open(group).samples for group in snapshot.buffer]
        assert found == [entry.record.samples for entry in self.moment(number).entries]
        return number

    def files(self, folder: Path) -> tuple[set[str], set[str]]:
        paths = [path for end in ("", ".1", ".2") if os.path.exists(path := self.path_of(folder, end))]
        groups = [group for path in paths for group in load(path).buffer]
        named = {f"{group[0]['__samples__']['file']}.group" for group in groups}
        return {path.name for path in Path(folder).glob("rollout/asyncdata_groups/*")}, named


KINDS: dict[str, Snapshots] = {"each call": Snapshots(), "groups of slime": Checkpoints()}


def intercept(kind: Snapshots, act: Callable[[int, str, str], object], *, links: bool) -> Callable[[], object]:
    """Call ``act`` with the number of the call, its name and the moment, around each call to the system; a way back."""
    real = {name: getattr(os, name) for name in CALLS}
    numbers, half = itertools.count(1), kind.piece_bytes // 2

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            act(number, name, "before")
            if name == "link" and not links:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            if name == "write":
                real["write"](args[0], args[1][:half])
                act(number, name, "half way")
                result = half + real["write"](args[0], args[1][half : kind.piece_bytes])
                result = min(result, len(args[1]))
            else:
                result = real[name](*args, **kwargs)
            act(number, name, "after")
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))
    return lambda: [setattr(os, name, function) for name, function in real.items()] and None


def killed_at(kind: Snapshots, write: Callable[[], object], place: int, moment: str, *, links: bool) -> bool:
    """Save in a process that ends without a word at that call; False if there is no such call."""
    child = os.fork()
    if child == 0:
        intercept(kind, lambda number, _, now: (number, now) == (place, moment) and os._exit(1), links=links)
        write()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def fresh(kind: Snapshots, folder: Path, num_older: int) -> None:
    """A folder with that many checkpoints, of those that are kept; made once and copied."""
    template = folder.parent / f"{folder.name}.{num_older}"
    if not template.exists():
        template.mkdir()
        for number in range(num_older):
            kind.write(template, number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)


def calls_of(kind: Snapshots, folder: Path, num_older: int, *, links: bool) -> list[str]:
    """The calls a save makes that nothing happens to."""
    names: list[str] = []
    fresh(kind, folder, num_older)
    undo = intercept(kind, lambda _, name, now: now == "before" and names.append(name), links=links)
    kind.write(folder, num_older)
    undo()
    return names


def verify(kind: Snapshots, folder: Path, new: int, *, links: bool) -> int:
    """1 if only the one before was whole, as may be without hard links. The next save leaves no file too many."""
    found, *older = [kind.number_of(folder, end) for end in ("", ".1", ".2")]
    previous = new - 1 if new else None
    is_gap = found is None and previous is not None
    if is_gap:
        assert not links
        assert older[0] == previous
    else:
        assert found in (previous, new)
        ages = [number for number in (found, *older) if number is not None]
        assert ages == sorted(ages, reverse=True)
        assert found != new or older[0] == previous
    kind.write(folder, 9)  # over whatever is left
    assert (kind.number_of(folder), kind.number_of(folder, ".1")) in ((9, found), (9, previous))
    files, named = kind.files(folder)
    assert {name for name in files if not name.endswith(".tmp")} == named  # these go an hour later
    return int(is_gap)


def die_everywhere(kind: Snapshots, folder: Path) -> dict[str, int]:
    """Every call x moment x number of older ones x hard links or none, each from a fresh start."""
    num_deaths = num_gaps = 0
    for links, num_older in itertools.product(kind.links, kind.numbers_older):
        for place, name in enumerate(calls_of(kind, folder, num_older, links=links), 1):
            for moment in ("before", "half way", "after") if name == "write" else ("before", "after"):
                fresh(kind, folder, num_older)
                num_deaths += killed_at(kind, partial(kind.write, folder, num_older), place, moment, links=links)
                num_gaps += verify(kind, folder, num_older, links=links)
    return {"deaths": num_deaths, "gaps": num_gaps}


@pytest.mark.parametrize(("name", "at_least"), [("each call", 1000), ("groups of slime", 300)])
def test_killed_at_any_call_the_old_or_the_new_one_is_there(tmp_path, name, at_least):
    with Program(__file__, str(tmp_path / "work"), name) as program:  # this process has threads, and must not fork
        found = json.loads(program.said(600).splitlines()[-1])

    record("R4", name, deaths=found["deaths"], unreadable=0, too_old=0)
    assert found["deaths"] >= at_least
    is_met = (False in KINDS[name].links) == (found["gaps"] > 0)
    assert is_met, "without hard links there is a moment of path.1 alone: this test must have met it"


def refused_everywhere(kind: Snapshots, folder: Path, num_older: int, error: BaseException, *, links: bool) -> int:
    """Each call is refused or interrupted once; how often the save said so."""
    num_refusals, moments = 0, ("before", "after") if isinstance(error, KeyboardInterrupt) else ("before",)
    total = len(calls_of(kind, folder, num_older, links=links))
    for fatal in itertools.product(range(1, total + 1), moments):
        fresh(kind, folder, num_older)

        def act(number: int, name: str, now: str, fatal: tuple[int, str] = fatal) -> None:
            # What cannot be tidied up stays; what is saved is whole all the same.
            if (number, now) == fatal and name not in ("unlink", "close"):
                raise error

        undo = intercept(kind, act, links=links)
        try:
            kind.write(folder, num_older)
        except (SnapshotError, KeyboardInterrupt) as raised:
            assert raised is error or str(raised).startswith("AD601 "), raised
            num_refusals += 1
        finally:
            undo()
        assert list(folder.rglob("*.tmp")) == []
        verify(kind, folder, num_older, links=links)
    return num_refusals


REFUSALS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)
FAULTS: dict[str, BaseException] = {errno.errorcode[code]: OSError(code, os.strerror(code)) for code in REFUSALS}
FAULTS["Ctrl-C"] = KeyboardInterrupt()


@pytest.mark.parametrize(("fault", "links"), each_value(FAULTS, [True, False]))
def test_refused_or_interrupted_at_any_call_the_old_or_the_new_one_is_there_and_nothing_half_written(
    tmp_path, fault, links
):
    assert refused_everywhere(KINDS["each call"], tmp_path / "work", 2, fault, links=links) > 12


@pytest.mark.parametrize("num_older", [0, 2])
def test_refused_at_any_call_the_old_checkpoint_of_slime_or_the_new_one_is_there_with_all_its_groups(
    tmp_path, monkeypatch, num_older
):
    change(monkeypatch, torch_is_there=lambda: False, bytes_of_a_group_in_a_file=0)
    for code in ("ENOSPC", "EIO"):
        kind = KINDS["groups of slime"]
        assert refused_everywhere(kind, tmp_path / code, num_older, FAULTS[code], links=True) > 14


# What is damaged

DAMAGED = num_rounds(quick=700, full=10_500, long=1_400_000)


def test_every_damaged_or_foreign_file_is_refused_and_no_code_of_theirs_runs(tmp_path):
    with Program.of("damage", {"folder": str(tmp_path), "number": DAMAGED, "seed": 1}) as program:
        found = json.loads(program.said(60 + DAMAGED / 20).splitlines()[-1])

    outcomes = found["outcomes"]
    accepted = sum(number for name, number in outcomes.items() if name.endswith(" accepted"))
    counts = {"files": DAMAGED, "accepted": accepted, "other_errors": outcomes.get("other error", 0)}
    record("R5", f"{len(damage.KINDS)} kinds", **counts, code_runs=found["code_runs"], peak_mb=found["peak_mb"])
    assert not found["others"], "\n".join(found["others"])
    assert sum(outcomes.values()) == DAMAGED
    assert accepted == 0
    assert found["code_runs"] == 0
    assert outcomes["SnapshotError"] > DAMAGED / 2


# How long it takes

NUM_ROWS = 200_000
FAR = 10_000_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("far") / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}, "pad": "{"x" * 40}"}}\n' for number in range(NUM_ROWS)))
    return path


def open_loader(path, **knobs):
    shuffle = Shuffle(block_bytes=16 << 10, window_blocks=32)
    return DataLoader(path, tokenize_fn=in_batches, shuffle=shuffle, num_workers=1, timeout_s=NEVER_S, **knobs)


def test_a_restore_at_ten_million_reads_one_window(path):
    """The state is that of a run of fifty epochs: made by setting the epoch, and stepping into the middle of it."""
    epoch = FAR // NUM_ROWS
    with open_loader(path) as loader:
        loader.set_epoch(epoch)
        loader.get_next_batch(NUM_ROWS // 2)
        state = json.dumps(loader.state_dict())
        expected = [entry(sample)[1:] for sample in loader.get_next_batch(100)]
    assert expected[0][0] == epoch

    took = []
    for _ in range(3):
        with open_loader(path) as loader:
            began = time.monotonic()
            loader.load_state_dict(json.loads(state))
            found = loader.get_next_batch(100)
            took.append(time.monotonic() - began)
        assert [entry(sample)[1:] for sample in found] == expected

    record("R12", "restore to the first batch", position=FAR + NUM_ROWS // 2, restore_s=statistics.median(took))


def test_a_snapshot_hardly_stops_the_trainer(path):
    pauses = []
    with open_loader(path, n_samples_per_prompt=8) as loader:
        loader.state_dict()  # the files' fingerprints are made once
        for _ in range(50):
            loader.get_samples(64)
            began = time.monotonic()
            loader.state_dict()
            pauses.append(1000 * (time.monotonic() - began))

    record("R12", "state_dict()", pause_ms=statistics.median(pauses))


if __name__ == "__main__":
    torch_data.is_available = lambda: False
    checkpoint.FILE_BYTES = 0  # each group has a file, however small
    sys.stdout.write(json.dumps(die_everywhere(KINDS[sys.argv[2]], Path(sys.argv[1]))))
