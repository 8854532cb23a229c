"""The examples run, and are short; ``asyncdata demo``, its data and its proof."""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from asyncdata import DataLoader, PromptTokenizeFn, demo
from asyncdata.cli import run as command
from asyncdata.cli.run import compare
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.errors import ConfigError, SourceError
from asyncdata.telemetry.reader import read
from tests.support.pages import asyncdata_process
from tests.support.parts import Delivered, change, main

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
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)


def run(name, *words):
    done = started(ROOT / "examples" / f"{name}.py", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_examples_are_known_and_losses_are_a_table_where_matplotlib_is_not_installed(tmp_path, monkeypatch, capsys):
    assert {path.stem for path in EXAMPLES} == {*SAID, PACKED, FIXED, PICTURES, *TRL, *HELPERS}
    assert {path.stem for path in OF_FRAMEWORKS} == {"_shared", *(f"train_{name}" for name in FRAMEWORKS)}
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    loss_curve = importlib.import_module("_loss_curve")
    loss_curve.write_curves(tmp_path / "losses.png", {"whole": {0: 2.5, 1: 1.5}, "resumed": {1: 1.5}}, "Losses")
    assert (tmp_path / "losses.csv").read_text().split() == ["step,whole,resumed", "0,2.5,", "1,1.5,1.5"]
    assert "matplotlib is not installed" in capsys.readouterr().out


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
def test_a_training_example_resumes_and_draws_the_same_losses(name, data, options, num_losses, tmp_path, request):
    words = ["--out", tmp_path / "losses.png", *options.split()]
    if data is not None:
        folder = request.getfixturevalue("test_data")
        words += ["--data", folder / data, "--tokenizer", folder / "tokenizers" / "gpt2-bpe-50k"]
    drawn = tmp_path / ("losses.png" if importlib.util.find_spec("matplotlib") else "losses.csv")
    assert f"the {num_losses} losses are the same, bit for bit\n" in run(name, *words)
    assert drawn.stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.timeout(600)  # it imports torch, transformers and TRL, twice
@pytest.mark.parametrize("name", [PICTURES, *TRL])
def test_an_example_of_transformers_or_trl_resumes_with_the_same_rows_and_losses(name):
    for package in ("torch", "datasets", "accelerate", "trl") if name in TRL else ("torch", "transformers", "PIL"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = started("-W", "ignore", ROOT / "examples" / f"{name}.py", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]  # TRL and transformers write their own words there
    assert done.stdout.endswith(TRL.get(name, "the losses are the same, bit for bit\n"))


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


@pytest.mark.thorough
def test_the_tokenizer_of_the_demo_can_be_made_again(tmp_path):
    said = run("train_demo_tokenizer", str(tmp_path), "1000")
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shipped = ROOT / "asyncdata" / "assets" / "demo_tokenizer"
    configs = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (tmp_path, shipped)]
    assert said == f"{tmp_path}: 1000 tokens\n"
    assert made.decode(made.encode("an awaitable résumé").ids) == "an awaitable résumé"
    assert configs[0] == configs[1]


NUM_ROWS = 500


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "prompts.jsonl"
    assert write_docstring_prompts(path, num_rows=1500) == 1500
    return path


def test_the_prompts_are_questions_whose_answer_is_the_label_and_the_tokenizer_is_small(prompts):
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    assert all(set(row) == {"input", "label", "metadata"} for row in rows)
    assert {row["metadata"]["kind"] for row in rows} == {"module", "class", "function"}
    found = next(row for row in rows if row["label"] == "argparse.ArgumentParser")
    assert found["metadata"]["module"] == "argparse"
    assert found["metadata"]["line"] > 1000
    assert found["input"].startswith("Which class of Python's standard library is described here? Answer with its")
    assert "Object for parsing command line strings into Python objects." in found["input"]
    files = {path.name: path for path in Path(tokenizer_folder()).iterdir()}
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert sum(path.stat().st_size for path in files.values()) < 500_000
    assert json.loads(files["tokenizer_config.json"].read_text())["chat_template"] == demo.CHAT_TEMPLATE


def test_a_python_without_source_or_rows_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="num_rows must be at least 1, got 0"):
        write_docstring_prompts(tmp_path / "prompts.jsonl", num_rows=0)
    change(monkeypatch, library_of_the_demo=lambda: tmp_path / "lib")
    with pytest.raises(SourceError, match="AD201 no docstring was found in .*lib"):
        write_docstring_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.thorough
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_tokenizer_is_the_same_for_transformers(prompts, is_chat):
    oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer_folder())
    fn = PromptTokenizeFn(tokenizer_folder(), apply_chat_template=is_chat)
    with DataLoader(str(prompts), tokenize_fn=fn, num_workers=0, shuffle=False) as loader:
        samples = loader.get_next_batch(300)
    for sample in samples:
        assert sample.tokens.tolist() == oracle(sample.prompt, add_special_tokens=False)["input_ids"]
    if is_chat:
        chat = [{"role": "user", "content": json.loads(prompts.read_bytes().splitlines()[0])["input"]}]
        assert samples[0].prompt == oracle.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert {oracle.eos_token, oracle.pad_token} == {"<|end|>", "<|pad|>"}


def delivered(*indices: int, seed: int = 0) -> list[Delivered]:
    return [Delivered(index, f"0:0:{index}", 3, f"{seed + index:032x}") for index in indices]


