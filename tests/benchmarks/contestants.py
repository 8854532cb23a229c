"""Who is in the contest: ours, and the peers that could be installed; each runs in a process of its own."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.backends import FAST_BACKENDS
from tests.benchmarks.framework import Bench, measured

PYTHON = (3, 11)
"""The pins are of this Python's wheels; torch has a build for CPUs alone for no other."""

TORCH = "torch==2.13.0"
INSTALL_TIMEOUT_S = 1800


class AbsentError(Exception):
    """A peer that is not there, and why."""


class Environment(NamedTuple):
    """What is installed, in steps: torch comes first and alone, so that nothing asks for another build of it.

    ``tokenizers``: the version that something there insists on; empty takes this process's.
    """

    steps: tuple[tuple[str, ...], ...]
    imports: str
    tokenizers: str = ""


ENVIRONMENTS = {
    "hf": Environment((("datasets==5.2.0", "gigatoken==0.10.0", "fastokens==0.3.5"),), "datasets"),
    "torchdata": Environment(((TORCH,), ("torchdata==0.11.0", "datasets==5.2.0")), "torchdata.stateful_dataloader"),
    "grain": Environment((("grain==0.2.18",),), "grain.python"),
    # torchvision, which it asks for, would choose a torch of its own; and transformers, which it imports, tokenizers.
    "mosaic": Environment(((TORCH,), (TORCH, "mosaicml-streaming==0.13.0")), "torch, transformers", "0.22.2"),
    "litdata": Environment(((TORCH,), ("litdata==0.2.76",)), "litdata"),
    "legacy": Environment((), "tokenizers"),
}


def peers_python() -> str:
    """The Python that the environments are made with."""
    if sys.version_info[:2] == PYTHON:
        return sys.executable

    found = shutil.which("python{}.{}".format(*PYTHON))
    if found is None:
        raise AbsentError("the peers are pinned for Python {}.{}, and there is none on PATH".format(*PYTHON))

    return found


def environment(name: str, folder: Path) -> str:
    """The Python of an environment, which is made if it is not there yet or if its pins have changed; with the same
    ``tokenizers`` as this process where it can be: what is compared is what is around it."""
    wanted = ENVIRONMENTS[name]
    steps = _steps(wanted)
    digest = hashlib.blake2b(json.dumps([steps, wanted.imports]).encode(), digest_size=8).hexdigest()
    home = folder / f"{name}-{digest}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        _make(home, python, steps, wanted.imports)
    return str(python)


def _steps(wanted: Environment) -> list[list[str]]:
    """What pip is given, call by call."""
    pin = f"tokenizers=={wanted.tokenizers or version('tokenizers')}"
    return [*map(list, wanted.steps[:-1]), [*(wanted.steps[-1] if wanted.steps else ()), pin]]


def _make(home: Path, python: Path, steps: list[list[str]], imports: str) -> None:
    print(f"making {home} ({', '.join(pin for step in steps for pin in step)})", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _call(peers_python(), "-m", "venv", str(home))
    for step in steps:
        _call(str(python), "-m", "pip", "install", "--quiet", *step)
    _call(str(python), "-c", f"import {imports}, tokenizers")
    (home / "complete").touch()


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise AbsentError(f"{' '.join(command)} took more than {INSTALL_TIMEOUT_S} s") from error

    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise AbsentError(f"{' '.join(command)} failed: {said[-1].strip()}")


SCRIPT = Path(__file__).parent / "peers" / "loaders.py"
TIMEOUT_S = 1200
OUR_PROBES = {"epoch": "contest", "paced": "data_wait", "save": "make_snapshots"}


class Contestant(NamedTuple):
    """A loader with a tokenizer backend; a peer's has the Python of its environment, and its class."""

    name: str
    label: str
    backend: str = "hf"
    python: str = ""
    peer: str = ""

    def epoch(self, bench: Bench, path: str, num_rows_at_most: int = 0, **more: Any) -> dict[str, float]:
        """An epoch in batches of 32, or its first rows: first batch, steady rate, rate end to end, memory."""
        return self.run("epoch", bench, path, watched=True, num_rows_at_most=num_rows_at_most, **more)

    def run(self, mode: str, bench: Bench, path: str, *, watched: bool = False, **settings: Any) -> dict[str, float]:
        """What a mode of peers/contest.py gives: ``epoch``, ``first_batch``, ``paced``, ``save`` or ``resume``."""
        settings |= {"path": path, "tokenizer": bench.tokenizer, "backend": self.backend}
        settings["num_workers"] = bench.num_workers
        if not self.peer:
            return bench.probe(OUR_PROBES.get(mode, mode), watched=watched, **settings)

        with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
            parts = parts_of(path, bench.num_workers)
            settings = {"mode": mode, "peer": self.peer, "parts": parts, "folder": f"{scratch}/converted", **settings}
            variables = {
                "HF_HOME": f"{scratch}/hf",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "true" if self.peer == "HfStreaming" else "false",
                "RAYON_NUM_THREADS": str(bench.num_workers),
                "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/litdata",
                "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/litdata",
                "TMPDIR": scratch,
            }
            command = [self.python, str(SCRIPT), json.dumps(settings)]
            return measured(command, variables, watched=watched, timeout_s=TIMEOUT_S)


def parts_of(path: str, num_parts: int) -> list[str]:
    """The file cut into parts of whole rows, beside it; made once. Peers that cannot split a file get it split."""
    parts = [Path(f"{path}.part{number}of{num_parts}") for number in range(num_parts)]
    if not all(part.exists() for part in parts):
        lines = Path(path).read_bytes().splitlines(keepends=True)
        for number, part in enumerate(parts):
            start, stop = (len(lines) * edge // num_parts for edge in (number, number + 1))
            part.write_bytes(b"".join(lines[start:stop]))
    return [str(part) for part in parts]


OURS = "ours"
PEERS = {
    "hf": ("Hugging Face streaming", "hf", "HfStreaming"),
    **{f"hf {fast}": (f"Hugging Face streaming, {fast}", "hf", "HfStreaming") for fast in FAST_BACKENDS},
    "torchdata": ("StatefulDataLoader, 2 workers", "torchdata", "TorchData"),
    "grain": ("Grain, 2 workers", "grain", "Grain"),
    "mosaic": ("Mosaic Streaming, 2 workers", "mosaic", "Mosaic"),
    "mosaic_from_s3": ("Mosaic Streaming", "mosaic", "MosaicFromS3"),
    "litdata": ("LitData, 2 workers", "litdata", "LitData"),
    "legacy": ("legacy loader, all rows first", "legacy", "Legacy"),
}
"""Name: what it is called, its environment, its class in peers/loaders.py."""


def present(bench: Bench, *names: str) -> tuple[list[Contestant], dict[str, str]]:
    """Those of ``names`` that are there, and why the others are not."""
    found, absent = [], {}
    for name in names:
        kind, _, backend = name.partition(" ")
        if kind == OURS:
            backend = backend or "hf"
            if backend in bench.backends:
                found.append(Contestant(name, f"asyncdata, {backend}, {bench.num_workers} workers", backend))
            else:
                absent[name] = "not installed"
            continue

        label, home, script = PEERS[name]
        try:
            python = environment(home, bench.peers)
        except AbsentError as reason:
            absent[name] = f"absent: {reason}"
        else:
            found.append(Contestant(name, label, backend or "hf", python, script))
    return found, absent
