"""The peers' virtual environments: pinned, made once, kept in a folder; what cannot be installed is absent."""

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

__all__ = ("ENVIRONMENTS", "AbsentError", "environment", "peers_python")

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
    """The Python that the environments are made with.

    :raises AbsentError: if there is none of that version.
    """
    if sys.version_info[:2] == PYTHON:
        return sys.executable

    found = shutil.which("python{}.{}".format(*PYTHON))
    if found is None:
        raise AbsentError("the peers are pinned for Python {}.{}, and there is none on PATH".format(*PYTHON))

    return found


def environment(name: str, folder: Path) -> str:
    """The Python of an environment, which is made if it is not there yet or if its pins have changed.

    They have the same ``tokenizers`` as this process where they can: what is compared is what is around it.

    :raises AbsentError: if it cannot be made.
    """
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
