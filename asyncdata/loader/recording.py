"""What of a loader is recorded, by ``telemetry=...``."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core import __version__
from asyncdata.core.errors import cleaned, redacted
from asyncdata.core.identity import all_sizes
from asyncdata.loader.pack_batches import PackBatching
from asyncdata.telemetry.recorder import Recorder, WatchedCoordinator
from asyncdata.telemetry.records import (
    FORMAT_VERSION,
    MAX_OF_REASON,
    Interval,
    Place,
    RunStart,
    SourceCounts,
    TokenizerName,
)
from asyncdata.tokenization.base import resolved
from asyncdata.tokenization.part_functions import PartFunctions
from asyncdata.workers.machine import resident_memory

if TYPE_CHECKING:
    from asyncdata.loader.engine import Engine

_MAX_FILES = 100
_NAMES = {
    **{"unread": "unread_keys", "unpacked": "unpacked_samples_total", "held_s": "loop_held_seconds_total"},
    **{"capacity": "capacity_samples", "in_flight": "in_flight_rows", "work_s": "tokenize_seconds_total"},
    **{"restarts": "worker_restarts_total", "buffered": "buffered_groups", "media_s": "media_load_seconds_total"},
    "wait_s": "wait",
}
"""Numbers of a record -> the statistics, where these are not called the same, or the same with ``_total``."""


def recorder_of(engine: Engine, function: Any, packing: Any) -> Recorder:
    """The recorder of a loader. It begins with the loader.

    :param function: the tokenize function, or the functions of a mixture's parts.
    """
    recorder = Recorder(
        engine.config.telemetry, _Subject(engine, resolved(function), packing), engine.config.ranks.rank
    )
    assert isinstance(engine.coordinator, WatchedCoordinator)
    engine.coordinator.on_chunk, engine.coordinator.on_restart = recorder.see, recorder.restarted
    engine.waits.on_begin, engine.waits.on_end = recorder.wait_begins, recorder.calls.wait_ends
    if (length := getattr(packing, "max_length", 0)) and isinstance(engine.batching, PackBatching):
        engine.batching.on_packs = lambda packs: recorder.packed(packs, length)
    return recorder


class _Subject:
    """A loader's engine, as :class:`~asyncdata.telemetry.recorder.Subject` says."""

    def __init__(self, engine: Engine, function: Any, packing: Any) -> None:
        self._engine, self._packing = engine, packing
        self.coordinator, self.executor = engine.coordinator, engine.executor
        self._shows_rows = {part.name: part.opening.bad_rows.shows_row for part in engine.parts}
        functions = function.functions if isinstance(function, PartFunctions) else [function]
        self._functions = dict(zip(self._shows_rows, functions, strict=True))
        self.shows_rows = engine.config.bad_rows.excerpts and all(self._shows_rows.values())
        self.max_samples = -(-engine.config.telemetry.samples // len(functions))

    def header(self) -> RunStart:
        engine, config, now = self._engine, self._engine.config, self._engine.statistics()
        files = engine.files
        packing = {} if self._packing is None else _kind_of(self._packing)
        if isinstance(self._packing, msgspec.Struct):
            packing |= msgspec.structs.asdict(self._packing)
        knobs = _changed(config)
        knobs.pop("telemetry", None)
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
            mix_by=engine.mix_by,
            group_size=config.n_samples_per_prompt,
            packing=self._shown(packing),
            pack_length=packing.get("max_length", 0),
            config=self._shown(knobs),
            tokenizer=", ".join(sorted({self._name(function) for function in self._functions.values()})),
            tokenize_fns={part: self._name(function) for part, function in self._functions.items() if part},
            tokenizers=self._tokenizers(),
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
        now = self._engine.statistics()
        states = [worker.state for worker in now.workers]
        is_local = self._engine.config.executor is None  # an actor's process is of another machine
        own = [worker.pid for worker in now.workers if worker.pid and is_local]
        parts = {name: SourceCounts(**_numbers(SourceCounts, source)) for name, source in now.by_source.items()}
        state: dict[str, Any] = {
            "place": Place(now.epoch, now.window, now.row),
            "ready": max(0, now.ready_samples),  # less than 0 while a state is loaded
            "has_no_room": now.ready_samples + now.in_flight_rows >= now.capacity_samples,
            "workers": len(states),
            "memory_bytes": resident_memory(os.getpid()),
            "worker_memory_bytes": sum(map(resident_memory, own)),
            **{each: states.count(each) for each in ("busy", "starting")},
        }
        return Interval(at=0.0, elapsed_s=0.0, **_numbers(Interval, now) | state | {"by_source": parts})

    def waits_for(self) -> str:
        return self._engine.waits_for()

    def shows_rows_of(self, source: str) -> bool:
        return self._shows_rows.get(source, False)

    def _tokenizers(self) -> dict[str, TokenizerName]:
        """The tokenizers of the parts whose rows may be recorded, where they are known."""
        found: dict[str, TokenizerName] = {}
        for source, function in self._functions.items():
            name = getattr(function, "tokenizer", None)
            if self._shows_rows[source] and isinstance(name, str | os.PathLike):
                found[source] = TokenizerName(redacted(os.fspath(name)), getattr(function, "revision", None))
        return found


def _numbers(kind: type[msgspec.Struct], found: object) -> dict[str, Any]:
    """The statistics that a record has, by their names there."""
    pairs = ((field, name) for field in kind.__struct_fields__ for name in (field, _NAMES.get(field, f"{field}_total")))
    return {field: getattr(found, name) for field, name in pairs if hasattr(found, name)}


def _kind_of(value: object) -> dict[str, Any]:
    return {"kind": type(value).__name__}


def _changed(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that have not their default; of structs, their kind and such fields of theirs."""
    fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
    return {
        field.name: _kind_of(each) | _changed(each) if isinstance(each, msgspec.Struct) else each
        for field, each in fields
        if each != field.default
    }


def _without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_texts(each) for name, each in value.items() if not isinstance(each, str)}

    return None if isinstance(value, list | str) else value
