"""Ranks of a training run, a loader each, in this process and in lock step; rows whose tokens say whose they are."""

import json
import multiprocessing
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import asyncdata
from asyncdata import DataLoader, Document, HardPacking, LengthGrouping, Mix, PackedCollator, Shuffle, SoftPacking

WAIT_S = 120
"""Nothing takes so long: a rank that is waited for has been lost."""


class Meeting:
    """A call of each rank returns what all ranks sent. It counts the bytes of each, and the calls of all together."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._sent = [b""] * world_size
        self.num_bytes = [0] * world_size
        self.num_calls = 0

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        """The exchange of one rank."""

        def exchange(data: bytes) -> list[bytes]:
            self._sent[rank] = data
            self.num_bytes[rank] += len(data)
            self._barrier.wait(WAIT_S)
            answers = list(self._sent)
            self._barrier.wait(WAIT_S)  # no call begins before all have their answers of this one
            self.num_calls += 1
            return answers

        return exchange

    def end(self) -> None:
        """Every call fails from now on."""
        self._barrier.abort()


class MeetingOverGloo:
    """The same over gloo: each rank has a process that calls ``asyncdata.integrations.torch.exchange`` for it."""

    def __init__(self, world_size: int) -> None:
        spawned, self._store = multiprocessing.get_context("spawn"), tempfile.NamedTemporaryFile()
        self._pipes = [spawned.Pipe() for _ in range(world_size)]
        places = [(end, rank, world_size, self._store.name) for rank, (_, end) in enumerate(self._pipes)]
        self._processes = [spawned.Process(target=_exchanged_over_gloo, args=place, daemon=True) for place in places]
        for process, (_, end) in zip(self._processes, self._pipes, strict=True):
            process.start()
            end.close()

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        """The exchange of one rank."""
        pipe, _ = self._pipes[rank]

        def exchange(data: bytes) -> list[bytes]:
            pipe.send_bytes(data)
            return pipe.recv()

        return exchange

    def end(self) -> None:
        """Every call fails from now on."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._store.close()


def _exchanged_over_gloo(pipe: Any, rank: int, world_size: int, store: str) -> None:
    import torch.distributed

    from asyncdata.integrations.torch import exchange

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    call = exchange()
    while True:
        pipe.send(call(pipe.recv_bytes()))


Row = dict[str, Any]

STRIDE = 1000
"""Token k of row i is ``i * STRIDE + k``: no two tokens of an epoch are alike."""

SHUFFLE = Shuffle(block_bytes=512, window_blocks=4)
"""Small enough that a few dozen rows fill several windows."""

CONTENTS = PackedCollator()

MAX_LENGTH = 64
SOFT = SoftPacking(max_length=MAX_LENGTH, window_samples=8, window_tokens=2 * MAX_LENGTH, across_epochs=True)
HARD = HardPacking(max_length=MAX_LENGTH, across_epochs=True)
GROUPING = LengthGrouping(window=8)
PLANNED = {"packing": msgspec.structs.replace(SOFT, across_epochs=False), "plan_packs": True}
WAYS: dict[str, dict[str, Any]] = {
    "soft": {"packing": SOFT},
    "soft, grouped": {"packing": SOFT, "length_grouping": GROUPING},
    "hard": {"packing": HARD},
    "hard, grouped": {"packing": HARD, "length_grouping": GROUPING},
    "planned, grouped": {**PLANNED, "length_grouping": GROUPING, "shuffle": "full", "cache": {"folder": ""}},
    "not packed": {},
    "not packed, grouped": {"length_grouping": GROUPING},
}
"""What a loader does with samples."""

PACKED = {name: way for name, way in WAYS.items() if "packing" in way}


