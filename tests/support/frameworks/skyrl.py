"""SkyRL's own trainer, configuration and checkpoints with its example, from the folder that ASYNCDATA_SKYRL names.

Stood in are the models (``dispatch``, and the three calls of a step), the inference engines (a prompt is answered with
its number), Ray's calls, and ``typing.TypedDict``, as SkyRL needs Python 3.12. The command line, the experiment, the
loops, the loaders and what is saved and loaded are SkyRL's code.
"""

import asyncio
import os
import typing
from pathlib import Path
from types import SimpleNamespace

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, Stepped, import_from, kill_and_resume_each, write_rows

VARIABLE = "ASYNCDATA_SKYRL"
NEEDS = {VARIABLE: "skyrl/train/fully_async_trainer.py"}
PACKAGES = ("torch", "ray", "torchdata", "loguru", "jaxtyping", "httpx", "cloudpathlib", "pybase64", "tabulate")
ROWS = 42
EPOCHS = 3
BATCHES = 48  # more than the training has
FIRST = 10  # the token that answers row 0
TRACKER = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
WORDS = f"""
    data.val_data=[] data.dataloader.num_workers=0 trainer.epochs={EPOCHS}
    trainer.placement.policy_num_gpus_per_node=1 trainer.placement.ref_num_gpus_per_node=1
    trainer.placement.colocate_all=false trainer.algorithm.use_kl_loss=false trainer.eval_interval=-1
    trainer.ckpt_interval=0 trainer.hf_save_interval=-1 trainer.logger=console trainer.print_example_interval=0
    trainer.num_logger_train_samples=0 generator.n_samples_per_prompt=1 generator.inference_engine.num_engines=1
    generator.inference_engine.enable_ray_prometheus_stats=false generator.inference_engine.tensor_parallel_size=1
    environment.env_class=gsm8k
""".split()
"""SkyRL's settings for a small run."""
CASES = {  # saved also at the end of an epoch
    "a short last batch": ({"batch": 4}, [3, 10, 13]),
    "whole batches": ({"batch": 6}, [3, 7, 9]),
}


class Models:
    """As much of SkyRL's ``WorkerDispatch`` as its loops call."""

    def get_lcm_dp_size(self):
        return 1

    def get_node_ids(self):
        return []

    async def save_weights_for_sampler(self): ...

    def save_checkpoint(self, model, folder, tokenizer):
        Path(folder).mkdir(parents=True)

    def load_checkpoint(self, model, folder, **_):
        assert Path(folder).is_dir()

    def finalize_pending_saves(self, model): ...


class Answers:
    """SkyRL's generator: each prompt is answered with its number."""

    async def generate(self, input_batch):
        numbers = [extras["number"] for extras in input_batch["env_extras"]]
        return {
            "prompt_token_ids": [[1, 2] for _ in numbers],
            "response_ids": [[FIRST + number] for number in numbers],
            "rewards": [1.0 for _ in numbers],
            "loss_masks": [[1] for _ in numbers],
            "stop_reasons": ["stop" for _ in numbers],
            "rollout_metrics": {},
            "rollout_logprobs": [[0.0] for _ in numbers],
        }


class Run(Stepped):
    """``train`` of SkyRL's PPO trainer."""

    def __init__(self, experiment):
        super().__init__()
        self._settings = experiment.cfg.trainer  # SkyRL reads ckpt_interval after each step
        of_experiment = ("cfg", "tokenizer", "train_dataset", "eval_dataset", "colocate_pg")
        trainer = experiment.get_trainer(
            **{name: getattr(experiment, name) for name in of_experiment},
            tracker=TRACKER,
            inference_engine_client=None,
            generator=Answers(),
        )
        trainer.dispatch = Models()
        trainer.init_weight_sync_state = lambda: None
        trainer.fwd_logprobs_values_reward = trainer.compute_advantages_and_returns = lambda batch: batch
        trainer.train_critic_and_policy = self._train_on
        self._save, trainer.save_checkpoints = trainer.save_checkpoints, self._saved
        self._load, trainer.load_checkpoints = trainer.load_checkpoints, self._loaded
        self.start(lambda: asyncio.run(trainer.train()))
        self.step = self.answer()

    def _loaded(self):
        found = self._load()
        self.answers.put(found[0])
        return found

    def _saved(self):
        found = self._save()
        if self._settings.ckpt_interval:  # not at the end of the training
            self._settings.ckpt_interval = 0
            self.answers.put("saved")
        return found

    def _train_on(self, batch):
        self.answers.put([int(token) - FIRST for token in batch["sequences"][:, -1]])
        if self.is_to_save():
            self._settings.ckpt_interval = 1
        return {}


def import_skyrl():
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
    import_from(os.environ[VARIABLE], os.path.join(os.environ[VARIABLE], "skyrl-gym"))
    import loguru

    loguru.logger.disable("skyrl")
    os.environ["TQDM_DISABLE"] = "1"
    import skyrl.train.entrypoints.main_base
    import skyrl.train.fully_async_trainer
    import skyrl.train.trainer

    skyrl.train.trainer.run_on_each_node = lambda *_: None


def drive(folder):
    import_skyrl()
    import train_skyrl as example
    from skyrl.train.config import SkyRLTrainConfig

    prompts = [[{"role": "user", "content": f"{number} + 1?"}] for number in range(ROWS)]
    rows = write_rows(folder, [{"prompt": prompt, "number": n, "data": "sums"} for n, prompt in enumerate(prompts)])

    def opens(place, batch):
        words = [f"data.train_data=['{rows}']", f"trainer.policy.model.path={DEMO_TOKENIZER}", *WORDS]
        words += [f"trainer.train_batch_size={batch}", f"trainer.policy_mini_batch_size={batch}"]
        cfg = SkyRLTrainConfig.from_cli_overrides([*example.ARGUMENTS, *words, f"trainer.ckpt_path={place}"])
        return Run(example.Experiment(cfg))

    return {"runs": kill_and_resume_each(opens, folder, CASES, num_batches=BATCHES, rows=ROWS)}
