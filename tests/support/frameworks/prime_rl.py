"""prime-rl's own orchestrator, tasks and checkpoints with its example.

ASYNCDATA_PRIME_RL and ASYNCDATA_VERIFIERS name the checkouts.

What runs is the orchestrator's main loop, dispatcher, sink, source, curriculum and checkpoint manager. Stand-ins: the
server that runs rollouts on GPUs, the trainer that takes the batches, and modules for monitors in a cloud, models and
the transfer of weights.
"""

import asyncio
import gc
import json
import os
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

from anyio.lowlevel import checkpoint

from tests.support.frameworks.killed_runs import import_from, kill_and_resume, write_rows

VARIABLE = "ASYNCDATA_PRIME_RL"
VERIFIERS = "ASYNCDATA_VERIFIERS"
PACKAGES = ("torch", "loguru", "renderers", "pydantic_config", "aiolimiter", "modelexpress", "math_verify", "mcp")
NEEDS = {VERIFIERS: "verifiers/v1/taskset.py", VARIABLE: "src/prime_rl/orchestrator/train_source.py"}
ROWS = 30
GROUP = 2
BATCH = 8
"""Rollouts of a batch: those of four tasks."""
NUM_BATCHES = 20


STAND_INS = {
    "prime_rl.monitors.wandb": "WandbMonitor",
    "prime_rl.monitors.prime": "PrimeMonitor",
    "prime_rl.trainer.model": "setup_tokenizer",
    "prime_rl.transports.weights": "setup_weight_broadcast",
    "prime_rl.transports.weights.nixl": "NIXLWeightBroadcast",
    "prime_rl.transports.weights.nixl.model_express": "ModelExpressSession",
}
"""Modules that need a GPU or a cloud account at their import, none of which reads or saves tasks."""


class Server:
    """In place of the server that runs the rollouts. They end in another order than they began."""

    def __init__(self, address):
        self.started = []

    async def wait_for_server_startup(self, **_): ...

    async def run(self, task_data, **_):
        import verifiers.v1 as vf

        idx = task_data["idx"]
        number = idx * ROWS + int(task_data["answer"])  # it says both which task it is, and of which row
        self.started.append(number)
        attempt = self.started.count(number)
        for _ in range(idx * 7 % 5 * 3):
            await checkpoint()
        data = vf.WireTaskData.model_validate(task_data)
        task = vf.Task(data)
        told = vf.TraceTask(type="MathTask", data=data, key=task.key, hash=task.hash)
        asked = vf.graph.MessageNode(message=vf.UserMessage(content="?"), token_ids=[1, number], mask=[False, False])
        said = vf.graph.MessageNode(
            parent=0, message=vf.AssistantMessage(content="!"), sampled=True, token_ids=[7], mask=[True], logprobs=[0.0]
        )
        reward = vf.Reward(score=float(attempt % 2))
        agent = vf.AgentInfo(config=vf.configs.agent.WireAgentConfig())
        trace = vf.Trace[vf.WireTaskData, vf.State, vf.configs.agent.WireAgentConfig](
            task=told, agent=agent, nodes=[asked, said], rewards={"r": reward}, ok=True, is_completed=True
        )
        return vf.WireEpisode(task=told, traces=[trace], ok=True)


class Trainer:
    """In place of the trainer: it takes one batch when it is asked for one, and publishes its weights."""

    def __init__(self, orchestrator):
        self._orchestrator = orchestrator
        self.asked = asyncio.Semaphore(0)
        self.stepped = asyncio.Event()
        self.batch = []

    def pack(self, samples):
        return samples

    async def send(self, samples):
        await self.asked.acquire()
        self.batch = samples
        self._orchestrator.policy.version = self._orchestrator.progress.step

    def beat(self):
        """The orchestrator's heartbeat, at the end of a step: the checkpoint is saved."""
        self.stepped.set()


