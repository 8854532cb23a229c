"""Loaders as tests open and close them, by both faces; what they deliver and refuse, and how errors of ours look."""

import asyncio
import inspect
import json
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

import asyncdata
from asyncdata import AsyncDataLoader, DataLoader, PromptTokenizeFn, RowFn, Sample
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import AsyncDataError, BadRowError, SourceError
from asyncdata.loader.service import Service
from tests.support.loading import NEVER_S, SHUFFLE, ids, row_id, write_rows


def make(source: Any, tokenize_fn: Any = row_id, face: Any = DataLoader, **knobs: Any) -> Any:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    knobs = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
    return face(source, tokenize_fn=tokenize_fn, **knobs)


def gated(tmp_path: Path, row: int, num_rows: int = 200) -> tuple[Path, Path]:
    """Rows of which one waits for a file, and the file."""
    gate = tmp_path / "gate"
    return write_rows(tmp_path / "gated.jsonl", num_rows, {row: {"gate": str(gate)}}), gate


def num_waiting(loader: Any) -> int:
    """How many calls wait for samples."""
    return len(loader._engine.coordinator._requests)  # noqa: SLF001 - nothing public counts them


def is_wanted(loader: Any) -> bool:
    """Whether a call waits for more than is there."""
    return bool(loader._engine.coordinator.channel.demand)  # noqa: SLF001 - nothing public tells


def path_waited_for(loader: Any) -> str:
    """The file of the row that holds up all others; empty if there is none."""
    entry = loader._engine._read_ahead.oldest_in_flight  # noqa: SLF001 - nothing public tells before a call times out
    return "" if entry is None or entry.location is None else entry.location(0).path


def rows_of_parts(loader: Any) -> dict[str, int]:
    """How many rows of each part of a mixture were tokenized."""
    return {part.name: part.reading.pacer.total_rows for part in loader._engine._read_ahead._parts}  # noqa: SLF001


def is_next_window_there(loader: Any) -> bool:
    """Whether the window after the current one has been read."""
    ahead = loader._engine._read_ahead._ahead  # noqa: SLF001 - nothing public tells
    return ahead is not None and ahead.is_kept


def slots_in_use(loader: Any) -> int:
    """How many slots of memory cannot be filled anew: they are held, or have requests under way."""
    slots = loader._engine.executor.slots  # noqa: SLF001 - as above
    return sum(map(any, zip(slots._is_held, slots._num_requests, strict=True)))  # noqa: SLF001


def bad_row_at(loader: DataLoader) -> tuple[list[int], BadRowError]:
    """What is delivered one by one before a bad row stops it, and how; twice, as nothing may be passed."""
    seen = []
    with pytest.raises(BadRowError) as caught:
        while True:
            seen += ids(loader.get_next_batch(1))
    with pytest.raises(BadRowError) as again:
        loader.get_next_batch(1)
    assert str(again.value) == str(caught.value)
    return seen, caught.value


def state_after(source: Any, number: int, tokenize_fn: Any = row_id, **knobs: Any) -> dict[str, Any]:
    """The state of a run that has delivered so many samples."""
    with make(source, tokenize_fn, **knobs) as loader:
        if number:
            loader.get_next_batch(number)
        return loader.state_dict()


def resumed(source, state, number, tokenize_fn=row_id, allow_changed=(), **knobs):
    """The ids of so many samples of a run that resumes from ``state``."""
    with make(source, tokenize_fn, **knobs) as loader:
        loader.load_state_dict(state, allow_changed=allow_changed)
        return ids(loader.get_next_batch(number))


