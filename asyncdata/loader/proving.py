"""The process that proves fast tokenizer backends beside a run."""

from __future__ import annotations

import os
import sys
import threading

import msgspec

from asyncdata.core.threads import end_with_parent
from asyncdata.tokenization.encoders.equivalence_records import Proof, alone, answered, asked_for, find, to_prove
from asyncdata.tokenization.encoders.equivalence_sweep import FIRST, GrowingProof
from asyncdata.tokenization.tokenizer_files import TokenizerFiles

_NICE = 7
"""The priority while a proof grows. The first proof is made at the workers' priority: beside others that leave no CPU
idle, a process of low priority gets a sixth of one CPU, and a short run would end before anything is proven."""

_LOOK_AGAIN_S, _MOST_QUIET = 0.1, 200
"""How often the process that proves looks. It ends after so many times without a request, as it has 150 MB."""


def main(folder: str, backends: list[str], needs_offsets: bool, parent: int) -> None:
    """Find the backend that workers use, or the first that is exact, and prove what workers request;
    print each proof as a line of JSON.

    It ends with the thread of ``parent`` that started it, or if nothing is asked for any more.
    """
    end_with_parent(parent)
    files = TokenizerFiles(folder)
    for subject in to_prove(files, backends, needs_offsets=needs_offsets):
        made = None
        with alone("proving"):
            proof = find(subject)
            if proof is None:
                made = GrowingProof(files, subject)
                proof = _told(made.proof)
        if proof.is_usable(needs_offsets=needs_offsets):
            os.nice(_NICE)
            with alone("growing", waits=False) as is_ours:
                if is_ours is not None:
                    growing = made or GrowingProof(files, subject)
                    growing.grow(FIRST)
                    _grow(growing)
            return


def _grow(growing: GrowingProof) -> None:
    """Prove the characters that workers ask for, until they ask for none for a while."""
    subject, num_quiet, never = growing.proof.subject, 0, threading.Event()
    while num_quiet < _MOST_QUIET and not growing.proof.refusal:
        asked = asked_for(subject)
        growing.grow(dict.fromkeys(asked))
        answered(subject, len(asked))
        if asked:
            _told(growing.proof)
            num_quiet = 0
        else:
            never.wait(_LOOK_AGAIN_S)
            num_quiet += 1


def _told(proof: Proof) -> Proof:
    """Print the proof, without what is long and only needed from its file."""
    sys.stdout.buffer.write(msgspec.json.encode(msgspec.structs.replace(proof, token_lengths=b"")) + b"\n")
    sys.stdout.flush()
    return proof
