"""NeMo-RL's own data sets, collate function and checkpoints, from the folder that ASYNCDATA_NEMO_RL names."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.frameworks.killed_runs import block_of, kill_and_resume, main, message_of, run_block

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "ASYNCDATA_NEMO_RL"
NEEDS = {VARIABLE: "nemo_rl/data/utils.py"}
PACKAGES = ("torch", "ray", "torchdata", "yaml")
ROWS = 42
BATCH = 4


def write_rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"input": f"{number} + 1?", "output": str(number)}) + "\n" for number in range(ROWS))
    )
    return str(path)


class Words:
    """As much of a tokenizer as NeMo-RL's processor of math problems calls."""

    class tokenizer:  # noqa: N801 - NeMo-RL looks for this attribute
        bos_token_id = None

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.tensor([[len(word) for word in text.split()]])}


class Run:
    """The loader of ``grpo.setup``, whose function for it cannot be called alone; all else is NeMo-RL's code."""

    def __init__(self, folder: Path, data: dict[str, Any], *, is_ours: bool) -> None:
        import torch
        from nemo_rl.data.collate_fn import rl_collate_fn
        from nemo_rl.data.utils import load_dataloader_state, setup_response_data
        from nemo_rl.utils.checkpoint import CheckpointManager
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(42)  # as set_seed of grpo.setup
        dataset: Any
        dataset, _ = setup_response_data(Words(), data, None)
        if is_ours:
            dataset = _as_the_page_does(dataset)
        self.loader = StatefulDataLoader(
            dataset,
            batch_size=BATCH,
            shuffle=data["shuffle"],
            collate_fn=rl_collate_fn,
            drop_last=True,
            num_workers=data["num_workers"],
        )
        settings = {"checkpoint_dir": str(folder), "metric_name": None, "higher_is_better": True, "keep_top_k": None}
        self.checkpointer = CheckpointManager({**settings, "save_period": 1, "save_optimizer": False})
        latest = self.checkpointer.get_latest_checkpoint_path()
        info = self.checkpointer.load_training_info(latest)
        self.step = info["step"] if info else 0
        if latest is not None:
            load_dataloader_state(self.loader, latest, data)
        self.batches = self._batches()

    def _batches(self) -> Any:
        """The loops of ``grpo_train``: batch after batch, epoch after epoch."""
        while True:
            yield from self.loader

    def take(self) -> list[Any]:
        return [int(info["ground_truth"]) for info in next(self.batches)["extra_env_info"]]

    def save(self) -> None:
        import torch

        path = self.checkpointer.init_tmp_checkpoint(self.step, {"step": self.step})
        torch.save(self.loader.state_dict(), os.path.join(path, "train_dataloader.pt"))
        self.checkpointer.finalize_checkpoint(path)


def _as_the_page_does(dataset: Any) -> Any:
    """The lines that the page adds to NeMo-RL's example."""
    names: dict[str, Any] = {"setup_response_data": lambda *_: (dataset, None, {}, {}), "tokenizer": None}
    names["config"] = SimpleNamespace(data=None, env=None)
    run_block("use-it-with-nemo-rl.md", names)
    return names["dataset"]


def drive(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, os.environ[VARIABLE])
    import nemo_rl.data.utils
    import nemo_rl.utils.checkpoint  # noqa: F401 - before the forks
    import yaml

    of_the_page = yaml.safe_load(block_of("use-it-with-nemo-rl.md", "yaml"))["data"]
    data = {"use_multiple_dataloader": False, "max_input_seq_length": 64, "validation": None, **of_the_page}
    data["train"] |= {"data_path": write_rows(folder), "processor": "math_hf_data_processor"}
    data["train"]["asyncdata"] |= {"cache": {"folder": str(folder / "index")}}

    def opens(place: Path, *, is_ours: bool = True) -> Run:
        return Run(place, json.loads(json.dumps(data)), is_ours=is_ours)

    runs = kill_and_resume(opens, folder / "ours", num_batches=27, saves=[3, 10, 13], rows=ROWS)
    forgotten = opens(folder / "forgotten", is_ours=False)
    forgotten.take()
    forgotten.step = 1
    forgotten.save()
    said = message_of(opens(folder / "forgotten", is_ours=False).take)
    wanted = r"AD445 an index of \[4\] is not the one after the last, which would be 0"
    return {"runs": {"ours": runs}, "refused": {"without with_state()": [said, wanted]}}


if __name__ == "__main__":
    main(drive)
