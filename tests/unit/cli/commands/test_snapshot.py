"""``asyncdata snapshot show`` describes a snapshot."""

from __future__ import annotations

from asyncdata.cli.main import main
from tests.support.commands import INLINE


def test_snapshot_show_describes_a_snapshot(data, tmp_path, run_json, capsys):
    snapshot = tmp_path / "s"
    run_json("run", data, *INLINE, "--num-batches", 2, "--snapshot", snapshot, "--max-length", 20)

    found = run_json("snapshot", "show", snapshot)
    assert main(["snapshot", "show", str(snapshot)]) == 0

    assert (found["path"], found["counters"]["num_samples"], found["order"]["seed"]) == (str(snapshot), 64, 42)
    out = capsys.readouterr().out
    assert f"position     0:0:{found['row']} comes next" in out
    assert "delivered    64 samples, " in out
    assert "dropped      max_length " in out
    assert "order        seed 42, " in out


def test_snapshot_show_refuses_a_damaged_snapshot(tmp_path, capsys):
    path = tmp_path / "s"
    path.write_text("no snapshot")

    assert main(["snapshot", "show", str(path)]) == 1

    assert f"asyncdata: SnapshotError: AD602 {path} cannot be loaded" in capsys.readouterr().err