class Awaited:
    """An ``AsyncDataLoader`` with the names of a ``DataLoader``: every call is awaited in one event loop."""

    def __init__(self, source, tokenize_fn=row_id, **knobs):
        self.loader = make(source, tokenize_fn, AsyncDataLoader, **knobs)
        self.runner = asyncio.Runner()

    def __getattr__(self, name):
        found = getattr(self.loader, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **kwargs: self.runner.run(found(*args, **kwargs))

    policy_version = property(
        lambda self: self.loader.policy_version, lambda self, version: setattr(self.loader, "policy_version", version)
    )

    def __iter__(self):
        return self._stepped(aiter(self.loader))

    def groups(self, **limits):
        return self._stepped(aiter(self.loader.groups(**limits)))

    def _stepped(self, loop):
        """An ``async for``, step by step."""

        async def step():
            return await anext(loop)

        def next_batch():
            try:
                return self.runner.run(step())
            except StopAsyncIteration:
                raise StopIteration from None

        return iter(next_batch, object())

    def close(self):
        """Close the loader; its last state may still be asked for."""
        self.runner.run(self.loader.aclose())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.runner.close()


FACES = {"DataLoader": make, "AsyncDataLoader": Awaited}


def service_of(loader: DataLoader | AsyncDataLoader) -> Service:
    return loader._engine.service  # noqa: SLF001 - nothing public says whether it is alive


def is_alive(loader: DataLoader | AsyncDataLoader) -> bool:
    thread = service_of(loader)._thread  # noqa: SLF001 - as above
    return thread is not None and thread.is_alive()


def slow_to_close(loader, monkeypatch):
    """Its thread ends only when the second event is set; the first says that it should."""
    should, may = threading.Event(), threading.Event()
    (transport,) = service_of(loader)._executor._transports  # noqa: SLF001 - closed last, in the service's thread
    close = transport.close

    def close_late() -> None:
        should.set()
        may.wait()
        close()

    monkeypatch.setattr(transport, "close", close_late)
    monkeypatch.setattr("asyncdata.loader.base._CLOSE_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(type(service_of(loader)).close, "__defaults__", (NEVER_S,))
    return should, may


def num_closing() -> int:
    """How many threads stand in a lock of closing, or wait for another thread to end."""
    waiting = {"_close", "join", "_wait_for_tstate_lock"}
    frames = sys._current_frames().values()  # noqa: SLF001 - nothing else tells where a thread stands
    return sum(frame.f_code.co_name in waiting for frame in frames)


AS_IT_LIES = {"tokenize_fn": RowFn(), "shuffle": False, "epochs": 1, "batch_size": 50, "num_workers": 0}


def samples_of(source: Any, **knobs: Any) -> list[Sample]:
    """A sample for each row of the epochs; ``extra`` is the row."""
    settings = AS_IT_LIES | {"timeout_s": NEVER_S} | knobs
    with DataLoader(source, **settings) as loader:
        return [sample for _ in range(settings["epochs"]) for batch in loader for sample in batch]


def rows_of(source: Any, **knobs: Any) -> list[Any]:
    return [sample.extra for sample in samples_of(source, **knobs)]


def read_until_fault(source: Any, **knobs: Any) -> tuple[list[Any], SourceError]:
    """The rows that come before an error, and the error."""
    found: list[Any] = []
    with pytest.raises(SourceError) as caught, DataLoader(source, **AS_IT_LIES | {"batch_size": 1} | knobs) as loader:
        for batch in loader:
            found += [sample.extra for sample in batch]
    return found, caught.value


def refusal_of(source: Any, **knobs: Any) -> str:
    with pytest.raises(SourceError) as caught:
        DataLoader(source, **AS_IT_LIES | knobs).close()

    return str(caught.value)


PACKAGE = str(Path(asyncdata.__file__).parent)
GOOD = [json.dumps({"input": f"question {number}", "label": number}).encode() for number in range(4)]
BAD_AT = 2
"""The bad row has two good ones before it and two behind it."""


def prompts(**settings: Any) -> PromptTokenizeFn:
    """Prompts by a small tokenizer; each sample's label says which row it was."""
    return PromptTokenizeFn(tokenizer_folder(), **{"label_key": "label", **settings})


class Outcome(NamedTuple):
    """What one epoch gave: labels of the samples that were delivered, and the error that ended it before its end."""

    labels: list[Any]
    samples: list[Any]
    error: Exception | None
    statistics: Any
    events: list[Any]

    def of(self, event: str) -> list[Any]:
        return [each for each in self.events if each["event"] == event]


def deliver(source: Any, tokenize_fn: Any = None, *, epochs: int | None = 1, size: int = 1, **knobs: Any) -> Outcome:
    """Everything that a loader gives, one by one; errors at its making count as well."""
    settings = {"shuffle": False, "num_workers": 0, "timeout_s": NEVER_S, "epochs": epochs} | knobs
    samples, error, statistics = [], None, None
    with capture_logs() as events:
        try:
            with DataLoader(source, tokenize_fn=tokenize_fn or prompts(), **settings) as loader:
                try:
                    while True:
                        samples += loader.get_next_batch(size)
                except asyncdata.errors.EndOfData as end:
                    samples += end.samples
                finally:
                    statistics = loader.statistics()
        except AsyncDataError as raised:
            error = raised
    if error is not None:
        assert_is_ours(error)
    about_data = [each for each in events if each["event"] != "autotune.changed"]  # that one tells of the machine
    return Outcome([sample.label for sample in samples], samples, error, statistics, about_data)


def assert_is_ours(error: BaseException, code: str = "") -> None:
    """One error of the tree, with its code and in words; no frame of the library in them, and no group of errors."""
    text = str(error)
    assert isinstance(error, AsyncDataError), repr(error)
    assert re.match(rf"{code or r'AD[0-9]{3}'} ", text) or not code, text
    assert PACKAGE not in text, text
    assert "ExceptionGroup" not in text, text
    assert "please report" not in text, text


def with_bad(bad: bytes, good: Sequence[bytes] = GOOD) -> bytes:
    """A file's content: good lines, and the bad one between them."""
    return b"\n".join([*good[:BAD_AT], bad, *good[BAD_AT:]]) + b"\n"


def place_of_bad(path: Path, good: Sequence[bytes] = GOOD) -> str:
    """What every error of the bad row begins with, behind its code."""
    offset = sum(len(line) + 1 for line in good[:BAD_AT])
    return f"{path}:{BAD_AT + 1} (byte {offset}): "
