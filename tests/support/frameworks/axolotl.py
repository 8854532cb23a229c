"""axolotl's own plugin manager and configuration, from the folder that ASYNCDATA_AXOLOTL names.

axolotl's trainer needs numba and triton to be imported. Stood in are that trainer (transformers' ``Trainer``, its base)
and ``axolotl.common.datasets``, of which only the class ``TrainDatasetMeta`` is taken.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.frameworks.killed_runs import ROOT, block_of

VARIABLE = "ASYNCDATA_AXOLOTL"
ROWS = 40
BATCH = 2
STEPS = 12


def import_axolotl() -> None:
    source = Path(os.environ[VARIABLE], "src")
    sys.path.insert(0, str(source))
    module = ModuleType("axolotl.common.datasets")
    sys.modules[module.__name__] = module
    tree = ast.parse((source / "axolotl/common/datasets.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainDatasetMeta"]
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + ast.unparse(found[0])
    exec(code, vars(module))  # noqa: S102 - the framework's own code


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


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def main(settings: dict[str, Any]) -> None:
    """``do_train`` of axolotl's command line, and the part of ``setup_model_and_trainer`` around the trainer."""
    import signal

    import yaml

    import_axolotl()
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Killed(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == settings.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    page = yaml.safe_load(block_of("use-it-with-axolotl.md", "yaml"))
    cfg = DictDefault({**page, "max_steps": STEPS, "rows": settings["rows"], "seen": settings["seen"]})
    cfg.asyncdata_loader = f"{__spec__.name}.make_loader"
    manager = PluginManager.get_instance()
    for name in cfg.plugins:
        manager.register(name)
    manager.cfg = cfg
    _, config_class = merge_input_args()
    data = manager.load_datasets(cfg, preprocess=False)
    arguments = TrainingArguments(
        output_dir=settings["folder"],
        max_steps=data.total_num_steps,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(_model(), args=arguments, train_dataset=data.train_dataset)
    manager.post_trainer_create(cfg, trainer)
    trainer.add_callback(Killed())
    trainer.train(resume_from_checkpoint=settings["resume"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    knows_the_key = "asyncdata_loader" in config_class.model_fields
    Path(settings["report"]).write_text(json.dumps({"losses": losses, "knows_the_key": knows_the_key}))


def page_makes_a_loader(folder: Path) -> Any:
    """The loader that the page's function makes, of the demo tokenizer."""
    from types import SimpleNamespace

    (folder / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    code = block_of("use-it-with-axolotl.md", "py").replace('"chats.jsonl"', repr(str(folder / "chats.jsonl")))
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - the project's own pages
    tokenizer = str(ROOT / "asyncdata/assets/demo_tokenizer")
    return names["make_loader"](SimpleNamespace(sequence_len=64, base_model=tokenizer))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
