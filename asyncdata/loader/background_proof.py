"""Proves fast tokenizer backends during a run: in one process that uses idle CPUs only, and ends with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from functools import cache, partial
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.extras import from_clone
from asyncdata.core.log import get_logger
from asyncdata.core.platform import end_with_parent
from asyncdata.core.threads import started
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve
from asyncdata.workers.machine import num_usable_cpus
from asyncdata.workers.pool.popen import ENVIRONMENT, command_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.tokenization.encoders.equivalence_records import Proof

__all__ = ("SWITCH", "Prover", "main")

_log = get_logger(__name__)

SWITCH = "ASYNCDATA_PROVE"
"""The environment variable that forbids proofs during a run, if it is "off"."""

_NICE, _FIRST_NICE = 19, 10
"""The niceness where the system forbids ``SCHED_IDLE``, and that of the proof of the common characters: two seconds of
CPU, which also a machine without an idle CPU gives within 20 s, as they are at most a tenth of one CPU there."""

_MAX_PROCESSES = 8
_REMEDY = (
    f"{from_clone('fast')}: texts are encoded about ten times as fast, once the ids are proven to be the same; "
    'tokenizer_backend="hf" turns this line off'
)


class Prover:
    """Makes the proofs that a loader's tokenize function needs.

    For a backend given by name, the constructor makes the proof, before any worker starts. For "auto", a process
    is started with the loader if a fast backend is installed that has no record yet.

    :param function: the loader's tokenize function, with its files resolved to local ones.
    :param on_usable: called when a backend was proven that ``function`` can use, from any thread.
    :param num_workers: of the loader. With the trainer they have so many CPUs; the proof is shared among the others.
    :raises ConfigError: if the named backend is not installed, or is not exact for the tokenizer.
    """

    def __init__(self, function: object, on_usable: Callable[[], object] = no_op, num_workers: int = 1) -> None:
        self._on_usable = on_usable
        self._num_workers = num_workers
        self._log = _log.owned()
        self._folder = _folder_to_prove(function)
        self._needs_offsets = isinstance(function, OfTokenizer) and function.needs_offsets
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Begin to prove in a thread, if there is anything to prove. Further calls do nothing."""
        with self._lock:
            folder, self._folder = self._folder, None
            if folder is None or self._is_closed:
                return

            try:
                self._thread = started(partial(self._run, folder), "asyncdata-proving")
            except WorkerError as error:
                _not_proven(folder, error)

    def _run(self, folder: str) -> None:
        self._log.own_thread()
        from asyncdata.tokenization.encoders.equivalence_records import Proof, missing

        try:
            files = TokenizerFiles(folder)
            backends = missing(files)
            with self._lock:
                if not backends or self._is_closed:
                    return

                process = self._process = _spawn(folder, backends, _num_spare_cpus(self._num_workers))
        except (OSError, AsyncDataError) as error:
            _not_proven(folder, error)
            return

        _log.info("tokenizer.proving", tokenizer=folder, backends=backends, pid=process.pid)
        with process:  # waits for its end
            for line in process.stdout or ():
                proof = msgspec.json.decode(line, type=Proof)
                _log_proof(folder, proof)
                if self._is_usable(proof, files):
                    self._on_usable()

    def _is_usable(self, proof: Proof, files: TokenizerFiles) -> bool:
        """Whether workers that open the function now have the backend, and the same tokens as the others."""
        if proof.refusal or (self._needs_offsets and proof.no_offsets):
            return False

        with contextlib.suppress(AsyncDataError):  # a changed folder: the workers keep what they have loaded
            return TokenizerFiles(files.folder).digest() == proof.subject.tokenizer == files.digest()

        return False

    def close(self) -> None:
        """End the process, finished or not; no partial record is left."""
        with self._lock:
            self._is_closed = True
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()


def _num_spare_cpus(num_workers: int) -> int:
    """CPUs beside those of the workers and the trainer; at least one."""
    return max(1, min(_MAX_PROCESSES, num_usable_cpus() - num_workers - 1))


