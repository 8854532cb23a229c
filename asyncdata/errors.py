"""The errors that asyncdata raises. The public import path."""

from __future__ import annotations

from asyncdata.core.errors import (
    AsyncDataError,
    BadRowError,
    ConfigError,
    EndOfData,
    FilterError,
    InvalidGroupError,
    LoaderClosedError,
    LoaderForkedError,
    NoSamplesError,
    PrefetchTimeoutError,
    QuarantineError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotVersionError,
    SourceChangedError,
    SourceError,
    TooManyBadRowsError,
    WorkerError,
)

__all__ = (
    "AsyncDataError",
    "BadRowError",
    "ConfigError",
    "EndOfData",
    "FilterError",
    "InvalidGroupError",
    "LoaderClosedError",
    "LoaderForkedError",
    "NoSamplesError",
    "PrefetchTimeoutError",
    "QuarantineError",
    "SnapshotError",
    "SnapshotMismatchError",
    "SnapshotVersionError",
    "SourceChangedError",
    "SourceError",
    "TooManyBadRowsError",
    "WorkerError",
)
