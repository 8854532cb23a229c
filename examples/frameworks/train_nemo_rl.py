"""GRPO with NeMo-RL, run in a checkout of it: ``uv run python train_nemo_rl.py``, and the same again after a kill.

It runs NeMo-RL's own ``examples/run_grpo.py``. The state is in ``train_dataloader.pt`` of NeMo-RL's checkpoints. The
prompts are sums, which NeMo-RL's environment for mathematics checks. Arguments are those of NeMo-RL, such as
``policy.model_name=my/model``. Copy this file and ``_shared.py``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from _shared import need, sums, write

from asyncdata import DataLoader, RowFn, Sample
from asyncdata.integrations.torch import OrderView

try:
    import nemo_rl.data.utils as data
    from nemo_rl.data.datasets.raw_dataset import RawDataset
except ImportError as error:
    sys.exit(f"this example needs NeMo-RL ({error}): run it in a checkout of NVIDIA-NeMo/RL, with uv run")

FOLDER = Path("asyncdata_nemo_rl").resolve()
PROMPTS = FOLDER / "prompts.jsonl"
PROGRAM = Path("examples/run_grpo.py")

ARGUMENTS = [
    # What asyncdata needs: it shuffles, and has its own workers.
    "data.shuffle=false",
    "data.num_workers=0",
    f"data.train.dataset_name={Path(__file__).stem}.Sums",
    # The rest is a training as any other:
    "data.train.split_validation_size=0",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=-1",
    "grpo.val_at_start=false",
    "policy.train_global_batch_size=32",
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=10",
    f"checkpointing.checkpoint_dir={FOLDER}/checkpoints",
]


class Sums(RawDataset):
    task_name, val_dataset = "sums", None

    def __init__(self, **_: Any) -> None:
        loader = DataLoader(str(PROMPTS), tokenize_fn=RowFn(), shuffle="full", seed=1, num_workers=2)
        self.dataset = OrderView(loader, item=self.messages)

    def messages(self, sample: Sample) -> dict[str, Any]:
        turns = [("user", sample.extra["input"]), ("assistant", sample.extra["output"])]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"messages": messages, "task_name": self.task_name}


def with_state(setup: Any) -> Any:
    """NeMo-RL's ``setup_response_data``, with what torchdata's loader looks for to save the state of a data set."""

    def setup_response_data(*args: Any, **more: Any) -> Any:
        dataset, *others = setup(*args, **more)
        need("NeMo-RL 7ea279ab", dataset, "dataset")
        need("NeMo-RL 7ea279ab, with one entry in data.train", dataset.dataset, "state_dict", "load_state_dict")
        dataset.state_dict = dataset.dataset.state_dict
        dataset.load_state_dict = dataset.dataset.load_state_dict
        return dataset, *others

    return setup_response_data


if __name__ == "__main__":
    need("NeMo-RL 7ea279ab", data, "setup_response_data")
    write(PROMPTS, ({"input": question, "output": answer} for question, answer in sums()))
    data.setup_response_data = with_state(data.setup_response_data)
    sys.argv = [str(PROGRAM), *ARGUMENTS, *sys.argv[1:]]
    runpy.run_path(str(PROGRAM), run_name="__main__")
