"""Proves fast tokenizer backends during a run: in one process, which ends with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import AsyncDataError, WorkerError, get_logger
from asyncdata.core.settings import from_clone, prepared
from asyncdata.core.threads import started
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve
from asyncdata.workers.popen import ENVIRONMENT, command_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.loader.service import Service
    from asyncdata.tokenization.encoders.equivalence_records import Proof

_log = get_logger(__name__)

SWITCH = "ASYNCDATA_PROVE"
"""The environment variable that forbids proofs during a run, if it is "off"."""

_LOOK_S = 1.0
"""How often the loader looks whether workers have asked for characters."""

_REMEDY = (
    f"{from_clone('fast')}: texts are encoded about ten times as fast, once the ids are proven to be the same; "
    'tokenizer_backend="hf" turns this line off'
)


class Prover:
    """Lets the proofs that a loader's tokenize function needs be made, and grow with the data.

    For a backend given by name, the constructor makes the first proof, before any worker starts. What else is to be
    proven, a process does beside the run: one for all loaders of the machine.

    :param function: the loader's tokenize function, with its files resolved to local ones.
    :param service: has the workers open the function again when a backend was proven that it can use; None: nobody.
    :raises ConfigError: if the named backend is not installed, or is not exact for the tokenizer.
    """

    def __init__(self, function: object, service: Service | None = None) -> None:
        self._service = service
        self._log = _log.owned()
        self._backends = _backends_to_prove(function)
        if self._backends and isinstance(function, OfTokenizer):
            self._folder = resolve(function.tokenizer, function.revision).folder
            self._needs_offsets = function.needs_offsets
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to prove in a thread, if there may be anything to prove. Further calls do nothing."""
        with self._lock:
            if not self._backends or self._closed.is_set() or self._thread is not None:
                return

            try:
                self._thread = started(self._run, "asyncdata-proving")
            except WorkerError as error:
                _not_proven(self._folder, error)

    def _run(self) -> None:
        self._log.own_thread()
        try:
            self._watch(TokenizerFiles(self._folder))
        except (OSError, AsyncDataError) as error:
            _not_proven(self._folder, error)

    def _watch(self, files: TokenizerFiles) -> None:
        """Start the process whenever there is something to prove, until the loader is closed."""
        from asyncdata.tokenization.encoders.equivalence_records import Proof, find_usable, is_asked, to_prove

        find_subjects = partial(to_prove, files, self._backends, needs_offsets=self._needs_offsets)
        is_usable = find_usable(files, self._backends, needs_offsets=self._needs_offsets) is not None
        subjects = find_subjects()
        while subjects and not self._closed.is_set():
            if not is_usable or is_asked(subjects[0]):
                for line in chain(self._lines(), [b""]):
                    if line:
                        _log_proof(self._folder, msgspec.json.decode(line, type=prepared(Proof)))
                    if not is_usable and self._is_usable(files):
                        is_usable = True
                        if self._service is not None:
                            self._service.reopen_soon()
                if not is_usable:
                    return  # no proof can be stored, every backend is refused, or the tokenizer's files have changed

                subjects = find_subjects()
            self._closed.wait(_LOOK_S)

    def _lines(self) -> Iterator[bytes]:
        """What the process says that proves, until it ends."""
        with self._lock:
            if self._closed.is_set():
                return

            process = self._process = _spawn(self._folder, self._backends, needs_offsets=self._needs_offsets)
        self._log.info("tokenizer.proving", tokenizer=self._folder, backends=self._backends, pid=process.pid)
        with process:  # waits for its end
            yield from process.stdout or ()
        if process.returncode and not self._closed.is_set():
            raise WorkerError(f"the process that proves has ended with status {process.returncode}")

    def _is_usable(self, files: TokenizerFiles) -> bool:
        """Whether workers that open the function now have a backend, and the same tokens as the others."""
        from asyncdata.tokenization.encoders.equivalence_records import find_usable

        with contextlib.suppress(AsyncDataError):  # a changed folder: the workers keep what they have loaded
            is_same = TokenizerFiles(files.folder).digest() == files.digest()
            return is_same and find_usable(files, self._backends, needs_offsets=self._needs_offsets) is not None

        return False

    def close(self) -> None:
        """End the process, finished or not; no partial record is left."""
        with self._lock:
            self._closed.set()
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()


def provers_of(functions: list[Any], service: Service) -> list[Prover]:
    """What proves fast backends of the tokenize functions that may use one."""
    return [Prover(one, service) for one in functions if getattr(one, "tokenizer_backend", "hf") != "hf"]


def _backends_to_prove(function: object) -> list[str]:
    """The backends that may be proven beside the run, in the order in which they are preferred."""
    if not isinstance(function, OfTokenizer) or function.tokenizer_backend == "hf":
        return []

    name = function.tokenizer_backend
    if name != "auto":
        from asyncdata.tokenization.encoders.equivalence_sweep import require

        files = TokenizerFiles(resolve(function.tokenizer, function.revision).folder)
        require(files, name, needs_offsets=function.needs_offsets)
    found: list[str] = [backend for backend in FAST_BACKENDS if version_of(backend)] if name == "auto" else [name]
    if not found:
        _say_what_is_missing()
    is_forbidden = os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")
    return [] if is_forbidden else found


@cache
def _say_what_is_missing() -> None:
    """Once in a process: users often do not know that this exists."""
    _log.info("tokenizer.no_fast_backend", remedy=_REMEDY)


def _not_proven(folder: str, error: Exception) -> None:
    """Log that no proof could be made; the run continues without it."""
    _log.warning("tokenizer.not_proven", tokenizer=folder, reason=str(error))


def _log_proof(folder: str, proof: Proof) -> None:
    from asyncdata.tokenization.encoders.equivalence_records import num_points

    backend, seconds = proof.subject.backend, proof.seconds
    if proof.refusal:
        _log.info("tokenizer.refused", tokenizer=folder, backend=backend, seconds=seconds, reason=proof.refusal)
    else:
        _log.info(
            "tokenizer.proved",
            tokenizer=folder,
            backend=backend,
            seconds=seconds,
            num_characters=num_points(proof.proven),
            num_refused=num_points(proof.refused),
        )


def _spawn(folder: str, backends: list[str], *, needs_offsets: bool) -> subprocess.Popen[bytes]:
    given = {"folder": folder, "backends": backends, "needs_offsets": needs_offsets, "parent": os.getpid()}
    return subprocess.Popen(
        command_of("asyncdata.loader.proving", given),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | ENVIRONMENT,
        # Ctrl-C is for the trainer only. Not a new session: with autogroups, Linux gives each session an equal share of
        # the CPUs, whatever the priorities of its processes are.
        process_group=0,
    )
