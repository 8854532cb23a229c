"""What the files of examples/frameworks tell a framework, against the framework's own code where that is at hand.

That they end with a clear line where a framework is missing is in ``tests/unit/test_examples.py``.
"""

import ast
import importlib.util
import json
import re
import runpy
import sys
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from asyncdata import DataLoader, RowFn
from asyncdata.integrations.verl import check
from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, ROOT, checkout, needs, run_python
from tests.support.frameworks.stand_ins import stand_in_module
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


def answer_of(code, folder, *places):
    return json.loads(run(folder, "-c", code, places=places).splitlines()[-1])


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
    needs("torchtitan")
    num_tokens, num_trained, largest, vocabulary = answer_of(TITAN, tmp_path)
    assert num_tokens == 8 * 2048
    assert num_trained > 0
    assert largest < vocabulary


INTERFACES = {
    "train_axolotl": {"axolotl.common.datasets": "TrainDatasetMeta", "axolotl.integrations.base": "BasePlugin"},
    "train_megatron_bridge": {
        "megatron.bridge.data.base": "DatasetProvider",
        "megatron.bridge.recipes.gpt.vanilla_gpt": "vanilla_gpt_pretrain_config",
        "megatron.bridge.training.checkpointing": "maybe_load_dataloader_state maybe_save_dataloader_state",
        "megatron.bridge.training.gpt_step": "forward_step",
        "megatron.bridge.training.pretrain": "pretrain",
    },
    "train_nemo_rl": {"nemo_rl.data.datasets.raw_dataset": "RawDataset", "nemo_rl.data.utils": "setup_response_data"},
    "train_openrlhf": {"openrlhf.trainer.ppo_trainer": "", "openrlhf.trainer.ppo_trainer_async": ""},
    "train_prime_rl": {
        "verifiers.v1": "",
        "prime_rl.orchestrator.train_source": "",
        "prime_rl.orchestrator.curriculum": "Curriculum TaskSampler",
    },
    "train_skyrl": {
        "ray": "",
        "skyrl.train.config": "SkyRLTrainConfig",
        "skyrl.train.entrypoints.main_base": "BasePPOExp",
        "skyrl.train.trainer": "RayPPOTrainer",
        "skyrl.train.utils": "validate_cfg",
        "skyrl.train.utils.utils": "initialize_ray",
    },
}
"""What each example imports of its framework."""


def stand_in(patch, name):
    """An example's framework, with nothing but the names that it imports."""
    for module, names in INTERFACES[name].items():
        stand_in_module(patch, module, **{attribute: type(attribute, (), {}) for attribute in names.split()})


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("train_axolotl", None, "BasePlugin has no load_datasets: this example was written for axolotl"),
        ("train_nemo_rl", lambda made: made.with_state(lambda: [()])(), "tuple has no dataset: .* for NeMo-RL"),
        ("train_openrlhf", lambda made: made.plug_in(), "openrlhf.trainer.ppo_trainer has no prepare_datasets: "),
        ("train_prime_rl", None, "prime_rl.orchestrator.train_source has no Curriculum: this example"),
        ("train_skyrl", None, "BasePPOExp has no get_train_dataset: this example was written for SkyRL"),
    ],
)
def test_an_example_names_what_its_framework_no_longer_has(example, monkeypatch, name, call, message):
    stand_in(monkeypatch, name)
    with pytest.raises(SystemExit, match=message):
        made = example(name)
        call(made)


def test_megatron_bridges_example_names_what_is_gone(example, monkeypatch):
    stand_in(monkeypatch, "train_megatron_bridge")
    monkeypatch.delattr("megatron.bridge.training.checkpointing.maybe_save_dataloader_state")
    with pytest.raises(SystemExit, match="checkpointing has no maybe_save_dataloader_state: this example"):
        example("train_megatron_bridge")


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


