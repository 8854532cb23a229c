"""A trainer that a loader is attached to: evaluation, epochs, and checkpoints that were not saved whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import structlog

from asyncdata import ConfigError, DataLoader, RowFn, RowShuffle, SnapshotError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from asyncdata.integrations.transformers import attach, placeholder
from tests.support.frameworks.killed_runs import ROOT

PROGRAM = "tests.integration.frameworks.hf_trainer"
ROWS = 40


@pytest.fixture
def rows(jsonl_file):
    def chat(number):
        question = {"role": "user", "content": f"What is {number} plus {number * 7 % 13}?"}
        return [question, {"role": "assistant", "content": f"It is {number + number * 7 % 13}. " * (1 + number % 5)}]

    def row(number):
        wrong = {"role": "assistant", "content": f"No idea, {number}."}
        found = chat(number)
        return {"messages": found, "prompt": found[:1], "chosen": found[1:], "rejected": [wrong], "number": number}

    return jsonl_file(map(row, range(ROWS)))


@pytest.fixture
def run(tmp_path, rows, small_tokenizer):
    """Runs a training, and returns its report."""
    shared = {"trainer": "Trainer", "packed": False, "rows": str(rows), "tokenizer": str(small_tokenizer)}

    def ran(name="run", *, resume=False, kill_at=None, **changes):
        report = tmp_path / f"{name}.json"
        settings = {**shared, "folder": str(tmp_path / name), "report": str(report), "resume": resume, **changes}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", PROGRAM, json.dumps({**settings, "kill_at": kill_at})],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr[-2000:]
        return None if kill_at else json.loads(report.read_text())

    return ran


many_processes = pytest.mark.timeout(900)  # each imports torch and transformers


@pytest.mark.thorough
@many_processes
@pytest.mark.parametrize(
    ("trainer", "packed"),
    [("Trainer", False), ("SFTTrainer", True), ("DPOTrainer", False)],
    ids=lambda value: str(value),
)
def test_evaluation_moves_neither_the_training_nor_itself(run, trainer, packed):
    if trainer != "Trainer":
        pytest.importorskip("trl", reason="trl is not installed")
    settings = {"trainer": trainer, "packed": packed}
    evaluates = {"evaluates": True, "arguments": {"eval_strategy": "steps", "eval_steps": 2}}

    alone = run("alone", **settings)
    evaluated = run("evaluated", **settings, **evaluates)
    run("killed", **settings, **evaluates, kill_at=6)
    resumed = run("killed", **settings, **evaluates, resume=True)

    assert (evaluated["losses"], evaluated["weights"]) == (alone["losses"], alone["weights"])
    assert evaluated["seen"] == alone["seen"], "the batches of the training"
    assert [step for step, _ in evaluated["evaluated"]] == [2, 4, 6, 8]
    assert resumed["evaluated"] == evaluated["evaluated"], "of the same rows in the same batches"
    assert resumed["losses"] == alone["losses"]


@pytest.mark.thorough
@many_processes
def test_epochs_of_a_known_length_are_trained_with_their_learning_rate(run):
    """40 rows in batches of 2, two batches a step: 10 steps an epoch."""
    known = {"epochs": 2, "batches_per_epoch": ROWS // 2}
    every = {"arguments": {"save_strategy": "epoch", "eval_strategy": "epoch"}, "evaluates": True}

    found = run("whole", **known, **every)
    run("killed", **known, kill_at=14)
    resumed = run("killed", **known, resume=True)

    assert len(found["losses"]) == 20
    assert found["rates"][-1][0] == 2.0, "the epoch in the log"
    assert found["rates"][-1][1] == pytest.approx(found["rates"][0][1] / 20), "it falls to its end, not beyond"
    rows = [str(row) for batch in found["seen"][:40] for row in batch]
    assert len(rows) == 2 * ROWS
    assert [step for step, _ in found["evaluated"]] == [10, 20]
    assert resumed["losses"] == found["losses"]
    assert resumed["rates"] == found["rates"]


@pytest.mark.thorough
@many_processes
def test_packs_of_an_epoch_are_counted_and_a_resume_does_not_count_again(run):
    settings = {"epochs": 2, "packed": True, "batches_per_epoch": "count"}

    whole = run("whole", **settings)
    num_packs = len(whole["seen"]) // 3  # an epoch to count, and two that are trained
    run("killed", **settings, kill_at=6)
    resumed = run("killed", **settings, resume=True)

    assert len(whole["losses"]) == num_packs
    assert whole["seen"][num_packs : 2 * num_packs] == whole["seen"][:num_packs], "the count has moved nothing"
    assert resumed["losses"] == whole["losses"]
    assert resumed["seen"][0] == whole["seen"][num_packs + 8]


@pytest.mark.thorough
@many_processes
def test_a_training_killed_in_a_save_resumes_from_the_checkpoint_before(run, tmp_path):
    whole = run("whole")
    run("killed", kill_at=6)
    saved, torn = (tmp_path / "killed" / f"checkpoint-{step}" for step in (4, 6))
    shutil.copytree(saved, torn, ignore=shutil.ignore_patterns("trainer_state.json"))

    resumed = run("killed", resume=True)

    assert resumed["losses"] == whole["losses"]


@pytest.mark.thorough
@many_processes
def test_a_data_set_of_chats_evaluates_beside_the_loader(tmp_path, rows, small_tokenizer):
    """The page's SFT trainer, with an ``eval_dataset`` that TRL prepares."""
    pytest.importorskip("trl", reason="trl is not installed")
    code = f"""
import json
from datasets import Dataset
from transformers import AutoTokenizer
from tests.integration.frameworks.hf_trainer import _arguments, _chats, _model
from asyncdata.integrations.transformers import attach, placeholder
from trl import SFTConfig, SFTTrainer
settings = {{"folder": {str(tmp_path)!r}, "rows": {str(rows)!r}, "tokenizer": {str(small_tokenizer)!r}, "packed": True}}
chats = [json.loads(line) for line in open({str(rows)!r})][:5]
tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
trainer = SFTTrainer(
    _model(tokenizer),
    args=_arguments(SFTConfig, settings, eval_strategy="steps", eval_steps=4),
    train_dataset=placeholder(),
    eval_dataset=Dataset.from_list([{{"messages": row["messages"]}} for row in chats]),
    processing_class=tokenizer,
)
loader = _chats(settings, [])
attach(trainer, loader)
with loader:
    trainer.train()
print("evaluated", sum("eval_loss" in entry for entry in trainer.state.log_history))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "evaluated 2" in done.stdout


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
sft, pairs, groups, evaluated = blocks_of("use-it-with-trl.md", "py")
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
print("all blocks ran")
"""


