"""What the files of examples/frameworks tell a framework, against the framework's own code where a checkout is at hand.

That they end with a clear line where a framework is missing is in ``tests/unit/test_examples.py``.
"""

import ast
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader
from asyncdata.integrations.axolotl import LoaderPlugin
from asyncdata.integrations.verl import check
from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, ROOT, checkout, run_python
from tests.support.frameworks.prime_rl import PACKAGES as PRIME_PACKAGES
from tests.support.frameworks.skyrl import PACKAGES as SKYRL_PACKAGES
from tests.support.frameworks.stand_ins import stand_in_module

pytestmark = [pytest.mark.thorough]
FOLDER = ROOT / "examples" / "frameworks"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Imports an example; its files are in a folder of the test."""
    monkeypatch.chdir(tmp_path)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def defaults_of(tree, file):
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    return omegaconf.OmegaConf.load(f"{tree}/{file}")


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


def answer_of(code, folder, *places):
    return json.loads(run(folder, "-c", code, places=places).splitlines()[-1])


def test_verl_knows_every_argument_of_its_example_and_reads_its_rows(example):
    file = "verl/trainer/config/_generated_ppo_trainer.yaml"
    defaults, verl = defaults_of(checkout("ASYNCDATA_VERL", file), file), example("train_verl")

    settings = settings_of(verl.ARGUMENTS, defaults)
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
from tests.support.frameworks.stand_ins import stand_in_for
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
    packages = ("torch", "tyro", "spmd_types")
    tree = checkout("ASYNCDATA_TORCHTITAN", "torchtitan/models/llama3/config_registry.py", packages)
    num_tokens, num_trained, largest, vocabulary = answer_of(TITAN, tmp_path, tree)
    assert num_tokens == 8 * 2048
    assert num_trained > 0
    assert largest < vocabulary


def test_nemo_rl_knows_every_argument_of_its_example(example):
    file = "examples/configs/grpo_math_1B.yaml"
    tree = checkout("ASYNCDATA_NEMO_RL", file)
    settings = settings_of(example("train_nemo_rl").ARGUMENTS, defaults_of(tree, file))
    assert settings.data.train.asyncdata == {"num_workers": 2, "seed": 1}
    assert settings.policy.train_global_batch_size == 8 * 4, "prompts of a step, and answers of each"
    assert Path(tree, "examples/run_grpo.py").read_text().count("= setup_response_data(") == 1


def test_nemo_rls_example_runs_its_program_with_the_state_added(example, monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    from asyncdata.integrations.nemo_rl import NemoRows

    nemo, ran = example("train_nemo_rl"), {}
    knobs = {"num_workers": 0, "cache": {"folder": str(tmp_path / "cache")}}

    def setup_response_data(*_):
        ran["rows"] = NemoRows(str(nemo.PROMPTS), asyncdata=knobs)
        return ran["rows"], None, {}, {}

    def run_path(path, **_):
        utils = sys.modules["nemo_rl.data.utils"]
        ran.update(path=path, words=sys.argv, dataset=utils.setup_response_data(None)[0])

    stand_in_module(monkeypatch, "nemo_rl.data.utils", setup_response_data=setup_response_data)
    monkeypatch.setattr(sys, "argv", ["train_nemo_rl.py", "policy.model_name=mine"])
    monkeypatch.setattr(runpy, "run_path", run_path)
    nemo.main()
    try:
        assert (ran["path"], ran["words"][-1]) == ("examples/run_grpo.py", "policy.model_name=mine")
        assert len(ran["dataset"]) == 2000
        assert "asyncdata" in ran["dataset"].state_dict()
    finally:
        ran["rows"].dataset.close()


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


MEGATRON = {
    "megatron.bridge.data.base": "DatasetProvider",
    "megatron.bridge.recipes.gpt.vanilla_gpt": "vanilla_gpt_pretrain_config",
    "megatron.bridge.training.gpt_step": "forward_step",
    "megatron.bridge.training.pretrain": "pretrain",
}


def test_megatron_bridge_has_what_its_example_imports_and_sets():
    tree = checkout("ASYNCDATA_MEGATRON_BRIDGE", "src/megatron/bridge/training/gpt_step.py")
    nodes = list(ast.walk(ast.parse((FOLDER / "train_megatron_bridge.py").read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and "megatron.bridge" in (node.module or "")]

    assert {str(node.module): node.names[0].name for node in imports} == MEGATRON
    for module, name in MEGATRON.items():
        source = Path(tree, "src", *module.split(".")).with_suffix(".py").read_text()
        assert re.search(rf"^(class|def) {name}\b|^    \w+ as {name},|^ *import {name}", source, re.MULTILINE), module
    step = Path(tree, "src/megatron/bridge/training/gpt_step.py").read_text()
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert f'"{key}"' in step


def test_megatron_bridges_example_gives_what_the_forward_step_reads(example, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    for module, name in MEGATRON.items():
        stand_in_module(monkeypatch, module, **{name: type(name, (), {})})
    megatron, opened = example("train_megatron_bridge"), []
    megatron.CHATS.parent.mkdir()
    megatron.write_chats()
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)

    def make(*args, **knobs):
        opened.append(DataLoader(*args, **knobs))
        return opened[0]

    monkeypatch.setattr(megatron, "DataLoader", make)
    iterator = megatron.Chats().build_datasets(SimpleNamespace(pg_collection=SimpleNamespace(dp=group)))[0]
    with opened[0]:
        batch = next(iterator)

    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert {tuple(value.shape) for value in batch.values()} == {(megatron.MICRO_BATCH, megatron.LENGTH)}
    assert int(batch["labels"].min()) == 0, "no -100: the loss mask says what is not trained on"
    assert 0 < float(batch["loss_mask"].sum()) < batch["loss_mask"].numel()


SKYRL = """
import json
import tests.support.frameworks.skyrl as driver
driver.import_skyrl()
import skyrl_gym
import train_skyrl as example
from asyncdata.demo import tokenizer_folder
from asyncdata.integrations.skyrl import PPOExp
example.write_prompts()
_, (cfg, knobs) = driver.arguments_sent([*example.ARGUMENTS, f"trainer.policy.model.path={tokenizer_folder()}"])
found = {"knobs": knobs, "samples": cfg.generator.n_samples_per_prompt, "checkpoints": cfg.trainer.ckpt_path}
cfg.trainer.placement.colocate_all = False  # it asks Ray for a GPU
prompts = PPOExp(cfg, **knobs, cache={"folder": "cache"}).train_dataset
item = prompts.view[0]
found |= {"rows": len(prompts), "fields": sorted(item)}
prompts.close()
answer = item["env_extras"]["reward_spec"]["ground_truth"]
for said in (answer, "-1"):
    env = skyrl_gym.make(item["env_class"] or cfg.environment.env_class, env_config={}, extras=item["env_extras"])
    found[said == answer] = env.step(f"It is #### {said}")["reward"]
