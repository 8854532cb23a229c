"""What scripts of the whole loader's machine are written in, beside the public API. They run from a clone."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from asyncdata import (
    BadRows,
    DataLoader,
    HardPacking,
    JsonlSource,
    Limits,
    Mix,
    Outcomes,
    Part,
    PassRate,
    Ranks,
    RowShuffle,
    Sample,
    Shuffle,
    SoftPacking,
    Status,
)
from asyncdata.errors import AsyncDataError, EndOfData
from tests.support.column_fns import PIXELS, media_of
from tests.support.faults import Program
from tests.support.loaders import Awaited
from tests.support.ranks import Meeting, MeetingOverGloo
from tests.support.stores import FAST, http_host

__all__ = [
    "FAST", "Awaited", "BadRows", "DataLoader", "HardPacking", "JsonlSource", "Limits", "Meeting", "MeetingOverGloo",
    "Mix", "Outcomes", "Part", "PassRate", "Path", "Ranks", "RowShuffle", "Shuffle", "SoftPacking", "Status", "by_fate",
    "by_hand", "cancelled", "end", "every", "gzip", "http_host", "is_held", "json", "killed", "known", "looped",
    "newest", "oldest_but_one", "outcome", "pictured", "recorded", "same_state", "start_of", "stored", "taken",
    "tempfile", "told", "worked", "write_parquet",
]  # fmt: skip


def by_fate(row: dict[str, Any]) -> Any:
    """A tokenize function that does with a row what the row says."""
    if row["fate"] == "fails":
        raise ValueError("as it was told to")
    return [row["id"]] * (1 + row["id"] * 7 % 5) if row["fate"] == "kept" else row["fate"]


def pictured(row: dict[str, Any]) -> Any:
    """The same with pictures, which are loaded when it is known that the row is a sample: a row may fail only then.

    Of every other row the plan only counts the tokens.
    """
    kept = by_fate(row | {"fate": "kept"} if row["fate"] == "fails" else row)
    if not isinstance(kept, list):
        return kept
    tokens = {"num_tokens": len(kept)} if row["id"] % 2 else {"input_ids": kept}
    return tokens | {"media": {"pixels": row["id"] % 3}}


def load_pictures(row: dict[str, Any], plan: dict[str, Any]) -> Any:
    """As many as the row's number says, each of numbers of its own."""
    kept = by_fate(row)
    tokens = {"input_ids": kept} if "num_tokens" in plan else {}
    return tokens | {"pixels": media_of(row["id"], plan["media"]["pixels"])}


pictured.columns, pictured.load = (PIXELS,), load_pictures  # type: ignore[attr-defined]


def number_of(row: dict[str, Any]) -> list[int]:
    """Keeps every row."""
    return [row["id"]]


def recorded(source: Any, num_rows: int, num_epochs: int, **settings: Any) -> list[list[list[int]]]:
    """The numbers of the rows of each window of each epoch, of a run that nothing disturbs."""
    found: list[list[list[int]]] = [[] for _ in range(num_epochs)]
    with DataLoader(source, tokenize_fn=number_of, num_workers=0, **settings) as loader:
        for sample in loader.get_next_batch(num_rows * num_epochs):
            epoch, window = sample.position.epoch, sample.position.window
            found[epoch] += [[]] * 0 if window < len(found[epoch]) else [[]]
            found[epoch][window].append(int(sample.tokens[0]))
    return found


