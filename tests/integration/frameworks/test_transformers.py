"""Trainers of transformers and TRL over a loader: killed and resumed, the losses are equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncdata import ConfigError, DataLoader, PreferenceCollator, PreferenceTokenizeFn, RowFn, SnapshotError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import StatefulDataLoader
from asyncdata.integrations.transformers import attach

PROGRAM = "tests.integration.frameworks.hf_trainer"


@pytest.fixture
def rows(jsonl_file):
    def chat(number):
        question = {"role": "user", "content": f"What is {number} plus {number * 7 % 13}?"}
        return [question, {"role": "assistant", "content": f"It is {number + number * 7 % 13}. " * (1 + number % 5)}]

    def answers(number):
        """For the trainers of pairs."""
        wrong = {"role": "assistant", "content": f"No idea, {number}."}
        return {"chosen": chat(number)[1:], "rejected": [wrong]}

    return jsonl_file([{"messages": chat(n), "prompt": chat(n)[:1], "number": n, **answers(n)} for n in range(40)])


def run(settings, **changes):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", PROGRAM, json.dumps({**settings, **changes})],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == (-signal.SIGKILL if changes.get("kill_at") else 0), done.stderr[-2000:]


@pytest.mark.thorough
@pytest.mark.timeout(900)  # three processes, each of which imports torch and transformers
@pytest.mark.parametrize(
    ("trainer", "packed"),
    [
        ("Trainer", False),
        ("SFTTrainer", False),
        ("SFTTrainer", True),
        ("DPOTrainer", False),
        ("RewardTrainer", False),
        ("GRPOTrainer", False),
    ],
    ids=["Trainer", "SFTTrainer", "SFTTrainer packed", "DPOTrainer", "RewardTrainer", "GRPOTrainer"],
)
def test_a_killed_training_resumes_with_the_same_batches_and_losses(tmp_path, rows, small_tokenizer, trainer, packed):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    if trainer != "Trainer":
        pytest.importorskip("trl", reason="trl is not installed")
    settings = {"trainer": trainer, "packed": packed, "rows": str(rows), "tokenizer": str(small_tokenizer)}
    whole, report = tmp_path / "whole.json", tmp_path / "report.json"

    run(settings, folder=str(tmp_path / "whole"), report=str(whole), resume=False)
    run(settings, folder=str(tmp_path / "killed"), report=str(report), resume=False, kill_at=6)
    run(settings, folder=str(tmp_path / "killed"), report=str(report), resume=True)

    expected, resumed = json.loads(whole.read_text()), json.loads(report.read_text())
    assert resumed["losses"] == expected["losses"], "of all steps: the trainer's log has those before the checkpoint"
    assert resumed["weights"] == expected["weights"]
    num_before = len(expected["seen"]) // 2  # saved in the middle
    assert resumed["seen"] == expected["seen"][num_before:]


def test_the_batches_of_pairs_are_those_of_trls_own_collator(jsonl_file, small_tokenizer):
    trl = pytest.importorskip("trl.trainer.dpo_trainer", reason="trl is not installed")
    rows = jsonl_file(
        [{"prompt": "1 + " * n, "chosen": " is " * (n % 3 + 1), "rejected": "?" * n} for n in range(1, 9)]
    )
    with DataLoader(
        rows, tokenize_fn=PreferenceTokenizeFn(str(small_tokenizer)), num_workers=0, timeout_s=240
    ) as loader:
        samples = loader.get_next_batch(5)
    found = PreferenceCollator(pad_id=7)(samples)

    examples = []
    for sample in samples:
        start = int((sample.labels == -100).sum())
        rejected, ((first, last),) = sample.extra["rejected_input_ids"], sample.extra["rejected_spans"]
        prompt = sample.tokens[:start].tolist()
        assert (rejected[:first], last) == (prompt, len(rejected)), "the prompt, and a trained answer up to the end"
        examples.append(
            {"prompt_ids": prompt, "chosen_ids": sample.tokens[start:].tolist(), "rejected_ids": rejected[first:]}
        )
    expected = trl.DataCollatorForPreference(pad_token_id=7)(examples)

    assert {name: array.tolist() for name, array in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


# What is refused


def trainer_of(**changes):
    arguments = SimpleNamespace(max_steps=10, world_size=1, process_index=0, **changes)
    callbacks = []
    handler = SimpleNamespace(callbacks=callbacks)
    return SimpleNamespace(
        args=arguments, callback_handler=handler, add_callback=callbacks.append, remove_callback=lambda kind: None
    )


@pytest.fixture
def loader(rows):
    with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, batch_size=2) as loader:
        yield loader


def test_max_steps_is_demanded(loader):
    trainer = trainer_of()
    trainer.args.max_steps = -1

    with pytest.raises(ConfigError, match="pass max_steps="):
        attach(trainer, loader)


def test_a_loader_of_other_ranks_is_refused(loader):
    trainer = trainer_of()
    trainer.args.world_size = 2

    with pytest.raises(ConfigError, match=r"the loader is rank 0 of 1, and the trainer rank 0 of 2: pass ranks="):
        attach(trainer, loader)


def test_reference_log_probs_computed_before_the_training_are_refused(loader):
    trainer = trainer_of(precompute_ref_log_probs=True)

    with pytest.raises(ConfigError, match="precompute_ref_log_probs"):
        attach(trainer, loader)


def test_a_grouping_trainer_wants_a_loader_of_single_rows(loader):
    trainer = trainer_of(generation_batch_size=8, steps_per_generation=2)
    trainer.num_generations = 2

    with pytest.raises(ConfigError, match="repeats prompts and shares them out itself"):
        attach(trainer, StatefulDataLoader(loader))


def test_a_checkpoint_without_a_state_is_refused_unless_it_is_allowed(loader):
    state = SimpleNamespace(stateful_callbacks={}, global_step=4)
    trainer = trainer_of()
    attach(trainer, loader)

    with pytest.raises(SnapshotError, match="the checkpoint of step 4 has no state of a loader"):
        trainer.callback_handler.callbacks[0].on_train_begin(None, state, None)

    allowed = trainer_of()
    attach(allowed, loader, starts_new=True)
    allowed.callback_handler.callbacks[0].on_train_begin(None, state, None)
    assert list(state.stateful_callbacks) == ["AsyncDataState"]


def test_the_trainer_skips_no_batches_and_asks_the_loader(loader):
    trainer = trainer_of()

    attach(trainer, loader)

    assert trainer.args.ignore_data_skip
    assert not hasattr(trainer.get_train_dataloader(), "__len__")
    batches = iter(trainer.get_train_dataloader())
    assert [len(next(batches)) for _ in range(25)] == [2] * 25, "epoch after epoch"


def test_prompts_are_repeated_as_trl_repeats_them(rows):
    """2 ranks, 3 prompts a generation batch, 4 times each, used 2 * 3 times."""
    parts = []
    for rank in range(2):
        trainer = trainer_of(generation_batch_size=12, steps_per_generation=2)
        trainer.num_generations, trainer.num_iterations = 4, 3
        trainer.args.world_size, trainer.args.process_index = 2, rank
        with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240) as loader:
            attach(trainer, loader)
            batches = iter(trainer.get_train_dataloader())
            parts.append([[row["number"] for row in next(batches)] for _ in range(7)])
            saved = trainer.callback_handler.callbacks[0].state()
            following = [row["number"] for row in next(batches)]
            attach(trainer, loader)
            state = SimpleNamespace(stateful_callbacks={"AsyncDataState": saved}, global_step=7)
            trainer.callback_handler.callbacks[-1].on_train_begin(None, state, None)
            assert [row["number"] for row in next(iter(trainer.get_train_dataloader()))] == following

    with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240) as loader:
        first, second, third, fourth = (sample.extra["number"] for sample in loader.get_next_batch(4))
    assert parts[0][:6] == [[first] * 4 + [second] * 2] * 6
    assert parts[1][:6] == [[second] * 2 + [third] * 4] * 6
    assert parts[0][6][:4] == [fourth] * 4
