"""A loader that is printed says what it reads and where it is."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader
from asyncdata.loader.base import BaseLoader

if TYPE_CHECKING:
    from pathlib import Path


def tokens(row: dict[str, Any]) -> list[int]:
    return [row["n"], 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a<b>.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"n": 1}\n{"n": 2}\n')
    return tmp_path


def test_a_loader_names_its_source_and_its_position(folder: Path) -> None:
    with DataLoader(str(folder), tokenize_fn=tokens, num_workers=0, buffer_size=8) as loader:
        loader.get_next_batch(3)

        assert re.fullmatch(
            rf"<DataLoader source: {re.escape(str(folder))}/a<b>.jsonl and 1 more files, size: 0.0 MB, "
            r"position: 0:0:3, "
            r"delivered: 3 samples, 6 tokens, dropped: 0 rows, ready: \d+ of 8 samples, waited: [\d.]+ s in \d+ calls, "
            r"workers: 1>",
            repr(loader),
        )

    assert repr(loader).endswith("closed: the loader was closed at the end of its `with`>")


def test_a_notebook_shows_a_table_and_no_markup_of_a_name(folder: Path) -> None:
    with DataLoader(str(folder / "a<b>.jsonl"), tokenize_fn=tokens, num_workers=0) as loader:
        table = loader._repr_html_()

    assert "<caption>DataLoader</caption>" in table
    assert "a&lt;b&gt;.jsonl" in table
    assert "<b>" not in table


def test_a_printed_loader_does_not_show_what_gives_access_to_a_store(folder: Path) -> None:
    (folder / "d.jsonl?X-Amz-Signature=5EC3E7").write_text('{"n": 1}\n')
    with DataLoader(str(folder / "d.jsonl?X-Amz-Signature=5EC3E7"), tokenize_fn=tokens, num_workers=0) as loader:
        shown = repr(loader) + loader._repr_html_()

    assert "d.jsonl" in shown
    assert "5EC3E7" not in shown


def test_a_loader_whose_constructor_failed_can_be_printed(tmp_path: Path) -> None:
    loader = DataLoader.__new__(DataLoader)

    with pytest.raises(ConfigError):
        BaseLoader.__init__(loader, str(tmp_path / "a.jsonl"), tokenize_fn=tokens, num_workers=-1)

    assert repr(loader) == "<DataLoader closed: the loader's constructor failed>"


def test_a_forked_child_can_print_it(folder: Path) -> None:
    with DataLoader(str(folder), tokenize_fn=tokens, num_workers=0) as loader:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if "the process that forked this one" in repr(loader) else 1)

        assert os.waitpid(pid, 0)[1] == 0
