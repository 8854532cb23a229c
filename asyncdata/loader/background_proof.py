"""Proves fast tokenizer backends during a run: in one process that uses idle CPUs only, and ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.errors import AsyncDataError, WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.threads import started
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve
from asyncdata.workers.pool.parent import end_with_parent
from asyncdata.workers.pool.popen import ENVIRONMENT, command_of

if TYPE_CHECKING:
    from asyncdata.tokenization.encoders.equivalence_records import Proof

__all__ = ("SWITCH", "Prover", "main")

_log = get_logger(__name__)

SWITCH = "ASYNCDATA_PROVE"
"""The environment variable that forbids proofs during a run, if it is "off"."""

_NICE = 19


class Prover:
    """Makes the proofs that a loader's tokenize function needs.

    For a backend given by name, the constructor makes the proof, before any worker starts. For "auto", a process
    is started with the loader if a fast backend is installed that has no record yet; workers that start after its proof
    use that backend.

    :param function: the loader's tokenize function, with its files resolved to local ones.
    :raises ConfigError: if the named backend is not installed, or is not exact for the tokenizer.
    """

    def __init__(self, function: object) -> None:
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        if not isinstance(function, OfTokenizer) or function.tokenizer_backend == "hf":
            return
        is_named = function.tokenizer_backend != "auto"
        if is_named or (any(map(version_of, FAST_BACKENDS)) and not _is_forbidden()):
            folder = resolve(function.tokenizer, function.revision).folder
            if is_named:
                _require(folder, function.tokenizer_backend, needs_offsets=function.needs_offsets)
            else:
                self._folder = folder

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
        from asyncdata.tokenization.encoders.equivalence_records import Proof, missing

        try:
            backends = missing(TokenizerFiles(folder))
            with self._lock:
                if not backends or self._is_closed:
                    return

                process = self._process = _spawn(folder, backends)
        except (OSError, AsyncDataError) as error:
            _not_proven(folder, error)
            return

        _log.info("tokenizer.proving", tokenizer=folder, backends=backends, pid=process.pid)
        with process:  # waits for its end
            for line in process.stdout or ():
                _log_proof(folder, msgspec.json.decode(line, type=Proof))

    def close(self) -> None:
        """End the process, finished or not; no partial record is left."""
        with self._lock:
            self._is_closed = True
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()


def _is_forbidden() -> bool:
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


def _not_proven(folder: str, error: Exception) -> None:
    """Log that no proof could be made; the run continues without it."""
    _log.warning("tokenizer.not_proven", tokenizer=folder, reason=str(error))


def _log_proof(folder: str, proof: Proof) -> None:
    backend, seconds = proof.subject.backend, proof.seconds
    if proof.refusal:
        _log.info("tokenizer.refused", tokenizer=folder, backend=backend, seconds=seconds, reason=proof.refusal)
    else:
        count = proof.num_exceptions
        _log.info("tokenizer.proved", tokenizer=folder, backend=backend, seconds=seconds, num_exceptions=count)


def _require(folder: str, backend: str, *, needs_offsets: bool) -> None:
    from asyncdata.tokenization.encoders.equivalence_records import find, require, subject_of

    files = TokenizerFiles(folder)
    subject = subject_of(files, backend)
    is_new = subject is not None and find(subject) is None
    if is_new:
        _log.info("tokenizer.proving", tokenizer=folder, backends=[backend], pid=os.getpid())
    proof = require(files, backend, needs_offsets=needs_offsets)
    if is_new:
        _log_proof(folder, proof)


def _spawn(folder: str, backends: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command_of(__name__, {"folder": folder, "backends": backends, "parent": os.getpid()}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        # Ctrl-C is for the trainer only. Not a new session: with autogroups, Linux gives each session an equal share of
        # the CPUs, whatever the priorities of its processes are.
        process_group=0,
    )


def main(folder: str, backends: list[str], parent: int) -> None:
    """The child process: prove ``backends`` one after another until one is exact; print each proof as a line of JSON.

    It ends with the thread of the process ``parent`` that started it.
    """
    end_with_parent(parent)
    _use_idle_cpus_only()
    from asyncdata.tokenization.encoders.equivalence_records import make, subject_of

    files = TokenizerFiles(folder)
    for backend in backends:
        subject = subject_of(files, backend)
        if subject is None:
            continue

        proof = make(files, subject)
        told = msgspec.structs.replace(proof, token_lengths=b"")  # it is long, and in the file
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.flush()
        if not proof.refusal:
            return


def _use_idle_cpus_only() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # where a sandbox forbids it
        os.nice(_NICE)
