"""Which names a snapshot may have, in folders and in stores."""

from __future__ import annotations

import pytest

from asyncdata import DataLoader, SnapshotError


@pytest.mark.parametrize("path", ["s3://bucket/run/", "s3://bucket", "s3://bucket/", "run/", ""])
def test_a_folder_is_no_name_of_a_snapshot(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with DataLoader("rows.jsonl", tokenize_fn=lambda row: [1], num_workers=0) as loader:
        with pytest.raises(SnapshotError, match=rf"^AD601 .*names no file.* {path.rstrip('/')}/data\.state"):
            loader.save(path)
        with pytest.raises(SnapshotError, match=r"^AD602 .*names no file.*data\.state"):
            loader.restore(path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
