"""``asyncdata snapshot show`` describes a snapshot."""

from __future__ import annotations

from asyncdata import DataLoader, Mix, Outcomes
from asyncdata.cli.main import main
from tests.support.commands import INLINE
from tests.support.loading import write_rows
from tests.support.tokenize_fns import row_id


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


def test_snapshot_show_has_the_parts_of_a_mixture_and_what_is_remembered_of_each(tmp_path, run_json, capsys):
    for name in ("math", "code"):
        write_rows(tmp_path / f"{name}.jsonl", 20)
    mix = Mix({name: tmp_path / f"{name}.jsonl" for name in ("math", "code")}, quota=4)
    for path, where in ((None, "in the snapshot"), (str(tmp_path / "outcomes"), "of its file")):
        settings = {"num_workers": 0, "outcomes": Outcomes(path=path), "n_samples_per_prompt": 2}
        with DataLoader(mix, tokenize_fn=row_id, **settings) as loader:
            loader.report(loader.get_samples(6), [1.0] * 6)
            loader.save(tmp_path / "s")

        part = run_json("snapshot", "show", tmp_path / "s")["parts"]["math"]
        assert (part["num_samples"], part["epoch"], part["is_parked"]) == (3, 0, False)
        assert (part["outcomes"]["num_rows"], part["outcomes"]["num_scores"]) == (3, 6)
        assert main(["snapshot", "show", str(tmp_path / "s")]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("part math"))
        assert f"3 rows, 6 scores, {part['outcomes']['num_bytes']} bytes {where}" in line
        assert part["outcomes"]["digest"] in line


def test_snapshot_show_prints_the_memory_of_a_single_source(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 20)
    with DataLoader(rows, tokenize_fn=row_id, num_workers=0, outcomes=Outcomes(path=str(tmp_path / "o"))) as loader:
        loader.report(loader.get_next_batch(7), [1.0] * 7)
        loader.save(tmp_path / "s")

    assert main(["snapshot", "show", str(tmp_path / "s")]) == 0
    assert "outcomes     7 rows, 7 scores, " in capsys.readouterr().out


def test_snapshot_show_refuses_a_damaged_snapshot(tmp_path, capsys):
    path = tmp_path / "s"
    path.write_text("no snapshot")

    assert main(["snapshot", "show", str(path)]) == 1

    assert f"asyncdata: SnapshotError: AD602 {path} cannot be loaded" in capsys.readouterr().err
