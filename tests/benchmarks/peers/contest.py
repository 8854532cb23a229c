"""What is done with a peer's loader. Runs in any peer's environment: needs nothing but the tokenizers.

``python loaders.py JSON`` prints one JSON object. Seconds count from the script's first statement, as for ours.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import json  # noqa: E402 - the clock starts before anything else
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = 32
SEED = 42


class Peer:
    """A loader, made of the contest's settings: ``path``, ``parts``, ``tokenizer``, ``backend``, ``num_workers``,
    ``folder``. Most have a ``loader`` that keeps its own state."""

    loader: Any

    def __init__(self, settings: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        """Batches of 32 samples, tokenized, in one epoch."""
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def states(self, stops: list[int]) -> Iterator[Any]:
        """What is to be saved after so many rows each, for JSON."""
        wanted = iter(stops)
        stop = next(wanted)
        for number, _ in enumerate(self.loader):
            if number * BATCH >= stop:
                yield self.state()
                stop = next(wanted, 1 << 62)

    def restore(self, state: Any) -> None:
        """Go on from there."""
        self.loader.load_state_dict(state)


def seconds() -> float:
    """Since the script's first statement."""
    return time.perf_counter() - BEGAN


def encoder(tokenizer: str, backend: str) -> Callable[[list[str]], list[Any]]:
    """Texts to token ids, with the tokenizer alone: no transformers, which would cost seconds and half a GB."""
    path = str(Path(tokenizer) / "tokenizer.json")
    if backend == "gigatoken":
        import gigatoken

        return gigatoken.Tokenizer(path).encode_batch_list

    if backend == "fastokens":
        return _flat(path)

    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(path).encode_batch_fast
    return lambda texts: [one.ids for one in encode(texts, add_special_tokens=False)]


def _flat(path: str) -> Callable[[list[str]], list[Any]]:
    import fastokens
    import numpy as np

    engine = fastokens.Tokenizer.from_file(path)

    def encode(texts: list[str]) -> list[Any]:
        ids, offsets = engine.encode_batch_flat(texts)
        return np.split(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)[1:-1].astype(np.int64))

    return encode


_ENCODERS: dict[tuple[str, str], Callable[[list[str]], list[Any]]] = {}


def encoded(texts: list[str], tokenizer: str, backend: str = "hf") -> list[Any]:
    """Token ids, by a tokenizer that every process loads once, when it first needs it."""
    key = (tokenizer, backend)
    if key not in _ENCODERS:
        _ENCODERS[key] = encoder(*key)
    return _ENCODERS[key](texts)


def lines(path: str) -> Iterator[str]:
    """The texts of a JSONL file."""
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)["input"]


def row_offsets(path: str) -> list[int]:
    """Where each row begins, and where the last one ends."""
    found = [0]
    with open(path, "rb") as file:
        for line in file:
            found.append(found[-1] + len(line))
    return found


def main(peers: dict[str, type[Peer]]) -> None:
    """Do what the command line asks for: ``mode`` is ``epoch``, ``first_batch``, ``paced``, ``save`` or ``resume``."""
    settings = json.loads(sys.argv[1])
    modes = {"epoch": _epoch, "first_batch": _first_batch, "paced": _paced, "save": _save, "resume": _resume}
    print(json.dumps(modes[settings["mode"]](peers[settings["peer"]](settings), settings)), flush=True)
    os._exit(0)  # a peer's workers and threads are not waited for


def through(batches: Iterable[Any], clock: Callable[[], float], num_rows_at_most: int) -> dict[str, float]:
    """An epoch in batches, or its first rows: seconds from the process's first statement, which ``clock`` counts."""
    num_rows, first = 0, 0.0
    for batch in batches:
        first = first or clock()
        num_rows += len(batch)
        if num_rows >= (num_rows_at_most or 1 << 62):
            break
    end = clock()
    return {
        "first_batch_s": first,
        "num_rows": num_rows,
        "steady_rows_per_s": (num_rows - BATCH) / (end - first),
        "end_to_end_rows_per_s": num_rows / end,
    }


def _epoch(peer: Peer, settings: dict[str, Any]) -> dict[str, float]:
    return through(peer, seconds, settings["num_rows_at_most"])


def _first_batch(peer: Peer, settings: dict[str, Any]) -> dict[str, float]:
    next(iter(peer))
    return {"first_batch_s": seconds()}


def _paced(peer: Peer, settings: dict[str, Any]) -> dict[str, float]:
    """Batches at a fixed rate: the share of the time that was spent in getting them."""
    batches, waited = iter(peer), 0.0
    next(batches)
    began = due = time.perf_counter()
    while due - began < settings["seconds"]:
        time.sleep(max(0.0, due - time.perf_counter()))
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        waited += time.perf_counter() - asked
        due += BATCH / settings["rows_per_s"]
    return {"called_share": waited / (time.perf_counter() - began)}


def _save(peer: Peer, settings: dict[str, Any]) -> dict[str, float]:
    stops = {percent: settings["num_rows"] * percent // 100 for percent in settings["percents"]}
    for percent, state in zip(stops, peer.states(list(stops.values())), strict=False):
        Path(f"{settings['state']}.{percent}").write_text(json.dumps(state))
    return {}


def _resume(peer: Peer, settings: dict[str, Any]) -> dict[str, float]:
    peer.restore(json.loads(Path(settings["state"]).read_text()))
    if next(iter(peer), None) is None:
        raise SystemExit("no batch comes: what is in a shuffle buffer is not in the state")

    return {"resume_s": seconds()}
