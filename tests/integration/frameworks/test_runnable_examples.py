"""What the files of examples/frameworks tell a framework, against the framework's own code where it is at hand."""

import ast
import importlib.util
import json
import re
import runpy
import sys
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader, RowFn
from asyncdata.integrations.verl import check
from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, ROOT, checkout, needs, run_python, stand_in_module
from tests.support.frameworks.verl import defaults

pytestmark = [pytest.mark.thorough]
FOLDER = ROOT / "examples" / "frameworks"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Imports an example; its files are in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def settings_of(arguments, defaults):
    """A configuration with these arguments of Hydra, of which only those with a plus may be new."""
    from omegaconf import OmegaConf

    for argument in arguments:
        key, _, value = argument.partition("=")
        path = key.removeprefix("+")
        parent, _, last = path.rpartition(".")
        found = OmegaConf.select(defaults, parent)
        assert found is not None, f"there is no {parent}"
        known = OmegaConf.to_container(found, resolve=False)  # also keys that have no value yet
        assert (last in known) != key.startswith("+"), key
        OmegaConf.update(defaults, path, OmegaConf.create(f"value: {value}")["value"])
    return defaults


def run(folder, *words, places):
    """What Python prints, in a folder of the test, with further places to import from."""
    return run_python(folder, *words, places=[*places, str(FOLDER)], HF_HUB_OFFLINE="1", HOME=str(folder))


def test_verl_knows_every_argument_of_its_example_and_reads_its_rows(example):
    needs("verl")
    verl = example("train_verl")

    settings = settings_of(verl.ARGUMENTS, defaults("_generated_ppo_trainer.yaml"))
    verl.write_rows()

    check(settings.data)
    lines = Path(settings.data.train_files).read_text().splitlines()
    assert len(lines) == 2000
    assert len(Path(settings.data.val_files).read_text().splitlines()) == 50
    assert set(json.loads(lines[0])) == {"data_source", "prompt", "reward_model", "extra_info"}
    reward = settings.reward.custom_reward_function
    assert Path(reward.path) == FOLDER / "train_verl.py"
    assert getattr(verl, reward.name)("docstrings", "It is json.loads.", "json.dumps") == 0.5


TITAN = """
import json, sys
import torch._inductor.compile_fx, torch.distributed.pipelining  # torch looks whether there is triton
from tests.support.frameworks.killed_runs import stand_in_for
stand_in_for("triton", "torch.utils.tensorboard")  # kernels of models for a GPU, and a log
import train_torchtitan as example
example.write_chats()
config = example.debugmodel()
of = config.training
if hasattr(of, "seq_len"):  # torchtitan 0.3
    given = {"seq_len": of.seq_len, "local_batch_size": 16384 // of.seq_len}
else:
    given = {"max_context_length": of.max_context_length}
    given["num_tokens_per_batch"] = of.num_tokens_per_microbatch_per_dp_rank
loader = config.dataloader.build(
    dp_world_size=1, dp_rank=0, tokenizer=config.tokenizer.build(tokenizer_path=config.hf_assets_path), **given
)
inputs, labels = next(iter(loader))
loader.close()
print(json.dumps([inputs["input"].numel(), int((labels != -100).sum()), int(inputs["input"].max()),
                  config.model_spec.model.tok_embeddings.num_embeddings]))
"""


def test_torchtitans_example_is_a_configuration_whose_loader_gives_batches(tmp_path):
    needs("torchtitan")
    num_tokens, num_trained, largest, vocabulary = json.loads(run(tmp_path, "-c", TITAN, places=()).splitlines()[-1])
    assert num_tokens == 8 * 2048
    assert num_trained > 0
    assert largest < vocabulary


OF_MEGATRON = {
    "megatron.bridge.data.base": "DatasetProvider",
    "megatron.bridge.recipes.gpt.vanilla_gpt": "vanilla_gpt_pretrain_config",
    "megatron.bridge.training.checkpointing": "maybe_load_dataloader_state maybe_save_dataloader_state",
    "megatron.bridge.training.gpt_step": "forward_step",
    "megatron.bridge.training.pretrain": "pretrain",
}
"""What its example imports of Megatron-Bridge."""


