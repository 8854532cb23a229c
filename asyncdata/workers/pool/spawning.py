"""Who makes the workers: a template that is forked, or, where a fork could do harm, one exec after another."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio

from asyncdata.core.errors import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Short
from asyncdata.workers.pool.connection import Connection
from asyncdata.workers.pool.deadlines import pause
from asyncdata.workers.pool.early_start import Newborn
from asyncdata.workers.pool.forkserver_messages import (
    COMMAND,
    FORK,
    REAP,
    SHARE,
    Born,
    Loaded,
    NotBorn,
    Reaped,
    decode_answer,
)
from asyncdata.workers.pool.lost_workers import died_starting, may_pass, new_patience
from asyncdata.workers.pool.popen import new_ends, no_room
from asyncdata.workers.pool.processes import Executed, Forked, Offspring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from asyncdata.core.messages import Job
    from asyncdata.workers.pool.forkserver_messages import Answer
    from asyncdata.workers.pool.processes import WorkerProcess
    from asyncdata.workers.pool.shared_resources import Spawner

__all__ = ("Births",)

_log = get_logger(__name__)
_PATIENCE_S = 10.0
"""An answer of the template takes milliseconds. One that has not come by then never will."""
_FAREWELL_S = 1.0
"""Its end takes no longer either."""


class _LostError(Exception):
    """The template has died, or is as good as dead."""


class _Template:
    """A template, from the trainer's side.

    :ivar reason: why it shares nothing; empty where it does, and before it has loaded anything.
    """

    def __init__(self, spawner: Spawner, newborn: Newborn) -> None:
        self._life = Executed(newborn.process)
        self.process = Offspring("template", self._life, Connection(newborn.ends.sock), newborn.ends.output_fd)
        self.reason = ""
        self._told = newborn.told
        self._spawner = spawner
        self._is_open = False
        self._lost_because = ""
        self._turn = anyio.Lock()

    async def open(self, job: Job, *, is_first: bool) -> None:
        """Have it load what ``job`` asks for, however long that takes.

        :param is_first: whether no other has loaded it: then what the system is short of is an error, too.
        :raises WorkerError: if that cannot be loaded.
        """
        if self._is_open:
            return

        await self._tell(frame(0, job.tokenize))
        loaded = await self._answer()
        if isinstance(loaded, Short) and not is_first:
            raise self._lost(loaded.reason)

        if isinstance(loaded, Short):
            raise WorkerError(f"{loaded.reason}\n{loaded.traceback}".rstrip())

        if isinstance(loaded, Failed):
            raise WorkerError(f"{loaded.message}\n{loaded.traceback}".rstrip())

        self.reason, self._is_open = loaded.reason if isinstance(loaded, Loaded) else "", True
        self._send(SHARE, 0, self._spawner.memory_fds)
        await self._send_first(frame(0, job))

    async def _tell(self, spec: bytearray) -> None:
        if self._told and self._told != spec:
            raise self._lost("it has loaded another function")

        if not self._told:
            await self._send_first(spec)
            self._told = spec

    async def _send_first(self, data: bytes | bytearray) -> None:
        try:
            await self.process.connection.send_first(data)
        except OSError as error:
            raise self._lost("it died") from error

    async def pump_output(self) -> None:
        """Until it has ended, and those who write to its pipe."""
        try:
            await self.process.pump_output()
        finally:
            self.process.close_output()

    async def bear(self, number: int) -> WorkerProcess:
        """Worker ``number``: forked, or what the template becomes."""
        async with self._turn:
            with new_ends() as ends:
                self._send(FORK, number, ends.their_fds)
            try:
                life = self._life if self.reason else await self._forked()
            except BaseException:
                ends.close()
                raise

        return self._spawner.worker(number, life, ends)

    async def _forked(self) -> Forked:
        born = await self._answer_in_time()
        if isinstance(born, NotBorn):
            error = OSError(born.errno, os.strerror(born.errno))
            raise no_room(error) from error

        if not isinstance(born, Born):
            raise WorkerError(f"a template answered a fork with {type(born).__name__}; it is out of step")

        try:
            pidfd = os.pidfd_open(born.pid)
        except ProcessLookupError as error:
            raise _LostError("it died") from error
        except OSError as error:
            raise no_room(error) from error

        forked = Forked(born.pid, pidfd, self._status_of)
        if not self._life.is_alive():  # then that pid may have been given to another meanwhile
            forked.forget()
            raise _LostError("it died")

        return forked

    async def _status_of(self, pid: int) -> int | None:
        """How a worker that has ended did so; only the template can tell, as it is its parent."""
        try:
            async with self._turn:
                self._send(REAP, pid)
                answer = await self._answer_in_time()
        except _LostError:
            return None

        return answer.status if isinstance(answer, Reaped) else None

    def _send(self, operation: int, argument: int, fds: Sequence[int] = ()) -> None:
        if self._lost_because:
            raise _LostError(self._lost_because)

        try:
            self.process.connection.send_with(COMMAND.pack(operation, argument), fds)
        except OSError as error:
            raise self._lost("it died") from error

    async def _answer_in_time(self) -> Answer:
        with anyio.move_on_after(_PATIENCE_S):
            return await self._answer()

        raise self._lost(f"no answer in {_PATIENCE_S:g} s; it was killed")

    async def _answer(self) -> Answer:
        try:
            _, body = await self.process.connection.receive()
        except (EOFError, OSError) as error:
            raise self._lost("it died") from error

        answer: Answer = decode_answer(body)
        return answer

    def _lost(self, reason: str) -> _LostError:
        """No answer to an earlier question may be taken for one to a later: it is done with, and so are its workers."""
        self._lost_because = reason
        self._life.kill()
        return _LostError(reason)

    async def end(self) -> None:
        """See to it that it is gone."""
        self._life.kill()
        with anyio.CancelScope(shield=True):
            await self._life.ended()
        self.process.connection.close()
        self.process.read_last_words()

    def close(self) -> None:
        """Let it end by itself, as it has to see to its dead workers first; but not for long."""
        self.process.connection.close()
        self._life.wait_or_kill(_FAREWELL_S if self._is_open and not self._lost_because else 0)
        self.process.close_output()


class Births:
    """Makes the workers of a pool.

    The template is born at once; it loads what is shared while the caller's loop is still to come.

    :ivar num_lost: templates that were replaced.
    :param newborn: a template that was born before; None for a new one.
    :raises WorkerError: if the system has no room for it.
    """

    def __init__(self, spawner: Spawner, newborn: Newborn | None = None) -> None:
        self.num_lost = 0
        self._losses = new_patience()
        self._has_started = False
        self._spawner = spawner
        self._shares = True
        self._template: _Template | None = _Template(spawner, newborn or Newborn(spawner.alive))
        self._group: TaskGroup | None = None
        self._job: Job | None = None
        self._turn = anyio.Lock()

    def begin(self, group: TaskGroup, job: Job) -> None:
        """From here on workers are born, with ``job`` to do."""
        self._group, self._job = group, job
        if self._template is not None:
            group.start_soon(self._template.pump_output)

    async def bear(self, number: int) -> WorkerProcess:
        """Worker ``number``.

        :raises WorkerError: if the system has no room for it, or the tokenize function cannot be opened.
        """
        job = self._job
        if job is None:
            raise WorkerError("begin() has not been called")

        async with self._turn:
            while self._shares:
                template = self._present_template()
                try:
                    await template.open(job, is_first=not self._has_started)
                    worker = await template.bear(number)
                except _LostError as lost:
                    await self._replace(template, str(lost))
                    continue

                self._losses.succeeded()
                self._has_started = True
                if template.reason:
                    self._share_no_more(template)
                return worker

        return self._spawner.spawn(number, frame(0, job))

    def _present_template(self) -> _Template:
        if self._template is None:
            self._template = _Template(self._spawner, Newborn(self._spawner.alive))
            if self._group is not None:
                self._group.start_soon(self._template.pump_output)
        return self._template

    def _share_no_more(self, template: _Template) -> None:
        """It is a worker now, and the others load for themselves."""
        _log.info("workers.not_shared", reason=template.reason)
        template.process.connection.close()
        self._shares, self._template = False, None

    async def _replace(self, template: _Template, reason: str) -> None:
        await template.end()
        self._template = None
        self.num_lost += 1
        how = template.process.how_it_ended()
        _log.warning("template.lost", pid=template.process.pid, reason=reason, how=how)
        wait_s = self._losses.failed(may_pass=may_pass(template.process))
        if wait_s is None:
            raise died_starting(template.process, self._losses.num_failures)

        await pause(wait_s)

    def close(self) -> None:
        """End the template. The workers must have ended."""
        if self._template is not None:
            self._template.close()
            self._template = None
