"""Trainers with a model (``hf_trainer`` forks their ranks), over a loader: killed and resumed, losses are equal."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncdata import DataLoader, RowFn
from tests.support.frameworks.killed_runs import ROOT, run_python

for package in ("torch", "transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # many processes, each of which imports torch and TRL

PROGRAM = "tests.integration.frameworks.hf_trainer"
ROWS = 40
ALONE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def rows(jsonl_file):
    """For trainers of chats, of prompts, and of pairs."""

    def row(number):
        question = [{"role": "user", "content": f"What is {number} plus {number * 7 % 13}?"}]
        answer = [{"role": "assistant", "content": f"It is {number + number * 7 % 13}. " * (1 + number % 5)}]
        pair = {"chosen": answer, "rejected": [{"role": "assistant", "content": f"No idea, {number}."}]}
        return {"messages": question + answer, "prompt": question, "number": number, **pair}

    return jsonl_file(map(row, range(ROWS)))


def places(num_ranks):
    """The variables of each rank, as torchrun sets them; none for a process alone."""
    if num_ranks == 1:
        return [{}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def trainers():
    """The process that runs trainings."""
    words = [sys.executable, "-W", "ignore", "-m", PROGRAM]
    place = {**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, text=True, env=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def run(trainers, tmp_path, rows, small_tokenizer):
    """Runs a training into a folder of this name, and gives the reports of its ranks.

    With ``kill_at`` each rank is killed once all have made this step, and there are none.
    """
    shared = {"packed": False, "rows": str(rows), "num_rows": ROWS, "tokenizer": str(small_tokenizer), "resume": False}

    def ran(name, *, num_ranks=1, kill_at=None, **changes):
        report = tmp_path / f"{name}.json"
        settings = {**shared, "folder": str(tmp_path / name), "report": str(report), **changes, "kill_at": kill_at}
        trainers.stdin.write(json.dumps([settings, places(num_ranks)]) + "\n")
        trainers.stdin.flush()
        statuses = json.loads(trainers.stdout.readline())
        logs = [Path(f"{report}.log{rank}").read_text()[-3000:] for rank in range(num_ranks)]
        assert set(statuses) == {-signal.SIGKILL if kill_at else 0}, logs
        return [] if kill_at else [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(num_ranks)]

    return ran


@pytest.mark.parametrize(
    ("trainer", "packed", "num_ranks"),
    [
        *((name, False, 1) for name in ("Trainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer")),
        *((name, False, 2) for name in ("Trainer", "GRPOTrainer")),
        *(("SFTTrainer", True, num_ranks) for num_ranks in (1, 2)),
    ],
)
def test_a_killed_training_resumes_with_the_same_batches_and_losses(run, trainer, packed, num_ranks):
    settings = {"trainer": trainer, "packed": packed, "num_ranks": num_ranks}
    expected = run("whole", **settings)
    run("killed", **settings, kill_at=6)
    resumed = run("killed", **settings, resume=True)

    for rank, (found, whole) in enumerate(zip(resumed, expected, strict=True)):
        num_before = len(whole["seen"]) // 2  # saved in the middle
        assert found["seen"] == whole["seen"][num_before:], f"rank {rank}"
        assert found["losses"] == whole["losses"], "of all steps: the trainer's log has those before the checkpoint"
        assert found["rates"] == whole["rates"], "and the epoch of the data"
        assert 0 < found["rates"][-1][0] == found["metrics"][-1]["data/epoch"] < 10
        assert found["weights"] == expected[0]["weights"]
    assert num_ranks == 1 or resumed[0]["seen"] != resumed[1]["seen"]


def test_ranks_killed_within_a_generation_batch_train_on_its_prompts_again(run, rows):
    """TRL samples their completions again, so losses differ; no prompt is skipped, and none comes twice."""
    settings = {"trainer": "GRPOTrainer", "save_steps": 3, "num_ranks": 2}
    with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240) as loader:
        prompts = [sample.extra["number"] for sample in loader.get_next_batch(32)]
    run("killed", **settings, kill_at=4)
    resumed = run("killed", **settings, resume=True)
    later = [prompts[first : first + 8] for first in (8, 16, 24)]  # generation batches of 8 prompts, used in two steps
    for rank, found in enumerate(resumed):
        assert found["seen"] == [[n for n in block[4 * rank :][:4] for _ in range(2)] for block in later]


def test_each_rank_has_the_prompts_that_trls_own_loader_gives_it(run):
    reports = run("none", trainer="layout", num_ranks=2)
    assert [report["ours"] for report in reports] == [report["own"] for report in reports]
    assert not set(sum(reports[0]["own"], [])) & set(sum(reports[1]["own"], []))


@pytest.mark.parametrize(("trainer", "packed"), [("Trainer", False), ("SFTTrainer", True), ("DPOTrainer", False)])
def test_evaluation_moves_neither_the_training_nor_itself(run, trainer, packed):
    settings = {"trainer": trainer, "packed": packed}
    evaluates = {**settings, "evaluates": True, "arguments": {"eval_strategy": "steps", "eval_steps": 2}}
    [alone] = run("alone", **settings)
    [evaluated] = run("evaluated", **evaluates)
    run("killed", **evaluates, kill_at=6)
    [resumed] = run("killed", **evaluates, resume=True)
    for same in ("losses", "weights", "seen"):
        assert evaluated[same] == alone[same]
    assert [step for step, _ in evaluated["evaluated"]] == [2, 4, 6, 8]
    assert resumed["evaluated"] == evaluated["evaluated"], "of the same rows in the same batches"
    assert resumed["losses"] == alone["losses"]


def test_epochs_of_a_known_length_are_trained_with_their_learning_rate(run):
    """40 rows in batches of 2, two batches a step: 10 steps an epoch."""
    known = {"trainer": "Trainer", "epochs": 2, "batches_per_epoch": ROWS // 2}
    every = {"arguments": {"save_strategy": "epoch", "eval_strategy": "epoch"}, "evaluates": True}

    [found] = run("whole", **known, **every)
    run("killed", **known, kill_at=14)
    [resumed] = run("killed", **known, resume=True)

    assert len(found["losses"]) == 20
    assert found["rates"][-1][0] == 2.0, "the epoch in the log"
    assert found["rates"][-1][1] == pytest.approx(found["rates"][0][1] / 20), "it falls to its end, not beyond"
    assert len(sum(found["seen"][:40], [])) == 2 * ROWS
    assert [step for step, _ in found["evaluated"]] == [10, 20]
    assert (resumed["losses"], resumed["rates"]) == (found["losses"], found["rates"])


def test_packs_of_an_epoch_are_counted_and_a_resume_does_not_count_again(run):
    settings = {"trainer": "Trainer", "epochs": 2, "packed": True, "batches_per_epoch": "count"}
    [whole] = run("whole", **settings)
    num_packs = len(whole["seen"]) // 3  # an epoch to count, and two that are trained
    run("killed", **settings, kill_at=6)
    [resumed] = run("killed", **settings, resume=True)
    assert len(whole["losses"]) == num_packs
    assert whole["seen"][num_packs : 2 * num_packs] == whole["seen"][:num_packs], "the count has moved nothing"
    assert resumed["losses"] == whole["losses"]
    assert resumed["seen"][0] == whole["seen"][num_packs + 8]


def test_a_training_killed_in_a_save_resumes_from_the_checkpoint_before(run, tmp_path):
    [whole] = run("whole", trainer="Trainer")
    run("killed", trainer="Trainer", kill_at=6)
    saved, torn = (tmp_path / "killed" / f"checkpoint-{step}" for step in (4, 6))
    shutil.copytree(saved, torn, ignore=shutil.ignore_patterns("trainer_state.json"))
    [resumed] = run("killed", trainer="Trainer", resume=True)
    assert resumed["losses"] == whole["losses"]
    [again] = run("killed", trainer="Trainer", resume=True)
    assert (again["losses"], again["weights"], again["seen"]) == (whole["losses"], whole["weights"], []), "it was over"


def test_a_data_set_that_trl_prepares_is_evaluated_beside_the_loader_of_the_training(run):
    arguments = {"eval_strategy": "steps", "eval_steps": 4}
    [found] = run("beside", trainer="SFTTrainer", packed=True, evaluates_rows=5, arguments=arguments)
    assert [step for step, _ in found["evaluated"]] == [4, 8]


PAGE = """
import json
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from asyncdata import PreferenceCollator, PreferenceTokenizeFn, RowFn
from tests.support.frameworks.killed_runs import blocks_of