@pytest.mark.parametrize("saved_at", range(8))
def test_batches_of_the_examples_continue_after_a_restart(example, jsonl_file, saved_at):
    """Seven rows are three batches, and the row that is left begins the next epoch."""
    path, shared = jsonl_file({"number": number} for number in range(7)), example("_shared")

    def opened():
        loader = DataLoader(path, tokenize_fn=RowFn(), shuffle="full", seed=1, num_workers=0)
        return shared.Batches(loader, 2, lambda samples: [sample.extra["number"] for sample in samples])

    def steps(batches):
        return chain.from_iterable(repeat(batches))

    whole, killed, resumed = opened(), opened(), opened()
    with whole.loader, killed.loader, resumed.loader:
        wanted = list(islice(steps(whole), 8))
        before = list(islice(steps(killed), saved_at))
        resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
        assert before + list(islice(steps(resumed), 8 - saved_at)) == wanted
    assert sorted(chain(*wanted[:3], wanted[3][:1])) == list(range(7))


def test_nemo_rl_knows_every_argument_of_its_example(monkeypatch):
    file = "examples/configs/grpo_math_1B.yaml"
    tree = checkout("ASYNCDATA_NEMO_RL", file)
    needs("torchdata", "omegaconf")
    from omegaconf import OmegaConf

    monkeypatch.syspath_prepend(tree)
    arguments = runpy.run_path(str(FOLDER / "train_nemo_rl.py"))["ARGUMENTS"]
    settings = settings_of(arguments, OmegaConf.load(f"{tree}/{file}"))
    assert settings.data.train.dataset_name == "train_nemo_rl.Sums"
    assert settings.policy.train_global_batch_size == 8 * 4, "prompts of a step, and answers of each"
    assert Path(tree, "examples/run_grpo.py").read_text().count("= setup_response_data(") == 1


def test_openrlhf_knows_every_argument_of_its_example(example):
    tree = checkout("ASYNCDATA_OPENRLHF", "openrlhf/cli/train_ppo_ray.py")
    arguments = example("train_openrlhf").ARGUMENTS
    source = Path(tree, "openrlhf/cli/train_ppo_ray.py").read_text()
    assert set(arguments) <= set(re.findall(r'add_argument\(\s*"(--[\w.]+)"', source))
    found = re.search(r'"--algo.advantage.estimator",.*?choices=\[(.*?)\]', source, re.DOTALL)
    assert f'"{arguments["--algo.advantage.estimator"]}"' in found[1]


def test_openrlhfs_example_rewards_an_answer_and_not_the_prompt(example):
    pytest.importorskip("torch", reason="torch is not installed")
    said, prompts = ["what is json.dumps? json.loads", "json? asyncio"], ["what is json.dumps? ", "json? "]
    found = example("train_openrlhf").reward_func(said, prompts, ["json.dumps"] * 2)
    assert found["rewards"].tolist() == [0.5, 0.0]


def test_megatron_bridge_has_what_its_example_imports_and_sets():
    tree = checkout("ASYNCDATA_MEGATRON_BRIDGE", "src/megatron/bridge/training/gpt_step.py")
    for module, names in OF_MEGATRON.items():
        source = Path(tree, "src", *module.split(".")).with_suffix(".py").read_text()
        for name in names.split():
            assert re.search(rf"^(class|def) {name}\b|^    \w+ as {name},|^ *import {name}", source, re.MULTILINE), name
    step = Path(tree, "src/megatron/bridge/training/gpt_step.py").read_text()
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert f'"{key}"' in step


def test_axolotl_knows_every_key_of_its_example(example, monkeypatch):
    schemas = Path(checkout("ASYNCDATA_AXOLOTL", "src/axolotl/utils/schemas/config.py"), "src/axolotl/utils/schemas")
    nodes = [node for path in schemas.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    known = {field.id for field in fields if isinstance(field, ast.Name)}
    assert set(axolotl_with_hooks(example, monkeypatch).CONFIG) <= known


def test_axolotls_example_makes_a_loader(example, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    axolotl = axolotl_with_hooks(example, monkeypatch)
    axolotl.write(axolotl.CHATS, axolotl.chats())
    assert axolotl.CONFIG["plugins"] == ["train_axolotl.LoaderPlugin"]
    cfg = SimpleNamespace(**{**axolotl.CONFIG, "base_model": DEMO_TOKENIZER})
    with axolotl.make_loader(cfg) as loader:
        assert len(next(iter(loader))["input_ids"][0]) == 1024


def axolotl_with_hooks(example, patch):
    plugin = type("BasePlugin", (), {"load_datasets": None, "post_trainer_create": None})
    stand_in_module(patch, "axolotl.common.datasets", TrainDatasetMeta=object)
    stand_in_module(patch, "axolotl.integrations.base", BasePlugin=plugin)
    return example("train_axolotl")
