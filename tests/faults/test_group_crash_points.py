"""Wherever a save of slime's data source is killed or refused by the disk, the old checkpoint or the new one is there,
with all its groups, also those that have files of their own; and nothing stays that no checkpoint names.
"""

import errno
import itertools
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import SnapshotError
from asyncdata.integrations.slime import checkpoint, torch_data
from asyncdata.integrations.slime.rollout_ledger import Entry
from tests.faults import test_snapshot_crash_points as crashes
from tests.support.figures import record
from tests.support.parts import Moment, Numbering

pytestmark = [pytest.mark.faults, pytest.mark.thorough]


def moment(number):
    """A buffer of three groups: one that is always there, one of this checkpoint and the one before, one of its own."""
    groups = [
        [{"response": name * 40, "tokens": [1, 2]}] for name in ("always", f"{number // 2} pair", f"{number} own")
    ]
    entries = tuple(Entry([object()], checkpoint.GroupRecord(group)) for group in groups)
    return Moment(Numbering(sample_group_index=number), entries, None, {})


def write(folder, number):
    checkpoint.write(folder, 0, moment(number), kind="none", samples_per_group=1, drops={})


def path_of(folder, end=""):
    return f"{folder}/rollout/global_dataset_state_dict_0.asyncdata{end}"


def number_of(folder, end=""):
    """The number of a checkpoint, whose groups are whole; None if there is none. What is damaged raises."""
    if not os.path.exists(path_of(folder, end)):
        return None

    snapshot, fields = snapshots.load_fields(path_of(folder, end))
    number = fields["slime"]["numbering"]["sample_group_index"]
    store = checkpoint.GroupStore(folder)
    found = [store.open(group).samples for group in snapshot.buffer]
    assert found == [entry.record.samples for entry in moment(number).entries]
    return number


def files(folder):
    with suppress(FileNotFoundError):
        return set(os.listdir(f"{folder}/rollout/asyncdata_groups"))
    return set()


def named_files(folder):
    paths = [path_of(folder, end) for end in ("", ".1", ".2") if os.path.exists(path_of(folder, end))]
    groups = [group for path in paths for group in snapshots.load(path).buffer]
    return {f"{group[0]['__samples__']['file']}.group" for group in groups}


def verify(folder, new):
    """The old one or the new one is whole, and so are those before it; the next save leaves no file too many."""
    previous = new - 1 if new else None
    found = number_of(folder)
    assert found in (previous, new)
    ages = [number for number in (found, number_of(folder, ".1"), number_of(folder, ".2")) if number is not None]
    assert ages == sorted(ages, reverse=True)
    write(folder, new + 1)
    assert number_of(folder) == new + 1
    left_over = {name for name in files(folder) if name.endswith(".tmp")}  # an hour later they go
    assert files(folder) - left_over == named_files(folder)


def fresh(folder, num_older):
    return crashes.fresh(folder, num_older, write)


def calls_of(folder, num_older):
    path = fresh(folder, num_older)
    return crashes.calls_of(partial(write, path, num_older), links=True)


def die_everywhere(folder):
    """Every call x moment x number of older checkpoints, each from a fresh start."""
    num_deaths = 0
    for num_older in (0, 1, 3):
        for place, name in enumerate(calls_of(folder, num_older), 1):
            for when in crashes.MOMENTS if name == "write" else ("before", "after"):
                path = fresh(folder, num_older)
                num_deaths += crashes.killed_at(partial(write, path, num_older), place, when, links=True)
                verify(path, num_older)
    return num_deaths


def refused_everywhere(folder):
    """Each call is refused once, by a full disk and by a broken one."""
    num_refusals = 0
    for code, num_older in itertools.product((errno.ENOSPC, errno.EIO), (0, 2)):
        for place in range(1, len(calls_of(folder, num_older)) + 1):
            path = fresh(folder, num_older)

            def act(number, name, now, place=place, code=code):
                if (number, now) == (place, "before") and name not in ("unlink", "close"):
                    raise OSError(code, os.strerror(code))

            undo = crashes.intercept(act, links=True)
            try:
                write(path, num_older)
            except SnapshotError as error:
                assert str(error).startswith("AD601 "), error
                num_refusals += 1
            finally:
                undo()
            assert {name for name in files(path) if name.endswith(".tmp")} == set()
            verify(path, num_older)
    return num_refusals


WHAT = {"everywhere": die_everywhere, "refused": refused_everywhere}


@pytest.mark.parametrize(("what", "at_least"), [("everywhere", 300), ("refused", 60)])
def test_the_old_checkpoint_or_the_new_one_is_there_with_all_its_groups(tmp_path, what, at_least):
    command = [sys.executable, __file__, str(tmp_path / "work"), what]  # this process has threads, and must not fork
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    if what != "refused":
        record("R4", f"groups, {what}", deaths=found, unreadable=0, too_old=0)
    assert found >= at_least


if __name__ == "__main__":
    torch_data.is_available = lambda: False
    checkpoint.FILE_BYTES = 0  # each group has a file, however small
    crashes.PIECE_BYTES = 300
    sys.stdout.write(json.dumps(WHAT[sys.argv[2]](Path(sys.argv[1]))))
