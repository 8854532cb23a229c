"""What peers deliver, as records in ``tests/golden``: inputs that we made, what a peer's own code made of them, and the
commit of the peer. They hold facts, and no code.

``python -m tests.support.peers slime=COMMIT ...`` writes them. A test takes its cases from a record, and so needs no
checkout. Where a variable names one, each case is also delivered anew, and must be as it was recorded; and with
``ASYNCDATA_PEER_SEED=7`` the cases are other ones than the recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.peers.checkouts import folder_of, needs_checkout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ("Case", "cases_of", "digest", "plain", "recorded", "write_record")

FOLDER = Path(__file__).parents[2] / "golden"
SEED = 1


class Record(NamedTuple):
    """Whose, its inputs by a generator of random numbers, and what the peer's code delivers of each in a folder."""

    peer: str
    inputs: Callable[[random.Random], Iterable[dict[str, Any]]]
    deliver: Callable[..., Any]


RECORDS: dict[str, Record] = {}


def recorded(name: str, peer: str, inputs: Callable[[random.Random], Iterable[dict[str, Any]]]) -> Callable[[Any], Any]:
    """Makes a record of what a function delivers; it is called with a folder and the items of an input."""

    def register(deliver: Any) -> Any:
        RECORDS[name] = Record(peer, inputs, deliver)
        return deliver

    return register


class Case:
    """An input, and what the peer delivered of it."""

    def __init__(self, record: str, number: int, given: dict[str, Any], delivered: Any = None) -> None:
        self.record, self.number, self.given, self._delivered = record, number, given, delivered

    def __str__(self) -> str:
        return str(self.number)

    def delivered(self, folder: Path) -> Any:
        """From the record; and from the checkout, where there is one."""
        record = RECORDS[self.record]
        if folder_of(record.peer) is None:
            return self._delivered

        (folder / record.peer).mkdir()
        fresh = plain(record.deliver(folder / record.peer, **self.given))
        assert self._delivered in (None, fresh), f"tests/golden/{self.record}.json is not what {record.peer} delivers"
        return fresh


def cases_of(name: str) -> list[Case]:
    """The cases of a record, in its order."""
    seed = os.environ.get("ASYNCDATA_PEER_SEED")
    if seed:
        inputs = RECORDS[name].inputs(random.Random(seed))
        return [Case(name, number, plain(given)) for number, given in enumerate(inputs)]

    cases = json.loads((FOLDER / f"{name}.json").read_bytes())["cases"]
    return [Case(name, number, *case) for number, case in enumerate(cases)]


def write_record(name: str, commit: str, folder: Path) -> None:
    """Run the peer's code, and write what it delivered."""
    record = RECORDS[name]
    needs_checkout(record.peer)
    cases = []
    for number, given in enumerate(record.inputs(random.Random(SEED))):
        place = folder / name / str(number)
        place.mkdir(parents=True)
        cases.append(json.dumps([given, record.deliver(place, **plain(given))]))
    head = json.dumps({"peer": record.peer, "commit": commit})[:-1]
    (FOLDER / f"{name}.json").write_text(f'{head}, "cases": [\n' + ",\n".join(cases) + "\n]}\n")


def plain(value: Any) -> Any:
    """A value as a record has it."""
    return json.loads(json.dumps(value))


def digest(value: Any) -> str:
    """Of what is too long for a record; NaN equals itself."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
