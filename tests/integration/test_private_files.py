"""Whatever is kept of a run is its owner's alone, and lies where it was asked to."""

from __future__ import annotations

import os
import stat

import pytest

from asyncdata import DataLoader
from asyncdata.errors import ConfigError, SnapshotError
from tests.support.bad_inputs import GOOD, prompts, with_bad


@pytest.fixture
def without_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(with_bad(b"{"))
    return str(path)


def run(data, folder, **knobs):
    """One epoch, with a bad row that is put aside, and a snapshot."""
    settings = {"num_workers": 0, "timeout_s": 240, "cache": {"folder": str(folder / "cache")}, **knobs}
    settings["bad_rows"] = {"policy": "quarantine", "path": str(folder / "quarantine.jsonl")}
    with DataLoader(data, tokenize_fn=prompts(), **settings) as loader:
        loader.get_next_batch(2 * len(GOOD))
        loader.save(folder / "run.snapshot")


@pytest.mark.usefixtures("without_umask")
@pytest.mark.parametrize("shuffle", ["full", True])
def test_no_file_of_a_run_can_be_read_by_others(data, tmp_path, shuffle):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)

    run(data, folder, shuffle=shuffle)

    files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    assert {"run.snapshot", "quarantine.jsonl"} <= {os.path.basename(path) for path in files}
    assert len(files) >= (3 if shuffle == "full" else 2)
    assert [path for path in files if stat.S_IMODE(os.stat(path).st_mode) != 0o600] == []
    leaves = [place for place, folders, names in os.walk(folder) if names]
    assert [path for path in leaves if stat.S_IMODE(os.stat(path).st_mode) != 0o700] == []


@pytest.mark.parametrize(
    ("name", "error"), [("quarantine.jsonl", ConfigError), ("run.snapshot", SnapshotError)], ids=str
)
def test_a_link_in_the_place_of_a_file_is_not_followed(data, tmp_path, name, error):
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("not ours", encoding="ascii")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(error, match="AD60[15] "):
        run(data, folder)
    assert elsewhere.read_text(encoding="ascii") == "not ours"
