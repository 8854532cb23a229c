"""The own SFT commands of axolotl with its example, and of LLaMA-Factory and ms-swift with their page's lines.

Stood in are packages that they import and this training does not use, where they are not installed.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, blocks_of
from tests.support.frameworks.stand_ins import stand_in_for_missing

PAGE = "use-it-with-trl.md#LLaMA-Factory and ms-swift"
UNUSED = ("jieba", "matplotlib", "nltk", "rouge_chinese", "tensorboard", "torchaudio")
ROWS = 40
BATCH = 2
STEPS = 12
SAVE_STEPS = 4


def make_loader(settings):
    """A loader that writes down which rows it collates."""
    from asyncdata import DataLoader, PaddedCollator

    pad = PaddedCollator()

    def collate(samples):
        with Path(settings["seen"]).open("a") as file:
            file.write(json.dumps([int(sample.tokens[0]) for sample in samples]) + "\n")
        return pad(samples)

    return DataLoader(settings["rows"], tokenize_fn=tokenize, collate_fn=collate, batch_size=BATCH, num_workers=0)


def tokenize(row):
    return {"tokens": [row["number"], 1, 2, 3]}


def write_model(folder):
    """A model and its tokenizer, and the row that LLaMA-Factory and ms-swift ask for."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "one_row.json").write_text(json.dumps([{"instruction": "1?", "input": "", "output": "1"}]))
    (folder / "dataset_info.json").write_text(json.dumps({"one_row": {"file_name": "one_row.json"}}))


def _watch(settings):
    """Let every trainer kill the process after a step, or write the losses at the end."""
    import transformers.trainer

    class Watched(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == settings["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_end(self, args, state, control, **_):
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            Path(settings["report"]).write_text(json.dumps({"losses": losses}))

    transformers.trainer.DEFAULT_CALLBACKS.append(Watched)


def axolotl(folder, settings, shared):
    """It resumes by itself, with the example's settings."""
    import train_axolotl as example

    example.make_loader = lambda cfg: make_loader(settings)
    changed = {name: shared[name] for name in ("max_steps", "save_steps", "logging_steps", "learning_rate")}
    changed |= {"base_model": "model", "gradient_accumulation_steps": 1, "bf16": False, "fp32": True}
    (folder / "config.yaml").write_text(json.dumps(example.CONFIG | changed))  # JSON is YAML
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    sys.argv = ["axolotl", "train", "config.yaml", "--launcher", "python", "--output-dir", settings["folder"]]
    _watch(settings)
    runpy.run_module("axolotl.cli.main", run_name="__main__")


def llama_factory(folder, settings, shared):
    config = {**shared, "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": "model"}
    config |= {"template": "empty", "dataset": "one_row", "dataset_dir": str(folder)}
    (folder / "config.yaml").write_text(json.dumps(config))
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # it wants older versions of what is installed
    sys.argv = ["train.py", "config.yaml"]
    _watch(settings)
    exec(blocks_of(PAGE, "py")[1], {"__name__": "__main__"})  # noqa: S102 - the project's own pages


def ms_swift(folder, settings, shared):
    from swift.pipelines.train.sft import sft_main

    _watch(settings)  # after the import, which replaces what every trainer has
    (folder / "plugin.py").write_text(blocks_of(PAGE, "py")[2])
    arguments = {**shared, "model": "model", "model_type": "llama", "template": "dummy", "tuner_type": "full"}
    arguments |= {"dataset": "one_row.json", "add_version": False, "split_dataset_ratio": 0, "max_length": 64}
    arguments |= {"external_plugins": "plugin.py", "callbacks": "asyncdata", "torch_dtype": "float32"}
    if settings["resume"]:
        arguments["resume_from_checkpoint"] = f"{shared['output_dir']}/checkpoint-{SAVE_STEPS}"
    told = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in arguments.items()}
    sft_main([word for name, value in told.items() for word in (f"--{name}", value)])


def main(settings):
    os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HF": "1"}
    folder = Path.cwd()
    if settings["framework"] != "axolotl":
        stand_in_for_missing(*UNUSED)
    if not (folder / "model").exists():
        write_model(folder)
    data = ModuleType("my_data")
    data.make_loader = lambda *_: make_loader(settings)
    sys.modules["my_data"] = data
    shared = {"output_dir": settings["folder"], "max_steps": STEPS, "save_steps": SAVE_STEPS, "logging_steps": 1}
    shared |= {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "learning_rate": 0.01}
    shared |= {"use_cpu": True, "report_to": "none"}
    start = {"axolotl": axolotl, "llamafactory": llama_factory, "swift": ms_swift}[settings["framework"]]
    start(folder, settings, shared)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
