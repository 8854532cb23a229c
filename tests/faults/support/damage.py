"""What a snapshot might turn into, or be taken for; ``python -m tests.faults.support.damage SETTINGS`` restores it all.

The child prints one JSON object: how many there were of each kind, what became of them, and whether code of theirs ran.
"""

import collections
import contextlib
import gzip
import importlib
import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncdata import DataLoader
from asyncdata.checkpoint.snapshot import SCHEMA
from asyncdata.core.checksummed_file import pack
from asyncdata.errors import AsyncDataError, SnapshotError
from tests.support.loading import NEVER_S, SHUFFLE, id_and_text, write_rows

KINDS = ("flipped", "cut", "torn", "longer", "foreign", "bomb", "sealed")
CODE = frozenset({"pickle.find_class", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"})
"""Audit events that reading a snapshot never has."""
ODD: list[Any] = [-1, 0, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, float("nan"), float("-inf"), None, True]
ODD += ["", "x", "\0" * 100, b"\xff", [], {}, [[]], {"__ndarray__": ["<i4", [2], "AA=="]}, "../../etc/passwd"]
ODD += ["os:system", "__import__('os')", {"__class__": "os.system"}, "9" * 5000]
HUGE = [b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x81\xa6buffer\xdd\xff\xff\xff\xff"]
"""Msgpack that claims to be huge."""


class Malicious:
    """Makes a folder if it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


class Damage:
    """Makes damaged files out of one that is whole; if code of theirs ran, there is the mark."""

    def __init__(self, whole: bytes, mark: str, seed: int) -> None:
        self._whole, self._mark, self._chance = whole, mark, random.Random(seed)
        (length,) = struct.unpack_from("<I", whole, 8)
        self._payload = whole[12 + length :]

    def flipped(self) -> bytes:
        data = bytearray(self._whole)
        for _ in range(self._chance.choice([1, 1, 1, 2, 8])):
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        return bytes(data) if bytes(data) != self._whole else self.flipped()

    def cut(self) -> bytes:
        return self._whole[: self._chance.randrange(len(self._whole))]

    def torn(self) -> bytes:
        """Something in the middle is missing, twice there, or zeros, as after a power loss."""
        start, stop = sorted(self._chance.sample(range(len(self._whole) + 1), 2))
        piece = self._chance.choice([b"", self._whole[start:stop] * 2, bytes(stop - start), os.urandom(stop - start)])
        data = self._whole[:start] + piece + self._whole[stop:]
        return data if data != self._whole else self.torn()

    def longer(self) -> bytes:
        return self._whole + self._chance.randbytes(self._chance.choice([1, 100, len(self._whole)]))

    def foreign(self) -> bytes:
        """Some other file, or bytes of no meaning; now and then after the head of a snapshot."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("archive/data.pkl", self._pickle())
        foreign = [
            *(self._pickle(), archive.getvalue(), gzip.compress(self._whole), b"", bytes(1000), b"\xff" * 1000),
            self._chance.randbytes(self._chance.randrange(5000)),
            f"!!python/object/apply:os.mkdir ['{self._mark}']\n".encode(),
            f"__import__('os').mkdir({self._mark!r})\n".encode(),
            json.dumps({"format": "asyncdata.snapshot", "schema": 1, "position": [0, 0, 0]}).encode(),
        ]
        return self._chance.choice([b"", b"", b"", self._whole[:8], self._whole[:12]]) + self._chance.choice(foreign)

    def _pickle(self) -> bytes:
        inner: Any = Malicious(self._mark)
        return pickle.dumps(self._chance.choice([inner, [inner], {"state": (1, inner)}]), self._chance.randrange(6))

    def bomb(self) -> bytes:
        """Claims to be huge or deep, in the head or in a payload whose checksum is right."""
        deep, chance = self._chance.choice([10_000, 300_000]), self._chance
        if chance.random() < 0.5:
            length = struct.pack("<I", chance.choice([2**31, 2**32 - 1, 1 << 16, 1 << 24]))
            claimed = b"payload_len\xcf" + struct.pack(">Q", 2**62)
            long_head = self._whole[:8] + length + self._whole[12:]
            return chance.choice([long_head, self._whole.replace(b"payload_len", claimed, 1)])

        payload, encoding = chance.choice(
            [
                *((data, "msgpack") for data in HUGE),
                *((data * deep, "msgpack") for data in (b"\x91", b"\x81\xa1a")),
                *((data, "json") for data in (b"[" * deep, b'{"a":' * deep, b"[" + b"9" * deep + b"]")),
                *((self._payload, name) for name in ("pickle", "yaml", "", "msgpack\0")),
                (b"\xdf\xff\xff\xff\xff" + self._payload, "msgpack"),
            ]
        )
        return pack(payload, encoding, schema=SCHEMA, library="0") + payload

    def sealed(self) -> bytes:
        """One value in it is another, and the checksum is right: as somebody who means harm would write it."""
        state = msgspec.msgpack.decode(self._payload)
        holder, key = self._chance.choice(list(_places(state)))
        holder[key] = self._chance.choice([*ODD, [holder[key]] * 3])
        payload = msgspec.msgpack.encode(state)
        return pack(payload, "msgpack", schema=SCHEMA, library="0") + payload


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


class Audit:
    """Counts events that only code of a file could cause, while it is on."""

    def __init__(self) -> None:
        self.is_on, self.num_events = False, 0
        self._thread = threading.get_ident()  # those of the service import what they need, whatever is restored
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _args: Any) -> None:
        self.num_events += self.is_on and event in CODE and threading.get_ident() == self._thread


def _outcome(call: Callable[[], object], audit: Audit) -> str:
    """``accepted``, the name of our error, or the traceback of another one."""
    audit.is_on = True
    try:
        call()
    except AsyncDataError as error:
        return type(error).__name__
    except BaseException:
        audit.is_on = False  # to print it, it is compiled
        return traceback.format_exc()
    finally:
        audit.is_on = False
    return "accepted"


def main(folder: str, number: int, seed: int) -> dict[str, Any]:
    work, audit = Path(folder), Audit()
    knobs: Any = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "num_workers": 0, "timeout_s": NEVER_S}
    outcomes: collections.Counter[str] = collections.Counter()
    others: list[str] = []
    with DataLoader(write_rows(work / "rows.jsonl", 300), commit="on_ack", n_samples_per_prompt=2, **knobs) as loader:
        groups = loader.get_samples(20)
        loader.add_samples(groups[:5])
        loader.ack(groups[7:9])
        loader.save(work / "whole")
        loader.restore(work / "whole")
        damage = Damage((work / "whole").read_bytes(), str(work / "mark"), seed)
        _warm_up(loader, work, **knobs)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for count in range(number):
            kind = KINDS[count % len(KINDS)]
            (work / "damaged").write_bytes(getattr(damage, kind)())
            outcome = _outcome(lambda: loader.restore(work / "damaged"), audit)
            if outcome == "accepted" and kind == "sealed":  # some are whole and mean something: it must serve then
                outcome = f"sealed, {_outcome(lambda: loader.get_samples(3), audit).replace('accepted', 'serves')}"
                loader.restore(work / "whole")
            if "Traceback" in outcome:
                (work / f"culprit-{len(others)}").write_bytes((work / "damaged").read_bytes())
                others.append(f"{kind}: {outcome}")
                outcome = "other error"
            outcomes[outcome if outcome != "accepted" else f"{kind} accepted"] += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        loader.restore(work / "whole")
        assert len(loader.get_samples(3)) == 3
    code_runs = audit.num_events + (work / "mark").exists()
    return {"outcomes": outcomes, "others": others[:5], "code_runs": code_runs, "peak_mb": grown / 1024}


def _warm_up(loader: DataLoader, work: Path, **knobs: Any) -> None:
    """What errors import and compile of ours is there before anybody listens."""
    importlib.import_module("asyncdata.core.columns")  # where a state has some
    loader.restore(work / "whole")
    loader.get_samples(1)  # a group is opened when it is served
    for text in (b"", b"x", b'{"a": 1}'):
        (work / "damaged").write_bytes(text)
        with contextlib.suppress(SnapshotError):
            loader.restore(work / "damaged")
    with DataLoader(write_rows(work / "other.jsonl", 10), **knobs) as others, contextlib.suppress(SnapshotError):
        others.restore(work / "whole")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))))
