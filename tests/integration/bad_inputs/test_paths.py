"""Paths that cannot be: refused as what they are, wherever a path is taken."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdata import ConfigError, DataLoader, JsonArraySource, ParquetSource, SnapshotError, SourceError
from asyncdata.delivery.quarantine import read_quarantine
from tests.support.tokenize_fns import row_id


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n' * 20)
    return str(path)


def open_loader(source: Any, **knobs: Any) -> DataLoader:
    return DataLoader(source, tokenize_fn=row_id, num_workers=0, timeout_s=240, **knobs)


@pytest.mark.parametrize("kind", [str, lambda path: [path], ParquetSource, JsonArraySource])
def test_data_at_a_path_with_a_nul_are_named(kind):
    with pytest.raises(SourceError, match=r"^AD304 cannot read 'a\\x00b': it has a NUL in it"):
        open_loader(kind("a\0b"))


@pytest.mark.parametrize(("knob", "setting"), [("bad_rows", "path"), ("cache", "folder"), ("cache", "tokens")])
def test_a_setting_with_a_nul_in_its_path_is_named(data, knob, setting):
    with pytest.raises(ConfigError, match=rf"^(BadRows|Cache): {setting}='a\\x00b' has a NUL in it"):
        open_loader(data, **{knob: {setting: "a\0b"}})


def test_a_snapshot_is_not_written_to_or_read_from_a_path_with_a_nul(data):
    with open_loader(data) as loader:
        loader.get_next_batch(1)
        with pytest.raises(SnapshotError, match=r"^AD601 '.*a\\x00b' was not written: it has a NUL in it"):
            loader.save("a\0b")
        with pytest.raises(SnapshotError, match=r"^AD602 '.*a\\x00b' cannot be read: it has a NUL in it"):
            loader.restore("a\0b")
        loader.get_next_batch(1)


def test_a_quarantine_at_a_path_with_a_nul_is_named():
    with pytest.raises(ConfigError, match=r"^AD605 cannot read the quarantine 'a\\x00b': embedded null byte"):
        read_quarantine("a\0b")
