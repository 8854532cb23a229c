"""verl's own trainers: data set, sampler, loader, checkpoint and fetch."""

# ruff: noqa: SLF001 - what a trainer of verl does with its loader is in methods of its own

from functools import partial
from importlib.resources import files
from pathlib import Path

from tests.support.frameworks.killed_runs import blocks_of, kill_and_resume

PACKAGES = ("verl", "transfer_queue", "cachetools", "fastapi", "uvicorn")
PAGE = "use-it-with-verl.md"
ROWS = 40
BATCH = 4
STEPS = ROWS // BATCH
IN_FILE_ORDER = {"data": {"asyncdata": {"shuffle": False}}}
ONE_EPOCH = {"data": {"asyncdata": {"rows_per_epoch": 3 * ROWS}}, "trainer": {"total_epochs": 1}}


def write_parquet(folder, row, validation):
    """The settings of verl for two files of training data and one of validation data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, numbers in {"first": range(25), "second": range(25, ROWS), "validation": validation}.items():
        pq.write_table(pa.Table.from_pylist(list(map(row, numbers))), folder / f"{name}.parquet", row_group_size=8)
    train = [str(folder / f"{name}.parquet") for name in ("first", "second")]
    return {"train_files": train, "val_files": str(folder / "validation.parquet")}


def row_of(number):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train"},
        "agent_name": "single_turn_agent",
    }


def defaults(name):
    """A file of verl's own configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.load(files("verl").joinpath("trainer/config", name))


def configuration(folder, changes):
    """verl's own defaults, and what a run of it needs besides; ``changes`` are those of a user."""
    from omegaconf import OmegaConf

    data = {"train_batch_size": BATCH, "cache": {"folder": str(folder / "cache")}}
    trainer = {"total_epochs": 3, "default_local_dir": str(folder), "resume_mode": "auto", "device": "cpu"}
    needed = {"algorithm": {"adv_estimator": "grpo"}, "data": data, "trainer": trainer}
    return OmegaConf.merge(defaults("_generated_ppo_trainer.yaml"), needed, changes)


class Actor:
    """The worker group of the actor; weights are no matter here."""

    def save_checkpoint(self, path, *_, **__):
        Path(path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, *_, **__): ...


class Run:
    """A trainer of verl, whose rollouts and weights are left out: they start Ray and a model."""

    def __init__(self, config):
        self.trainer = self.made(config)
        self.trainer.actor_rollout_wg, self.trainer.global_steps = Actor(), 0
        self.trainer._load_checkpoint()
        self.step = self.trainer.global_steps

    def save(self):
        self.trainer.global_steps = self.step
        self.trainer._save_checkpoint()


class V1(Run):
    """The trainer of ``trainer.use_v1: true``, the default."""

    def made(self, config):
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        kind = type("Trainer", (PPOTrainer,), {"tokenizer": None, "processor": None})
        kind.__abstractmethods__ = frozenset()  # what a trainer does with samples of its rollouts
        trainer = kind(config)
        trainer._init_dataloader()
        return trainer

    def take(self):
        return [info["index"] for info in self.trainer._next_train_batch()["extra_info"]]


