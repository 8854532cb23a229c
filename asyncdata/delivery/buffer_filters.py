"""Buffer filters for RL loops: by staleness, by reward, by metadata, and several in a row.

Each filter is a description that is called as ``filter(buffer, num_groups)`` and returns groups of that buffer. No
filter changes a group or keeps state between calls, and no group is lost: groups that a filter does not return stay in
the buffer. Of two groups with the same rank, the one that was given back first comes first. A version, reward or value
that cannot be ranked is an :class:`~asyncdata.errors.InvalidGroupError` with AD433; a loader's call raises it as
``FilterError``.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

from asyncdata.core.errors import ConfigError, InvalidGroupError
from asyncdata.core.settings import Description
from asyncdata.core.types import Group, Sample, Status

VERSION_KEY = "policy_version"

_DOWNWARDS = {"freshest_first", "highest_first", "descending"}

Place = Literal["first", "last", "stay"]
"""Where groups go that a filter does not rank: before the others, after them, or they stay in the buffer."""


class ByStaleness(Description, frozen=True, kw_only=True):
    """By the age of the policy that wrote a group's oldest token; groups that are too stale come last.

    The rollout writes the version of its policy to ``sample.extra[version_key]`` when it begins a response: a whole
    number that grows, such as the number of weight updates or of rollouts, or a list of them, of which the lowest
    counts. A group's version is the lowest of its samples; a sample without a version has no token yet. A group in
    which no sample has a version counts as fresher than all others.

    No group stays in the buffer, unless ``too_stale="stay"``: then stale groups stay, and they never get fresher.
    By default such groups are served after the others, and the loop decides: :meth:`is_stale` tells which they are, and
    :func:`reset_response` turns them into prompts again.

    :ivar version_key: where a sample's ``extra`` has the version.
    :ivar order: ``"freshest_first"``; ``"stalest_first"``, to finish groups before they are too stale; or None, which
        keeps the order of the buffer.
    :ivar max_staleness: the largest allowed ``current_version() - version``; None: no group is too stale.
    :ivar current_version: the policy's version now, such as ``lambda: trainer.version``. It is called under the
        loader's lock, so it must not wait.
    :ivar too_stale: where groups go that are staler than ``max_staleness``.
    :raises ConfigError: for a setting that cannot work.
    """

    version_key: str = VERSION_KEY
    order: Literal["freshest_first", "stalest_first"] | None = "freshest_first"
    max_staleness: int | None = None
    current_version: Callable[[], int] | None = None
    too_stale: Place = "last"

    def check(self) -> None:
        if (self.max_staleness is None) != (self.current_version is None):
            raise ConfigError("ByStaleness: max_staleness and current_version need one another; set both or neither")

        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"ByStaleness: max_staleness must be at least 0, got {self.max_staleness}")

    def __call__(self, buffer: list[Group], num_groups: int) -> list[Group]:
        """At most ``num_groups`` groups of ``buffer``. AD433 for a version that is not a whole number."""
        oldest = self._oldest_version()
        versions = [_version(group, self.version_key) for group in buffer]
        ranked, too_stale = _split(buffer, [version if version >= oldest else None for version in versions])
        return _placed(_in_order(ranked, self.order), too_stale, self.too_stale)[:num_groups]

    def is_stale(self, group: Group) -> bool:
        """Whether the group is staler than ``max_staleness`` now."""
        return _version(group, self.version_key) < self._oldest_version()

    def _oldest_version(self) -> float:
        if self.max_staleness is None or self.current_version is None:
            return -math.inf

        return self.current_version() - self.max_staleness


class ByReward(Description, frozen=True, kw_only=True):
    """By the mean or the standard deviation of a group's rewards.

    With group-relative advantages, a group whose rewards are all alike has no gradient: ``ByReward()`` serves those
    last, and ``ByReward(statistic="mean", above=0, below=1)`` first serves prompts that are solved sometimes.

    No group stays in the buffer, unless ``outside`` or ``missing`` is ``"stay"``.

    :ivar statistic: ``"mean"`` or ``"std"``, the standard deviation of the group (divided by n, not by n - 1).
    :ivar order: ``"highest_first"``, ``"lowest_first"``, or None, which keeps the order of the buffer.
    :ivar above: the statistic must be higher than this; None: no bound.
    :ivar below: the statistic must be lower than this; None: no bound.
    :ivar outside: where groups go whose statistic is not within the bounds.
    :ivar missing: where groups go in which a sample's reward is None, NaN, infinite, or a dict without ``reward_key``.
    :ivar reward_key: which value of a reward that is a dict; needed for one.
    :raises ConfigError: for a setting that cannot work.
    """

    statistic: Literal["mean", "std"] = "std"
    order: Literal["highest_first", "lowest_first"] | None = "highest_first"
    above: float | None = None
    below: float | None = None
    outside: Place = "last"
    missing: Place = "last"
    reward_key: str | None = None

    def check(self) -> None:
        low, high = self._bounds()
        if not low < high:  # also refuses NaN
            raise ConfigError(f"ByReward: above must be lower than below, got above={low} and below={high}")

    def __call__(self, buffer: list[Group], num_groups: int) -> list[Group]:
        """At most ``num_groups`` groups of ``buffer``. AD433 for a reward that is not a number."""
        low, high = self._bounds()
        measure = _mean if self.statistic == "mean" else _std
        rewards = [_rewards(group, self.reward_key) for group in buffer]
        known, missing = _split(buffer, [None if values is None else measure(values) for values in rewards])
        ranked = [(value, group) for value, group in known if low < value < high]
        outside = [group for value, group in known if not low < value < high]
        within = _placed(_in_order(ranked, self.order), outside, self.outside)
        return _placed(within, missing, self.missing)[:num_groups]

    def _bounds(self) -> tuple[float, float]:
        return -math.inf if self.above is None else self.above, math.inf if self.below is None else self.below


class _OfKey(Description, frozen=True):
    """A filter whose first field may be given by position."""

    key: str


class ByMetadata(_OfKey, frozen=True, kw_only=True):
    """By a value of the row, such as a priority: ``ByMetadata("priority", order="descending")``.

    The value is ``metadata[key]`` of the group's first sample: all numbers, or all texts.

    No group stays in the buffer, unless ``missing="stay"``.

    :ivar key: of the samples' metadata.
    :ivar order: ``"ascending"`` or ``"descending"``.
    :ivar missing: where groups go that lack the key, or have None or NaN there.
    :raises ConfigError: for a setting that cannot work.
    """

    order: Literal["ascending", "descending"] = "ascending"
    missing: Place = "last"

    def __call__(self, buffer: list[Group], num_groups: int) -> list[Group]:
        """At most ``num_groups`` groups of ``buffer``. AD433 for a value that cannot be compared with the first one."""
        ranked, missing = _split(buffer, [_metadata(group, self.key) for group in buffer])
        for value, group in ranked:
            first = ranked[0][0]
            if isinstance(value, str) != isinstance(first, str):
                kind = "text" if isinstance(first, str) else "number"
                raise _unfit(group[0], f"metadata[{self.key!r}]", value, f"a {kind}, as {first!r} before it")

        return _placed(_in_order(ranked, self.order), missing, self.missing)[:num_groups]


class BalancedByMetadata(_OfKey, frozen=True, kw_only=True):
    """A mixture by a value of the row, such as its source.

    ::

        BalancedByMetadata("source", weights={"math": 3, "code": 1})

    Every request is divided among the values in proportion to their weights, as seats are among parties by the
    method of A. Sainte-Laguë ("La représentation proportionnelle et la méthode des moindres carrés", 1910). If a
    value has too few groups, groups of the other values fill the request. Within a value the oldest come first. The
    value is ``metadata[key]`` of the group's first sample: a number or a text. Each request is divided on its own: what
    earlier requests were served does not count.

    No group stays in the buffer, unless ``missing="stay"``.

    :ivar key: of the samples' metadata.
    :ivar weights: value -> weight, above 0; None: equal weights.
    :ivar missing: where groups go that lack the key, have None or NaN there, or a value that is not in ``weights``.
    :raises ConfigError: for a setting that cannot work.
    """

    weights: dict[Any, float] | None = None
    missing: Place = "last"

    def check(self) -> None:
        for value, weight in (self.weights or {}).items():
            if not 0 < weight < math.inf:
                raise ConfigError(f"BalancedByMetadata: the weight of {value!r} must be above 0, got {weight}")

    def __call__(self, buffer: list[Group], num_groups: int) -> list[Group]:
        """At most ``num_groups`` groups of ``buffer``. AD433 for a value that is neither a number nor a text."""
        seen: Counter[Any] = Counter()
        turns: list[float | None] = []
        for group in buffer:
            value = _metadata(group, self.key)
            weight = self.weights.get(value) if self.weights is not None else 1.0
            turns.append(None if value is None or weight is None else (2 * seen[value] + 1) / weight)
            seen[value] += 1
        ranked, missing = _split(buffer, turns)
        return _placed(_in_order(ranked, "ascending"), missing, self.missing)[:num_groups]


class Chain(Description, frozen=True):
    """Several filters in a row: each chooses among the groups that the one before it returned, in that order.

    So an early filter can leave out unwanted groups, and the last filter decides the order:
    ``Chain((ByMetadata("priority"), ByStaleness()))`` orders by staleness, and by priority among groups of one version.
    The last filter is asked for the wanted number of groups, the filters before it for all groups.

    Groups that one of the filters does not return stay in the buffer.

    :ivar filters: functions of (buffer, num_groups).
    :raises ConfigError: if one of them is not a function, or if there is none.
    """

    filters: tuple[Callable[[list[Group], int], list[Group]], ...]

    def check(self) -> None:
        if not self.filters:
            raise ConfigError("Chain: filters must have at least one filter")

    def __call__(self, buffer: list[Group], num_groups: int) -> list[Group]:
        """What the last filter returns.

        :raises TypeError: if an earlier filter did not return a list.
        """
        *earlier, last = self.filters
        for step in earlier:
            chosen: Any = step(list(buffer), len(buffer))
            if not isinstance(chosen, list | tuple):
                raise TypeError(f"{step!r} returned {type(chosen).__name__}; need a list of groups")

            buffer = list(chosen)
        return last(list(buffer), num_groups)


def has_reward_spread(group: Group, *, reward_key: str | None = None, tolerance: float = 0.0) -> bool:
    """Whether the rewards of a group differ: what dynamic sampling keeps (Q. Yu et al., "DAPO", 2025, section 3.2).

    With group-relative advantages, rewards that are all alike give no gradient. This is not a buffer filter: the loop
    calls it after it has rewarded the group. The loop should count the groups that it drops.

    :param group: samples that all have a reward.
    :param reward_key: which value of a reward that is a dict.
    :param tolerance: rewards whose difference is at most this count as alike.
    :raises InvalidGroupError: AD433, for a reward that is missing, not finite, or not a number.
    """
    rewards = _rewards(group, reward_key)
    if rewards is None:
        sample = next(sample for sample in group if _reward(sample, reward_key) is None)
        raise _unfit(sample, "reward", sample.reward, "a finite number; reward every sample first")

    return max(rewards) - min(rewards) > tolerance


def reset_response(group: Group, *, response_in_tokens: bool, version_key: str = VERSION_KEY) -> None:
    """Turn a group's samples into prompts again, for a new rollout.

    Clears response, response_length, reward, loss_mask, rollout_log_probs and ``extra[version_key]``, and sets the
    status to pending. Call it for groups that the loop holds, before it gives them back: groups in the buffer belong to
    the loader.

    :param group: either all of its samples are reset, or, if one of them cannot be, none.
    :param response_in_tokens: whether the rollout appended the response's tokens to the prompt's in
        ``sample.tokens``; then the last ``response_length`` tokens are cut off.
    :raises InvalidGroupError: AD433, for a sample with fewer tokens than its ``response_length``.
    """
    for sample in group:
        length, num_tokens = sample.response_length, len(sample.tokens)
        if response_in_tokens and not 0 <= length <= num_tokens:
            raise _unfit(sample, "response_length", length, f"at most its {num_tokens} tokens")

    for sample in group:
        if response_in_tokens:
            sample.tokens = sample.tokens[: len(sample.tokens) - sample.response_length].copy()
        sample.response, sample.response_length = "", 0
        sample.reward = sample.loss_mask = sample.rollout_log_probs = None
        sample.extra.pop(version_key, None)
        sample.status = Status.PENDING


def _split(buffer: list[Group], values: Sequence[Any]) -> tuple[list[tuple[Any, Group]], list[Group]]:
    """The groups that have a value, with it, and those that have none."""
    pairs = list(zip(values, buffer, strict=True))
    return [pair for pair in pairs if pair[0] is not None], [group for value, group in pairs if value is None]


def _in_order(ranked: list[tuple[Any, Group]], order: str | None) -> list[Group]:
    """Sorted by value; groups of equal value keep their order, for ascending and descending order alike."""
    if order is not None:
        ranked = sorted(ranked, key=operator.itemgetter(0), reverse=order in _DOWNWARDS)
    return [group for _, group in ranked]


def _placed(groups: list[Group], others: list[Group], place: Place) -> list[Group]:
    if place == "stay":
        return groups

    return others + groups if place == "first" else groups + others


def _version(group: Group, key: str) -> float:
    """The lowest version of the group; infinity if it has none."""
    return min(versions_of(group, key), default=math.inf)


def versions_of(group: Group, key: str = VERSION_KEY) -> list[int]:
    """The versions of the policy in the group's samples. AD433 for one that is not a whole number."""
    return [version for sample in group for version in _versions(sample, key)]


