"""Scores that ranks report together: all count those of all, in one order, and so leave out the same rows.

All ranks take the same samples in a step, each its share of them. So all decide what an epoch leaves out in the same
step, by the same scores; in their next reports they compare it.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from asyncdata.core.errors import AsyncDataError, ConfigError, WorkerError
from asyncdata.core.rank_answers import rank_answers
from asyncdata.core.threads import call_soon_in_this_loop, started
from asyncdata.delivery.outcomes.memory import RowReport  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from asyncdata.delivery.chunk import Ids

    Count = Callable[[Iterable[RowReport]], int]
    Decided = list[tuple[tuple[str, int], Ids]]

__all__ = ("SharedOutcomes", "reporting", "settled")


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends.

    :ivar reports: of its own samples.
    :ivar decided: of each part and epoch that it has decided since its last report, a digest of what that leaves out.
    :ivar error: why it reports nothing.
    """

    reports: list[RowReport] = []
    decided: list[list[Any]] = []
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class SharedOutcomes:
    """Counts what all ranks report.

    :param exchange: a call sends bytes to all ranks, and returns those of each.
    :param decided: returns what was decided since the last call, by part and epoch.
    :param count: counts reports, and returns how many scores were new.
    """

    def __init__(
        self, exchange: Callable[[bytes], list[bytes]], world_size: int, decided: Callable[[], Decided], count: Count
    ) -> None:
        self._exchange, self._world_size, self._decided, self._count = exchange, world_size, decided, count

    def report(self, own: Callable[[], list[RowReport]], lock: AbstractContextManager[Any]) -> int:
        """Count the reports of all ranks; return how many scores were new. Every rank must call it.

        :param own: makes this rank's reports.
        :param lock: the coordinator's, which is not held now.
        :raises WorkerError: AD486, if another rank cannot report or be reached; nothing is counted then.
        :raises ConfigError: AD487, if another rank leaves out other rows.
        """
        try:
            reports = own()
        except AsyncDataError as error:
            self._send(_Message(error=str(error)))  # the others wait for it
            raise

        with lock:
            decided = [[*place, _digest(ids)] for place, ids in self._decided()]
        messages = self._send(_Message(reports, decided))
        for rank, message in enumerate(messages):
            if message.error:
                raise WorkerError(f"AD486 rank {rank} cannot report its scores, and none was counted: {message.error}")

            if message.decided != decided:
                raise ConfigError(
                    f"AD487 since the last report, rank {rank} has left out other rows than this rank: their data, "
                    "policies or states differ, or one of them took samples while it reported"
                )

        with lock:
            return self._count(report for message in messages for report in message.reports)

    def _send(self, message: _Message) -> list[_Message]:
        try:
            answers = self._exchange(_encode(message))
        except Exception as error:  # whatever the trainer's library raises
            raise WorkerError(
                f"AD486 the other ranks cannot be reached with scores: {error!r}. Each rank must call report() equally "
                "often, with no samples if it has none"
            ) from error

        return rank_answers(answers, _decode, self._world_size, "Outcomes(exchange=...)")


def reporting(report: Callable[[], int], before: Future[int] | None) -> Future[int]:
    """The result of a report that a thread makes, after one that was made before."""
    result: Future[int] = Future()

    def run() -> None:
        if before is not None:
            wait([before])
        try:
            result.set_result(report())
        except BaseException as error:  # for who waits
            result.set_exception(error)

    stuck = "AD486 the other ranks did not come to a report of scores: this process ends without it"
    started(run, "asyncdata-report", if_stuck=stuck)
    return result


async def settled(result: Future[int]) -> None:
    """Wait until it is there, or its error."""
    ready, call_soon = anyio.Event(), call_soon_in_this_loop()
    result.add_done_callback(lambda _: call_soon(ready.set))
    await ready.wait()


def _digest(ids: Ids) -> str:
    return blake2b(ids.tobytes(), digest_size=16).hexdigest()
