"""The programs of the page about dashboards run, and log numbers only. The packages are stood in for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncdata import DataLoader, RowFn

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "send-numbers-to-a-dashboard.md"
MAX_LINES = 7


def program_of(name: str) -> str:
    found = re.search(rf"^## {name}\n\n```py\n(.*?)```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_program_of_the_page_logs_a_number_for_each_statistic(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    logged: list[dict[str, Any]] = []
    package = ModuleType(name)
    vars(package)["log"] = lambda values, **_: logged.append(values)
    vars(package)["init"] = lambda project: SimpleNamespace(log=vars(package)["log"])
    monkeypatch.setitem(sys.modules, name, package)

    with DataLoader(path, tokenize_fn=RowFn(), num_workers=0, batch_size=5) as loader:
        exec(program_of(name), {"loader": loader, "train": lambda batch: len(batch) / 2})  # noqa: S102

    assert [(values["loss"], values["asyncdata_samples_total"]) for values in logged] == [(2.5, 5), (2.5, 10)]
    assert [key for key, value in logged[-1].items() if not isinstance(value, int | float | None)] == []
    assert len(program_of(name).splitlines()) <= MAX_LINES
