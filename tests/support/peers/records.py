"""What peers deliver, as records in ``tests/golden``: inputs that we made, what a peer's own code made of them, and the
commit of the peer. They hold facts, and no code.

A test takes its cases from a record, and so needs no checkout. Where a variable names one, each case is also delivered
anew, and must be as it was recorded. ``python -m tests.support.peers slime=COMMIT ...`` delivers all cases of a peer
anew, and writes them: after a new commit, or after an input was added as ``[input, null]``.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.peers.checkouts import folder_of, needs_checkout

__all__ = ("Case", "cases_of", "digest", "plain", "recorded", "write_record")

FOLDER = Path(__file__).parents[2] / "golden"


class Record(NamedTuple):
    """Whose it is, and what the peer's code delivers of an input in a folder."""

    peer: str
    deliver: Callable[..., Any]


RECORDS: dict[str, Record] = {}


def recorded(name: str, peer: str) -> Callable[[Any], Any]:
    """Makes a record of what a function delivers; it is called with a folder and the items of an input."""

    def register(deliver: Any) -> Any:
        RECORDS[name] = Record(peer, deliver)
        return deliver

    return register


class Case:
    """An input, and what the peer delivered of it."""

    def __init__(self, record: str, number: int, given: dict[str, Any], delivered: Any) -> None:
        self.record, self.number, self.given, self._delivered = record, number, given, delivered

    def __str__(self) -> str:
        return str(self.number)

    def delivered(self, folder: Path) -> Any:
        """From the record; and from the checkout, where there is one."""
        record = RECORDS[self.record]
        if folder_of(record.peer) is not None:
            (folder / record.peer).mkdir()
            fresh = plain(record.deliver(folder / record.peer, **self.given))
            assert fresh == self._delivered, f"tests/golden/{self.record}.json is not what {record.peer} delivers"
        return self._delivered


def cases_of(name: str) -> list[Case]:
    """The cases of a record, in its order."""
    cases = json.loads((FOLDER / f"{name}.json").read_bytes())["cases"]
    return [Case(name, number, *case) for number, case in enumerate(cases)]


def write_record(name: str, commit: str, folder: Path) -> None:
    """Run the peer's code, and write what it delivered."""
    record = RECORDS[name]
    needs_checkout(record.peer)
    cases = []
    for case in cases_of(name):
        place = folder / name / str(case)
        place.mkdir(parents=True)
        cases.append(json.dumps([case.given, record.deliver(place, **case.given)]))
    head = json.dumps({"peer": record.peer, "commit": commit})[:-1]
    (FOLDER / f"{name}.json").write_text(f'{head}, "cases": [\n' + ",\n".join(cases) + "\n]}\n")


def plain(value: Any) -> Any:
    """A value as a record has it."""
    return json.loads(json.dumps(value))


def digest(value: Any) -> str:
    """Of what is too long for a record; NaN equals itself."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
