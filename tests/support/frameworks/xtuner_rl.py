"""XTuner's own RL sampler, replay buffer and their checkpoints, from the folder that ASYNCDATA_XTUNER names.

Rollouts are stood in for: of each fifth group one is aborted the first time, and XTuner's sampler gives it back.
"""

import asyncio
import json
import os
import sys
from functools import partial

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, blocks_of, kill_and_resume, write_rows
from tests.support.frameworks.stand_ins import stand_in_for

VARIABLE = "ASYNCDATA_XTUNER"
NEEDS = {VARIABLE: "xtuner/v1/rl/agent_loop_manager/sampler.py"}
PACKAGES = ("torch", "ray", "pydantic", "mmengine", "loguru", "cyclopts", "more_itertools", "httpx", "pandas")
PAGE = "use-it-with-rl-trainers.md#XTuner"
ROWS = 21  # and two that are too long
TASK = "gsm8k"
REPEATS = 2


def row_of(number):
    words = f"{number} + 1?" + " and more" * 40 * (number >= ROWS)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": words}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number},
    }


def number_of(state):
    return int(state.reward_model["ground_truth"])


class Run:
    """A task's sampler, as XTuner's manager builds, saves and resumes it."""

    def __init__(self, folder, config, tokenizer):
        from xtuner.v1.data_proto.rl_data import Status
        from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig

        self.status = Status
        self.buffer = SyncReplayBufferConfig().build()
        self.sampler = config.build(tokenizer=tokenizer, replay_buffer=self.buffer)
        self.folder = folder
        saved = folder / "saved.json"
        self.step, self.fresh = json.loads(saved.read_text()) if saved.exists() else (0, 0)
        if self.step:
            self.sampler.resume(folder)
            asyncio.run(self.buffer.resume(folder))

    def take(self):
        """The row of the next group whose rollouts are complete."""
        return asyncio.run(self._take())

    async def _take(self):
        while True:
            group = await self.sampler.sample(TASK, [self.status.ABORTED])
            if group[0].response is not None:
                assert [state.status for state in group] == [self.status.ABORTED, self.status.COMPLETED]
                return [number_of(group[0])]

            number = self._check(group)
            if number % 5:
                return [number]

            for state in group:
                state.status, state.response = self.status.COMPLETED, "half an answer"
            group[0].status = self.status.ABORTED
            await self.buffer.put(group, TASK)
            if number % 2:  # it is given back after the next prompt
                return [self._check(self.sampler.sample_from_dataloader())]

    def _check(self, group):
        """XTuner numbers the groups of fresh prompts, also after a restart."""
        ids = [(state.group_id, state.rollout_id) for state in group]
        assert ids == [(self.fresh, self.fresh * REPEATS + number) for number in range(REPEATS)]
        self.fresh += 1
        return number_of(group[0])

    def save(self):
        self.sampler.save(self.folder)
        asyncio.run(self.buffer.save(self.folder))
        (self.folder / "saved.json").write_text(json.dumps([self.step, self.fresh]))


def of_xtuner(path, tokenize_fn, tokenizer):
    """The states that XTuner's own loader makes."""
    from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig

    sets = [{"dataset": DatasetConfig(anno_path=path), "tokenize_fn": tokenize_fn}]
    config = DataloaderConfig(dataset_config_list=sets, collator="fake_collator", pack_level="none")
    return config.build(tokenizer=tokenizer, dp_mesh=None, global_batch_size=1, micro_batch_size=1, seed=1)


def drive(folder):
    sys.path.append(os.environ[VARIABLE])
    stand_in_for("xtuner.v1.datasets.mllm_tokenize_fn")  # functions for pictures, which need torchvision
    import xtuner.v1.rl.agent_loop_manager.sampler  # noqa: F401 - before the forks
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER)
    path = write_rows(folder, map(row_of, range(ROWS + 2)), "prompts.jsonl")
    os.chdir(folder)
    told: dict = {}
    exec(compile(blocks_of(PAGE, "py")[0], PAGE, "exec"), told)  # noqa: S102 - the page tells a user what to write
    config = told["sampler_config"].model_copy(update={"prompt_repeat_k": REPEATS})
    config.dataloader_cfg.tokenize_fn.max_length = 60
    opens = partial(Run, config=config, tokenizer=tokenizer)
    runs = kill_and_resume(opens, folder / "runs", num_batches=3 * ROWS, saves=[1, 10, ROWS, 2 * ROWS - 1])

    loader = config.dataloader_cfg.build(tokenizer, seed=1)
    ours, theirs = (
        [state.model_dump(mode="json") for (state,) in sorted(found, key=lambda batch: number_of(batch[0]))]
        for found in (loader, of_xtuner(path, config.dataloader_cfg.tokenize_fn, tokenizer))
    )
    loader.close()
    after = [taken for _, taken in runs["resumed"]]
    return {
        "runs": {"groups": {**runs, "order": "any", "rows": ROWS}},
        "same": {"RolloutState": [ours, theirs], "order after a kill": [after, [runs["whole"]] * len(after)]},
    }
