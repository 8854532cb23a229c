"""``asyncdata doctor``: what this machine has for a run, as one text to paste into an issue."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.cli.output import fields, shown_path
from asyncdata.core.errors import AsyncDataError, printable, shortened
from asyncdata.core.files import cache_folder
from asyncdata.core.version import __version__
from asyncdata.sources.resolve import described
from asyncdata.tokenization.encoders.fast_backends import PROOFS
from asyncdata.workers.machine import available_memory, num_usable_cpus

if TYPE_CHECKING:
    from types import SimpleNamespace

    from asyncdata.cli.output import Output

_FAILED = "FAILED: "
_NUM_ROWS = 64
_BLOCK_BYTES = 1 << 16
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
_PACKAGE = re.compile(r"[\w.-]+")


def doctor(args: SimpleNamespace, output: Output) -> int:
    """The command; exit status 1 if workers do not start, the cache cannot be written, or data cannot be read."""
    facts = {
        "asyncdata": f"{__version__} in {Path(__file__).parents[3]}",
        "python": f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": _packages(),
        "cpus": f"{num_usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{available_memory() / 1e9:.1f} GB available",
        "limits": ", ".join(f"{_limit(number)} {name}" for name, number in _LIMITS.items()),
        "cache": _tried(_cache),
        "workers": _tried(_workers),
        **{path: _tried(_data, path) for path in args.data},
    }
    output.put(facts, lambda found: fields((printable(name), printable(text)) for name, text in found.items()))
    return int(any(text.startswith(_FAILED) for text in facts.values()))


def _limit(number: int) -> str:
    soft, _ = resource.getrlimit(number)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _packages() -> str:
    """The installed versions of what asyncdata can use."""
    found = []
    for name in dict.fromkeys(_PACKAGE.findall(wanted)[0] for wanted in requires("asyncdata") or ()):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _tried(look: Any, *args: Any) -> str:
    """What a look finds, or why it failed."""
    try:
        return str(look(*args))
    except (AsyncDataError, OSError) as error:
        return _FAILED + shortened(str(error))


def _cache() -> str:
    folder = Path(cache_folder())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    num_proofs = len(list((folder / PROOFS).glob("*.proof")))
    return f"{shown_path(str(folder))}, {num_proofs} proofs of fast tokenizers"


def _workers() -> str:
    """A worker process reads a few rows."""
    from asyncdata import DataLoader, RowFn

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(f'{{"row": {number}}}\n' for number in range(_NUM_ROWS)), encoding="ascii")
        began = time.perf_counter()
        with DataLoader(path, tokenize_fn=RowFn(), num_workers=1, timeout_s=60, progress="none") as loader:
            loader.get_next_batch(_NUM_ROWS)
            return f"one starts, and {_NUM_ROWS} rows are there after {time.perf_counter() - began:.2f} s"


def _data(path: str) -> str:
    files = described(path).open(_BLOCK_BYTES)
    try:
        sizes = [file.num_bytes for file in files.files]
        return f"{len(sizes):,} files, {sum(sizes) / 1e6:,.1f} MB"
    finally:
        files.close()
