"""SkyRL's own trainers, configuration and checkpoints, from the folder that ASYNCDATA_SKYRL names.

Stood in are the models (``dispatch``, and the three calls of a step), the inference engines (a prompt is answered with
its number), Ray's calls, and ``typing.TypedDict``, as SkyRL needs Python 3.12. The command line, the experiment, the
loops, the loaders and what is saved and loaded are SkyRL's code.
"""

import asyncio
import os
import shlex
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

from anyio.lowlevel import checkpoint

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, Stepped, blocks_of, kill_and_resume, write_rows

VARIABLE = "ASYNCDATA_SKYRL"
NEEDS = {VARIABLE: "skyrl/train/fully_async_trainer.py"}
PACKAGES = ("torch", "ray", "torchdata", "loguru", "jaxtyping", "httpx", "cloudpathlib", "pybase64", "tabulate")
PAGE = "use-it-with-rl-trainers.md#SkyRL"
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
ASYNC = """
    trainer.fully_async.enabled=true trainer.algorithm.policy_loss_type=rollout_is generator.batched=false
""".split()
DROPS = """
    generator.n_samples_per_prompt=2 trainer.algorithm.zero_variance_filter=true
    trainer.fully_async.sample_full_batch=true
""".split()
CASES = {
    # Saved also at the end of an epoch. Asynchronous rollouts end in an order that depends on time.
    "a short last batch": (4, [], [3, 10, 13]),
    "whole batches": (6, [], [3, 7, 9]),
    "asynchronous, a short last batch": (4, ASYNC, [3, 10, 13]),
    "asynchronous, whole batches": (6, ASYNC, [3, 7, 9]),
    "asynchronous, rows without a reward's spread are dropped": (4, ASYNC + DROPS, [3, 8, 11]),
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
    """SkyRL's generator: each prompt is answered with its number. Some take longer, so that they end out of order.

    Answers to every fifth prompt have the same reward, for SkyRL's filter of those.
    """

    def __init__(self):
        self.numbers = {}

    async def generate(self, input_batch):
        numbers = [extras["number"] for extras in input_batch["env_extras"]]
        answered = list(zip(input_batch["trajectory_ids"], numbers, strict=True))
        self.numbers |= {answer.instance_id: number for answer, number in answered}
        for _ in range(sum(numbers) * 7 % 5):
            await checkpoint()
        return {
            "prompt_token_ids": [[1, 2] for _ in numbers],
            "response_ids": [[FIRST + number] for number in numbers],
            "rewards": [float(answer.repetition_id if number % 5 else 1) for answer, number in answered],
            "loss_masks": [[1] for _ in numbers],
            "stop_reasons": ["stop" for _ in numbers],
            "rollout_metrics": {},
            "rollout_logprobs": [[0.0] for _ in numbers],
        }


class SkyRLRun(Stepped):
    """A training of SkyRL.

    :param settings: SkyRL's, with ``ckpt_interval``, which it reads after each step.
    """

    def __init__(self, settings):
        super().__init__()
        self._settings = settings

    def loads(self, load, step_of):
        """SkyRL's function that loads, which then says the step."""

        def loaded():
            found = load()
            self.answers.put(step_of(found))
            return found

        return loaded

    def saves(self, save):
        """SkyRL's function that saves, which then says so."""

        def saved():
            found = save()
            if self._settings.ckpt_interval:  # not at the end of the training
                self._settings.ckpt_interval = 0
                self.answers.put("saved")
            return found

        return saved

    def trains_on(self, ids):
        """Called by a step."""
        self.answers.put(ids)
        if self.is_to_save():
            self._settings.ckpt_interval = 1


class Run(SkyRLRun):
    """``train`` of one of SkyRL's PPO trainers."""

    def __init__(self, experiment):
        super().__init__(experiment.cfg.trainer)
        self._samples = experiment.cfg.generator.n_samples_per_prompt
        self._answering, self._dropped = Answers(), []
        of_experiment = ("cfg", "tokenizer", "train_dataset", "eval_dataset", "colocate_pg")
        trainer = experiment.get_trainer(
            **{name: getattr(experiment, name) for name in of_experiment},
            tracker=TRACKER,
            inference_engine_client=None,
            generator=self._answering,
        )
        trainer.dispatch = Models()
        trainer.init_weight_sync_state = lambda: None
        trainer.fwd_logprobs_values_reward = trainer.compute_advantages_and_returns = lambda batch: batch
        trainer.train_critic_and_policy = self._train_on
        trainer.save_checkpoints = self.saves(trainer.save_checkpoints)
        trainer.load_checkpoints = self.loads(trainer.load_checkpoints, lambda found: found[0])
        if experiment.cfg.trainer.fully_async.enabled:
            self._note_drops(trainer.async_train_dataloader)
        self.start(lambda: asyncio.run(trainer.train()))
        self.step = self.answer()

    def _note_drops(self, loader):
        """Rows that SkyRL drops count as taken, with the batch before which it does."""
        mark = loader.mark_filtered_uids

        async def marked(uids):
            self._dropped += [self._answering.numbers[uid] for uid in uids]
            await mark(uids)

        loader.mark_filtered_uids = marked

    def _train_on(self, batch):
        trained = [int(token) - FIRST for token in batch["sequences"][:: self._samples, -1]]
        dropped, self._dropped = self._dropped, []
        self.trains_on(dropped + trained)
        return {}

    def take(self):
        """Also what was dropped after the last batch."""
        found = super().take()
        if not found:
            found, self._dropped = self._dropped, []
        return found


def import_skyrl():
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
    sys.path[:0] = [os.environ[VARIABLE], os.path.join(os.environ[VARIABLE], "skyrl-gym")]
    import loguru

    loguru.logger.disable("skyrl")
    os.environ["TQDM_DISABLE"] = "1"
    import skyrl.train.entrypoints.main_base
    import skyrl.train.fully_async_trainer
    import skyrl.train.trainer

    skyrl.train.trainer.run_on_each_node = lambda *_: None


def arguments_sent(words):
    """What SkyRL's command line sends to Ray, after its checks of the settings: a function and its arguments."""
    import ray
    import skyrl.train.utils.utils as utils

    sent = []

    def remote(**_):
        return lambda function: SimpleNamespace(remote=lambda *arguments: sent.append((function, arguments)))

    own = ray.remote, ray.get, utils.initialize_ray, sys.argv
    try:
        ray.remote, ray.get, utils.initialize_ray = remote, lambda _: None, lambda _: None
        sys.argv = ["main_base", *words]
        from skyrl.train.entrypoints.main_base import main as start

        start()
    finally:
        ray.remote, ray.get, utils.initialize_ray, sys.argv = own
    ((function, arguments),) = sent
    return function, arguments


def drive(folder):
    import_skyrl()
    from skyrl.train.config import SkyRLTrainConfig

    from asyncdata.integrations.skyrl import PPOExp

    texts = [f"{n} + 1? " + "why? " * (n % 7 == 6) * 8 for n in range(ROWS)]  # every seventh is long
    prompts = [[{"role": "user", "content": text}] for text in texts]
    rows = write_rows(folder, [{"prompt": prompt, "number": n, "data": "sums"} for n, prompt in enumerate(prompts)])
    command = shlex.split(blocks_of(PAGE, "sh")[0].replace("\\\n", " ").replace(" ...", ""))
    runs = {}
    for name, (batch, more, saves) in CASES.items():
        words = [f"data.train_data=['{rows}']", f"trainer.policy.model.path={DEMO_TOKENIZER}", *WORDS, *more]
        words += [f"trainer.train_batch_size={batch}", f"trainer.policy_mini_batch_size={batch}"]
        if more:
            words += [f"trainer.fully_async.num_parallel_generation_workers={2 * batch}"]
        _, (_, sent) = arguments_sent([*command[3:], *words])  # what the command of the page sends, with these words
        knobs = {**sent, "cache": {"folder": str(folder / "index")}, "timeout_s": 240}

        def opens(place, words=words, knobs=knobs):
            cfg = SkyRLTrainConfig.from_cli_overrides([*words, f"trainer.ckpt_path={place}"])
            return Run(PPOExp(cfg, **knobs))

        told = {"rows": ROWS, "order": "any" if more else "own"}
        runs[name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves, **told)
    return {"runs": runs}
