"""The file: a state's prefix is found wherever it is now, and what is wrong with it is said."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from asyncdata.delivery.outcomes.file import OutcomeFile
from asyncdata.delivery.outcomes.memory import Record
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError

FIRST, SECOND, THIRD = (Record(b"E", text * 5) for text in (b"first", b"second", b"third"))


@pytest.fixture
def opened(tmp_path):
    """Opens the file; all are closed at the end."""
    files: list[OutcomeFile] = []

    def open_file(name: str = "outcomes") -> OutcomeFile:
        files.append(OutcomeFile(str(tmp_path / name)))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def state(file):
    return file.num_bytes, file.digest


def written(file, *records):
    file.append(records)
    return state(file)


def restored(file, at):
    found = file.find(*at)
    file.continue_after(found.path, found.data)
    return found.records


def test_no_file_is_made_before_there_is_a_record(opened, tmp_path):
    file = opened()

    assert written(file) == (0, "")
    assert restored(file, (0, "")) == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_appended_after_an_earlier_state_replaces_the_later_records_whole_or_cut_at_any_byte(opened, tmp_path):
    file = opened()
    first, second = written(file, FIRST), written(file, SECOND)
    file.close()
    whole = (tmp_path / "outcomes").read_bytes()

    for num_bytes in range(first[0], len(whole) + 1):
        (tmp_path / "outcomes").write_bytes(whole[:num_bytes])
        resumed = opened()
        assert restored(resumed, first) == [FIRST]
        if num_bytes == len(whole):
            assert opened().find(*second).records == [FIRST, SECOND], "reading alone cuts nothing off"
        third = written(resumed, THIRD)
        resumed.close()
        assert opened().find(*third).records == [FIRST, THIRD]
    with pytest.raises(SnapshotMismatchError, match="AD606.*resumed from an earlier snapshot"):
        opened().find(*second)


def test_every_damaged_byte_is_noticed_and_its_record_is_named(opened, tmp_path):
    file = opened()
    written(file, FIRST)
    at = written(file, SECOND)
    file.close()
    whole = (tmp_path / "outcomes").read_bytes()

    for place in range(len(whole)):
        (tmp_path / "outcomes").write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(SnapshotMismatchError, match=r'AD606(?s:.*)allow_changed=\{"outcomes"\}') as refused:
            opened().find(*at)
    assert f"damaged in the record at byte {len(whole) - 39}" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (os.unlink, "there is no such file"),
        (lambda path: os.truncate(path, 20), "has only 20 bytes"),
        (lambda path: Path(path).write_bytes(b"x" * 100), "is no outcome memory"),
    ],
)
def test_a_file_that_is_missing_cut_off_or_foreign_is_said_so(opened, tmp_path, change, reason):
    file = opened()
    at = written(file, FIRST)
    file.close()
    for num_bytes in (1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1):
        with pytest.raises(SnapshotMismatchError, match=rf"^AD606 .*{num_bytes} bytes .* has only \d+ bytes"):
            opened().find(num_bytes, "00")
    change(tmp_path / "outcomes")

    with pytest.raises(SnapshotMismatchError, match=f"AD606.*{reason}"):
        opened().find(*at)


def test_a_file_that_has_grown_is_replaced_and_older_states_stay(opened, tmp_path):
    file = opened()
    before = written(file, FIRST, SECOND)
    file.replace(THIRD)
    after = written(file, FIRST)
    file.close()

    assert opened().find(*before).records == [FIRST, SECOND]
    assert opened().find(*after).records == [THIRD, FIRST]
    resumed, late = opened(), opened()
    restored(resumed, before)
    restored(late, before)
    again = written(resumed, THIRD)
    resumed.close()
    assert opened().find(*again).records == [FIRST, SECOND, THIRD]
    assert opened().find(*after).records == [THIRD, FIRST], "it is beside the new one now"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outcomes", "outcomes.1", "outcomes.2", "outcomes.lock"]
    shutil.copy(tmp_path / "outcomes.1", tmp_path / "outcomes.2")
    with pytest.raises(SnapshotError, match="AD601.*changed since it was read"):
        late.append([THIRD])


def test_two_loaders_cannot_write_the_same_file_and_a_folder_that_is_missing_is_said_at_the_start(opened):
    with pytest.raises(ConfigError, match="AD607.*absent"):
        opened("absent/outcomes")
    one, other = opened(), opened()
    at = written(one, FIRST)

    with pytest.raises(ConfigError, match="AD607.*in use by another loader"):
        other.append([SECOND])
    one.close()
    restored(other, at)
    written(other, SECOND)


def test_an_append_that_fails_half_way_is_repeated_in_its_place(opened, monkeypatch):
    file = opened()
    written(file, FIRST)
    write = os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        write(fd, bytes(data[:7]), offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SnapshotError, match="AD601.*No space left"):
        file.append([SECOND])
    monkeypatch.setattr(os, "pwrite", write)
    at = written(file, THIRD)
    file.close()

    assert opened().find(*at).records == [FIRST, THIRD]


def test_an_append_is_written_to_its_last_byte_and_on_the_disk_before_a_state_names_it(opened, monkeypatch):
    file, write, synced = opened(), os.pwrite, []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd)))
    written(file, FIRST)
    assert any(stat.S_ISDIR(one.st_mode) for one in synced), "and its name is in the folder"
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, bytes(data[:3]), offset))

    at = written(file, SECOND, THIRD)

    assert synced[-1].st_size == at[0] > 0
    assert opened().find(*at).records == [FIRST, SECOND, THIRD]
