"""What the files of examples/frameworks tell a framework, against the framework's own code where a checkout is at hand.

That they end with a clear line where a framework is missing is in ``tests/unit/test_examples.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdata import DataLoader
from asyncdata.integrations.axolotl import LoaderPlugin
from asyncdata.integrations.verl import check
from tests.support.frameworks.killed_runs import ROOT, checkout
from tests.support.frameworks.prime_rl import PACKAGES as PRIME_PACKAGES
from tests.support.frameworks.skyrl import PACKAGES as SKYRL_PACKAGES
from tests.support.frameworks.stand_ins import stand_in_module

pytestmark = [pytest.mark.thorough]
FOLDER = ROOT / "examples" / "frameworks"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example; its files are in a folder of the test."""
    monkeypatch.chdir(tmp_path)

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def settings_of(arguments: list[str], defaults: Any) -> Any:
    """A configuration with these arguments of Hydra, of which only those with a plus may be new."""
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    for argument in arguments:
        key, _, value = argument.partition("=")
        path = key.removeprefix("+")
        parent, _, last = path.rpartition(".")
        found = omegaconf.OmegaConf.select(defaults, parent)
        assert found is not None, f"there is no {parent}"
        known = omegaconf.OmegaConf.to_container(found, resolve=False)  # also keys that have no value yet
        assert (last in known) != key.startswith("+"), key
        omegaconf.OmegaConf.update(defaults, path, omegaconf.OmegaConf.create(f"value: {value}")["value"])
    return defaults


