"""NeMo-RL's own data sets, collate function and checkpoints with its example; ASYNCDATA_NEMO_RL names the checkout."""

import json
import os
from pathlib import Path

import pytest

from asyncdata.errors import ConfigError
from tests.support.frameworks.killed_runs import import_from, kill_and_resume, write_rows

VARIABLE = "ASYNCDATA_NEMO_RL"
NEEDS = {VARIABLE: "nemo_rl/data/utils.py"}
PACKAGES = ("torch", "ray", "torchdata", "omegaconf")
ROWS = 42
BATCH = 4


class Words:
    """As much of a tokenizer as NeMo-RL's processor of math problems calls."""

    class tokenizer:  # noqa: N801 - NeMo-RL looks for this attribute
        bos_token_id = None

    def apply_chat_template(self, messages, **_):
        return " ".join(message["content"] for message in messages)

    def __call__(self, text, **_):
        import torch

        return {"input_ids": torch.tensor([[len(word) for word in text.split()]])}


class Run:
    """The loader of ``grpo.setup``, whose function for it cannot be called alone; all else is NeMo-RL's code."""

    def __init__(self, folder, data, setup):
        import torch
        from nemo_rl.data.collate_fn import rl_collate_fn
        from nemo_rl.data.utils import load_dataloader_state
        from nemo_rl.utils.checkpoint import CheckpointManager
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(42)  # as set_seed of grpo.setup
        dataset, _ = setup(Words(), data, None)
        given = {"shuffle": data["shuffle"], "drop_last": True, "num_workers": data["num_workers"]}
        self.loader = StatefulDataLoader(dataset, batch_size=BATCH, collate_fn=rl_collate_fn, **given)
        settings = {"checkpoint_dir": str(folder), "metric_name": None, "higher_is_better": True, "keep_top_k": None}
        self.checkpointer = CheckpointManager({**settings, "save_period": 1, "save_optimizer": False})
        latest = self.checkpointer.get_latest_checkpoint_path()
        info = self.checkpointer.load_training_info(latest)
        self.step = info["step"] if info else 0
        if latest is not None:
            load_dataloader_state(self.loader, latest, data)
        self.batches = self._batches()

    def _batches(self):
        """The loops of ``grpo_train``: batch after batch, epoch after epoch."""
        while True:
            yield from self.loader

    def take(self):
        return [int(info["ground_truth"]) for info in next(self.batches)["extra_env_info"]]

    def save(self):
        import torch

        path = self.checkpointer.init_tmp_checkpoint(self.step, {"step": self.step})
        torch.save(self.loader.state_dict(), os.path.join(path, "train_dataloader.pt"))
        self.checkpointer.finalize_checkpoint(path)


def drive(folder):
    import_from(os.environ[VARIABLE])
    import nemo_rl.data.utils as utils
    import nemo_rl.utils.checkpoint  # noqa: F401 - before the forks
    import train_nemo_rl as example
    from omegaconf import OmegaConf

    own = OmegaConf.from_cli([word.lstrip("+") for word in example.ARGUMENTS if word.startswith("data.")])
    data = {"use_multiple_dataloader": False, "max_input_seq_length": 64, "validation": None}
    data |= OmegaConf.to_container(own.data)
    data["train"] |= {"processor": "math_hf_data_processor"}
    rows = [{"input": f"{number} + 1?", "output": str(number)} for number in range(ROWS)]
    example.PROMPTS = Path(write_rows(folder, rows))

    def opens(place, *, is_ours=True):
        setup = example.with_state(utils.setup_response_data) if is_ours else utils.setup_response_data
        return Run(place, json.loads(json.dumps(data)), setup)

    runs = kill_and_resume(opens, folder / "ours", num_batches=27, saves=[3, 10, 13], rows=ROWS)
    without_state = opens(folder / "without_state", is_ours=False)
    without_state.take()
    without_state.step = 1
    without_state.save()
    resumed = opens(folder / "without_state", is_ours=False)
    with pytest.raises(ConfigError, match=r"^AD445 an index of \[4\] is not the one after the last, which would be 0"):
        resumed.take()
    return {"runs": {"ours": runs}}
