"""What the tests of commands share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from asyncdata.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

from tests.support.commands import NUM_ROWS


@pytest.fixture(autouse=True)
def the_log_is_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def data(jsonl_file: Callable[..., Path]) -> str:
    rows = [{"input": f"question {number} " * (number % 7 + 1), "label": number} for number in range(NUM_ROWS)]
    return str(jsonl_file(rows, "data.jsonl"))


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that runs a command with --json and returns what it printed."""

    def run(*words: object, status: int = 0) -> Any:
        assert main([*map(str, words), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run
