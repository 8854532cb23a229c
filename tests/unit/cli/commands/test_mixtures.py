"""``--mix``: a mixture in a file is run, resumed and ordered as a loader delivers it."""

from __future__ import annotations

import json

import pytest

from asyncdata import DataLoader, RowFn
from asyncdata.cli.main import main
from asyncdata.loader.mix_file import mix_of_file

FN = "tests.support.tokenize_fns:id_and_text"


@pytest.fixture
def mix(tmp_path):
    for name, number in (("a", 50), ("b", 40)):
        rows = [json.dumps({"id": n, "pad": name * (n % 3)}) + "\n" for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    (tmp_path / "mix.toml").write_text('quota = 4\n[parts]\na = {source = "a.jsonl", weight = 3}\nb = "b.jsonl"\n')
    return str(tmp_path / "mix.toml")


def test_the_order_is_that_of_the_loader_with_the_names_of_the_parts(mix, capsys):
    assert main(["order", "--mix", mix, "--num", "30", "--from", "5", "--json", "--window-blocks", "7"]) == 0

    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with DataLoader(mix_of_file(mix), tokenize_fn=RowFn(), num_workers=0, shuffle={"window_blocks": 7}) as loader:
        wanted = loader.get_next_batch(35)[5:]
    assert [(row["source"], row["byte_offset"]) for row in found] == [
        (sample.source_name, sample.source.byte_offset) for sample in wanted
    ]


def test_a_run_is_resumed(mix, tmp_path, capsys):
    def run(*words):
        command = ["run", "--mix", mix, "--tokenize-fn", FN, "--num-workers", "0", "--batch-size", "10", "--json"]
        assert main([*command, *words]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    snapshot = str(tmp_path / "snapshot")
    run("--num-batches", "3", "--snapshot", snapshot, "--record", str(tmp_path / "two"))
    run("--num-batches", "8", "--snapshot", snapshot, "--record", str(tmp_path / "two"), "--resume")
    run("--num-batches", "8", "--record", str(tmp_path / "one"))

    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


def test_data_and_a_mixture_exclude_each_other(mix, capsys):
    with pytest.raises(SystemExit):
        main(["run", "rows.jsonl", "--mix", mix, "--tokenize-fn", FN])

    assert "name DATA, or a mixture by --mix FILE" in capsys.readouterr().err


def test_what_needs_a_window_is_refused(mix, capsys):
    assert main(["order", "--mix", mix, "--window", "3"]) == 1
    assert "--window is not for --mix" in capsys.readouterr().err
