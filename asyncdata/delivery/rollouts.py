"""Groups one by one, what is finished, and what is too old: requests and rules of loops that roll out beside training.

The way of a group::

    the stream --groups()--> out --consume--> gone for good
                    ^        | ^
         needs work |        v | take_finished
                  the buffer: what was given back

What is in the buffer and too old needs work again, or is dropped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from asyncdata.core.errors import AsyncDataError, ConfigError, FilterError
from asyncdata.core.settings import Count, Number, whole_number
from asyncdata.core.types import FINISHED, Group, Sample
from asyncdata.delivery.buffer_filters import VERSION_KEY, reset_response, versions_of
from asyncdata.delivery.ledger import AT_END, DeliveryRules, Ledger, Request, Returned, counted
from asyncdata.delivery.rollout_buffer import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Choose

PROMPT_KEY = "prompt_length"
TOO_OLD = "too_old"


class WorkRequest(Request):
    """For the next group that needs work. It waits while as many groups as may be are out, or finished.

    :param max_finished: finished groups in the buffer at which it waits until some are taken; None: any number.
    """

    __slots__ = "max_finished", "max_out"
    may_be_held = True

    def __init__(self, max_out: int, max_finished: int | None) -> None:
        super().__init__(1)
        self.max_out, self.max_finished = max_out, max_finished

    def again(self) -> WorkRequest:
        """A new request, for the group after it."""
        return WorkRequest(self.max_out, self.max_finished)

    def choose(self, buffer: Sequence[Returned], choose: Choose) -> list[Returned]:
        return choose([item for item in buffer if not item.is_finished], self.num_groups)

    def held_by(self, ledger: Ledger, rules: DeliveryRules) -> str:
        num_work, num_finished = _counts(ledger)
        if ledger.num_out >= self.max_out:
            return f"{ledger.num_out} groups are out, as many as max_out: consume, drop or give back some"

        if self.max_finished is not None and num_finished >= self.max_finished:
            return f"{num_finished} groups are finished, as many as max_finished: take some by take_finished()"

        if ledger.num_out and not num_work and _is_over(ledger, rules):
            return f"{AT_END}, and {ledger.num_out} groups are out: consume, drop or give them back"

        return ""


class FinishedRequest(Request):
    """For finished groups of the buffer, the oldest first: at most ``num_groups``, once there are ``at_least``.

    There are fewer once no more can come.
    """

    __slots__ = ()
    may_be_held = takes_finished = True

    def choose(self, buffer: Sequence[Returned], choose: Choose) -> list[Returned]:
        return [item for item in buffer if item.is_finished][: self.num_groups]

    def held_by(self, ledger: Ledger, rules: DeliveryRules) -> str:
        num_work, num_finished = _counts(ledger)
        if num_finished >= self.at_least or (not num_work and not ledger.num_out and _is_over(ledger, rules)):
            return ""

        return f"{num_finished} groups are finished, and take_finished() waits for {self.at_least}"


def _counts(ledger: Ledger) -> tuple[int, int]:
    """The groups of the buffer that need work, and those that are finished."""
    num_finished = sum(item.is_finished for item in ledger.buffer)
    return len(ledger.buffer) - num_finished, num_finished


def _is_over(ledger: Ledger, rules: DeliveryRules) -> bool:
    return rules.epochs is not None and ledger.position.epoch >= rules.epochs


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot keeps of them.

    :ivar tracked: whether groups are tracked.
    :ivar policy_version: the policy's version; None: not known.
    :ivar too_old: groups that were too old, by what was done.
    """

    tracked: bool = False
    policy_version: Number | None = None
    too_old: dict[str, Count] = {}

    def restored(self, now: Rollouts) -> Rollouts:
        """The rules of now, with what was saved. What tracks goes on to track."""
        version = now.version if self.policy_version is None else self.policy_version
        return structs.replace(now, tracked=now.tracked or self.tracked, version=version, counts=self.too_old)


