"""miles' own fully asynchronous rollout, driven as its ``train_async.py`` does, and killed at any of its steps.

From the folder that ASYNCDATA_MILES names. Only the engine that answers prompts is stood in for, by ``answer``, and the
training step. The rollout, its scheduler, the reward and the default data buffer are miles' code.
"""

import asyncio
import json
import os
import random
import re
import signal
from types import SimpleNamespace

from tests.support.frameworks.killed_runs import blocks_of, in_fork
from tests.support.peers.checkouts import importable
from tests.support.slime_source import args_for, write_prompts

NUM_ROWS = 41
NUM_ROLLOUTS = 10
BATCH = 4
NONE = """
    chat_template_path max_weight_staleness async_max_concurrent_samples rollout_submission_granularity
    dynamic_sampling_filter_path rollout_sample_filter_path rollout_stop rollout_stop_token_ids sglang_router_policy
""".split()
DEFAULTS = {  # what miles' parser gives, and what makes a run short
    **dict.fromkeys(NONE),
    **dict.fromkeys(("partial_rollout", "mask_offpolicy_in_partial_rollout", "group_rm"), False),
    **dict.fromkeys(("rollout_num_gpus", "rollout_num_gpus_per_engine"), 1),
    **dict.fromkeys(("rollout_temperature", "rollout_top_p"), 1.0),
    **dict.fromkeys(("rollout_shuffle", "rollout_skip_special_tokens"), True),
    "rollout_batch_size": BATCH,
    "n_samples_per_prompt": 2,
    "async_data_buffer_capacity_factor": 2.0,
    "async_unused_samples_handler": "drop",
    "sglang_server_concurrency": 64,
    "rollout_top_k": -1,
    "rollout_max_response_len": 8,
    "custom_generate_function_path": f"{__name__}.answer",
    # What the how-to page tells a user to set.
    **{
        name.replace("-", "_"): value
        for name, value in re.findall(r"--([\w-]+) (asyncdata\.\S+)", blocks_of("move-a-slime-run.md#miles", "sh")[0])
    },
}

present = None
"""The run of this process."""


class Run:
    """One process of a run: it continues after the last rollout that is saved.

    :param kill_at: the number of the step at which it is killed; None: never.
    """

    def __init__(self, folder, log, seed, kill_at, aborts, **given):
        self._log_file = log.open("a")
        self._kill_at, self.aborts = kill_at, aborts
        self._num_steps = 0
        self.chance = random.Random(seed)
        self.version = 1
        self.save_every = given.pop("save_every")
        self.given = {**given, "save": str(folder), "load": str(folder)}
        self.start = last_saved(folder) + 1
        self._start(folder)
        self.source.load(self.start - 1)
        self.log("start", self.start, self.source.sample_group_index)

    def _start(self, folder):
        from miles.rollout.base_types import RolloutFnConstructorInput
        from miles.rollout.fully_async_rollout import FullyAsyncRolloutFn
        from miles.utils.misc import load_function

        self.args = args_for(folder.parent / "prompts.jsonl", **{**DEFAULTS, **self.given})
        self.source = load_function(self.args.data_source_path)(self.args)
        self.rollout = FullyAsyncRolloutFn(RolloutFnConstructorInput(args=self.args, data_source=self.source))

    def log(self, *event):
        self._log_file.write(json.dumps(event) + "\n")
        self._log_file.flush()

    def step(self):
        """A place at which the process may be killed."""
        self._num_steps += 1
        if self._num_steps == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def generate(self, rollout_id):
        from miles.rollout.base_types import RolloutFnTrainInput

        output = await self.rollout(RolloutFnTrainInput(rollout_id=rollout_id, weight_version=self.version))
        self.metrics = output.metrics
        return list(output.samples)

    async def train_async(self):
        """The loop of ``train_async.py``: the next rollout begins before this one is trained and saved."""
        following = asyncio.create_task(self.generate(self.start))
        groups = None
        for rollout_id in range(self.start, NUM_ROLLOUTS):
            if following is not None:
                groups = await following
            following = None
            if rollout_id + 1 < NUM_ROLLOUTS:
                following = asyncio.create_task(self.generate(rollout_id + 1))
            for _ in range(self.chance.randint(0, 30)):
                await asyncio.sleep(0)
            self.log("train", rollout_id, [group[0].group_index for group in groups])
            self.step()
            if (rollout_id + 1) % self.save_every == 0 or rollout_id + 1 == NUM_ROLLOUTS:
                self.source.save(rollout_id)
                self.log("saved", rollout_id)
                self.step()
            if following is not None:
                groups, following = await following, None
            self.version += 1