def test_nemo_rls_example_has_a_data_set_with_a_state(example, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    stand_in(monkeypatch, "train_nemo_rl")
    nemo = example("train_nemo_rl")
    nemo.write(nemo.PROMPTS, ({"input": question, "output": answer} for question, answer in nemo.sums()))
    rows = nemo.Sums(dataset_name="train_nemo_rl.Sums").dataset
    dataset, _ = nemo.with_state(lambda *_: (SimpleNamespace(dataset=rows), None))(None)
    try:
        assert len(rows) == 2000
        assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
        assert dataset.state_dict()["next_index"] == 1
    finally:
        rows.close()


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
    for module, names in INTERFACES["train_megatron_bridge"].items():
        source = Path(tree, "src", *module.split(".")).with_suffix(".py").read_text()
        for name in names.split():
            assert re.search(rf"^(class|def) {name}\b|^    \w+ as {name},|^ *import {name}", source, re.MULTILINE), name
    step = Path(tree, "src/megatron/bridge/training/gpt_step.py").read_text()
    for key in ("tokens", "labels", "loss_mask", "position_ids"):
        assert f'"{key}"' in step


def test_megatron_bridges_example_gives_what_the_forward_step_reads(example, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    stand_in(monkeypatch, "train_megatron_bridge")
    megatron, opened = example("train_megatron_bridge"), []
    megatron.write(megatron.CHATS, megatron.chats())
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


def test_skyrls_example_gives_the_batches_of_its_trainer_which_refuses_a_checkpoint_without_them(example, monkeypatch):
    stand_in(monkeypatch, "train_skyrl")
    found = {"load_checkpoints": lambda _: (3, "path"), "_build_train_dataloader_and_compute_training_steps": None}
    monkeypatch.setattr("skyrl.train.trainer.RayPPOTrainer", type("RayPPOTrainer", (), found))
    experiment = type("BasePPOExp", (), {"get_train_dataset": None, "get_trainer": None})
    monkeypatch.setattr("skyrl.train.entrypoints.main_base.BasePPOExp", experiment)
    skyrl = example("train_skyrl")
    skyrl.write(Path("prompts.jsonl"), skyrl.rows())
    made, trainer = skyrl.Experiment(), skyrl.Trainer()
    config = SimpleNamespace(train_batch_size=64, seed=1, epochs=5)
    made.cfg = trainer.cfg = SimpleNamespace(data=SimpleNamespace(train_data=["prompts.jsonl"]), trainer=config)
    trainer.train_dataset = made.get_train_dataset()
    trainer._build_train_dataloader_and_compute_training_steps()  # noqa: SLF001 - SkyRL calls it
    with trainer.train_dataset.loader:
        batch = next(iter(trainer.train_dataloader))
        with pytest.raises(RuntimeError, match="no data.pt of this example"):
            trainer.load_checkpoints()
        trainer.train_dataset.load_state_dict(trainer.train_dataset.state_dict())
        assert trainer.load_checkpoints() == (3, "path")
    assert (len(batch), set(batch[0])) == (64, {"env_class", "env_extras", "prompt", "uid"})
    assert trainer.total_training_steps == 5 * (2000 // 64)


def test_prime_rls_example_gives_tasks_that_come_again_until_their_rollouts_are_complete(example, monkeypatch):
    stand_in(monkeypatch, "train_prime_rl")
    generic = {"__class_getitem__": classmethod(lambda kind, _: kind)}
    for name in ("Task", "TaskData", "Taskset", "TasksetConfig", "Trace", "Episode"):
        monkeypatch.setattr(f"verifiers.v1.{name}", type(name, (SimpleNamespace,), generic), raising=False)
    made = lambda self, data, config: vars(self).update(data=data, key=str(data.idx))  # noqa: E731
    monkeypatch.setattr("verifiers.v1.Task.__init__", made)
    monkeypatch.setattr("verifiers.v1.reward", lambda function: function, raising=False)
    monkeypatch.setattr("prime_rl.orchestrator.train_source.Curriculum", SimpleNamespace, raising=False)
    of_sampler = dict.fromkeys(("observe", "state_dict", "load_state_dict"))
    monkeypatch.setattr("prime_rl.orchestrator.curriculum.TaskSampler", type("TaskSampler", (), of_sampler))
    prime = example("train_prime_rl")
    prime.write(prime.PROMPTS, prime.docstring_prompts())
    tasks, again = prime.Tasks(None), prime.Tasks(None)
    with tasks.loader, again.loader:
        first, second = next(tasks), next(tasks)
        tasks.observe([SimpleNamespace(task=first)])
        again.load_state_dict(tasks.state_dict())
        assert next(again).data == second.data
    assert (first.key, second.key, set(tasks.waiting)) == ("0", "1", {"1"})
    assert anyio.run(first.has_name, SimpleNamespace(last_reply=f"It is {first.data.answer}.")) == 1.0


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