class Run:
    """The orchestrator as its ``setup`` makes it, which connects to GPUs and cannot be called alone."""

    def __init__(self, folder, source):
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.trained = []
        self.loop.run_until_complete(self._open(json.loads(source)))
        self._task = self.loop.create_task(self._main())

    async def _open(self, source):
        import prime_rl.orchestrator.envs as envs
        from prime_rl.configs.orchestrator import CheckpointConfig, TrainSourceConfig
        from prime_rl.orchestrator.ckpt import setup_ckpt_manager
        from prime_rl.orchestrator.orchestrator import Orchestrator
        from prime_rl.orchestrator.train_source import TrainSource
        from prime_rl.orchestrator.types import Policy, Progress

        envs.EnvClient = Server
        orchestrator = self.orchestrator = Orchestrator.__new__(Orchestrator)
        train = SimpleNamespace(filter_zero_advantages=True)
        ckpt = CheckpointConfig(interval=1)
        given = {"ckpt": ckpt, "max_steps": None, "train": train, "max_off_policy_steps": 8, "seq_len": 64}
        orchestrator.config = SimpleNamespace(**given)
        orchestrator.progress, orchestrator.policy = Progress(), Policy()
        orchestrator.ckpt_manager = setup_ckpt_manager(self.folder, ckpt)
        settings = TrainSourceConfig(**source, group_size=GROUP, algo={"type": "grpo"})
        settings.algo.sampling.source = "policy"
        pool = SimpleNamespace(train_client=None, model_name="m")
        address = {("train", settings.resolved_name): "nowhere"}
        orchestrator.train_envs = envs.TrainEnvs([settings], address, policy_pool=pool)
        await orchestrator.train_envs.start()
        [self.env] = orchestrator.train_envs
        orchestrator.train_source = TrainSource(orchestrator.train_envs)
        marker = self.folder / "resume_step"  # what a user passes as --resume.step
        if marker.exists():
            step = int(marker.read_text())
            orchestrator.ckpt_manager.load(orchestrator.progress, orchestrator.train_source, step=step)
            orchestrator.progress.step = step + 1
            orchestrator.policy.version = step
        self.step = orchestrator.progress.step - 1
        self._connect(orchestrator, pool)

    def _connect(self, orchestrator, pool):
        from prime_rl.orchestrator.dispatcher import Dispatcher
        from prime_rl.orchestrator.train_sink import TrainSink

        trainer = self.trainer = Trainer(orchestrator)
        orchestrator.packer = orchestrator.sender = orchestrator.heart = trainer
        orchestrator.stopped, orchestrator.version_advanced = asyncio.Event(), asyncio.Event()
        orchestrator.draining, orchestrator.gate_closed_at, orchestrator.eval_source = False, None, None
        orchestrator.consecutive_empty_batches, orchestrator.last_batch_at = 0, None
        orchestrator.wait_for_policy_time = 0.0
        shared = {"train_envs": orchestrator.train_envs, "progress": orchestrator.progress}
        orchestrator.dispatcher = Dispatcher(
            **shared,
            **dict.fromkeys(("eval_envs", "eval_source", "tasks_per_minute", "run_name")),
            **dict.fromkeys(("initial_max_inflight", "max_inflight_ceiling"), 12),
            train_source=orchestrator.train_source,
            policy_pool=pool,
            policy=orchestrator.policy,
            max_off_policy_steps=8,
            run_id="run",
        )
        orchestrator.dispatcher.min_burst = 12  # so that it need not grow for half a minute
        orchestrator.train_sink = TrainSink(
            orchestrator.config,
            **shared,
            **dict.fromkeys(("tokenizer", "mm_token_type_ids_mapping", "token_batch_size")),
            batch_size=BATCH,
            on_result=orchestrator.train_source.on_result,
        )

    async def _main(self):
        dispatching = asyncio.ensure_future(self.orchestrator.dispatcher.start())
        self.orchestrator.component_tasks = [dispatching]
        await self.orchestrator.main_loop()

    def take(self):
        """The tasks of the next batch that the trainer gets, each once."""
        self.loop.run_until_complete(self._stepped())
        found = sorted({sample.token_ids[1] for sample in self.trainer.batch})
        self.trained += found
        still_open = sorted(set(self.env.env_client.started) - set(self.trained))
        (self.folder / "open.json").write_text(json.dumps(still_open))
        return found

    async def _stepped(self):
        self.trainer.asked.release()
        stepped = asyncio.ensure_future(self.trainer.stepped.wait())
        await asyncio.wait([stepped, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        self.trainer.stepped.clear()

    def save(self):
        """The orchestrator has saved this step itself."""
        assert self.orchestrator.ckpt_manager.get_ckpt_path(self.step).is_dir()
        (self.folder / "resume_step").write_text(str(self.step))


def drive(folder):
    tree = Path(os.environ[VARIABLE])
    import_from(str(tree / "packages/prime-rl-configs/src"), str(folder), str(tree / "src"), os.environ[VERIFIERS])
    for name, attribute in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], attribute, type(attribute, (), {}))
    import prime_rl.orchestrator.orchestrator  # noqa: F401 - before the forks

    os.chdir(folder)
    import train_prime_rl as example

    gc.freeze()  # the orchestrator collects garbage twice a step
    [ours] = tomllib.loads(example.CONFIG)["orchestrator"]["train"]["source"]
    example.PROMPTS = write_rows(folder, [{"input": f"{number} + 1?", "label": str(number)} for number in range(ROWS)])
    opens = partial(Run, source=json.dumps(ours))
    runs = kill_and_resume(opens, folder / "ours", num_batches=NUM_BATCHES, saves=[1, 5, 11])
    row_of = dict(sorted(divmod(number, ROWS) for batch in runs["whole"] for number in batch))
    return {"same": _counted(folder / "ours", runs["resumed"], row_of)}


def _counted(place, runs, row_of):
    """Tasks of resumed runs that are neither trained on nor open at the end, or twice; and the rows of all."""
    found = {}
    seen = set()
    for save_at, batches in runs:
        numbers = [number for batch in batches for number in batch]
        seen |= set(numbers)
        tasks = [number // ROWS for number in numbers]
        still_open = {number // ROWS for number in json.loads((place / f"killed_{save_at}" / "open.json").read_text())}
        skipped = sorted(set(range(max(tasks))) - set(tasks) - still_open)
        repeated = sorted({task for task in tasks if tasks.count(task) > 1})
        found[f"tasks skipped and repeated after a save at step {save_at}"] = [[skipped, repeated], [[], []]]
        found[f"tasks in all after a save at step {save_at}"] = [len(tasks), 4 * NUM_BATCHES]
        known = {str(n // ROWS): n % ROWS for n in numbers if n // ROWS in row_of}
        found[f"rows of tasks after a save at step {save_at}"] = [known, {task: row_of[int(task)] for task in known}]
    first, second = ([n % ROWS for n in sorted(seen) if n // ROWS // ROWS == epoch] for epoch in (0, 1))
    every = list(range(ROWS))
    found["rows of two epochs"] = [[sorted(first), sorted(second), first != second], [every, every, True]]
    return found
