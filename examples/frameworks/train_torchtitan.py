"""SFT with torchtitan's smallest model: ``python train_torchtitan.py``, and the same again after a kill.

The chats are made of docstrings. Arguments are those of torchtitan, such as ``--training.steps 100``. Several GPUs:
``NPROC=8 python train_torchtitan.py``; a resume may have another number of them. A copy of this file is a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn
from asyncdata.demo import docstring_prompts, tokenizer_folder

FOLDER = Path("asyncdata_torchtitan").resolve()
CHATS = FOLDER / "chats.jsonl"


def debugmodel() -> Any:
    """The configuration of ``--config debugmodel``."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from asyncdata.integrations.torchtitan import AsyncDataLoader

    config = llama3_debugmodel()
    config.hf_assets_path = tokenizer_folder()
    config.dataloader = AsyncDataLoader.Config(
        dataset=str(CHATS),
        make_tokenize_fn=lambda tokenizer, length: ChatTokenizeFn(tokenizer, max_length=length),
        num_workers=2,
        seed=1,
    )
    config.training.steps = 50
    config.checkpoint.enable = True
    config.checkpoint.folder = str(FOLDER / "checkpoints")

    # torchtitan's smallest model has 2048 tokens, and this tokenizer has more.
    size = Tokenizer.from_file(f"{config.hf_assets_path}/tokenizer.json").get_vocab_size()
    model = config.model_spec.model
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = size
    config.loss.loss_fn.global_vocab_size = size
    return config


def write_chats() -> None:
    FOLDER.mkdir(exist_ok=True)
    with CHATS.open("w") as file:
        for _, row in zip(range(2000), docstring_prompts(), strict=False):
            turns = [("user", row["input"]), ("assistant", row["label"])]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def main() -> None:
    try:
        import torchtitan  # noqa: F401
    except ImportError as error:
        sys.exit(f"this example needs torchtitan ({error}): pip install torchtitan")

    if not CHATS.exists():  # the same file after a restart
        write_chats()
    here = str(Path(__file__).resolve().parent)
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={os.environ.get('NPROC', '1')}"]
    words += ["-m", "torchtitan.train", "--module", Path(__file__).stem, "--config", "debugmodel", *sys.argv[1:]]
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.exit(subprocess.call(words, env=os.environ | {"PYTHONPATH": path}))


if __name__ == "__main__":
    main()