def write_parquet(path: Path, lines: bytes) -> None:
    """Rows of lines as a table of row groups of five."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(map(json.loads, lines.splitlines()))), path, row_group_size=5)


def stored(folder: Path, name: str) -> str:
    """The address of an object in a store on loopback."""
    return f"{http_host().url}/{folder.name}/{name}"


def newest(buffer: list[Any], num_groups: int) -> list[Any]:
    """A filter that returns one group too many and each twice, removes none, and spoils the list."""
    wanted = buffer[::-1][: num_groups + 1]
    buffer.clear()
    return wanted + wanted


def oldest_but_one(buffer: list[Any], num_groups: int) -> list[Any]:
    """A filter that leaves groups in the buffer, which must stay there, and removes what it returns."""
    wanted = buffer[1 : 1 + num_groups]
    del buffer[1 : 1 + num_groups]
    return wanted


def by_hand(name: str, size: int) -> list[Sample]:
    """A group that no loader has made."""
    return [Sample(tokens=np.array([7, 7], np.int32), extra={"name": name}) for _ in range(size)]


def known(group: Any) -> tuple[Any, ...]:
    """A group as the model knows it: its number, or name if it was made by hand; part, tokens, pictures, response, and
    the version of the policy.
    """
    first = group[0]
    number = first.extra["name"] if first.group_index is None else first.group_index
    (tokens,) = {tuple(sample.tokens.tolist()) for sample in group}
    (response,) = {sample.response for sample in group}
    (version,) = {sample.extra.get("policy_version") for sample in group}
    if first.group_index is not None:
        assert [sample.index for sample in group] == [number * len(group) + place for place in range(len(group))]
    return number, first.source_name or "", tokens, num_pictures(group), response, version


def num_pictures(group: Any) -> int:
    """How many pictures each sample has, which must be those of its row."""
    (number,) = {len(sample.columns.get("pixels", ())) for sample in group}
    if number:
        assert all((s.columns["pixels"] == media_of(int(s.tokens[0]), number)).all() for s in group)
    return number


def outcome(call: Any) -> tuple[Any, str]:
    """What a call returns, and the name of its error."""
    try:
        return call(), ""
    except EndOfData as end:
        return end.groups, "EndOfData"
    except AsyncDataError as error:
        return [], type(error).__name__


def told(held: dict[Any, Any], call: Any) -> tuple[list[Any], str]:
    """The groups of a call, which the trainer has from now on, and its error."""
    groups, error = outcome(call)
    assert len({id(sample) for group in groups for sample in group}) == sum(map(len, groups))
    return taken(held, groups), error


def taken(held: dict[Any, Any], groups: list[Any]) -> list[Any]:
    """What the model knows of groups, which the trainer has from now on."""
    held.update((known(group)[0], group) for group in groups)
    return list(map(known, groups))


def cancelled(held: dict[Any, Any], loader: Awaited, number: int, num_steps: int) -> tuple[list[Any], str]:
    """The same of an awaited call that is cancelled after so many steps of its event loop, if it has not ended then."""

    async def take() -> Any:
        task = asyncio.ensure_future(loader.loader.get_samples(number))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        return None

    groups, error = outcome(lambda: loader.runner.run(take()))
    return ([], "cancelled") if groups is None else (taken(held, groups), error)


def worked(held: dict[Any, Any], loader: Any, number: int, **limits: Any) -> tuple[list[Any], str]:
    """So many groups of a loop over groups that need work, which may be at its end before."""
    groups, error = list[Any](), ""
    try:
        groups.extend(islice(loader.groups(**limits), number))
        error = "end" if len(groups) < number else ""
    except AsyncDataError as failure:
        error = type(failure).__name__
    return taken(held, groups), error


def is_held(loader: Any, **limits: Any) -> bool:
    """Whether an awaited loop over groups serves none while its event loop runs some steps."""
    if not isinstance(loader, Awaited):
        return True

    async def step() -> Any:
        task = asyncio.ensure_future(anext(loader.loader.groups(**limits)))
        for _ in range(9):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        return None

    return loader.runner.run(step()) is None


def every(loaders: list[Any], call: Any) -> list[Any]:
    """``call(rank, loader)`` in all ranks at the same time, as ranks that have an exchange wait for each other."""
    if len(loaders) == 1:
        return [call(0, loaders[0])]

    with ThreadPoolExecutor(len(loaders)) as threads:
        return list(threads.map(call, range(len(loaders)), loaders))


def start_of(loader: Any) -> tuple[int, bool]:
    """The epoch that a loop would cover, and whether at its start."""
    place = loader.position()
    return place.epoch, (place.window, place.row) == (0, 0)


def killed(folder: Path, lines: list[str]) -> Any:
    """What lines of a script find in a process of their own, which then ends by SIGKILL."""
    told = Path(f"{folder}.found")  # not on standard output, where other threads write as well
    begin = ["import os, signal", "from tests.support.steps import *", f"folder = Path({str(folder)!r})"]
    end = [f"Path({str(told)!r}).write_text(repr(found))", "os.kill(os.getpid(), signal.SIGKILL)"]
    with Program("-c", "\n".join([*begin, *lines, *end]), options=("-X", "faulthandler")) as program:
        status, said = program.end()
        assert status == -signal.SIGKILL, (status, said)
        return ast.literal_eval(told.read_text())


def end(loaders: list[Any]) -> None:
    """All ranks close."""
    every(loaders, lambda _, loader: loader.close())
    for loader in loaders:
        if isinstance(loader, Awaited):
            loader.runner.close()


def looped(held: list[dict[Any, Any]], loaders: list[Any], number: int, size: int) -> list[Any]:
    """Of each rank, the batches of a loop that is left after so many, and its error. A batch is groups, or packs."""

    def loop(rank: int, loader: Any) -> Any:
        found: list[Any] = []
        try:
            for batch in islice(loader, number):
                if isinstance(batch[0], Sample):
                    groups = [batch[first : first + size] for first in range(0, len(batch), size)]
                    found.append(taken(held[rank], groups))
                else:
                    found.append([[document.tokens.tolist() for document in pack] for pack in batch])
        except AsyncDataError as error:
            return found, type(error).__name__
        return found, ""

    return every(loaders, loop)


def same_state(loaders: list[Any]) -> str:
    """The state of all ranks, which must not differ but for canaries, estimates, and rows that are no sample after the
    last one that was delivered: whether these are over already depends on what is ready.
    """
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    kept = [{name: value for name, value in state.items() if name not in ("canaries", "rows_left")} for state in states]
    for state in kept:
        state.pop("position")
        state["counters"] = {
            n: v for n, v in state["counters"].items() if n not in ("drops", "epoch_drops", "epoch_groups", "notes")
        }
    assert all(state == kept[0] for state in kept), kept
    return json.dumps(states[-1])