def _folder_to_prove(function: object) -> str | None:
    """The tokenizer for which backends are to be proven beside the run; None if there is none."""
    if not isinstance(function, OfTokenizer) or function.tokenizer_backend == "hf":
        return None

    if function.tokenizer_backend != "auto":
        folder = resolve(function.tokenizer, function.revision).folder
        _require(folder, function.tokenizer_backend, needs_offsets=function.needs_offsets)
        return None

    if not any(map(version_of, FAST_BACKENDS)):
        _say_what_is_missing()
        return None

    is_forbidden = os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")
    return None if is_forbidden else resolve(function.tokenizer, function.revision).folder


@cache
def _say_what_is_missing() -> None:
    """Once in a process: users often do not know that this exists."""
    _log.info("tokenizer.no_fast_backend", remedy=_REMEDY)


def _not_proven(folder: str, error: Exception) -> None:
    """Log that no proof could be made; the run continues without it."""
    _log.warning("tokenizer.not_proven", tokenizer=folder, reason=str(error))


def _log_proof(folder: str, proof: Proof) -> None:
    backend, seconds = proof.subject.backend, proof.seconds
    if proof.refusal:
        _log.info("tokenizer.refused", tokenizer=folder, backend=backend, seconds=seconds, reason=proof.refusal)
    else:
        _log.info(
            "tokenizer.proved",
            tokenizer=folder,
            backend=backend,
            seconds=seconds,
            num_exceptions=proof.num_exceptions,
            is_partial=proof.is_partial,
        )


def _require(folder: str, backend: str, *, needs_offsets: bool) -> None:
    from asyncdata.tokenization.encoders.equivalence_records import find, require, subject_of

    files = TokenizerFiles(folder)
    subject = subject_of(files, backend)
    known = find(subject) if subject is not None else None
    is_new = subject is not None and (known is None or known.is_partial)
    if is_new:
        _log.info("tokenizer.proving", tokenizer=folder, backends=[backend], pid=os.getpid())
    proof = require(files, backend, needs_offsets=needs_offsets)
    if is_new:
        _log_proof(folder, proof)


def _spawn(folder: str, backends: list[str], num_processes: int) -> subprocess.Popen[bytes]:
    given = {"folder": folder, "backends": backends, "parent": os.getpid(), "num_processes": num_processes}
    return subprocess.Popen(
        command_of(__name__, given),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        # Ctrl-C is for the trainer only. Not a new session: with autogroups, Linux gives each session an equal share of
        # the CPUs, whatever the priorities of its processes are.
        process_group=0,
    )


def main(folder: str, backends: list[str], parent: int, num_processes: int) -> None:
    """The child process: prove ``backends`` one after another until one is exact; print each proof as a line of JSON.

    The first line is about the common characters only. The process ends with the thread of ``parent`` that started it.
    """
    end_with_parent(parent)
    os.nice(_FIRST_NICE)
    from asyncdata.tokenization.encoders.equivalence_records import find, make, make_first, subject_of

    files = TokenizerFiles(folder)
    subjects = [subject for backend in backends if (subject := subject_of(files, backend)) is not None]
    if not any(map(find, subjects)):  # workers have chosen by the others
        for subject in subjects:
            if not _told(make_first(files, subject)).refusal:
                break
    _use_idle_cpus_only()
    for subject in subjects:
        proof = find(subject)
        if not (proof and proof.refusal) and not _told(make(files, subject, num_processes=num_processes)).refusal:
            return


def _told(proof: Proof) -> Proof:
    """Print the proof, without what is long and only needed from its file."""
    sys.stdout.buffer.write(msgspec.json.encode(msgspec.structs.replace(proof, token_lengths=b"")) + b"\n")
    sys.stdout.flush()
    return proof


def _use_idle_cpus_only() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # where a sandbox forbids it
        os.nice(_NICE)
