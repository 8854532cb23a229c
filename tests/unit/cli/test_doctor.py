"""``asyncdata doctor`` says what the machine has, and what of it fails."""

import json
import os

from tests.support.parts import main


def doctor(capsys, *data: object) -> tuple[int, dict[str, str]]:
    status = main(["doctor", "--json", *map(str, data)])
    return status, json.loads(capsys.readouterr().out)


def test_workers_start_and_data_is_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' * 5)

    status, found = doctor(capsys, path)

    assert status == 0
    assert "64 rows are there" in found["workers"]
    assert "0 proofs" in found["cache"]
    assert found[str(path)] == "1 files, 0.0 MB"
    assert f"of {os.cpu_count()}" in found["cpus"]
    assert "msgspec " in found["packages"]


def test_what_fails_is_named_and_is_the_exit_status(capsys, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))

    status, found = doctor(capsys, tmp_path / "missing.jsonl")

    assert status == 1
    assert found["cache"].startswith("FAILED: ")
    assert found[str(tmp_path / "missing.jsonl")].startswith("FAILED: AD304 cannot read")
