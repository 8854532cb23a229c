"""What of a loader is recorded, by ``telemetry=...``."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import redacted
from asyncdata.core.file_refs import all_sizes
from asyncdata.core.log import cleaned
from asyncdata.core.version import __version__
from asyncdata.loader.mixture_engine import MixtureEngine
from asyncdata.telemetry.helper_process import Tokenizer
from asyncdata.telemetry.recorder import NoRecorder, Recorder
from asyncdata.telemetry.records import FORMAT_VERSION, MAX_OF_REASON, Interval, Place, RunStart, SourceCounts
from asyncdata.telemetry.watched import WatchedCoordinator
from asyncdata.tokenization.part_functions import PartFunctions
from asyncdata.tokenization.resolve import resolved
from asyncdata.workers.traced import TracedInlineExecutor, TracedProcessExecutor

if TYPE_CHECKING:
    from asyncdata.batching.packers.base import Packing
    from asyncdata.core.types import Position
    from asyncdata.delivery.channel import Channel
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.engine import Engine
    from asyncdata.loader.statistics import SourceStatistics

__all__ = ("recorder_of",)

_MAX_FILES = 100


def recorder_of(engine: Engine, function: Any, packing: Packing | None) -> Recorder | NoRecorder:
    """The recorder of a loader. It begins with the loader.

    :param function: the tokenize function, or those of a mixture's parts.
    """
    settings = engine.config.telemetry
    if not settings.is_on:
        return NoRecorder()

    recorder = Recorder(settings, _Subject(engine, resolved(function), packing), engine.config.ranks.rank)
    assert isinstance(engine.coordinator, WatchedCoordinator)
    engine.coordinator.on_chunk, engine.coordinator.on_restart = recorder.see, recorder.restarted
    engine.waits.on_begin, engine.waits.on_end = recorder.wait_begins, recorder.calls.wait_ends
    if isinstance(engine.executor, TracedInlineExecutor | TracedProcessExecutor):
        engine.executor.on_request = recorder.request
    return recorder


class _Subject:
    """A loader's engine, as :class:`~asyncdata.telemetry.recorder.Subject` says."""

    def __init__(self, engine: Engine, function: Any, packing: Packing | None) -> None:
        self._engine, self._packing = engine, packing
        parts = engine.parts if isinstance(engine, MixtureEngine) else []
        own = engine.config.bad_rows.excerpts
        self._shows_rows = {part.name: part.config.bad_rows.excerpts for part in parts} or {"": own}
        functions = function.functions if isinstance(function, PartFunctions) else [function]
        self._functions = dict(zip(self._shows_rows, functions, strict=True))
        self.shows_rows = own and all(self._shows_rows.values())
        self.max_samples = -(-engine.config.telemetry.samples // len(functions))

    def header(self) -> RunStart:
        """As the protocol says."""
        engine, config, now = self._engine, self._engine.config, self._engine.statistics()
        files = engine.files
        packing = {} if self._packing is None else _described(self._packing)
        return RunStart(
            version=FORMAT_VERSION,
            library=__version__,
            at=time.time(),
            rank=config.ranks.rank,
            world_size=config.ranks.world_size,
            dp_size=config.dp_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            place=Place(now.epoch, now.window, now.row),
            samples=now.samples_total,
            sources=sorted(now.by_source),
            files=[redacted(file.path) for file in files[:_MAX_FILES]],
            num_files=len(files),
            num_bytes=sum(all_sizes(files)),
            mix_by=engine.mix_by if isinstance(engine, MixtureEngine) else "",
            group_size=config.n_samples_per_prompt,
            packing=self._shown(packing),
            pack_length=packing.get("max_length", 0),
            config=self._shown(_changed(config)),
            tokenizer=", ".join(sorted({self._name(function) for function in self._functions.values()})),
            shows_rows=self.shows_rows,
            interval_s=config.telemetry.interval_s,
            max_samples=self.max_samples,
            max_of_reason=MAX_OF_REASON if self.max_samples else 0,
        )

    def _shown(self, settings: Any) -> Any:
        """The settings as JSON, without what gives access to a store; without texts, if rows are not shown."""
        plain = cleaned(msgspec.json.decode(msgspec.json.encode(settings, enc_hook=repr)))
        return plain if self.shows_rows else _without_texts(plain)

    def _name(self, function: Any) -> str:
        is_description = isinstance(function, msgspec.Struct) and self.shows_rows
        return redacted(repr(function)) if is_description else type(function).__name__

    def interval(self) -> Interval:
        """As the protocol says."""
        now = self._engine.statistics()
        states = [worker.state for worker in now.workers]
        return Interval(
            at=0.0,
            elapsed_s=0.0,
            place=Place(now.epoch, now.window, now.row),
            samples=now.samples_total,
            groups=now.groups_total,
            tokens=now.tokens_total,
            dropped=now.dropped_total,
            noted=now.noted_total,
            bad_rows=now.bad_rows_total,
            by_source={name: _counts(source) for name, source in now.by_source.items()},
            packs=now.packs_total,
            packed_tokens=now.packed_tokens_total,
            unpacked=now.unpacked_samples_total,
            ready=max(0, now.ready_samples),  # less than 0 while a state is loaded
            capacity=now.capacity_samples,
            in_flight=now.in_flight_rows,
            has_no_room=now.ready_samples + now.in_flight_rows >= now.capacity_samples,
            workers=len(states),
            busy=states.count("busy"),
            starting=states.count("starting"),
            work_s=now.tokenize_seconds_total,
            restarts=now.worker_restarts_total,
            buffered=now.buffered_groups,
            cached_rows=now.cached_rows_total,
            cache_bytes=now.token_cache_bytes,
            indexed_rows=now.indexed_rows,
        )

    def channel(self) -> Channel:
        """As the protocol says."""
        return self._engine.coordinator.channel

    def place(self) -> Position:
        """As the protocol says."""
        return self._engine.coordinator.ledger.position

    def num_groups(self) -> int:
        """As the protocol says."""
        return self._engine.coordinator.ledger.counters.num_groups

    def waits_for(self) -> str:
        """As the protocol says."""
        return self._engine.waits_for()

    def worker_pids(self) -> list[int]:
        """As the protocol says."""
        workers = self._engine.executor.statistics().workers
        return [worker.pid for worker in workers if worker.pid is not None]

    def shows_rows_of(self, source: str) -> bool:
        """As the protocol says."""
        return self._shows_rows.get(source, False)

    def tokenizer(self, source: str) -> Tokenizer | None:
        """As the protocol says."""
        function = self._functions.get(source)
        name, revision = getattr(function, "tokenizer", None), getattr(function, "revision", None)
        return Tokenizer(os.fspath(name), revision) if isinstance(name, str | os.PathLike) else None

    def tokenizers(self) -> list[Tokenizer]:
        """As the protocol says."""
        found = [self.tokenizer(source) for source, shows_row in self._shows_rows.items() if shows_row]
        return [tokenizer for tokenizer in found if tokenizer is not None]


def _counts(source: SourceStatistics) -> SourceCounts:
    return SourceCounts(
        samples=source.samples,
        tokens=source.tokens,
        epoch=source.epoch,
        dropped=source.dropped,
        wait_s=source.wait,
        target=source.target,
    )


def _described(packing: Packing) -> dict[str, Any]:
    settings = msgspec.structs.asdict(packing) if isinstance(packing, msgspec.Struct) else {}
    return {"kind": type(packing).__name__, **settings}


def _changed(config: LoaderConfig) -> dict[str, Any]:
    """The knobs that have not their default, and of structs their settings."""
    changed: dict[str, Any] = {}
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if field.name == "telemetry" or value == field.default:
            continue

        is_struct = isinstance(value, msgspec.Struct)
        changed[field.name] = {"kind": type(value).__name__, **_own(value)} if is_struct else value
    return changed


def _own(value: msgspec.Struct) -> dict[str, Any]:
    fields = {field.name: field.default for field in msgspec.structs.fields(value)}
    return {name: each for name, each in msgspec.structs.asdict(value).items() if each != fields[name]}


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_texts(each) for name, each in value.items() if not isinstance(each, str)}

    return None if isinstance(value, list | str) else value
