"""axolotl's own command with the lines of its page, on a tiny model; and a loader for tests of its relatives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.frameworks.killed_runs import ROOT, block_of

ROWS = 40
BATCH = 2
STEPS = 12


def make_loader(cfg: Any) -> Any:
    from asyncdata import DataLoader, PaddedCollator

    seen = cfg["seen"]
    pad = PaddedCollator()

    def collate(samples: list[Any]) -> Any:
        with Path(seen).open("a") as file:
            file.write(json.dumps([int(sample.tokens[0]) for sample in samples]) + "\n")
        return pad(samples)

    return DataLoader(cfg["rows"], tokenize_fn=tokenize, collate_fn=collate, batch_size=BATCH, num_workers=0)


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [row["number"], 1, 2, 3]}


WATCHED = """
import json, os, runpy, signal
import transformers.trainer


class Watched(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, args, state, control, **_):
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        with open(os.environ["REPORT"], "w") as file:
            json.dump(losses, file)


transformers.trainer.DEFAULT_CALLBACKS.append(Watched)
runpy.run_module("axolotl.cli.main", run_name="__main__")
"""
"""The command ``axolotl``, whose trainer kills itself after a step, or writes its losses at the end."""


def write_page(folder: Path) -> None:
    """The page's two files, for a tiny model on a CPU, and chats."""
    import yaml
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "asyncdata/assets/demo_tokenizer"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    config = yaml.safe_load(block_of("use-it-with-axolotl.md", "yaml"))
    config |= {"base_model": "model", "max_steps": STEPS, "save_steps": 4, "sequence_len": 128, "logging_steps": 1}
    config |= {"gradient_accumulation_steps": 1, "learning_rate": 0.01, "bf16": False, "fp32": True}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "my_data.py").write_text(block_of("use-it-with-axolotl.md", "py"))
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(ROWS):
            turns = [("user", f"{number} + 1?"), ("assistant", f"{number + 1}. " * (number % 7 + 1))]
            chat = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": chat}) + "\n")


def train(folder: Path, name: str, kill_at: int = 0) -> list[float]:
    """The losses of ``axolotl train config.yaml`` into a folder of this name, or nothing if it is killed at a step."""
    report = folder / f"{name}.json"
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    environment |= {"KILL_AT": str(kill_at), "REPORT": str(report), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-c", WATCHED, "train", "config.yaml", "--launcher", "python"]
    done = subprocess.run([*words, "--output-dir", name], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stdout[-1000:] + done.stderr[-4000:]
    return [] if kill_at else json.loads(report.read_text())


def page_makes_a_loader(folder: Path) -> Any:
    """The loader that the page's function makes, of the demo tokenizer."""
    from types import SimpleNamespace

    (folder / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    code = block_of("use-it-with-axolotl.md", "py").replace('"chats.jsonl"', repr(str(folder / "chats.jsonl")))
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - the project's own pages
    tokenizer = str(ROOT / "asyncdata/assets/demo_tokenizer")
    return names["make_loader"](SimpleNamespace(sequence_len=64, base_model=tokenizer))
