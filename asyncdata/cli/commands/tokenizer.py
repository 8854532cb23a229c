"""``asyncdata tokenizer prove`` and ``show``: which fast backends give the same ids for a tokenizer."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncdata.cli.output import fields, shown_path
from asyncdata.core.errors import ConfigError, printable
from asyncdata.tokenization.encoders.equivalence_records import alone, find, num_points, proof_path, subject_of
from asyncdata.tokenization.encoders.equivalence_sweep import GrowingProof, known_points, make
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from types import SimpleNamespace

    from asyncdata.cli.output import Output
    from asyncdata.tokenization.encoders.equivalence_records import Proof, Subject

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
                os.unlink(proof_path(subject))
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

    known: dict[str, Any] = {"version": subject.backend_version, "state": _UNKNOWN, "proof": proof_path(subject)}
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