class V0(Run):
    """The older ``RayPPOTrainer``, which does not restore its loader at the end of an epoch."""

    def made(self, config):
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role

        trainer = RayPPOTrainer(config, None, {Role.ActorRollout: None}, None)
        self.batches = self._batches(trainer)
        return trainer

    def _batches(self, trainer):
        """The loops of its ``fit``."""
        for _ in range(trainer.global_steps // len(trainer.train_dataloader), trainer.config.trainer.total_epochs):
            yield from trainer.train_dataloader

    def take(self):
        return [info["index"] for info in next(self.batches)["extra_info"]]


def run_each(opens, folder, cases, changes, **told):
    """By name: the runs of each kind, with these settings of verl besides the changes of a user."""
    from omegaconf import OmegaConf

    found = {}
    for name, (kind, settings, saves) in cases.items():
        given = partial(opens, kind=kind, changes=OmegaConf.merge(changes, settings))
        order = "files" if settings is IN_FILE_ORDER else "own"
        found[name] = kill_and_resume(given, folder / name, saves=saves, rows=ROWS, order=order, **told)
    return found


def scores_of_step(folder):
    """Scores that the loader has of groups which verl's replay buffer leaves out or its trainer computes advantages of.

    The odd ones of four prompts are solved. A rollout has two outputs, of which the last one counts; the batch is
    filled up by padding.
    """
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    changes = yaml_of(PAGE)
    changes["data"] |= write_parquet(folder, row_of, range(1000, 1010))
    changes["data"]["asyncdata"] |= {"shuffle": True, "rows_per_epoch": ROWS, "outcomes": {}}
    changes["algorithm"] = {"filter_groups": {"enable": True, "metric": "acc"}}
    changes["trainer"] = {"v1": {"trainer_mode": "separate_async", "sampler": {"max_off_policy_threshold": 1}}}
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR")
    tq.init()
    trainer = V1(configuration(folder, changes)).trainer
    trainer.replay_buffer.poll_interval = 0.01
    trainer.replay_buffer.refill_fn = trainer._next_train_batch  # prompts that no one answers
    counted = trainer.train_dataset._view.loader.statistics
    tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
    for number, row in enumerate(trainer.train_dataset.__getitems__(range(4))):
        solved = [1.0, 1.0, float(number % 2), float(number % 2)]
        scores = [7.0, solved[1], 7.0, solved[3]]
        keys = [f"{number}_{rollout}_{output}" for rollout in range(2) for output in (9, 10)]
        nested = [torch.tensor([0.0, score]) for score in scores]
        fields = {
            "extra_info": NonTensorStack(*[row["extra_info"]] * 4),
            "extra_fields": NonTensorStack(*[{"reward_extra_info": {"acc": acc}} for acc in solved]),
            "uid": NonTensorStack(*[str(number)] * 4),
            "rm_scores": torch.nested.as_nested_tensor(nested, layout=torch.jagged),
            "response_mask": torch.nested.as_nested_tensor([torch.ones(2, dtype=torch.long)] * 4, layout=torch.jagged),
        }
        tags = [{"status": "success"}] * 4
        tq.kv_batch_put(keys=keys, partition_id="train", tags=tags, fields=TensorDict(fields, batch_size=4))
        tq.kv_put(key=str(number), partition_id="train", tag=tag)
    batch, _ = trainer.replay_buffer.sample(1, "train", 2)
    filtered = counted().outcome_scores_total
    trainer._compute_advantage(upsample_batch_to_divisible_size(batch, 9, 0), {})
    left = sorted({key[0] for key in tq.kv_list("train")["train"]})
    tq.close()
    ray.shutdown()
    trainer.train_dataset.close()
    return [sorted(batch.keys), left, filtered, counted().outcome_scores_total]


def yaml_of(page):
    import yaml

    return yaml.safe_load(blocks_of(page, "yaml")[0])


def drive(folder):
    import verl.trainer.ppo.ray_trainer
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401 - before the forks

    changes = yaml_of(PAGE)
    changes["data"] |= write_parquet(folder, row_of, range(1000, 1010))
    changes["data"]["asyncdata"]["cache"] = {"folder": str(folder / "index")}
    cases = {
        "v1": (V1, {}, [7, STEPS, 13]),
        "v1, a prompt a fetch": (V1, {"data": {"gen_batch_size": 1}}, [7, STEPS]),
        "v1, in the order of the files": (V1, IN_FILE_ORDER, [13]),
        "v0": (V0, ONE_EPOCH, [7, STEPS, 13]),
    }
    opens = lambda place, kind, changes: kind(configuration(place, changes))  # noqa: E731
    found = {"runs": run_each(opens, folder, cases, changes, num_batches=27)}
    keys = [f"{number}_{rollout}_{output}" for number in (0, 2) for rollout in range(2) for output in (10, 9)]
    return found | {"same": {"scores are reported": [scores_of_step(folder), [keys, ["0", "2", "p"], 4, 8]]}}
