"""The order of the whole loader's model, in plain Python: which rows and packs there are, and in which order.

The rows of a data set (``Part``), the part of a mixture that comes next (``Schedule``), and packs (``Packer``). It
shares no code with the library.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from fractions import Fraction
from typing import Any, NamedTuple

KEPT, BAD = "kept", "bad"
MAX_ROW_BYTES = 100
Key = tuple[str, int, int]

# The order: keyed permutations, with a key for each seed, epoch and use.

MASK, GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """A 64-bit number of which every bit depends on every bit of ``word`` (the end of splitmix64)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def keys_of(seed: int, epoch: int, use: str) -> list[int]:
    digest = hashlib.blake2b(f"asyncdata order 1|{seed}|{epoch}|{use}".encode(), digest_size=48).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]


def seed_of_part(seed: int, name: str) -> int:
    """A part of a mixture has an order of its own."""
    return int.from_bytes(hashlib.blake2b(f"asyncdata part 1|{seed}|{name}".encode(), digest_size=7).digest(), "little")


def permuted(size: int, keys: list[int]) -> list[int]:
    """A Feistel network over a power of four; what falls outside the size walks on."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)

    def step(value: int) -> int:
        left, right = value >> half, value & (1 << half) - 1
        for key in keys:
            left, right = right, left ^ mixed(right + key & MASK) & (1 << half) - 1
        return left << half | right

    found = [step(number) for number in range(size)]
    while max(found, default=0) >= size > 0:
        found = [number if number < size else step(number) for number in found]
    return found


def shuffled(size: int, key: int) -> list[int]:
    """Numbers sorted by a keyed mix of each."""
    return sorted(range(size), key=lambda number: mixed(number * GOLDEN + key & MASK))


class Row(NamedTuple):
    """A row: its place, and its ``fate``: KEPT, BAD, or the reason why it is dropped. A sample may have pictures."""

    part: str
    file: int
    offset: int
    number: int
    fate: str
    tokens: tuple[int, ...] = ()
    code: str = ""
    num_pictures: int = 0

    @property
    def key(self) -> Key:
        return self[:3]


def row_of(place: Key, line: bytes) -> Row | None:
    """None for a blank line, which is no row."""
    if len(line) > MAX_ROW_BYTES:
        return Row(*place, -1, BAD, code="AD108")

    try:
        row = json.loads(line) if line.strip() else None
    except ValueError as error:
        return Row(*place, -1, BAD, code="AD119" if "Extra data" in str(error) else "AD101")

    if row is None or row["fate"] == "fails":
        return None if row is None else Row(*place, row["id"], BAD, code="AD421")

    return Row(*place, row["id"], row["fate"], (row["id"],) * (1 + row["id"] * 7 % 5) if row["fate"] == KEPT else ())


class Part(NamedTuple):
    """One data set, and the order of its rows: an epoch is a list of windows, and a window a list of rows.

    :ivar files: the bytes of each file.
    :ivar covered: of files that grow, the bytes of each that an epoch covers.
    :ivar block_bytes: 0: all rows are permuted as one (``shuffle="full"``), or only those that are samples.
    :ivar recorded: the numbers of the rows of each window of each epoch, where the order is that of a plain run.
    """

    name: str
    files: list[bytes]
    seed: int
    is_shuffled: bool
    block_bytes: int
    window_blocks: int
    only_kept: bool
    has_pictures: bool
    recorded: list[list[list[int]]]
    covered: dict[int, list[int]]
    known: dict[Any, list[list[Row]]]

    def rows(self, epoch: int) -> list[Row]:
        """All rows of an epoch, in the order of the files."""
        found = []
        for file, data in enumerate(self.files):
            offset = 0
            size = self.covered[epoch][file : file + 1] if epoch in self.covered else [len(data)]
            for line in data[: sum(size)].split(b"\n"):
                found.append(row_of((self.name, file, offset), line))
                offset += len(line) + 1
        kept = [row for row in found if row is not None and (row.fate == KEPT or not self.only_kept)]
        return [row._replace(num_pictures=row.number % 3) for row in kept] if self.has_pictures else kept

    def windows(self, epoch: int) -> list[list[Row]]:
        key = epoch, *self.covered.get(epoch, map(len, self.files))
        if key not in self.known:
            self.known[key] = self._windows(epoch, self.rows(epoch), key[1:])
        return self.known[key]

    def _windows(self, epoch: int, rows: list[Row], sizes: tuple[int, ...]) -> list[list[Row]]:
        if self.recorded:
            by_number = {row.number: row for row in rows}
            return [[by_number[number] for number in window] for window in self.recorded[epoch]]

        if not self.block_bytes:
            order = permuted(len(rows), keys_of(self.seed, epoch, "all rows"))
            return [[rows[number] for number in order] if self.is_shuffled else rows]

        places = [(file, at) for file, size in enumerate(sizes) for at in range(-(-size // self.block_bytes))]
        blocks: dict[Any, list[Row]] = {place: [] for place in places}
        for row in rows:
            blocks[row.file, row.offset // self.block_bytes].append(row)
        if self.is_shuffled:
            places = [places[at] for at in permuted(len(places), keys_of(self.seed, epoch, "blocks"))]
        number, windows = -(-len(places) // self.window_blocks), []
        for window in range(number):
            some = places[window * len(places) // number : (window + 1) * len(places) // number]
            held = [row for place in some for row in blocks[place]]
            order = shuffled(len(held), keys_of(self.seed, epoch, f"rows {window}")[0])
            windows.append([held[at] for at in order] if self.is_shuffled else held)
        return windows

    def epoch(self, epoch: int) -> list[Row]:
        return [row for window in self.windows(epoch) for row in window]


# Which part of a mixture has the next sample.


class Mixing(NamedTuple):
    """The settings of a mixture. Weights are in the order of the names. A single source is a part without a name."""

    names: tuple[str, ...] = ("",)
    by: str = "rows"
    quota: int = 1
    weights: tuple[int, ...] = (1,)
    stages: dict[int, tuple[int, ...]] = {}
    ends: dict[str, tuple[str, int | None]] = {"": ("stop", None)}

    def epochs_of(self, name: str) -> int | None:
        """Of a part in one epoch of the mixture; None: any number."""
        when_done, most = self.ends.get(name, ("repeat", None))
        return 1 if most is None and when_done != "repeat" else most

    @property
    def has_end(self) -> bool:
        stops = any(when_done == "stop" for when_done, _ in self.ends.values())
        return stops or None not in map(self.epochs_of, self.names)


class Schedule:
    """Which part is next. A single source is a mixture of one part, whose epochs are those of the mixture."""

    def __init__(self, mixing: Mixing, seed: int) -> None:
        self.mixing, self.seed, self.at = mixing, seed, 0
        self.epochs, self.begun, self.left = Counter[str](), set[str](), set[str]()
        self.back, self.times = dict[str, int](), dict[str, int]()  # of the parts that sit out
        self.begin_anew()

    def begin_anew(self) -> None:
        """Other weights hold from here on: what each part has had is forgotten."""
        self.since, self.block, self.counts = self.at, list[str](), Counter[str]()
        weights = self.mixing.stages.get(max((at for at in self.mixing.stages if at <= self.at), default=-1))
        gone = {name for name in self.mixing.names if name in self.left or self.back.get(name, 0) > self.at}
        pairs = zip(self.mixing.names, weights or self.mixing.weights, strict=True)
        self.weights = {name: 0 if name in gone else weight for name, weight in pairs}

    @property
    def changes(self) -> list[int]:
        return [at for at in (*self.mixing.stages, *self.back.values()) if at > self.at]

    def pick(self) -> str | None:
        """The part of the next sample; None if no part has a weight."""
        if not any(self.weights.values()):
            return None

        if self.mixing.by == "tokens":
            return self._neediest()

        self.block = self.block or self._next_block()
        return self.block[0]

    def _neediest(self) -> str:
        total, whole = sum(self.counts.values()), sum(self.weights.values())
        deficits = {name: weight * total - whole * self.counts[name] for name, weight in self.weights.items() if weight}
        most = [name for name, deficit in deficits.items() if deficit == max(deficits.values())]
        return min(most, key=lambda name: keys_of(self.seed, self.at, f"mixture  {name}")[0])

    def _next_block(self) -> list[str]:
        """Each part has its share of the samples until the block's end, to within one; the earliest deadline first."""
        size = min([self.at + self.mixing.quota, *self.changes]) - self.at
        total, whole = self.at + size - self.since, sum(self.weights.values())
        shares = {name: Fraction(weight * total, whole) for name, weight in self.weights.items()}
        after = Counter({name: max(self.counts[name], int(share)) for name, share in shares.items()})
        while sum(after.values()) < total:
            due = [name for name, share in shares.items() if share > after[name]]
            after[min(due, key=lambda name: Fraction(after[name] + 1, self.weights[name]))] += 1
        members = [name for name in self.weights for _ in range(after[name] - self.counts[name])]
        self.counts = after
        return [members[place] for place in shuffled(size, keys_of(self.seed, self.at, "mixture ")[0])]

    def took(self, name: str, num_tokens: int) -> None:
        self.begun.add(name)
        self.back.pop(name, None), self.times.pop(name, None)
        changes = self.changes
        self.at += 1
        if self.mixing.by == "tokens":
            self.counts[name] += num_tokens
        else:
            self.block = self.block[1:]
        if self.at in changes:
            self.begin_anew()

    def epoch_ended(self, name: str, *, is_empty: bool) -> bool:
        """A part came to the end of its epoch at its turn. Whether that of the mixture is over, too."""
        limit, is_counted = self.mixing.epochs_of(name), is_empty or name in self.begun
        self.epochs[name] += is_counted
        if is_counted and limit is not None and self.epochs[name] >= limit:
            if self.mixing.ends[name][0] == "stop":
                return True

            self.left.add(name)
        elif is_empty:  # it sits out
            self.times[name] = 2 * self.times.get(name, 0) or 1
            self.back[name] = (self.at // self.mixing.quota + self.times[name]) * self.mixing.quota
        else:
            return False

        self.begin_anew()
        return not any(self.weights.values())

    def begin_epoch(self) -> None:
        self.epochs, self.begun = Counter(), set()
        if self.left or self.back:
            self.left, self.back, self.times = set(), {}, {}
            self.begin_anew()


# Packs.

Piece = tuple[Row, int, int]


class Packing(NamedTuple):
    """``window`` is that of soft packing, in samples; 0: hard packing, end to end."""

    max_length: int
    window: int
    across_epochs: bool


class Packer:
    """Samples in, packs out: lists of pieces (row, start, stop). Of the run, some samples may be packed already."""

    def __init__(self, packing: Packing) -> None:
        self.packing, self.run, self.open = packing, list[Row | None](), list[Piece]()

    def __copy__(self) -> Packer:
        other = Packer(self.packing)
        other.run, other.open = self.run.copy(), self.open.copy()
        return other

    @property
    def room(self) -> int:
        return self.packing.max_length - sum(stop - start for _, start, stop in self.open)

    def push(self, row: Row) -> list[list[Piece]]:
        if self.packing.window:
            self.run.append(row)
            return self._filled(self.packing.window)

        packs, start = [], 0
        while start < len(row.tokens):
            stop = min(len(row.tokens), start + self.room)
            self.open.append((row, start, stop))
            start = stop
            packs += [] if self.room else [self._closed()]
        return packs

    def _filled(self, window: int) -> list[list[Piece]]:
        """The oldest goes into the open pack. If it does not fit, the largest that do, and the pack is closed."""
        packs = []
        while len(self.run) >= window and self.run:
            row = self.run[0]
            if row is not None and len(row.tokens) > self.room:
                while fitting := [one for one in self.run if one is not None and len(one.tokens) <= self.room]:
                    largest = max(fitting, key=lambda one: len(one.tokens))  # of one size, the oldest
                    self.run[self.run.index(largest)] = None
                    self.open.append((largest, 0, len(largest.tokens)))
                packs.append(self._closed())
                continue

            if row is not None:
                self.open.append((row, 0, len(row.tokens)))
            del self.run[0]
        return packs

    def flush(self) -> list[list[Piece]]:
        """There are no more samples. What fills no hard pack is dropped."""
        packs, rest = self._filled(1), self._closed()
        return [*packs, rest] if rest and self.packing.window else packs

    def _closed(self) -> list[Piece]:
        pack, self.open = self.open, []
        return pack
