"""The examples run, and are short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
MAX_LINES_OF_A_ROLLOUT_LOOP = 150

SAID = {
    "01_async_rollout": "resumed: ",
    "02_sync_trainer": "samples in the same order",
    "03_resume": "are the same, tokens and all",
    "04_dynamic_sampling": "142 prompts drawn = 48 trained on + 88 rejected + 6 in the buffer\n",
    "05_over_sampling": "with await: the same 256 responses\n",
    "06_partial_rollout": "steps 3 to 5 trained on the same bytes as without interruption\n",
}


def run(path: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), *words], cwd=ROOT, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}


def test_every_example_is_known_here():
    assert {path.stem for path in EXAMPLES} == {*SAID, "_stub_engine", "train_demo_tokenizer"}


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name):
    assert SAID[name] in run(ROOT / "examples" / f"{name}.py")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    is_a_rollout_loop = path.stem == "_stub_engine" or path.stem[:2] in {"04", "05", "06"}

    assert len(path.read_text().splitlines()) <= (MAX_LINES_OF_A_ROLLOUT_LOOP if is_a_rollout_loop else MAX_LINES)


def test_the_tokenizer_of_the_demo_can_be_made_again(tmp_path):
    said = run(ROOT / "examples" / "train_demo_tokenizer.py", str(tmp_path), "1000")

    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    shipped = ROOT / "asyncdata" / "assets" / "demo_tokenizer" / "tokenizer_config.json"
    assert said == f"{tmp_path}: 1000 tokens\n"
    assert made.decode(made.encode("an awaitable résumé").ids) == "an awaitable résumé"
    assert config == json.loads(shipped.read_text())
