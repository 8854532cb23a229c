"""OpenRLHF's own PPOTrainer and checkpoints, from the folder that ASYNCDATA_OPENRLHF names.

Stood in are vLLM (it answers with the prompt), the training step, DeepSpeed's engine (it stores ``client_state`` and
the file ``latest``) and Ray's calls. The loop, the generator of samples and the saving are OpenRLHF's code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.frameworks.killed_runs import ROOT, Stepped, kill_and_resume, main, run_block
from tests.support.frameworks.stand_ins import stand_in_for

VARIABLE = "ASYNCDATA_OPENRLHF"
NEEDS = {VARIABLE: "openrlhf/trainer/ppo_trainer.py"}
PACKAGES = ("torch", "ray", "torchdata", "peft", "pylatexenc")
ROWS = 42
EPISODES = 3
BATCHES = 48  # more than the training has
HEAVY = ("deepspeed", "flash_attn", "vllm")  # they need a GPU to be installed


class Engine:
    """As much of DeepSpeed's engine as stores and loads ``client_state``."""

    def save_checkpoint(self, folder: str, tag: str, client_state: Any, save_latest: bool) -> None:
        import torch

        (Path(folder) / tag).mkdir()
        torch.save(client_state, Path(folder) / tag / "states.pt")
        (Path(folder) / "latest").write_text(tag)

    def load_checkpoint(self, folder: str, *_: Any, **__: Any) -> Any:
        import torch

        path = Path(folder) / (Path(folder) / "latest").read_text() / "states.pt"
        return path, torch.load(path, weights_only=False)


class Actors:
    """The actor's processes: it saves when it is told to."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def async_run_method(self, method_name: str, **settings: Any) -> list[Any]:
        run = self._run
        if method_name == "get_checkpoint_states":
            return [run.strategy.load_ckpt(run.engine, os.path.join(run.strategy.args.ckpt.path, "_actor"))[1]]
        if method_name == "save_checkpoint":
            if run.is_to_save():
                folder = os.path.join(run.strategy.args.ckpt.path, "_actor")
                run.strategy.save_ckpt(
                    run.engine, folder, settings["tag"], client_state=settings["client_states"], max_num=100
                )
                run.answers.put("saved")
        return []


class Run(Stepped):
    """``PPOTrainer.fit``."""

    def __init__(self, folder: Path, rows: str, batch: int, index: Path) -> None:
        super().__init__()
        import openrlhf.trainer.ppo_trainer as module
        from openrlhf.utils.deepspeed import DeepspeedStrategy

        self.strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
        self.strategy.args = settings(folder, rows, batch)
        self.engine = sys.modules["deepspeed"].DeepSpeedEngine()
        _as_the_page_does(index)
        actors = Actors(self)
        tokenizer = str(ROOT / "asyncdata/assets/demo_tokenizer")
        kind = module.PPOTrainer.__ray_metadata__.modified_class
        self.trainer = kind(tokenizer, self.strategy, actors, None, None, None, [], n_samples_per_prompt=1)
        self.trainer.broadcast_to_vllm = lambda: None
        self.trainer.train_step = self._step
        vars(self.trainer.samples_generator).update(
            _dispatch_prompts_to_vllm=lambda prompts, *_, **__: [[prompt] for prompt in prompts],
            _process_response_into_experience=lambda response, **_: response,
        )
        self.step = self.trainer.init_checkpoint_states()["global_step"]
        self.start(self.trainer.fit)

    def _step(self, samples: list[str], step: int) -> Any:
        self.answers.put([int(prompt.split()[0]) for prompt in samples])
        return {}, step + 1


def settings(folder: Path, rows: str, batch: int) -> Any:
    """As OpenRLHF's command line gives them."""
    groups = {
        "data": {"prompt_dataset": rows, "prompt_probs": None, "prompt_split": "train", "max_samples": 10**8},
        "eval": {"steps": -1, "dataset": None},
        "ckpt": {"save_steps": 1, "path": str(folder), "load_enable": True},
        "train": {"seed": 42, "num_episodes": EPISODES, "max_epochs": 1, "batch_size": batch},
        "rollout": {"batch_size": batch, "vllm_generate_batch_size": batch, "n_samples_per_prompt": 1},
        "algo": {"kl": SimpleNamespace(target=None, init_coef=0.0), "dynamic_filtering_enable": False},
        "logger": {"wandb": SimpleNamespace(key=None), "tensorboard_dir": None, "logging_steps": 1000},
        "vllm": {"enable_sleep": False},
        "reward": {"remote_url": None},
    }
    groups["data"] |= {"input_template": None, "input_key": "input", "label_key": "label", "disable_fast_tokenizer": 0}
    groups["data"] |= {"dataloader_num_workers": 0}
    groups["algo"]["advantage"] = SimpleNamespace(estimator="reinforce")
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in groups.items()})


def _as_the_page_does(index: Path) -> None:
    """The lines that the page tells a user to write; OpenRLHF's command line is not run."""
    from asyncdata.integrations import openrlhf

    plug_in, own = openrlhf.plug_in, runpy.run_module
    try:
        openrlhf.plug_in = lambda **knobs: plug_in(**{**knobs, "cache": {"folder": str(index)}, "timeout_s": 240})
        runpy.run_module = lambda *_, **__: {}  # type: ignore[assignment]
        run_block("use-it-with-openrlhf.md", {})
    finally:
        openrlhf.plug_in, runpy.run_module = plug_in, own


def import_openrlhf() -> None:
    os.environ["TQDM_DISABLE"] = "1"
    stand_in_for(*HEAVY)
    import deepspeed

    deepspeed.DeepSpeedEngine = type("DeepSpeedEngine", (Engine,), {})
    sys.path.insert(0, os.environ[VARIABLE])
    import openrlhf.trainer.ppo_trainer as module
    import openrlhf.trainer.ppo_utils.samples_generator as generator
    from openrlhf.utils import deepspeed as strategies

    module.ray = generator.ray = SimpleNamespace(
        get=lambda found: found, wait=lambda refs, **_: (refs[:1], refs[1:]), cancel=lambda _: None
    )
    strategies.deepspeed.torch_dist_barrier_and_cuda_sync = lambda: None


def drive(folder: Path) -> dict[str, Any]:
    """A batch of 4 leaves a short one at an episode's end, at which OpenRLHF sees that end. After whole ones not."""
    import_openrlhf()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"{n} + 1?", "label": str(n)}) + "\n" for n in range(ROWS)))
    found = {}
    for name, batch, saves in (("a short last batch", 4, [3, 11, 13]), ("whole batches", 6, [3, 7, 9])):

        def opens(place: Path, batch: int = batch) -> Run:
            return Run(place, str(rows), batch, folder / "index")

        found[name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves, rows=ROWS)
    num_rows = [sum(map(len, runs["whole"])) for runs in found.values()]
    same = {"rows of all episodes": [num_rows, [EPISODES * ROWS] * 2]}
    return {"runs": found, "same": same}


if __name__ == "__main__":
    main(drive)
