"""What this machine has: for a run, as one text to paste into an issue (``asyncdata doctor``), and which fast backends
give the same ids for a tokenizer (``asyncdata tokenizer prove`` and ``show``).
"""

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
from types import SimpleNamespace
from typing import Any

from asyncdata.cli.output import Output, fields, shown_path
from asyncdata.core import __version__
from asyncdata.core.errors import AsyncDataError, ConfigError, printable, shortened
from asyncdata.core.files import cache_folder
from asyncdata.sources.resolve import described
from asyncdata.tokenization.encoders.equivalence_records import Proof, Subject, alone, find, num_points, subject_of
from asyncdata.tokenization.encoders.equivalence_sweep import GrowingProof, known_points, make
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, PROOFS, version_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve
from asyncdata.workers.machine import available_memory, num_usable_cpus

_FAILED = "FAILED: "
_NUM_ROWS = 64
_BLOCK_BYTES = 1 << 16
_LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
_PACKAGE = re.compile(r"[\w.-]+")


def doctor(args: SimpleNamespace, output: Output) -> int:
    """The command; exit status 1 if workers do not start, the cache cannot be written, or data cannot be read."""
    facts = {
        "asyncdata": f"{__version__} in {Path(__file__).parents[2]}",
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


_NOT_INSTALLED = "not installed"
_UNKNOWN = "not proven yet"


def tokenizer_show(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    files = TokenizerFiles(resolve(args.tokenizer).folder)
    found = {}
    for name in FAST_BACKENDS:
        subject = subject_of(files, name)
        found[name] = _facts(subject, None if subject is None else find(subject))
    _put(files, found, output)
    return 0


def tokenizer_prove(args: SimpleNamespace, output: Output) -> int:
    """The command; exit status 1 if no backend gives the same ids."""
    files = TokenizerFiles(resolve(args.tokenizer).folder)
    names = [args.backend] if args.backend else [name for name in FAST_BACKENDS if version_of(name)]
    if not names or version_of(names[0]) is None:
        wanted = args.backend or "gigatoken"
        raise ConfigError(f"AD435 no fast tokenizer backend is installed; pip install {wanted}")

    found, is_exact = {}, False
    for name in names:
        subject = subject_of(files, name)
        if subject is None:
            continue

        if args.again:
            with suppress(FileNotFoundError):
                os.unlink(subject.path)
        proof = make(files, subject)
        if args.all and not proof.refusal:
            output.say(f"{name}: all characters of Unicode, about a minute")
            with alone("growing"):
                growing = GrowingProof(files, subject)
                growing.grow(known_points())
                proof = growing.proof
        found[name] = _facts(subject, proof)
        is_exact |= not proof.refusal
    _put(files, found, output)
    return 0 if is_exact else 1


def _facts(subject: Subject | None, proof: Proof | None) -> dict[str, Any]:
    """The stored result for one backend."""
    if subject is None:
        return {"version": None, "state": _NOT_INSTALLED}

    known: dict[str, Any] = {"version": subject.backend_version, "state": _UNKNOWN, "proof": subject.path}
    if proof is None:
        return known

    numbers = {"num_characters": num_points(proof.proven), "num_refused": num_points(proof.refused)}
    names = ("refusal", "no_offsets", "num_texts", "num_differences", "seconds")
    state = "refused" if proof.refusal else "exact"
    return known | {"state": state} | numbers | {name: getattr(proof, name) for name in names}


def _put(files: TokenizerFiles, found: dict[str, dict[str, Any]], output: Output) -> None:
    lines = [("tokenizer", shown_path(files.folder)), *((name, _line(facts)) for name, facts in found.items())]
    text = fields((name, printable(value)) for name, value in lines)
    output.put({"tokenizer": files.folder, "backends": found}, lambda _: text)


def _line(facts: dict[str, Any]) -> str:
    if facts["state"] in (_NOT_INSTALLED, _UNKNOWN):
        return " ".join(filter(None, (facts["version"], facts["state"])))

    if facts["state"] == "refused":
        return f"{facts['version']} refused: {facts['refusal']}"

    places = f"; only for prompts and whole texts: {facts['no_offsets']}" if facts["no_offsets"] else ""
    return (
        f"{facts['version']} exact for {facts['num_characters']:,} characters, on {facts['num_texts']:,} texts in "
        f"{facts['seconds']:.0f} s; not for {facts['num_refused']:,}, whose texts go to tokenizers{places}"
    )
