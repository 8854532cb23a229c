"""Scores that ranks report together: all count those of all, in one order, and so leave out the same rows.

All ranks take the same samples in a step, each its share of them. So all begin an epoch in the same step, with what it
leaves out decided by the same scores; in their next reports they compare it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError
from asyncdata.core.rank_answers import rank_answers
from asyncdata.delivery.outcomes.memory import RowReport  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.delivery.chunk import Ids
    from asyncdata.loader.outcomes import News

    Count = Callable[[Iterable[RowReport]], int]
    Send = Callable[[bytes], list[bytes]]

__all__ = ("report_together",)


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends.

    :ivar reports: of its own samples.
    :ivar decided: of each part and epoch that has begun since the last report, a digest of what that leaves out.
    :ivar error: why it reports nothing.
    """

    reports: list[RowReport] = []
    decided: list[list[Any]] = []
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


def report_together(
    exchange: Send, world_size: int, own: Callable[[], list[RowReport]], news: News, count: Count
) -> int:
    """Count the reports of all ranks; return how many scores were new. Every rank must call it.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param own: makes this rank's reports.
    :param news: what is left out since the last report that was counted, by part and epoch.
    :param count: counts reports, and returns how many scores were new.
    :raises WorkerError: AD486, if another rank cannot report or be reached; nothing is counted then.
    :raises ConfigError: AD487, if another rank leaves out other rows.
    """
    decided = [[name, epoch, _digest(ids)] for name, epoch, ids in news]
    try:
        message = _Message(own(), decided)
    except AsyncDataError as error:
        _sent(exchange, world_size, _Message(error=str(error)))  # the others wait for it
        raise

    messages = _sent(exchange, world_size, message)
    for rank, message in enumerate(messages):
        if message.error:
            raise WorkerError(f"AD486 rank {rank} cannot report its scores, and none was counted: {message.error}")

        if message.decided != decided:
            raise ConfigError(
                f"AD487 since the last report, rank {rank} has left out other rows than this rank: their data, "
                "policies or states differ, or one of them took samples while it reported"
            )

    return count(report for message in messages for report in message.reports)


def _sent(exchange: Send, world_size: int, message: _Message) -> list[_Message]:
    try:
        answers = exchange(_encode(message))
    except Exception as error:  # whatever the trainer's library raises
        raise WorkerError(
            f"AD486 the other ranks cannot be reached with scores: {error!r}. Each rank must call report() equally "
            "often, with no samples if it has none"
        ) from error

    return rank_answers(answers, _decode, world_size, "Outcomes(exchange=...)")


def _digest(ids: Ids) -> str:
    return blake2b(ids.tobytes(), digest_size=16).hexdigest()
