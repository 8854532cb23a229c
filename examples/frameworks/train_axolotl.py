"""SFT with axolotl: ``python train_axolotl.py``, and the same again after a kill.

It writes ``config.yaml`` and starts ``axolotl train``. The chats are made of docstrings. Arguments are those of
``axolotl train``, such as ``--base-model my/model``. A copy of this file is a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncdata import ChatTokenizeFn, DataLoader, PackedCollator, SoftPacking
from asyncdata.demo import docstring_prompts
from asyncdata.integrations.torch import ranks

FOLDER = Path("asyncdata_axolotl").resolve()
CHATS = FOLDER / "chats.jsonl"

CONFIG = {
    # What asyncdata needs:
    "plugins": ["asyncdata.integrations.axolotl.AsyncDataPlugin"],
    "asyncdata_loader": f"{Path(__file__).stem}.make_loader",
    "max_steps": 100,
    # The rest is a training as any other:
    "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    "datasets": [{"path": str(CHATS), "type": "chat_template"}],  # axolotl asks for it, and does not read it
    "sequence_len": 1024,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_torch",
    "learning_rate": 1e-5,
    "lr_scheduler": "cosine",
    "bf16": "auto",
    "save_steps": 20,
    "auto_resume_from_checkpoints": True,
    "output_dir": str(FOLDER / "checkpoints"),
}


def make_loader(cfg: Any) -> DataLoader:
    length = cfg.sequence_len
    return DataLoader(
        str(CHATS),
        tokenize_fn=ChatTokenizeFn(cfg.base_model, max_length=length),
        packing=SoftPacking(max_length=length),
        collate_fn=PackedCollator(max_length=length, keys="transformers"),
        batch_size=1,
        num_workers=2,
        ranks=ranks(),
    )


def write_chats() -> None:
    FOLDER.mkdir(exist_ok=True)
    with CHATS.open("w") as file:
        for _, row in zip(range(2000), docstring_prompts(), strict=False):
            turns = [("user", row["input"]), ("assistant", row["label"])]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def main() -> None:
    try:
        import axolotl  # noqa: F401
    except ImportError as error:
        sys.exit(f"this example needs axolotl ({error}): pip install axolotl")

    if not CHATS.exists():  # the same file after a restart
        write_chats()
    config = FOLDER / "config.yaml"
    config.write_text(json.dumps(CONFIG, indent=2))  # JSON is YAML
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "axolotl.cli.main", "train", str(config), *sys.argv[1:]]
    sys.exit(subprocess.call(words, env=os.environ | {"PYTHONPATH": path}))


if __name__ == "__main__":
    main()
