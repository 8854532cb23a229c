"""The requests of calls for rollouts, and the version of the policy: what users give them is checked here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import whole_number
from asyncdata.delivery.ledger import Request
from asyncdata.delivery.rollouts import FinishedRequest, Rollouts, WorkRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.engine import Engine


def request_of(num_groups: int, at_least: Any, *, finished: bool) -> Request:
    """A request for at least so many groups, and for at most ``num_groups``.

    :param finished: those of the buffer that are finished.
    """
    kind, fewest = (FinishedRequest, 0) if finished else (Request, 1)
    return kind(num_groups, at_least=_number("at_least", at_least, fewest, num_groups))


def work_of(max_out: Any, max_finished: Any) -> Callable[[], Request]:
    """Makes the requests of a loop over groups."""
    if max_finished is not None:
        max_finished = _number("max_finished", max_finished, 1)
    return partial(WorkRequest, _number("max_out", max_out, 1), max_finished)


def set_version(coordinator: Coordinator, version: Any) -> None:
    """Tell the version of the policy."""
    set_rollouts(coordinator, version=_number("policy_version", version, 0))


def set_lag(engine: Engine, too_old: Any) -> None:
    """Tell what is done with groups that are too old."""
    if loops_only := engine.batching.loops_only:
        raise ConfigError(f"AD438 max_policy_lag is for groups that are given back, and this loader {loops_only}")

    if too_old not in ("reset", "drop") and not callable(too_old):
        raise ConfigError(f"AD438 too_old is 'reset', 'drop', or a function of a group, got {too_old!r}")

    set_rollouts(engine.coordinator, version=0, max_lag=engine.config.max_policy_lag, too_old=too_old)


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