@pytest.mark.parametrize(
    ("resumed", "first_difference"),
    [
        pytest.param(delivered(4, 5, 6), 3, id="lost"), pytest.param(delivered(3, 5, 4, 6), 4, id="out of order"),
        pytest.param(delivered(3, 4, 4, 5, 6), 5, id="repeated"), pytest.param(delivered(3, 4, 5), 6, id="cut off"),
        pytest.param(delivered(3, 4, 5, 6, 7), 7, id="too much"),
        pytest.param(delivered(3, 4, 5, 6, seed=9), 3, id="other tokens"), pytest.param([], 3, id="nothing at all"),
    ],
)  # fmt: skip
def test_a_resumed_run_that_differs_is_found(resumed, first_difference):
    outcome = compare(delivered(0, 1, 2), resumed, delivered(*range(7)))
    assert (outcome.is_identical, outcome.first_difference) == (False, first_difference)
    assert outcome.digest != outcome.uninterrupted_digest
    again = compare(delivered(0, 1, 2, 3, seed=1), delivered(3, 4), delivered(0, 1, 2, 3, 4))
    assert not again.is_identical and not again.repeated_identical, "samples that come again otherwise are found"


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are short, but for the steps of the one that is killed: it is not over before the kill, however late."""
    change(monkeypatch, demo_runs_s=1.0)
    change(monkeypatch, demo_kills_at=0.0)
    run = command._delivered  # noqa: SLF001 - nothing public makes one run slower than the others

    def slowly(data: Path, name: str, options: Sequence[str], *is_enough: Any) -> Any:
        return run(data, name, [*options, "--step-s", "0.5"] if name == "killed" else options, *is_enough)

    change(monkeypatch, demo_delivers=slowly)


def test_a_killed_and_resumed_run_is_the_uninterrupted_one(tmp_path, capsys, in_a_hurry):
    (tmp_path / "run.snapshot").write_text("of an earlier demo")
    (tmp_path / "killed.record.jsonl").write_text("of an earlier demo\n")
    words = ["--num-workers", "1", "--keep", str(tmp_path), "--telemetry", str(tmp_path / "telemetry")]

    assert main(["demo", "--rows", str(NUM_ROWS), *words]) == 0

    out, err = capsys.readouterr()
    _, killed, whole, verdict = out.splitlines()
    assert killed.split()[:4] == ["killed", "and", "resumed", f"{2 * NUM_ROWS:,}"]
    assert whole.split()[:2] == ["never", "interrupted"]
    assert killed.split()[3:] == whole.split()[2:]
    assert verdict == "identical: no sample lost, repeated or out of order"
    assert "killed after" in err and "resumed at sample" in err and "samples came again" in err
    assert err.endswith(f"Data, snapshot and records are in {tmp_path}\n")
    assert "\x1b" not in out + err
    records = {f"{name}.record.jsonl" for name in ("killed", "resumed", "uninterrupted")}
    assert {path.name for path in tmp_path.iterdir()} >= {"prompts.jsonl", "run.snapshot", *records}
    first, second = read(tmp_path / "telemetry").starts
    assert first.end is None
    assert 0 < second.header.samples < 2 * NUM_ROWS


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_demo_with_a_difference_is_status_1_and_has_numbers_for_programs(monkeypatch, capsys, in_a_hurry, options):
    words_of = command._run_words  # noqa: SLF001 - one of the three runs gets another seed

    def with_another_seed(data: Path, record: Path) -> list[str]:
        return [*words_of(data, record), *(["--seed", "43"] if "uninterrupted" in record.name else [])]

    change(monkeypatch, demo_words=with_another_seed)

    assert main(["demo", "--rows", str(NUM_ROWS), *options]) == 1

    out = capsys.readouterr().out
    if not options:
        assert out.splitlines()[3] == "DIFFERENT from sample 0 on"
        return

    facts = json.loads(out)
    wanted = {"is_identical": False, "first_difference": 0, "rows": NUM_ROWS, "samples": 2 * NUM_ROWS, "folder": None}
    assert facts.items() >= wanted.items()
    assert facts["digest"] != facts["uninterrupted_digest"]
    assert 0 < facts["resumed_at"] <= facts["killed_at"] < 2 * NUM_ROWS
    assert facts["repeated"] == facts["killed_at"] - facts["resumed_at"]


OVER = "the run was over before it could be killed; try more --rows"
FAILED = "a run ended with exit status 1: asyncdata: ConfigError: AD413 tokenizer '/no/such/folder'"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"_KILL_AT": 2.0, "_RUN_S": 0.1}, OVER, marks=pytest.mark.thorough, id="over before the kill"),
        pytest.param({"tokenizer_folder": lambda: "/no/such/folder"}, FAILED, id="a run that fails"),
    ],
)
def test_a_demo_that_cannot_be_done_says_why(monkeypatch, capsys, changes, said):
    for name, value in changes.items():
        monkeypatch.setattr(command, name, value)
    assert main(["demo", "--rows", str(NUM_ROWS)]) == 1
    assert said in capsys.readouterr().err


def test_ctrl_c_ends_the_demo_and_everything_it_started():
    with asyncdata_process("demo", "--rows", NUM_ROWS, start_new_session=True) as process:
        while "killed with SIGKILL" not in process.stderr.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the run is told as well
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
