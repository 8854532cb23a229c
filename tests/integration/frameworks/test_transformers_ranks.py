"""Two ranks of a trainer, each a process, over a loader: both are killed, and resume from the trainer's checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from asyncdata import DataLoader, RowFn
from tests.support.frameworks.killed_runs import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

for package in ("torch", "transformers", "accelerate", "datasets"):
    pytest.importorskip(package, reason=f"{package} is not installed")

PROGRAM = "tests.integration.frameworks.hf_trainer"
REACHED = "the step is reached\n"
RANKS = 2
ROWS = 40

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # two processes at a time, which import torch and TRL


@pytest.fixture
def settings(jsonl_file: Callable[..., Path], small_tokenizer: Path) -> dict[str, Any]:
    def row(number: int) -> dict[str, Any]:
        question = {"role": "user", "content": f"What is {number} plus {number * 7 % 13}?"}
        answer = {"role": "assistant", "content": f"It is {number + number * 7 % 13}. " * (1 + number % 5)}
        return {"messages": [question, answer], "prompt": [question], "number": number}

    rows = jsonl_file([row(number) for number in range(ROWS)])
    return {"rows": str(rows), "num_rows": ROWS, "tokenizer": str(small_tokenizer), "resume": False}


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run(settings: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The reports of the ranks. With ``kill_at`` each is killed once all have made this step, and there are none."""
    words = [sys.executable, "-W", "ignore", "-m", PROGRAM, json.dumps({**settings, **changes})]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    shared = {**os.environ, **place, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        ranks = []
        for rank in map(str, range(RANKS)):
            env = {**shared, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(RANKS)}
            log = stack.enter_context(open(f"{changes['report']}.log{rank}", "w+"))
            ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=env))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        if "kill_at" in changes:
            reached = [REACHED in iter(process.stdout.readline, "") for process in ranks if process.stdout]
            assert reached == [True] * RANKS, _logs(changes["report"])
            for process in ranks:
                process.kill()
        for process in ranks:
            process.communicate()
        wanted = -signal.SIGKILL if "kill_at" in changes else 0
        assert [process.returncode for process in ranks] == [wanted] * RANKS, _logs(changes["report"])
    if "kill_at" in changes:
        return []
    reports = []
    for rank in range(RANKS):
        with open(f"{changes['report']}.{rank}") as file:
            reports.append(json.load(file))
    return reports


def _logs(report: str) -> str:
    texts = []
    for rank in range(RANKS):
        with open(f"{report}.log{rank}") as file:
            texts.append(file.read()[-3000:])
    return "\n".join(texts)


def numbers_of(report: dict[str, Any], settings: dict[str, Any]) -> list[list[int]]:
    """Which rows each batch of a rank has: a batch is their tokens, or already their numbers."""
    tokenizer = Tokenizer.from_file(f"{settings['tokenizer']}/tokenizer.json")

    def of(batch: list[Any]) -> list[int]:
        if batch and isinstance(batch[0], int):
            return batch
        return [int(n) for row in batch for n in re.findall(r"What is (\d+) plus", tokenizer.decode(row))]

    return [of(batch) for batch in report["seen"]]


def counted(parts: list[list[list[int]]]) -> Counter[int]:
    return Counter(number for batches in parts for batch in batches for number in batch)


@pytest.mark.parametrize(
    ("trainer", "packed"),
    [("Trainer", False), ("SFTTrainer", True), ("GRPOTrainer", False)],
    ids=["Trainer", "SFTTrainer packed", "GRPOTrainer"],
)
def test_two_killed_ranks_resume_with_the_same_rows_and_losses(
    tmp_path: Path, settings: dict[str, Any], trainer: str, packed: bool
) -> None:
    if trainer != "Trainer":
        pytest.importorskip("trl", reason="trl is not installed")
    settings |= {"trainer": trainer, "packed": packed}
    report = str(tmp_path / "report.json")

    expected = run(settings, folder=str(tmp_path / "whole"), report=str(tmp_path / "whole.json"))
    run(settings, folder=str(tmp_path / "killed"), report=report, kill_at=6)
    resumed = run(settings, folder=str(tmp_path / "killed"), report=report, resume=True)

    whole = [numbers_of(found, settings) for found in expected]
    after = [numbers_of(found, settings) for found in resumed]
    before = [batches[: len(batches) // 2] for batches in whole]  # saved in the middle
    trained, wanted = counted(before) + counted(after), counted(whole)
    assert ((wanted - trained).total(), (trained - wanted).total()) == (0, 0), "rows skipped, and repeated"
    assert after == [batches[len(batches) // 2 :] for batches in whole]
    assert [found["losses"] for found in resumed] == [found["losses"] for found in expected]
    assert [found["weights"] for found in resumed] == [expected[0]["weights"]] * RANKS
    copies = 2 if trainer == "GRPOTrainer" else 1  # completions of a prompt
    in_order = [number for batches in zip(*whole, strict=True) for batch in batches for number in batch][::copies]
    assert Counter(in_order[:ROWS]).most_common(1)[0][1] == 1, "a row of the epoch is of one rank, once"


def test_ranks_killed_within_a_generation_batch_train_on_its_prompts_again(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """TRL samples their completions again, so losses differ; no prompt is skipped, and none comes twice."""
    pytest.importorskip("trl", reason="trl is not installed")
    settings |= {"trainer": "GRPOTrainer", "packed": False, "save_steps": 3, "folder": str(tmp_path / "killed")}
    with DataLoader(settings["rows"], tokenize_fn=RowFn(), num_workers=0, timeout_s=240) as loader:
        prompts = [sample.extra["number"] for sample in loader.get_next_batch(32)]

    run(settings, report=str(tmp_path / "report.json"), kill_at=4)
    resumed = run(settings, report=str(tmp_path / "report.json"), resume=True)

    later = [prompts[first : first + 8] for first in (8, 16, 24)]  # generation batches of 8 prompts, used in two steps
    for rank, found in enumerate(resumed):
        assert found["seen"] == [[n for n in block[4 * rank :][:4] for _ in range(2)] for block in later]


def test_each_rank_has_the_prompts_that_trls_own_loader_gives_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="trl is not installed")

    reports = run({**settings, "trainer": "layout"}, folder=str(tmp_path / "none"), report=str(tmp_path / "report"))

    assert [report["ours"] for report in reports] == [report["own"] for report in reports]
    assert not set(sum(reports[0]["own"], [])) & set(sum(reports[1]["own"], []))
