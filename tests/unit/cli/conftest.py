"""What the tests of commands share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Any]]:
    """A function that runs a command with --json, and returns the objects that it printed."""

    def run(*words: object, status: int = 0) -> list[Any]:
        assert main([*map(str, words), "--json"]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def demo_tokenizer() -> str:
    """The tokenizer that comes with the package."""
    return tokenizer_folder()
