"""Stands for an inference engine in the examples: a made-up model that is counted in decode steps, not in seconds.

All it says follows from a sample's index and the policy's version, so an example prints the same figures every time.
Like an engine with continuous batching, it gives one token to every running sample in a decode step.
"""

from __future__ import annotations

import hashlib
import math

import anyio.lowlevel
import numpy as np

from asyncdata import Group, Sample, Status

WORDS = "an awaitable returns the value that its caller asked for , or raises what went wrong".split()
MIN_LENGTH, MAX_LENGTH = 8, 120


class StubEngine:
    """Groups are submitted, decoded step by step, and may be aborted in between.

    :param policy_version: of the weights; the trainer raises it.
    :ivar num_steps: decode steps so far.
    :ivar num_tokens: tokens decoded so far.
    """

    def __init__(self, policy_version: int = 0) -> None:
        self.policy_version = policy_version
        self.num_steps = 0
        self.num_tokens = 0
        self._running: list[Group] = []

    @property
    def num_running(self) -> int:
        """Groups that were submitted and are neither finished nor aborted."""
        return len(self._running)

    def submit(self, groups: list[Group]) -> None:
        """Begin these groups, or go on with them where they were aborted."""
        for sample in (sample for group in groups for sample in group):
            sample.extra.setdefault("policy_version", self.policy_version)  # the oldest token's
            sample.rollout_log_probs = sample.rollout_log_probs or []
            sample.loss_mask = sample.loss_mask or []
        self._running += groups

    def step(self) -> list[Group]:
        """Decode one token of every sample; the groups that are finished now."""
        self.num_steps += 1
        for sample in (sample for group in self._running for sample in group if sample.status != Status.COMPLETED):
            self._decode(sample)
        finished = [group for group in self._running if all(sample.status == Status.COMPLETED for sample in group)]
        self._running = [group for group in self._running if group not in finished]
        return finished

    async def next_step(self) -> list[Group]:
        """As :meth:`step`; other tasks run meanwhile."""
        await anyio.lowlevel.checkpoint()
        return self.step()

    def abort(self) -> list[Group]:
        """Stop; the groups that are not finished, each with what it has."""
        aborted, self._running = self._running, []
        for sample in (sample for group in aborted for sample in group if sample.status != Status.COMPLETED):
            sample.status = Status.ABORTED
        return aborted

    def _decode(self, sample: Sample) -> None:
        chance = draw("token", sample.index, sample.response_length, self.policy_version)
        sample.tokens = np.append(sample.tokens, np.int32(256 + 4096 * chance))  # behind the prompt's
        sample.response += " " + WORDS[int(chance * len(WORDS))]
        sample.response_length += 1
        sample.rollout_log_probs.append(math.log(0.1 + 0.9 * chance))
        sample.loss_mask.append(1)
        self.num_tokens += 1
        if sample.response_length == length_of(sample):
            sample.status = Status.COMPLETED


def length_of(sample: Sample) -> int:
    """How long the response will be, in tokens. Most are short, and a few very long."""
    return MIN_LENGTH + int((MAX_LENGTH - MIN_LENGTH) * draw("length", sample.index) ** 5)


def reward_of(sample: Sample) -> float:
    """1.0 for a right answer. Some prompts are always solved, some never, the others now and then."""
    difficulty = draw("difficulty", sample.group_index)
    chance = 0.0 if difficulty < 0.3 else 1.0 if difficulty > 0.7 else 0.5
    return float(draw("answer", sample.index) < chance)


def draw(*key: object) -> float:
    """A number in [0, 1) that the key decides."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) / 2**64
