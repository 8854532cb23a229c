"""What the tests of commands share."""

import json

import pytest

from asyncdata.demo import tokenizer_folder
from tests.support.parts import main


@pytest.fixture
def run_json(capsys):
    """A function that runs a command with --json, and returns the objects that it printed."""

    def run(*words, status=0):
        assert main([*map(str, words), "--json"]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def demo_tokenizer():
    return tokenizer_folder()
