"""The examples run, and are short."""

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

SAID = {
    "01_async_rollout": "resumed: ",
    "02_sync_trainer": "samples in the same order",
    "03_resume": "are the same, tokens and all",
    "04_dynamic_sampling": "142 prompts drawn = 48 trained on + 88 rejected + 6 in the buffer\n",
    "05_over_sampling": "with await: the same 256 responses\n",
    "06_partial_rollout": "steps 3 to 5 trained on the same bytes as without interruption\n",
    "11_exact_refill": "the 24 steps trained on the same groups as without the kill\n",
}
PACKED, FIXED, PICTURES = "07_sft_packed", "08_babilong_fixed_length", "12_pictures"
TRL = {
    "09_trl_sft": "resumed: steps 9 to 12 trained on the same rows, with the same losses\n",
    "10_trl_grpo": "the 8 losses are the same\n",
}
FRAMEWORKS = "axolotl megatron_bridge nemo_rl openrlhf prime_rl skyrl torchtitan verl".split()
NEEDED = {f"train_{name}": name.removesuffix("_bridge") for name in FRAMEWORKS} | dict.fromkeys(TRL, "trl")
"""The module that each example needs."""
WHOLE_OR_OF_ONES_OWN = [
    (PACKED, None, "", 40),
    (FIXED, None, "", 30),
    (PACKED, "chat_sft/chat_sft.jsonl", "--steps 8 --max-length 256", 8),
    (FIXED, "babilong/qa1_4k.json", "--steps 4 --max-length 256 --batch-size 1", 4),
]
HELPERS = {"_docstring_data", "_loss_curve", "_stub_engine", "_tiny_model", "train_demo_tokenizer"}


def started(*words, cwd=ROOT, **variables):
    """Python with these words."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)


def run(name, *words):
    done = started(ROOT / "examples" / f"{name}.py", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_example_is_known_here():
    assert {path.stem for path in EXAMPLES} == {*SAID, PACKED, FIXED, PICTURES, *TRL, *HELPERS}
    assert {path.stem for path in OF_FRAMEWORKS} == {"_shared", *(f"train_{name}" for name in FRAMEWORKS)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name):
    assert SAID[name] in run(name)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.timeout(600)  # whole, half a minute on an idle machine; they train a model twice and more
@pytest.mark.parametrize(
    ("name", "data", "options", "num_losses"),
    [
        (PACKED, None, "--steps 12", 12),
        (FIXED, None, "--steps 6 --max-length 64", 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in WHOLE_OR_OF_ONES_OWN),
    ],
)
def test_a_training_example_resumes_with_the_same_losses_and_draws_them(
    name, data, options, num_losses, tmp_path, request
):
    words = ["--out", tmp_path / "losses.png", *options.split()]
    if data is not None:
        folder = request.getfixturevalue("test_data")
        words += ["--data", folder / data, "--tokenizer", folder / "tokenizers" / "gpt2-bpe-50k"]
    drawn = tmp_path / ("losses.png" if importlib.util.find_spec("matplotlib") else "losses.csv")
    assert f"the {num_losses} losses are the same, bit for bit\n" in run(name, *words)
    assert drawn.stat().st_size > 0


@pytest.mark.thorough
def test_a_model_is_trained_on_pictures_and_resumes_with_the_same_losses():
    for package in ("torch", "transformers", "PIL"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = started("-W", "ignore", ROOT / "examples" / f"{PICTURES}.py", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("the losses are the same, bit for bit\n")


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
@pytest.mark.parametrize("name", NEEDED)
def test_an_example_whose_framework_is_missing_says_so_in_a_line(name, tmp_path):
    if name in TRL:
        pytest.importorskip("transformers", reason="transformers is not installed")
    path = ROOT / "examples" / ("" if name in TRL else "frameworks") / f"{name}.py"
    code = f"import runpy, sys; sys.modules[{NEEDED[name]!r}] = None; sys.path.insert(0, {str(path.parent)!r}); "
    code += f"runpy.run_path({str(path)!r}, run_name='__main__')"

    done = started("-W", "ignore", "-c", code, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith("this example needs ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_losses_are_a_table_where_matplotlib_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    loss_curve = importlib.import_module("_loss_curve")
    loss_curve.write_curves(tmp_path / "losses.png", {"whole": {0: 2.5, 1: 1.5}, "resumed": {1: 1.5}}, "Losses")
    assert (tmp_path / "losses.csv").read_text().split() == ["step,whole,resumed", "0,2.5,", "1,1.5,1.5"]
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_tokenizer_of_the_demo_can_be_made_again(tmp_path):
    said = run("train_demo_tokenizer", str(tmp_path), "1000")
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shipped = ROOT / "asyncdata" / "assets" / "demo_tokenizer"
    configs = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (tmp_path, shipped)]
    assert said == f"{tmp_path}: 1000 tokens\n"
    assert made.decode(made.encode("an awaitable résumé").ids) == "an awaitable résumé"
    assert configs[0] == configs[1]