def _versions(sample: Sample, key: str) -> list[int]:
    value = sample.extra.get(key)
    if value is None:
        return []

    versions = value if isinstance(value, list | tuple) else [value]
    try:
        return [operator.index(version) for version in versions]
    except TypeError:
        raise _unfit(sample, f"extra[{key!r}]", value, "a whole number, or a list of them") from None


def _rewards(group: Group, key: str | None) -> list[float] | None:
    """One reward per sample; None if one is missing."""
    rewards = [reward for sample in group if (reward := _reward(sample, key)) is not None]
    return rewards if len(rewards) == len(group) else None


def _reward(sample: Sample, key: str | None) -> float | None:
    value: Any = sample.reward
    if isinstance(value, dict):
        if key is None:
            raise _unfit(sample, "reward", value, f"reward_key, one of {sorted(value)}")

        value = value.get(key)
    if value is None:
        return None

    if not isinstance(value, Real):
        raise _unfit(sample, "reward", value, "a number")

    return float(value) if math.isfinite(value) else None


def _mean(rewards: list[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def _std(rewards: list[float]) -> float:
    """Rounded to 12 digits, so that mirrored groups, such as 0, 0, 1 and 1, 1, 0, rank alike."""
    if min(rewards) == max(rewards):
        return 0.0  # the mean of equal numbers may be rounded, and differ from them

    std = math.dist(rewards, [_mean(rewards)] * len(rewards)) / math.sqrt(len(rewards))
    return float(f"{std:.12g}")


def _metadata(group: Group, key: str) -> str | float | None:
    """The value of the group's first sample; None if it is missing, or NaN, which cannot be ordered."""
    value = group[0].metadata.get(key)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None

    if not isinstance(value, str | int | float):
        raise _unfit(group[0], f"metadata[{key!r}]", value, "a number or a text")

    return value


def _unfit(sample: Sample, where: str, value: Any, needed: str) -> InvalidGroupError:
    return InvalidGroupError(
        f"AD433 group {sample.group_index}, sample {sample.index}: {where} is {str(value)[:80]!r} "
        f"({type(value).__name__}); need {needed}"
    )