def briefly(code, kind):
    more = "use_cpu=True, report_to=[], disable_tqdm=True, output_dir='out', eval_strategy='steps', eval_steps=1"
    return code.replace(f"{kind}(max_steps=1000, save_steps=100", f"{kind}(max_steps=2, {more}")

tokenizer = AutoTokenizer.from_pretrained("tokenizer")
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
sft, pairs, _, groups, evaluated = blocks_of("use-it-with-trl.md", "py")[:5]
exec(briefly(sft, "SFTConfig").replace("eval_strategy='steps'", "eval_strategy='no'").replace(
    "train_dataset=placeholder()", "train_dataset=placeholder(), eval_dataset=None"))
arguments = eval(briefly("SFTConfig(max_steps=1000, save_steps=100)", "SFTConfig"))
loader, eval_loader = (DataLoader(
    "chats.jsonl", tokenize_fn=ChatTokenizeFn("tokenizer", max_length=512), packing=SoftPacking(max_length=512),
    collate_fn=PackedCollator(max_length=512, keys="transformers"), batch_size=1, num_workers=0) for _ in range(2))
exec(evaluated)
with loader, eval_loader:
    trainer.train()
assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2
short = dict(use_cpu=True, report_to=[], disable_tqdm=True, output_dir="out", max_steps=2)
arguments = DPOConfig(**short)
model = LlamaForCausalLM.from_pretrained("out/checkpoint-2")
exec(pairs)
with loader:
    trainer.train()
arguments = GRPOConfig(**short, num_generations=2, per_device_train_batch_size=2, max_completion_length=4)
reward = lambda completions, **_: [float(len(str(each)) % 5) for each in completions]
exec(groups)
with loader:
    trainer.train()
"""
"""The blocks of the page on TRL, as they are printed."""


def test_the_lines_of_a_user_train_to_the_end(tmp_path, rows, small_tokenizer):
    shutil.copytree(small_tokenizer, tmp_path / "tokenizer")
    for name in ("chats.jsonl", "pairs.jsonl", "prompts.jsonl"):
        shutil.copy(rows, tmp_path / name)
    said = run_python(tmp_path, "-c", f"{PAGE}\nprint('it came to its end')", **ALONE)
    assert "it came to its end" in said
