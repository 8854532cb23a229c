"""SkyRL's own trainers, configuration and checkpoints, from the folder that ASYNCDATA_SKYRL names.

Stood in are the models (``dispatch``, and the three calls of a step), the inference engines (a prompt is answered with
its number), Ray's calls, and ``typing.TypedDict``, as SkyRL needs Python 3.12. The command line, the experiment, the
loops, the loaders and what is saved and loaded are SkyRL's code.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.frameworks.killed_runs import ROOT, Stepped, block_of, kill_and_resume, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "ASYNCDATA_SKYRL"
NEEDS = {VARIABLE: "skyrl/train/fully_async_trainer.py"}
PACKAGES = ("torch", "ray", "torchdata", "loguru", "jaxtyping", "httpx", "cloudpathlib", "pybase64", "tabulate")
ROWS = 42
EPOCHS = 3
BATCHES = 48  # more than the training has
FIRST = 10  # the token that answers row 0
TRACKER = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)


class Models:
    """As much of SkyRL's ``WorkerDispatch`` as its loops call."""

    def get_lcm_dp_size(self) -> int:
        return 1

    def get_node_ids(self) -> list[str]:
        return []

    async def save_weights_for_sampler(self) -> None: ...

    def save_checkpoint(self, model: str, folder: str, tokenizer: Any) -> None:
        Path(folder).mkdir(parents=True)

    def load_checkpoint(self, model: str, folder: str, **_: Any) -> None:
        assert Path(folder).is_dir()

    def finalize_pending_saves(self, model: str) -> None: ...


class _Turn:
    """Lets the other tasks of an event loop have their turn."""

    def __await__(self) -> Iterator[None]:
        yield


class Answers:
    """SkyRL's generator: each prompt is answered with its number. Some take longer, so that they end out of order.

    Answers to every fifth prompt have the same reward, for SkyRL's filter of those.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    async def generate(self, input_batch: Any) -> dict[str, Any]:
        numbers = [extras["number"] for extras in input_batch["env_extras"]]
        answers = input_batch["trajectory_ids"]
        self.numbers |= {answer.instance_id: number for answer, number in zip(answers, numbers, strict=True)}
        for _ in range(sum(numbers) * 7 % 5):
            await _Turn()
        return {
            "prompt_token_ids": [[1, 2] for _ in numbers],
            "response_ids": [[FIRST + number] for number in numbers],
            "rewards": [
                float(answer.repetition_id if number % 5 else 1)
                for answer, number in zip(answers, numbers, strict=True)
            ],
            "loss_masks": [[1] for _ in numbers],
            "stop_reasons": ["stop" for _ in numbers],
            "rollout_metrics": {},
            "rollout_logprobs": [[0.0] for _ in numbers],
        }


class SkyRLRun(Stepped):
    """A training of SkyRL.

    :param settings: SkyRL's, with ``ckpt_interval``, which it reads after each step.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def loads(self, load: Callable[[], Any], step_of: Callable[[Any], int]) -> Callable[[], Any]:
        """SkyRL's function that loads, which then says the step."""

        def loaded() -> Any:
            found = load()
            self.answers.put(step_of(found))
            return found

        return loaded

    def saves(self, save: Callable[[], Any]) -> Callable[[], Any]:
        """SkyRL's function that saves, which then says so."""

        def saved() -> Any:
            found = save()
            if self._settings.ckpt_interval:  # not at the end of the training
                self._settings.ckpt_interval = 0
                self.answers.put("saved")
            return found

        return saved

    def trains_on(self, ids: list[int]) -> None:
        """Called by a step."""
        self.answers.put(ids)
        if self.is_to_save():
            self._settings.ckpt_interval = 1


