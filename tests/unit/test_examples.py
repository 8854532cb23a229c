"""The examples run, and are short."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_FRAMEWORKS = sorted((ROOT / "examples" / "frameworks").glob("*.py"))
MAX_LINES = 60
MAX_LINES_OF_A_LOOP = 170  # of rollouts, or of training

SAID = {
    "01_async_rollout": "resumed: ",
    "02_sync_trainer": "samples in the same order",
    "03_resume": "are the same, tokens and all",
    "04_dynamic_sampling": "142 prompts drawn = 48 trained on + 88 rejected + 6 in the buffer\n",
    "05_over_sampling": "with await: the same 256 responses\n",
    "06_partial_rollout": "steps 3 to 5 trained on the same bytes as without interruption\n",
    "11_exact_refill": "the 24 steps trained on the same groups as without the kill\n",
}

TRAINING = {  # a short run of each, with a checkpoint in it, and all its steps
    "07_sft_packed": (["--steps", "12"], 12, 40),
    "08_babilong_fixed_length": (["--steps", "6", "--max-length", "64"], 6, 30),
}
TRL = {
    "09_trl_sft": "resumed: steps 9 to 12 trained on the same rows, with the same losses\n",
    "10_trl_grpo": "the 8 losses are the same\n",
}
FRAMEWORKS = {  # the example of each -> the module that it needs
    "train_axolotl": "axolotl",
    "train_megatron_bridge": "megatron",
    "train_nemo_rl": "nemo_rl",
    "train_openrlhf": "openrlhf",
    "train_prime_rl": "prime_rl",
    "train_skyrl": "skyrl",
    "train_torchtitan": "torchtitan",
    "train_verl": "verl",
}
HELPERS = {"_docstring_data", "_loss_curve", "_stub_engine", "_tiny_model", "train_demo_tokenizer"}
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def started(*words: object, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these words."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)


def run(path: Path, *words: object) -> str:
    done = started(path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_every_example_is_known_here():
    assert {path.stem for path in EXAMPLES} == {*SAID, *TRAINING, *TRL, *HELPERS}
    assert {path.stem for path in OF_FRAMEWORKS} == set(FRAMEWORKS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name):
    assert SAID[name] in run(ROOT / "examples" / f"{name}.py")


@pytest.mark.thorough
@needs_torch
@pytest.mark.timeout(600)  # whole, half a minute on an idle machine; they train a model twice and more
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["short", "whole"])
@pytest.mark.parametrize("name", TRAINING)
def test_a_training_example_resumes_with_the_same_losses_and_draws_them(name, is_short, tmp_path):
    options, num_short, num_whole = TRAINING[name]
    said = run(ROOT / "examples" / f"{name}.py", "--out", str(tmp_path / "losses.png"), *(options if is_short else []))

    drawn = tmp_path / ("losses.png" if importlib.util.find_spec("matplotlib") else "losses.csv")
    assert f"the {num_short if is_short else num_whole} losses are the same, bit for bit\n" in said
    assert drawn.stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.timeout(600)  # it imports torch, transformers and TRL, twice
@pytest.mark.parametrize("name", TRL)
def test_an_example_of_trl_is_killed_and_resumes_with_the_same_rows_and_losses(name):
    for package in ("torch", "datasets", "accelerate", "trl"):
        pytest.importorskip(package, reason=f"{package} is not installed")

    done = started("-W", "ignore", ROOT / "examples" / f"{name}.py", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

    assert done.returncode == 0, done.stderr[-3000:]  # TRL and transformers write their own words there
    assert done.stdout.endswith(TRL[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*FRAMEWORKS, *TRL])
def test_an_example_whose_framework_is_missing_says_so_in_a_line(name, tmp_path):
    if name in TRL:
        pytest.importorskip("transformers", reason="transformers is not installed")
    module, folder = (FRAMEWORKS[name], "frameworks/") if name in FRAMEWORKS else ("trl", "")
    path = ROOT / "examples" / f"{folder}{name}.py"
    code = f"import runpy, sys; sys.modules[{module!r}] = None; sys.path.insert(0, {str(path.parent)!r}); "
    code += f"runpy.run_path({str(path)!r}, run_name='__main__')"

    done = started("-W", "ignore", "-c", code, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith("this example needs ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing was made"


REAL = {
    "07_sft_packed": ("chat_sft/chat_sft.jsonl", "--steps", "8", "--max-length", "256"),
    "08_babilong_fixed_length": ("babilong/qa1_4k.json", "--steps", "4", "--max-length", "256", "--batch-size", "1"),
}


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("name", REAL)
def test_a_training_example_takes_data_of_ones_own(name, test_data, tmp_path):
    data, *options = REAL[name]
    tokenizer = test_data / "tokenizers" / "gpt2-bpe-50k"

    words = "--data", test_data / data, "--tokenizer", tokenizer, "--out", tmp_path / "losses.png", *options
    said = run(ROOT / "examples" / f"{name}.py", *words)
    assert f"the {options[1]} losses are the same, bit for bit\n" in said


def test_losses_are_a_table_where_matplotlib_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    loss_curve = importlib.import_module("_loss_curve")

    loss_curve.write_curves(tmp_path / "losses.png", {"whole": {0: 2.5, 1: 1.5}, "resumed": {1: 1.5}}, "Losses")
    assert (tmp_path / "losses.csv").read_text().split() == ["step,whole,resumed", "0,2.5,", "1,1.5,1.5"]
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("path", [*EXAMPLES, *OF_FRAMEWORKS], ids=lambda path: path.stem)
def test_an_example_is_short(path):
    is_a_training = path.stem in {*TRAINING, *TRL, *FRAMEWORKS}
    is_a_loop = path.stem[0] == "_" or is_a_training or path.stem[:2] in {"04", "05", "06", "11"}

    assert len(path.read_text().splitlines()) <= (MAX_LINES_OF_A_LOOP if is_a_loop else MAX_LINES)


@pytest.mark.thorough
def test_the_tokenizer_of_the_demo_can_be_made_again(tmp_path):
    said = run(ROOT / "examples" / "train_demo_tokenizer.py", str(tmp_path), "1000")

    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    shipped = ROOT / "asyncdata" / "assets" / "demo_tokenizer" / "tokenizer_config.json"
    assert said == f"{tmp_path}: 1000 tokens\n"
    assert made.decode(made.encode("an awaitable résumé").ids) == "an awaitable résumé"
    assert config == json.loads(shipped.read_text())
