"""OpenRLHF's own PPOTrainer and checkpoints with its example, from the folder that ASYNCDATA_OPENRLHF names.

Stood in are vLLM (it answers with the prompt), the training step, DeepSpeed's engine (it stores ``client_state`` and
the file ``latest``) and Ray's calls. The loop, the generator of samples and the saving are OpenRLHF's code.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, Stepped, import_from, kill_and_resume_each, write_rows
from tests.support.frameworks.stand_ins import stand_in_for

VARIABLE = "ASYNCDATA_OPENRLHF"
NEEDS = {VARIABLE: "openrlhf/trainer/ppo_trainer.py"}
PACKAGES = ("torch", "ray", "torchdata", "peft", "pylatexenc")
ROWS = 42
EPISODES = 3
BATCHES = 48  # more than the training has
HEAVY = ("deepspeed", "flash_attn", "vllm")  # they need a GPU to be installed
CASES = {
    # A short batch is left at an episode's end, at which OpenRLHF sees that end. After whole ones not.
    "a short last batch": ({"batch": 4}, [3, 11, 13]),
    "whole batches": ({"batch": 6}, [3, 7, 9]),
}


class Engine:
    """As much of DeepSpeed's engine as stores and loads ``client_state``."""

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        import torch

        (Path(folder) / tag).mkdir()
        torch.save(client_state, Path(folder) / tag / "states.pt")
        (Path(folder) / "latest").write_text(tag)

    def load_checkpoint(self, folder, *_, **__):
        import torch

        path = Path(folder) / (Path(folder) / "latest").read_text() / "states.pt"
        return path, torch.load(path, weights_only=False)


class Run(Stepped):
    """``PPOTrainer.fit``. It is the actor's processes too, which save when they are told to."""

    def __init__(self, folder, rows, batch):
        super().__init__()
        import openrlhf.trainer.ppo_trainer as module
        from openrlhf.utils.deepspeed import DeepspeedStrategy

        self.strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
        self.strategy.args = settings(folder, rows, batch)
        self.engine = sys.modules["deepspeed"].DeepSpeedEngine()
        self.actor = str(folder / "_actor")
        kind = module.PPOTrainer.__ray_metadata__.modified_class
        self.trainer = kind(DEMO_TOKENIZER, self.strategy, self, None, None, None, [], n_samples_per_prompt=1)
        self.trainer.broadcast_to_vllm = lambda: None
        self.trainer.train_step = self._step
        vars(self.trainer.samples_generator).update(
            _dispatch_prompts_to_vllm=lambda prompts, *_, **__: [[prompt] for prompt in prompts],
            _process_response_into_experience=lambda response, **_: response,
        )
        self.step = self.trainer.init_checkpoint_states()["global_step"]
        self.start(self.trainer.fit)

    def async_run_method(self, method_name, **given):
        if method_name == "get_checkpoint_states":
            return [self.strategy.load_ckpt(self.engine, self.actor)[1]]
        if method_name == "save_checkpoint" and self.is_to_save():
            states = {"tag": given["tag"], "client_state": given["client_states"]}
            self.strategy.save_ckpt(self.engine, self.actor, **states, max_num=100)
            self.answers.put("saved")
        return []

    def _step(self, samples, step):
        self.answers.put([int(prompt.split()[0]) for prompt in samples])
        return {}, step + 1


def settings(folder, rows, batch):
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
    groups["data"] |= {"disable_fast_tokenizer": 0}
    groups["algo"]["advantage"] = SimpleNamespace(estimator="reinforce")
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in groups.items()})


def import_openrlhf():
    os.environ["TQDM_DISABLE"] = "1"
    stand_in_for(*HEAVY)
    import deepspeed

    deepspeed.DeepSpeedEngine = type("DeepSpeedEngine", (Engine,), {})
    import_from(os.environ[VARIABLE])
    import openrlhf.trainer.ppo_trainer as module
    import openrlhf.trainer.ppo_utils.samples_generator as generator
    from openrlhf.utils import deepspeed as strategies

    module.ray = generator.ray = SimpleNamespace(
        get=lambda found: found, wait=lambda refs, **_: (refs[:1], refs[1:]), cancel=lambda _: None
    )
    strategies.deepspeed.torch_dist_barrier_and_cuda_sync = lambda: None


def drive(folder):
    import_openrlhf()
    import train_openrlhf as example

    example.plug_in()
    rows = write_rows(folder, [{"input": f"{n} + 1?", "label": str(n)} for n in range(ROWS)])
    opens = partial(Run, rows=rows)
    found = kill_and_resume_each(opens, folder, CASES, num_batches=BATCHES, rows=ROWS)
    num_rows = [sum(map(len, runs["whole"])) for runs in found.values()]
    return {"runs": found, "same": {"rows of all episodes": [num_rows, [EPISODES * ROWS] * 2]}}