class Run(SkyRLRun):
    """``train`` of one of SkyRL's PPO trainers."""

    def __init__(self, experiment: Any) -> None:
        super().__init__(experiment.cfg.trainer)
        self._samples = experiment.cfg.generator.n_samples_per_prompt
        self._answering, self._dropped = Answers(), []
        trainer = experiment.get_trainer(
            cfg=experiment.cfg,
            tracker=TRACKER,
            tokenizer=experiment.tokenizer,
            train_dataset=experiment.train_dataset,
            eval_dataset=experiment.eval_dataset,
            inference_engine_client=None,
            generator=self._answering,
            colocate_pg=experiment.colocate_pg,
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

    def _note_drops(self, loader: Any) -> None:
        """Rows that SkyRL drops count as taken, with the batch before which it does."""
        mark = loader.mark_filtered_uids

        async def marked(uids: Any) -> None:
            self._dropped += [self._answering.numbers[uid] for uid in uids]
            await mark(uids)

        loader.mark_filtered_uids = marked

    def _train_on(self, batch: Any) -> dict[str, Any]:
        trained = [int(token) - FIRST for token in batch["sequences"][:: self._samples, -1]]
        dropped, self._dropped = self._dropped, []
        self.trains_on(dropped + trained)
        return {}

    def take(self) -> list[Any]:
        """Also what was dropped after the last batch."""
        found = super().take()
        if found:
            return found

        dropped, self._dropped = self._dropped, []
        return dropped


def import_skyrl() -> None:
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    sys.path[:0] = [os.environ[VARIABLE], os.path.join(os.environ[VARIABLE], "skyrl-gym")]
    import loguru

    loguru.logger.disable("skyrl")
    os.environ["TQDM_DISABLE"] = "1"
    import skyrl.train.entrypoints.main_base
    import skyrl.train.fully_async_trainer
    import skyrl.train.trainer

    skyrl.train.trainer.run_on_each_node = lambda *_: None


def words_of(rows: Path, *, batch: int, is_async: bool, drops: bool = False) -> list[str]:
    """SkyRL's settings for a small run."""
    words = [
        f"data.train_data=['{rows}']",
        "data.val_data=[]",
        "data.dataloader.num_workers=0",
        f"trainer.policy.model.path={ROOT / 'asyncdata/assets/demo_tokenizer'}",
        f"trainer.epochs={EPOCHS}",
        f"trainer.train_batch_size={batch}",
        f"trainer.policy_mini_batch_size={batch}",
        "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.placement.ref_num_gpus_per_node=1",
        "trainer.placement.colocate_all=false",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.eval_interval=-1",
        "trainer.ckpt_interval=0",
        "trainer.hf_save_interval=-1",
        "trainer.logger=console",
        "trainer.print_example_interval=0",
        "trainer.num_logger_train_samples=0",
        "generator.n_samples_per_prompt=1",
        "generator.inference_engine.num_engines=1",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
        "generator.inference_engine.tensor_parallel_size=1",
        "environment.env_class=gsm8k",
    ]
    if is_async:
        words += [
            "trainer.fully_async.enabled=true",
            f"trainer.fully_async.num_parallel_generation_workers={2 * batch}",
            "trainer.algorithm.policy_loss_type=rollout_is",
            "generator.batched=false",
        ]
    if drops:
        words += [
            "generator.n_samples_per_prompt=2",
            "trainer.algorithm.zero_variance_filter=true",
            "trainer.fully_async.sample_full_batch=true",
        ]
    return words


def arguments_of_page(words: list[str]) -> tuple[Any, tuple[Any, ...]]:
    """What the command of the page sends to Ray, with ``words`` in place of its dots."""
    command = shlex.split(block_of("use-it-with-skyrl.md", "sh").replace("\\\n", " ").replace(" ...", ""))
    return arguments_sent([*command[3:], *words])


def arguments_sent(words: list[str]) -> tuple[Any, tuple[Any, ...]]:
    """What SkyRL's command line sends to Ray, after its checks of the settings: a function and its arguments."""
    import ray
    import skyrl.train.utils.utils as utils

    sent = []

    def remote(**_: Any) -> Any:
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


def write_rows(folder: Path) -> Path:
    """Prompts with their number; every seventh is long."""
    path = folder / "rows.jsonl"
    lines = [
        {
            "prompt": [{"role": "user", "content": f"{n} + 1? " + "why? " * (n % 7 == 6) * 8}],
            "number": n,
            "data": "sums",
        }
        for n in range(ROWS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drive(folder: Path) -> dict[str, Any]:
    """Saved also at the end of an epoch. Asynchronous rollouts end in an order that depends on time."""
    import_skyrl()
    from skyrl.train.config import SkyRLTrainConfig

    from asyncdata.integrations.skyrl import PPOExp

    rows = write_rows(folder)
    runs: dict[str, Any] = {}
    for name, is_async, drops, batch, saves in (
        ("a short last batch", False, False, 4, [3, 10, 13]),
        ("whole batches", False, False, 6, [3, 7, 9]),
        ("asynchronous, a short last batch", True, False, 4, [3, 10, 13]),
        ("asynchronous, whole batches", True, False, 6, [3, 7, 9]),
        ("asynchronous, rows without a reward's spread are dropped", True, True, 4, [3, 8, 11]),
    ):
        words = words_of(rows, batch=batch, is_async=is_async, drops=drops)
        sent = arguments_of_page(words)
        knobs = {**sent[1][1], "cache": {"folder": str(folder / "index")}, "timeout_s": 240}

        def opens(place: Path, words: list[str] = words, knobs: Any = knobs) -> Run:
            cfg = SkyRLTrainConfig.from_cli_overrides([*words, f"trainer.ckpt_path={place}"])
            return Run(PPOExp(cfg, **knobs))

        order = "any" if is_async else "own"
        runs[name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves, rows=ROWS, order=order)
    return {"runs": runs}


if __name__ == "__main__":
    main(drive)