print(json.dumps(found))
"""


def test_skyrl_takes_every_argument_of_its_example_and_rewards_its_prompts(tmp_path):
    tree = checkout("ASYNCDATA_SKYRL", "skyrl/train/fully_async_trainer.py", SKYRL_PACKAGES)

    assert answer_of(SKYRL, tmp_path, tree) == {
        "knobs": {"num_workers": 2, "seed": 1},
        "samples": 4,
        "checkpoints": f"{tmp_path}/asyncdata_skyrl/checkpoints",
        "rows": 2000,
        "fields": ["env_class", "env_extras", "prompt", "uid"],
        "true": 1.0,
        "false": 0.0,
    }


TASKSET = """
import asyncio, json
from types import SimpleNamespace
import verifiers.v1 as vf
from prime_rl.configs.orchestrator import OrchestratorConfig
text = open("asyncdata_prime_rl/runs/docstrings/configs/orchestrator.json").read()
[source] = OrchestratorConfig.model_validate_json(text).train.source
taskset = vf.load_taskset(source.env.taskset)
task = next(iter(taskset.head(1)))
rewards = [
    asyncio.run(task.has_name(SimpleNamespace(last_reply=reply))) for reply in (f"It is {task.data.answer}.", "no")
]
print(json.dumps([type(taskset).__module__, task.data.idx, task.data.prompt, rewards]))
"""


@pytest.fixture
def prime_rl():
    """The folders to import prime-rl and verifiers from."""
    verifiers = checkout("ASYNCDATA_VERIFIERS", "verifiers/v1/taskset.py")
    tree = checkout("ASYNCDATA_PRIME_RL", "src/prime_rl/entrypoints/rl.py", (*PRIME_PACKAGES, "tomli"))
    return [f"{tree}/src", f"{tree}/packages/prime-rl-configs/src", verifiers]


def launched(places, folder, *words):
    """The settings that prime-rl's launcher writes for its orchestrator."""
    run(folder, str(FOLDER / "train_prime_rl.py"), "--dry-run", *words, places=places)
    return json.loads((folder / "asyncdata_prime_rl/runs/docstrings/configs/orchestrator.json").read_text())


