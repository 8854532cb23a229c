"""slime's own fully asynchronous rollout, driven as its ``train_async.py`` does, and killed at any of its steps.

From the folder that ASYNCDATA_SLIME names. Only the engine that answers prompts is stood in for, by ``answer``, and the
training step. The rollout, its worker, its thread and its queue are slime's code.
"""

import asyncio
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor

from tests.support.frameworks import miles_async
from tests.support.frameworks.killed_runs import blocks_of
from tests.support.frameworks.miles_async import DEFAULTS, NUM_ROLLOUTS
from tests.support.peers.checkouts import importable, stand_ins
from tests.support.slime_source import args_for, set_rollout_id

SLIMES = {
    **{name: value for name, value in DEFAULTS.items() if not name.startswith(("async_", "custom_async"))},
    "sglang_server_concurrency": 6,
    "sglang_dp_size": 1,
    "custom_generate_function_path": f"{__name__}.answer",
    # What the how-to page tells a user to set.
    **{
        name.replace("-", "_"): value
        for block in blocks_of("move-a-slime-run.md#slime's fully asynchronous rollout", "sh")
        for name, value in re.findall(r"--([\w-]+) (asyncdata\.\S+)", block)
    },
}

UNUSED = {
    "aiohttp": {"ClientSession": object},
    "pylatexenc": {"latex2text": None},
    "sglang_router": {"__version__": "0.2.3"},
}
"""What slime imports, and this run does not use."""


class Run(miles_async.Run):
    """One process of a run: it continues after the last rollout that is saved."""

    def _start(self, folder):
        import slime.rollout.fully_async_rollout as theirs
        from slime.utils.misc import load_function

        class Worker(theirs.AsyncRolloutWorker):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.poll_interval = 0.002  # slime's second makes a run long

        theirs.AsyncRolloutWorker = Worker
        self.args = args_for(folder.parent / "prompts.jsonl", **SLIMES, **self.given)
        self.source = load_function(self.args.data_source_path)(self.args)
        self.rollout = load_function(self.args.rollout_function_path)
        self.metrics = None

    def generate(self, rollout_id):
        """What slime's ``RolloutManager`` does. Older versions tell nobody which rollout it is."""
        if self.chance.random() < 0.5:
            set_rollout_id(rollout_id)
        return self.rollout(self.args, rollout_id, self.source)

    async def train_async(self):
        """The loop of ``train_async.py``. The rollout manager is an actor: its calls run one after the other."""
        with ThreadPoolExecutor(1) as actor:
            following = actor.submit(self.generate, self.start)
            for rollout_id in range(self.start, NUM_ROLLOUTS):
                if following is not None:
                    groups = following.result()
                following = actor.submit(self.generate, rollout_id + 1) if rollout_id + 1 < NUM_ROLLOUTS else None
                self.log("train", rollout_id, [group[0].group_index for group in groups])
                self.step()
                if (rollout_id + 1) % self.save_every == 0 or rollout_id + 1 == NUM_ROLLOUTS:
                    actor.submit(self.source.save, rollout_id).result()
                    self.log("saved", rollout_id)
                    self.step()
                if self.chance.random() < 0.5 and following is not None:  # the weights are updated
                    groups, following = following.result(), None
                self.version += 1


async def answer(args, sample, sampling_params):
    """In place of the engine: a response after some steps, or none."""
    run = miles_async.present
    run.step()
    for _ in range(run.chance.choice([1, 1, 1, 5, 60])):
        await asyncio.sleep(0)
    run.step()
    sample.tokens, sample.response, sample.response_length, sample.reward = [1, 2, 3], "an answer", 1, 1.0
    is_aborted = run.chance.random() < run.aborts
    sample.status = type(sample).Status.ABORTED if is_aborted else type(sample).Status.COMPLETED
    return sample


def drive(folder, runs, tokenizer):
    unused = {name: contents for name, contents in UNUSED.items() if importlib.util.find_spec(name) is None}
    with stand_ins(unused), importable("slime"):
        import slime.rollout.fully_async_rollout  # noqa: F401 - once, for all forks

        return miles_async.driven(folder, runs, tokenizer, Run)
