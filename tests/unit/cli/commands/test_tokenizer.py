from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata.cli import main as cli
from asyncdata.cli.commands import tokenizer as command
from asyncdata.tokenization.encoders.equivalence_records import revoke, subject_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import Fake, install

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_tokenizer: Path) -> Any:
    """Runs a command where gigatoken is right and fastokens is wrong; gives its status, what it wrote, what it said."""
    tokenizer = TokenizerFiles(str(small_tokenizer)).load()
    found = {
        "gigatoken": lambda: Fake(tokenizer, lambda _: False),
        "fastokens": lambda: Fake(tokenizer, lambda _: True),
    }

    def run(*arguments: str, installed: tuple[str, ...] = ("gigatoken", "fastokens")) -> tuple[int, str, str]:
        encoders = {name: found[name] for name in installed}
        install(monkeypatch, encoders)
        monkeypatch.setattr(command, "version_of", lambda name: "1.0" if name in encoders else None)
        status = cli.main(["tokenizer", *arguments, str(small_tokenizer)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def lines(text: str) -> list[str]:
    return [line.partition("  ")[2].strip() for line in text.splitlines()]


def test_tokenizer_show_says_what_is_known(run: Any) -> None:
    assert lines(run("show")[1])[1:] == ["1.0 not proven yet", "1.0 not proven yet"]
    assert lines(run("show", installed=("fastokens",))[1])[1:] == ["not installed", "1.0 not proven yet"]


@pytest.mark.thorough
def test_prove_proves_and_show_remembers(run: Any) -> None:
    status, proved, talk = run("prove")

    assert status == 0
    assert "gigatoken: characters, 0 %" in talk
    exact, refused = lines(proved)[1:]
    assert exact.startswith("1.0 exact on ")
    assert refused == "1.0 refused: its ids differ on 'aa'"
    assert run("show")[1] == proved


def test_tokenizer_show_with_json_is_one_object(run: Any) -> None:
    status, proved, _ = run("prove", "--json")

    found = json.loads(proved)["backends"]
    assert (status, found["gigatoken"]["state"], found["fastokens"]["state"]) == (0, "exact", "refused")
    assert found["gigatoken"]["num_texts"] > 0
    assert json.loads(run("show", "--json", installed=())[1])["backends"] == {
        "gigatoken": {"version": None, "state": "not installed"},
        "fastokens": {"version": None, "state": "not installed"},
    }


def test_prove_is_status_1_if_no_backend_is_exact(run: Any) -> None:
    assert run("prove", "--backend", "fastokens")[0] == 1


def test_prove_says_how_to_install_a_backend(run: Any) -> None:
    status, _, talk = run("prove", "--backend", "fastokens", installed=("gigatoken",))

    assert status == 1
    assert "AD435 no fast tokenizer backend is installed; pip install fastokens" in talk


def test_prove_again_forgets_what_an_audit_revoked(run: Any, small_tokenizer: Path) -> None:
    assert run("prove", "--backend", "gigatoken")[0] == 0
    subject = subject_of(TokenizerFiles(str(small_tokenizer)), "gigatoken")
    assert subject is not None
    revoke(subject, "an audit found it out")

    assert run("prove", "--backend", "gigatoken")[0] == 1
    assert run("prove", "--backend", "gigatoken", "--again")[0] == 0