def run_python(words: list[str], folder: Path, *places: str) -> str:
    """What Python prints, in a folder of the test, with further places to import from."""
    path = os.pathsep.join([*places, str(FOLDER), str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


# verl


def test_verl_knows_every_argument_of_its_example_and_reads_its_rows(example: Any) -> None:
    tree = checkout("ASYNCDATA_VERL", "verl/trainer/config/_generated_ppo_trainer.yaml")
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    verl = example("train_verl")
    defaults = omegaconf.OmegaConf.load(f"{tree}/verl/trainer/config/_generated_ppo_trainer.yaml")

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


# torchtitan

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


def test_torchtitans_example_is_a_configuration_whose_loader_gives_batches(tmp_path: Path) -> None:
    packages = ("torch", "tyro", "spmd_types")
    tree = checkout("ASYNCDATA_TORCHTITAN", "torchtitan/models/llama3/config_registry.py", packages)

    found = run_python(["-c", TITAN], tmp_path, tree)

    num_tokens, num_trained, largest, vocabulary = json.loads(found.splitlines()[-1])
    assert num_tokens == 8 * 2048
    assert num_trained > 0
    assert largest < vocabulary


# NeMo-RL


def test_nemo_rl_knows_every_argument_of_its_example(example: Any) -> None:
    tree = checkout("ASYNCDATA_NEMO_RL", "examples/configs/grpo_math_1B.yaml")
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    defaults = omegaconf.OmegaConf.load(f"{tree}/examples/configs/grpo_math_1B.yaml")

    settings = settings_of(example("train_nemo_rl").ARGUMENTS, defaults)

    assert settings.data.train.asyncdata == {"num_workers": 2, "seed": 1}
    assert settings.policy.train_global_batch_size == 8 * 4, "prompts of a step, and answers of each"
    assert Path(tree, "examples/run_grpo.py").read_text().count("= setup_response_data(") == 1


def test_nemo_rls_example_runs_its_program_with_the_state_added(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from asyncdata.integrations.nemo_rl import NemoRows

    nemo = example("train_nemo_rl")
    rows: list[Any] = []

    def setup_response_data(*_: Any) -> Any:
        rows.append(NemoRows(str(nemo.PROMPTS), asyncdata={"num_workers": 0, "cache": {"folder": str(tmp_path / "c")}}))
        return rows[0], None, {}, {}

    stand_in_module(monkeypatch, "nemo_rl.data.utils", setup_response_data=setup_response_data)
    utils: Any = sys.modules["nemo_rl.data.utils"]
    monkeypatch.setattr(sys, "argv", ["train_nemo_rl.py", "policy.model_name=mine"])
    ran: dict[str, Any] = {}

    def run_path(path: str, **_: Any) -> None:
        ran.update(path=path, words=sys.argv, dataset=utils.setup_response_data(None)[0])

    monkeypatch.setattr(runpy, "run_path", run_path)
    nemo.main()
    try:
        assert ran["path"] == "examples/run_grpo.py"
        assert ran["words"][-1] == "policy.model_name=mine"
        assert len(ran["dataset"]) == 2000
        assert "asyncdata" in ran["dataset"].state_dict()
    finally:
        rows[0].dataset.close()


# OpenRLHF


def test_openrlhf_knows_every_argument_of_its_example(example: Any) -> None:
    tree = checkout("ASYNCDATA_OPENRLHF", "openrlhf/cli/train_ppo_ray.py")
    openrlhf = example("train_openrlhf")

    source = Path(tree, "openrlhf/cli/train_ppo_ray.py").read_text()
    known = set(re.findall(r'add_argument\(\s*"(--[\w.]+)"', source))
    assert set(openrlhf.ARGUMENTS) <= known
    found = re.search(r'"--algo.advantage.estimator",.*?choices=\[(.*?)\]', source, re.DOTALL)
    assert found is not None
    assert f'"{openrlhf.ARGUMENTS["--algo.advantage.estimator"]}"' in found[1]


def test_openrlhfs_example_rewards_an_answer_and_not_the_prompt(example: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    reward = example("train_openrlhf").reward_func

    found = reward(
        ["what is json.dumps? json.loads", "json? asyncio"], ["what is json.dumps? ", "json? "], ["json.dumps"] * 2
    )
    assert found["rewards"].tolist() == [0.5, 0.0]


# Megatron-Bridge

MEGATRON = {
    "megatron.bridge.data.base": "DatasetProvider",
    "megatron.bridge.recipes.gpt.vanilla_gpt": "vanilla_gpt_pretrain_config",
    "megatron.bridge.training.gpt_step": "forward_step",
    "megatron.bridge.training.pretrain": "pretrain",
}


def test_megatron_bridge_has_what_its_example_imports_and_sets() -> None:
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


def test_megatron_bridges_example_gives_what_the_forward_step_reads(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for module, name in MEGATRON.items():
        stand_in_module(monkeypatch, module, **{name: type(name, (), {})})
    megatron = example("train_megatron_bridge")
    megatron.CHATS.parent.mkdir()
    megatron.write_chats()
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    opened: list[DataLoader] = []
    monkeypatch.setattr(
        megatron, "DataLoader", lambda *args, **knobs: opened.append(DataLoader(*args, **knobs)) or opened[0]
    )

    iterator = megatron.Chats().build_datasets(SimpleNamespace(pg_collection=SimpleNamespace(dp=group)))[0]
    with opened[0]:
        batch = next(iterator)

    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert {tuple(value.shape) for value in batch.values()} == {(megatron.MICRO_BATCH, megatron.LENGTH)}
    assert int(batch["labels"].min()) == 0, "no -100: the loss mask says what is not trained on"
    assert 0 < float(batch["loss_mask"].sum()) < batch["loss_mask"].numel()


# SkyRL

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


def test_skyrl_takes_every_argument_of_its_example_and_rewards_its_prompts(tmp_path: Path) -> None:
    tree = checkout("ASYNCDATA_SKYRL", "skyrl/train/fully_async_trainer.py", SKYRL_PACKAGES)

    found = json.loads(run_python(["-c", SKYRL], tmp_path, tree).splitlines()[-1])

    assert found == {
        "knobs": {"num_workers": 2, "seed": 1},
        "samples": 4,
        "checkpoints": f"{tmp_path}/asyncdata_skyrl/checkpoints",
        "rows": 2000,
        "fields": ["env_class", "env_extras", "prompt", "uid"],
        "true": 1.0,
        "false": 0.0,
    }


# prime-rl

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
def prime_rl() -> list[str]:
    """The folders to import prime-rl and verifiers from."""
    verifiers = checkout("ASYNCDATA_VERIFIERS", "verifiers/v1/taskset.py")
    tree = checkout("ASYNCDATA_PRIME_RL", "src/prime_rl/entrypoints/rl.py", (*PRIME_PACKAGES, "tomli"))
    return [f"{tree}/src", f"{tree}/packages/prime-rl-configs/src", verifiers]


def launched(places: list[str], folder: Path, *words: str) -> Any:
    """The settings that prime-rl's launcher writes for its orchestrator."""
    run_python([str(FOLDER / "train_prime_rl.py"), "--dry-run", *words], folder, *places)
    return json.loads((folder / "asyncdata_prime_rl/runs/docstrings/configs/orchestrator.json").read_text())


def test_prime_rls_launcher_takes_the_configuration_of_its_example_and_continues_a_killed_run(
    prime_rl: list[str], tmp_path: Path
) -> None:
    """``--dry-run`` makes all settings as for a run, and checks them."""
    run = tmp_path / "asyncdata_prime_rl" / "runs" / "docstrings"
    for step, part in ((20, "trainer/.metadata"), (20, "orchestrator/progress.pt"), (30, "orchestrator/progress.pt")):
        file = run / "checkpoints" / f"step_{step}" / part
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    after = launched(prime_rl, tmp_path, "--max-steps", "70")
    assert after["resume"]["step"] == 20, "the trainer had not saved step 30"
    assert after["max_steps"] == 70
    assert launched(prime_rl, tmp_path, "--resume.step", "30")["resume"]["step"] == 30

    (run / "checkpoints/step_20/trainer/.metadata").unlink()
    assert launched(prime_rl, tmp_path)["resume"] is None
    assert not (run / "checkpoints").exists(), "prime-rl begins only where no earlier run has left files"


def test_prime_rls_example_is_a_taskset_whose_tasks_are_rewarded(prime_rl: list[str], tmp_path: Path) -> None:
    settings = launched(prime_rl, tmp_path)
    [source] = settings["train"]["source"]
    assert source["group_size"] == 4
    assert settings["batch_size"] % source["group_size"] == 0

    module, idx, prompt, rewards = json.loads(run_python(["-c", TASKSET], tmp_path, *prime_rl).splitlines()[-1])
    assert (module, idx, rewards) == ("train_prime_rl", 0, [1.0, 0.0])
    assert prompt.startswith("Which ")


# axolotl


def test_axolotl_knows_every_key_of_its_example(example: Any) -> None:
    tree = checkout("ASYNCDATA_AXOLOTL", "src/axolotl/utils/schemas/config.py")
    known = set()
    for path in Path(tree, "src/axolotl/utils/schemas").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)

    assert set(example("train_axolotl").CONFIG) - known == {"asyncdata_loader"}, "which the plugin adds"


def test_axolotls_example_passes_the_plugin_and_makes_a_loader(example: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    axolotl = example("train_axolotl")
    axolotl.write_chats()
    tokenizer = str(ROOT / "asyncdata/assets/demo_tokenizer")

    class Config(SimpleNamespace):
        def get(self, name: str) -> Any:
            return getattr(self, name, None)

    LoaderPlugin().check(Config(**axolotl.CONFIG))
    assert axolotl.CONFIG["asyncdata_loader"] == "train_axolotl.make_loader"
    with axolotl.make_loader(Config(**{**axolotl.CONFIG, "base_model": tokenizer})) as loader:
        assert len(next(iter(loader))["input_ids"][0]) == 1024