async def answer(input):
    """In place of the engine: a response after some steps, or none."""
    from miles.rollout.base_types import GenerateFnOutput

    run, sample = present, input.sample
    run.step()
    version = run.version
    for _ in range(run.chance.choice([1, 1, 1, 5, 60])):
        await asyncio.sleep(0)
    run.step()
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "an answer", 1
    sample.rollout_log_probs, sample.weight_versions = [-0.5], [str(version)]
    sample.reward = 1.0
    is_aborted = run.chance.random() < run.aborts
    sample.status = type(sample).Status.ABORTED if is_aborted else type(sample).Status.COMPLETED
    return GenerateFnOutput(samples=sample)


def keep(args, group, **_):
    """A dynamic filter: some groups have no gradient."""
    return bool(group[0].group_index % 7 != 3)


def last_saved(folder):
    names = [path.name for path in folder.glob("rollout/*.pt")]
    return max((int(re.findall(r"_(\d+)\.pt", name)[0]) for name in names), default=-1)


def _chain(run, folder, *, seed, num_kills, latest_kill, **settings):
    """Processes until one comes to the end; the events of each."""
    folder.mkdir()
    write_prompts(folder / "prompts.jsonl", NUM_ROWS)
    chance = random.Random(seed)
    events = []
    while True:
        log = folder / f"log.{len(events)}"
        is_killed = len(events) < num_kills
        kill_at = chance.randint(1, latest_kill) if is_killed else None

        def work(log=log, kill_at=kill_at):
            global present
            present = run(folder / "checkpoints", log, chance.randint(0, 999), kill_at, **settings)
            asyncio.run(present.train_async())
            present.log("metrics", present.metrics)

        status = in_fork(work)
        assert status in (0, -signal.SIGKILL), f"the run ended with {status}"
        events.append([json.loads(line) for line in log.read_text().splitlines()])
        if status == 0:
            return events


def _left(kind, folder, settings):
    """What the last checkpoint has."""
    answer = folder / "left.json"

    def work():
        run = kind(folder / "checkpoints", folder / "log.left", 0, None, **settings)
        statistics, prefix = run.source.statistics(), "asyncdata_dropped_groups_"
        found = {
            "served": run.source.sample_group_index,
            "buffer": [group[0].group_index for group in run.source.buffer],
            "responses": [sample.response for group in run.source.buffer for sample in group],
            "drops": {name.removeprefix(prefix): n for name, n in statistics.items() if name.startswith(prefix)},
        }
        answer.write_text(json.dumps(found))

    assert in_fork(work) == 0
    found = json.loads(answer.read_text())
    return found


def drive(folder, runs, tokenizer):
    with importable("miles"):
        import miles.rollout.fully_async_rollout  # noqa: F401 - once, for all forks

        return driven(folder, runs, tokenizer, Run)


def driven(folder, runs, tokenizer, run):
    """Each run, killed and continued until its end: the events of its processes, and what the last checkpoint has."""
    found = {}
    for number, (name, settings) in enumerate(runs.items()):
        place = folder / f"run {number}"
        given = {"aborts": 0.0, "save_every": 1, "hf_checkpoint": tokenizer, **settings}
        kills = {key: given.pop(key) for key in ("seed", "num_kills", "latest_kill")}
        events = _chain(run, place, **kills, **given)
        found[name] = {"events": events, "left": _left(run, place, given)}
    return found


def outcome_of(found):
    """What the run has trained on in the end, and what has come to other groups that were served.

    ``trained`` and ``left`` are numbers of groups, ``drops`` counts by reason, and ``lost`` are groups that are none of
    these.
    """
    last = {}
    for events in found["events"]:
        for name, rollout_id, *more in events:
            if name == "start":
                assert rollout_id <= len(last), "it continues after a rollout that was never trained"
                last = {number: groups for number, groups in last.items() if number < rollout_id}
            elif name == "train":
                last[rollout_id] = more[0]
    left = found["left"]
    trained = [number for groups in last.values() for number in groups]
    drops = {name.removesuffix("_total"): number for name, number in left["drops"].items() if name != "total"}
    gone = set(range(left["served"])) - {*trained, *left["buffer"]}
    return SimpleNamespace(
        trained=trained,
        left=left["buffer"],
        drops=drops,
        num_lost=len(gone) - sum(drops.values()),
        num_repeated=len(trained) + len(left["buffer"]) - len({*trained, *left["buffer"]}),
        num_rollouts=len(last),
        num_kills=len(found["events"]) - 1,
        responses=left["responses"],
    )