def test_prime_rls_launcher_takes_the_configuration_of_its_example_and_continues_a_killed_run(prime_rl, tmp_path):
    """``--dry-run`` makes all settings as for a run, and checks them."""
    checkpoints = tmp_path / "asyncdata_prime_rl" / "runs" / "docstrings" / "checkpoints"
    for step, part in ((20, "trainer/.metadata"), (20, "orchestrator/progress.pt"), (30, "orchestrator/progress.pt")):
        file = checkpoints / f"step_{step}" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    after = launched(prime_rl, tmp_path, "--max-steps", "70")
    assert after["resume"]["step"] == 20, "the trainer had not saved step 30"
    assert after["max_steps"] == 70
    assert launched(prime_rl, tmp_path, "--resume.step", "30")["resume"]["step"] == 30

    (checkpoints / "step_20/trainer/.metadata").unlink()
    assert launched(prime_rl, tmp_path)["resume"] is None
    assert not checkpoints.exists(), "prime-rl begins only where no earlier run has left files"


def test_prime_rls_example_is_a_taskset_whose_tasks_are_rewarded(prime_rl, tmp_path):
    settings = launched(prime_rl, tmp_path)
    [source] = settings["train"]["source"]
    assert source["group_size"] == 4
    assert settings["batch_size"] % source["group_size"] == 0
    module, idx, prompt, rewards = answer_of(TASKSET, tmp_path, *prime_rl)
    assert (module, idx, rewards) == ("train_prime_rl", 0, [1.0, 0.0])
    assert prompt.startswith("Which ")


def test_axolotl_knows_every_key_of_its_example(example):
    schemas = Path(checkout("ASYNCDATA_AXOLOTL", "src/axolotl/utils/schemas/config.py"), "src/axolotl/utils/schemas")
    nodes = [node for path in schemas.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    fields = [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    known = {field.id for field in fields if isinstance(field, ast.Name)}
    assert set(example("train_axolotl").CONFIG) - known == {"asyncdata_loader"}, "which the plugin adds"


def test_axolotls_example_passes_the_plugin_and_makes_a_loader(example):
    pytest.importorskip("torch", reason="torch is not installed")
    axolotl = example("train_axolotl")
    axolotl.write_chats()

    class Config(SimpleNamespace):
        def get(self, name):
            return getattr(self, name, None)

    LoaderPlugin().check(Config(**axolotl.CONFIG))
    assert axolotl.CONFIG["asyncdata_loader"] == "train_axolotl.make_loader"
    with axolotl.make_loader(Config(**{**axolotl.CONFIG, "base_model": DEMO_TOKENIZER})) as loader:
        assert len(next(iter(loader))["input_ids"][0]) == 1024