@pytest.mark.thorough
@many_processes
def test_the_blocks_of_the_page_run_as_they_are_printed(tmp_path, rows, small_tokenizer):
    pytest.importorskip("trl", reason="trl is not installed")
    shutil.copytree(small_tokenizer, tmp_path / "tokenizer")
    for name in ("chats.jsonl", "pairs.jsonl", "prompts.jsonl"):
        shutil.copy(rows, tmp_path / name)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PAGE], capture_output=True, text=True, env=environment, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "all blocks ran" in done.stdout


# Without a model


class Trainer:
    """What ``attach`` uses of a trainer of transformers."""

    def __init__(self, folder, **changes):
        given = {"max_steps": 10, "world_size": 1, "process_index": 0, "gradient_accumulation_steps": 1}
        self.args = SimpleNamespace(output_dir=str(folder), num_train_epochs=3, **{**given, **changes})
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.add_callback = self.callback_handler.callbacks.append
        self.remove_callback = lambda kind: None
        self.trained = []

    def train(self, resume_from_checkpoint=None, trial=None):
        self.trained.append((resume_from_checkpoint, self.args.max_steps))

    def get_eval_dataloader(self, eval_dataset=None):
        return eval_dataset


@pytest.fixture
def loader(rows):
    with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, batch_size=3) as loader:
        yield loader


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of the steps 2, 4, 10 and 12; the last two were not saved whole."""
    for step, state in ((2, "{}"), (4, "{}"), (10, '{"global_'), (12, None)):
        path = tmp_path / "out" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        if state is not None:
            (path / "trainer_state.json").write_text(state)
    return tmp_path / "out"


@pytest.mark.parametrize("given", [True, "checkpoint-12"])
def test_a_checkpoint_that_was_not_saved_whole_is_left_out_by_name(loader, folder, given):
    trainer = Trainer(folder)
    attach(trainer, loader)

    with structlog.testing.capture_logs() as logs:
        trainer.train(resume_from_checkpoint=given if given is True else str(folder / given))

    assert trainer.trained == [(str(folder / "checkpoint-4"), 10)]
    assert [entry["path"] for entry in logs] == [str(folder / f"checkpoint-{step}") for step in (12, 10)]


@pytest.mark.parametrize("given", [None, False, "checkpoint-2"])
def test_what_the_trainer_is_given_otherwise_is_left_as_it_is(loader, folder, given):
    trainer = Trainer(folder)
    attach(trainer, loader)
    given = str(folder / given) if given else given

    trainer.train(given)

    assert trainer.trained == [(given, 10)]


def test_no_whole_checkpoint_at_all_is_an_error_that_names_the_newest(loader, folder):
    for step in (2, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    trainer = Trainer(folder)
    attach(trainer, loader)

    with pytest.raises(SnapshotError, match=r"AD641 .*checkpoint-12 was not saved whole"):
        trainer.train(True)


def test_an_evaluation_is_one_epoch_and_always_the_same(loader, rows):
    trainer = Trainer("out")
    trainer.eval_dataset = placeholder()
    with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, batch_size=8) as evaluated:
        attach(trainer, loader, eval_loader=evaluated)

        loops = [list(trainer.get_eval_dataloader(trainer.eval_dataset)) for _ in range(2)]

    numbers = [[sample.extra["number"] for batch in loop for sample in batch] for loop in loops]
    assert numbers[0] == numbers[1]
    assert sorted(numbers[0]) == list(range(ROWS))
    assert trainer.get_eval_dataloader("another") == "another", "a set that the caller names is the trainer's own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "AD642 the trainer's eval_dataset is a placeholder: pass eval_loader="),
        ({"same": True}, "AD642 eval_loader is the loader of the training"),
        ({"eval_dataset": {"a": None}, "other": True}, "AD642 eval_loader= is one set of batches"),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused(loader, changes, message):
    trainer = Trainer("out")
    trainer.eval_dataset = changes.get("eval_dataset", placeholder())

    other = SimpleNamespace(config=loader.config) if changes.get("other") else None
    with pytest.raises(ConfigError, match=message):
        attach(trainer, loader, eval_loader=loader if changes.get("same") else other)


@pytest.mark.parametrize(
    ("knobs", "given", "num_steps"),
    [
        ({}, 14, 42),
        ({}, "count", 42),
        ({"shuffle": RowShuffle(only_kept=True)}, None, 42),
        ({"shuffle": RowShuffle(only_kept=True), "drop_last": True}, None, 39),
    ],
    ids=["given", "counted", "known", "known, drop_last"],
)
def test_epochs_are_steps(rows, tmp_path, knobs, given, num_steps):
    """40 rows in batches of 3, and three epochs."""
    trainer = Trainer("out", max_steps=-1)
    cache = {"folder": str(tmp_path / "cache")}
    with DataLoader(
        rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, batch_size=3, cache=cache, **knobs
    ) as loader:
        attach(trainer, loader, batches_per_epoch=given)
        trainer.train()

        assert loader.position().epoch == 0, "the count has moved nothing"
    assert trainer.trained == [(None, num_steps)]


def test_max_steps_goes_before_epochs_which_are_counted_all_the_same(loader):
    trainer = Trainer("out", max_steps=10, logging_strategy="epoch", eval_strategy="no", save_strategy="no")
    attach(trainer, loader, batches_per_epoch=4)
    trainer.train()
    control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
    seen = []
    for step in range(1, 9):
        control.should_log = False
        state = SimpleNamespace(global_step=step, max_steps=10, epoch=None)
        trainer.callback_handler.callbacks[-1].on_step_end(trainer.args, state, control)
        seen.append((state.epoch, control.should_log))

    assert trainer.trained == [(None, 10)]
    assert seen == [(step / 4, step in (4, 8)) for step in range(1, 9)]
    assert not (control.should_evaluate or control.should_save)


@pytest.mark.parametrize("given", [0, True, "counted", 2.5])
def test_a_number_of_batches_that_is_none_is_refused(loader, given):
    with pytest.raises(ConfigError, match="AD643 batches_per_epoch is a whole number from 1 on, or 'count'"):
        attach(Trainer("out", max_steps=-1), loader, batches_per_epoch=given)


def test_an_unknown_length_of_an_epoch_is_refused_with_all_ways_out(loader):
    with pytest.raises(ConfigError, match=r"AD643 .* no max_steps.* pass max_steps=; .* 'count'.* RowShuffle"):
        attach(Trainer("out", max_steps=-1), loader)
