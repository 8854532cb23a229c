"""Proves fast tokenizer backends during a run: in one process of low priority, which ends with the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

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
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        if not isinstance(function, OfTokenizer) or function.tokenizer_backend == "hf" or function.needs_offsets:
            return

        is_named = function.tokenizer_backend != "auto"
        if is_named or (any(map(version_of, FAST_BACKENDS)) and not _is_forbidden()):
            folder = resolve(function.tokenizer, getattr(function, "revision", None)).folder
            if is_named:
                _require(folder, function.tokenizer_backend)
            else:
                self._folder = folder

    def start(self) -> None:
        """Begin to prove in a thread, if there is anything to prove. Further calls do nothing."""
        with self._lock:
            if self._folder is None or self._thread is not None or self._is_closed:
                return

            try:
                self._thread = started(partial(self._run, self._folder), "asyncdata-proving")
            except WorkerError as error:
                _not_proven(self._folder, error)

    def _run(self, folder: str) -> None:
        from asyncdata.tokenization.encoders.equivalence_records import missing

        try:
            backends = missing(TokenizerFiles(folder))
            process = self._spawn(folder, backends) if backends else None
        except (OSError, AsyncDataError) as error:
            _not_proven(folder, error)
            return

        if process is None:
            return

        _log.info("tokenizer.proving", tokenizer=folder, backends=backends, pid=process.pid)
        with process:  # waits for its end
            for line in process.stdout or ():
                _log_proof(folder, json.loads(line))

    def _spawn(self, folder: str, backends: list[str]) -> subprocess.Popen[str] | None:
        with self._lock:
            if not self._is_closed:
                self._process = _spawn(folder, backends)
            return self._process

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


def _log_proof(folder: str, found: dict[str, Any]) -> None:
    backend, seconds, refusal = found["backend"], found["seconds"], found["refusal"]
    if refusal:
        _log.info("tokenizer.refused", tokenizer=folder, backend=backend, seconds=seconds, reason=refusal)
    else:
        count = found["num_exceptions"]
        _log.info("tokenizer.proved", tokenizer=folder, backend=backend, seconds=seconds, num_exceptions=count)


def _require(folder: str, backend: str) -> None:
    from asyncdata.tokenization.encoders.equivalence_records import find, require, subject_of

    files = TokenizerFiles(folder)
    subject = subject_of(files, backend)
    is_new = subject is not None and find(subject) is None
    if is_new:
        _log.info("tokenizer.proving", tokenizer=folder, backends=[backend], pid=os.getpid())
    proof = require(files, backend)
    if is_new:
        _log_proof(folder, _summary(proof))


def _summary(proof: Proof) -> dict[str, Any]:
    return {
        "backend": proof.subject.backend,
        "seconds": proof.seconds,
        "refusal": proof.refusal,
        "num_exceptions": proof.num_exceptions,
    }


def _spawn(folder: str, backends: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of(__name__, {"folder": folder, "backends": backends, "parent": os.getpid()}),
        stdin=subprocess.PIPE,  # its end tells the child that this process is gone, if the kernel does not
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the trainer only
    )


def main(folder: str, backends: list[str], parent: int) -> None:
    """The child process: prove ``backends`` one after another until one is exact; print a line of JSON for each.

    It ends with the process ``parent``, even if a forked child of that process keeps the other end of stdin open.
    """
    end_with_parent(parent)
    from asyncdata.tokenization.encoders.equivalence_records import make, subject_of

    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICE)
    files = TokenizerFiles(folder)
    for backend in backends:
        subject = subject_of(files, backend)
        if subject is None:
            continue

        proof = make(files, subject)
        sys.stdout.write(json.dumps(_summary(proof)) + "\n")
        sys.stdout.flush()
        if not proof.refusal:
            return


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the parent is gone
    os._exit(1)