def lengths(num_tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Tokens of rows that have ``num_tokens`` together, 1 to ``longest`` each."""
    rng, found = random.Random(seed), []
    while num_tokens:
        found.append(min(num_tokens, rng.randint(1, longest)))
        num_tokens -= found[-1]
    return found


def write(path: Path, sizes: Iterable[int | None]) -> Path:
    """Rows 0, 1, ... of so many tokens; None: a bad row."""
    rows = ({"id": number, "n": size, "pad": "x" * (number * 37 % 30)} for number, size in enumerate(sizes))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(row: Row) -> list[int]:
    """The tokens of a row."""
    return [row["id"] * STRIDE + number for number in range(row["n"])]


class Calls:
    """A tokenize function that counts its calls by row."""

    version = "1"

    def __init__(self, function: Callable[[Row], Any] = numbered) -> None:
        self.of_row = Counter[int]()
        self._function = function

    def __call__(self, row: Row) -> Any:
        self.of_row[row["id"]] += 1
        return self._function(row)


class Batch(NamedTuple):
    """What a rank got: packs of documents of tokens, a pack for a sample that is not packed; and the batch's bytes."""

    packs: list[list[list[int]]]
    content: bytes

    def __hash__(self) -> int:
        return hash(self.content)

    @property
    def tokens(self) -> list[int]:
        """All of them."""
        return [token for pack in self.packs for document in pack for token in document]


def batch_of(items: list[Any]) -> Batch:
    """A collate function, of packs or of samples."""
    packs = [item if isinstance(item, list) else [Document(item.tokens)] for item in items]
    arrays = {name: np.asarray(array) for name, array in CONTENTS(packs).items()}
    content = b"".join(
        f"{name} {array.dtype} {array.shape}".encode() + array.tobytes() for name, array in arrays.items()
    )
    return Batch([[document.tokens.tolist() for document in pack] for pack in packs], content)


def make(source: Path | Mix, tokenize_fn: Callable[..., Any] = numbered, **knobs: Any) -> DataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    settings = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240, "batch_size": 1, "collate_fn": batch_of}
    return DataLoader(source, tokenize_fn=tokenize_fn, **settings | knobs)


def stream(loader: DataLoader) -> Iterator[Batch]:
    """The batches of one epoch after the other, until there are no more."""
    is_over = False
    while not is_over:
        is_over = True
        for batch in loader:
            is_over = False
            yield batch


def settled(state: dict[str, Any]) -> dict[str, Any]:
    """What of a state does not depend on time: canaries come when a worker has made them, ``rows_left`` with a
    count."""
    return {name: value for name, value in state.items() if name not in ("canaries", "rows_left")}


class Step(NamedTuple):
    """One batch of each rank, None if its data is at an end; and the state of all of them after it."""

    batches: list[Batch | None]
    state: dict[str, Any]


class Ranks(ExitStack):
    """All ranks of a run, resumed from ``state``, which agree on their state after each step; ``ends`` has the steps
    until the end of each epoch."""

    def __init__(self, path, world_size, state=None, gradient_accumulation=1, round_up=None, exchanges=(), **knobs):
        super().__init__()
        self.loaders, self.ends, self.num_steps = [], [], 0
        settings = {"gradient_accumulation": gradient_accumulation, "round_up": round_up}
        with ExitStack() as stack:
            for rank in range(world_size):
                exchange = exchanges[rank] if exchanges else None
                ranks = asyncdata.Ranks(rank=rank, world_size=world_size, exchange=exchange, **settings)
                self.loaders.append(stack.enter_context(make(path, ranks=ranks, **knobs)))
                if state is not None:
                    self.loaders[-1].load_state_dict(json.loads(json.dumps(state)))
            self.push(stack.pop_all())
        self.callback(self._close)

    def _close(self) -> None:
        """At the same time, as ranks that have an exchange wait for each other."""
        with ThreadPoolExecutor(len(self.loaders)) as threads:
            list(threads.map(DataLoader.close, self.loaders))

    def state(self) -> dict[str, Any]:
        """The state of all ranks, which must not differ."""
        states = [loader.state_dict() for loader in self.loaders]
        for rank, state in enumerate(states):
            assert settled(state) == settled(states[0]), f"rank {rank}"
        return states[0]

    def steps(self, number: int | None = None) -> Iterator[Step]:
        """So many steps, or all that there are."""
        return islice(self._steps(), number)

    def _steps(self) -> Iterator[Step]:
        is_over = False
        while not is_over:
            is_over = True
            loops = [iter(loader) for loader in self.loaders]
            while any(batches := [next(loop, None) for loop in loops]):
                is_over = False
                self.num_steps += 1
                yield Step(batches, self.state())

            self.ends.append(self.num_steps)


def tokens_of(steps: Iterable[Step]) -> Counter[int]:
    """How often each token was delivered, to whatever rank."""
    return Counter(token for step in steps for batch in step.batches if batch for token in batch.tokens)