class Rollouts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Whether groups are tracked, which are too old, and what is done with them.

    :ivar version: the policy's version now; None: not known.
    :ivar max_lag: how much older than that a response may be; None: any age.
    :ivar too_old: ``reset``, ``drop``, or a function of the group that returns one of these or ``keep``.
    :ivar counts: groups that were reset or dropped.
    """

    tracked: bool = False
    version: int | None = None
    max_lag: int | None = None
    too_old: str | Callable[[Group], str] = "reset"
    counts: dict[str, int] = {}

    def saved(self) -> RolloutState:
        """What a snapshot keeps."""
        return RolloutState(tracked=self.tracked, policy_version=self.version, too_old=self.counts)

    def stamp(self, samples: Iterable[Sample]) -> None:
        """Samples whose response begins now are of this version."""
        for sample in samples if self.version is not None else ():
            if not _has_response(sample):
                sample.extra |= {VERSION_KEY: self.version, PROMPT_KEY: len(sample.tokens)}

    def judged(self, ledger: Ledger) -> Ledger:
        """The ledger after groups of its buffer that are too old were reset or dropped.

        :raises FilterError: AD431, if the user's function fails, or returns something else; nothing is changed then.
        """
        if self.max_lag is None or self.version is None:
            return ledger

        oldest = self.version - self.max_lag
        words = [self._verdict(item.group) if _version(item.group) < oldest else "" for item in ledger.buffer]
        verdicts = zip(ledger.buffer, words, strict=True)
        buffer = tuple(_reset(item) if word == "reset" else item for item, word in verdicts if word != "drop")
        counts = self.counts
        for word in ("reset", "drop"):
            counts = counted(counts, word, words.count(word))
        drops = counted(ledger.group_drops, TOO_OLD, words.count("drop"))
        return structs.replace(ledger, buffer=buffer, group_drops=drops, rollouts=structs.replace(self, counts=counts))

    def _verdict(self, group: Group) -> str:
        if isinstance(self.too_old, str):
            return self.too_old

        try:
            word = self.too_old(group)
        except AsyncDataError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise FilterError(f"AD431 too_old raised {error!r}; no group was reset or dropped") from error

        if word not in ("reset", "drop", "keep"):
            raise FilterError(f"AD431 too_old returned {word!r}; need 'reset', 'drop' or 'keep'")

        return word


def _has_response(sample: Sample) -> bool:
    return bool(sample.response or sample.response_length or sample.status in FINISHED)


def _version(group: Group) -> float:
    """The lowest version of a response of the group; infinity if it has none."""
    return min(versions_of([sample for sample in group if _has_response(sample)]), default=math.inf)


def _reset(item: Returned) -> Returned:
    """The group as a prompt again."""
    for sample in item.group:
        sample.tokens = sample.tokens[: sample.extra.pop(PROMPT_KEY, None)].copy()
    reset_response(item.group, response_in_tokens=False)
    return Returned(item.group, record_of(item.group))


# What users give: it is checked here.


def request_of(num_groups: int, at_least: Any, *, finished: bool) -> Request:
    """A request for at least so many groups, and for at most ``num_groups``.

    :param finished: those of the buffer that are finished.
    """
    kind, fewest = (FinishedRequest, 0) if finished else (Request, 1)
    return kind(num_groups, at_least=_number("at_least", at_least, fewest, num_groups))


def work_of(max_out: Any, max_finished: Any) -> WorkRequest:
    """The first request of a loop over groups."""
    if max_finished is not None:
        max_finished = _number("max_finished", max_finished, 1)
    return WorkRequest(_number("max_out", max_out, 1), max_finished)


def set_version(coordinator: Coordinator, version: Any) -> None:
    """Tell the version of the policy."""
    set_rollouts(coordinator, version=_number("policy_version", version, 0))


def set_lag(coordinator: Coordinator, max_lag: int, too_old: Any, loops_only: str) -> None:
    """Tell what is done with groups that are too old.

    :param loops_only: why the loader takes no group back; empty: it does.
    """
    if loops_only:
        raise ConfigError(f"AD438 max_policy_lag is for groups that are given back, and this loader {loops_only}")

    if too_old not in ("reset", "drop") and not callable(too_old):
        raise ConfigError(f"AD438 too_old is 'reset', 'drop', or a function of a group, got {too_old!r}")

    set_rollouts(coordinator, version=0, max_lag=max_lag, too_old=too_old)


def set_rollouts(coordinator: Coordinator, **rules: Any) -> None:
    """Change the rules for rollouts."""
    with coordinator.lock:
        coordinator.set_rollouts(structs.replace(coordinator.ledger.rollouts or Rollouts(), **rules))


def _number(name: str, value: Any, low: int, high: int | None = None) -> int:
    number = whole_number(value)
    if number < low or (high is not None and number > high):
        limit = "" if high is None else f" to {high}"
        raise ConfigError(f"AD438 {name} is a whole number from {low}{limit or ' on'}, got {value!r}")

    return number
