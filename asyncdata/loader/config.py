"""The loader's knobs: their defaults, their checks, and their meaning in one place."""

from __future__ import annotations

import difflib
import importlib.util
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.timeouts import checked_timeout
from asyncdata.order.shuffle import RowShuffle, Shuffle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("Knobs", "LoaderConfig")

FIRST_BUFFER_SIZE = 1000

_CALLED_ELSEWHERE = {
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "workers": "num_workers",
    "num_proc": "num_workers",
    "prefetch": "buffer_size",
    "prefetch_factor": "buffer_size",
    "timeout": "timeout_s",
    "per_device_train_batch_size": "batch_size",
    "num_replicas": "world_size",
}
"""Names of knobs in other loaders -> their name here."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class LoaderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every knob of a loader. Knobs marked *order* change the sequence D; all others may change at a restart.

    With a length grouping, ``world_size`` and ``batch_size * gradient_accumulation`` also decide the order of packs.

    :ivar seed: *order.* Any integer.
    :ivar shuffle: *order.* True mixes windows of blocks, False keeps the order of the files, ``"full"`` is an exact
        permutation of all rows, which needs a pass over the data. A :class:`~asyncdata.Shuffle` says how large blocks
        and windows are, a :class:`~asyncdata.RowShuffle` how rows are ordered one by one.
    :ivar batch_size: samples per batch of a ``for`` loop; a multiple of ``n_samples_per_prompt``.
    :ivar drop_last: drop a short last batch (of all ranks) instead of delivering it. Dropped samples are counted.
    :ivar epochs: number of epochs after which the data ends; None: no end.
    :ivar n_samples_per_prompt: samples per group.
    :ivar num_workers: worker processes. None starts with one, and adds more while the trainer waits for them. 0 uses
        a thread of this process, where any callable may be the tokenize function.
    :ivar max_workers: the largest number of workers if ``num_workers`` is None; None: the CPUs that this process may
        use.
    :ivar max_memory_bytes: memory of the worker processes and the read-ahead together, if ``num_workers`` is None;
        None: half of the memory that is free when the loader is made.
    :ivar max_bytes_per_worker: resident memory above which a worker process is replaced between two requests, so that a
        tokenize function that leaks does not end a run. None: no check.
    :ivar buffer_size: samples of the stream read ahead per data-parallel rank; each becomes a group of
        ``n_samples_per_prompt``. None starts with 1000, and reads further ahead if the trainer then waits less.
    :ivar dp_size: data-parallel ranks that are fed; ``buffer_size * dp_size`` samples of the stream are read ahead.
    :ivar world_size: ranks that iterate at the same time, each with its own loader over the same data. They cut
        batches of ``world_size * batch_size`` from D, so that no two ranks have the same sample.
    :ivar rank: the rank of this loader, counted from 0.
    :ivar gradient_accumulation: batches of each rank in an optimizer step. Length grouping balances whole steps.
    :ivar round_up: fill the last batch of all ranks by repeating its samples, so that all ranks have equally many
        batches. None: True if there is more than one rank. ``drop_last=True`` takes precedence.
    :ivar plan_packs: *order.* Count the tokens of all rows first, in the row index, and plan an epoch's packs from
        them. Each rank then tokenizes only its own packs. Needs an order of single rows, such as ``shuffle="full"``.
        With XTuner's packs or order, packs are always planned.
    :ivar max_ready_bytes: bytes read ahead, for any number of samples.
    :ivar timeout_s: seconds that a call waits for data before it raises PrefetchTimeoutError; None and infinity: no
        limit.
    :ivar row_timeout_s: seconds without progress after which a worker counts as hung, and is killed.
    :ivar on_bad_row: ``raise``, ``skip`` (counted by code), or ``quarantine`` (also written to ``quarantine_path``).
    :ivar max_bad_rows: bad rows that may be passed over in a run; None: no limit.
    :ivar quarantine_path: a JSONL file to which bad rows are appended.
    :ivar log_excerpts: whether errors of bad rows, the log and the quarantine file may quote a row. False leaves out
        excerpts, quoted values and messages of the tokenize function; place and code stay.
    :ivar commit: ``on_delivery``, or ``on_ack``: groups that were not acknowledged are delivered again after a restart.
    :ivar cache_dir: the folder of the row index of ``shuffle="full"``; None: ``$XDG_CACHE_HOME/asyncdata`` or
        ``~/.cache/asyncdata``; an empty string: the index is not stored.
    :ivar row_index_max_bytes: limit for all row indexes in that folder, with the rows copied for them: when a loader is
        made, the least recently used are removed. None: no limit.
    :ivar token_cache: store the results of the tokenize function, and read them in later epochs and runs: in this
        folder, or, if True, in ``tokens`` beside the row index. Changes only the time. None: no cache.
    :ivar token_cache_max_bytes: limit for all token caches in that folder: the least recently used segments are
        removed, and if that is not enough, nothing more is written. None: no limit.
    :ivar digest: what the running digest in the state covers: ``positions``, with the number of tokens of each sample;
        or ``tokens``, each token, which costs a worker 0.6 us for a sample of 190 tokens. ``asyncdata verify``
        compares the digests of two runs.
    :ivar backend: the event loop of the service's thread: ``asyncio``, ``uvloop`` or ``trio``.
    """

    seed: int = 42
    shuffle: Any = True
    batch_size: Positive | None = None
    drop_last: bool = False
    epochs: Positive | None = None
    n_samples_per_prompt: Positive = 1
    num_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_workers: Positive | None = None
    max_memory_bytes: Positive | None = None
    max_bytes_per_worker: Positive | None = None
    buffer_size: Positive | None = None
    dp_size: Positive = 1
    world_size: Positive = 1
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    gradient_accumulation: Positive = 1
    round_up: bool | None = None
    plan_packs: bool = False
    max_ready_bytes: Positive = 64 * 1024 * 1024
    timeout_s: PositiveSeconds | None = None
    row_timeout_s: PositiveSeconds = 60.0
    on_bad_row: Literal["raise", "skip", "quarantine"] = "raise"
    max_bad_rows: Annotated[int, msgspec.Meta(ge=0)] | None = 100
    quarantine_path: str = "quarantine.jsonl"
    log_excerpts: bool = True
    commit: Literal["on_delivery", "on_ack"] = "on_delivery"
    cache_dir: str | None = None
    row_index_max_bytes: Positive | None = None
    token_cache: str | bool | None = None
    token_cache_max_bytes: Positive | None = None
    digest: Literal["positions", "tokens"] = "positions"
    backend: Literal["asyncio", "uvloop", "trio"] = "asyncio"

    @classmethod
    def of(cls, knobs: dict[str, Any]) -> LoaderConfig:
        """The configuration that ``knobs`` describe.

        :raises ConfigError: naming the knob that is unknown, of the wrong type, or out of range.
        """
        known = cls.__struct_fields__
        for name in knobs:
            if name not in known:
                raise ConfigError(_no_such_knob(name, known))

        values = {name: int(value) if _is_integer(value) else value for name, value in knobs.items()}
        if "timeout_s" in values:
            values["timeout_s"] = checked_timeout(values["timeout_s"])
        try:
            values["shuffle"] = _shuffle_of(values.get("shuffle", True))
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error).replace("`$.", "`")) from error

        for name in ("quarantine_path", "cache_dir", "token_cache"):
            path = getattr(config, name)
            if isinstance(path, str) and "\0" in path:
                raise ConfigError(f"`{name}` is {path!r}, with a NUL in it, which no path may have")

        needed = config.backend if config.backend != "asyncio" else None
        if needed is not None and importlib.util.find_spec(needed) is None:
            raise ConfigError(f"backend={needed!r} needs {needed}, which is not installed: pip install {needed}")

        if config.batch_size is not None and config.batch_size % config.n_samples_per_prompt:
            raise ConfigError(
                f"batch_size={config.batch_size} is no multiple of n_samples_per_prompt={config.n_samples_per_prompt}; "
                "a batch holds whole groups"
            )

        if config.rank >= config.world_size:
            raise ConfigError(
                f"rank={config.rank} is too large for world_size={config.world_size}: ranks are counted from 0"
            )

        return config

    @property
    def rounds_up(self) -> bool:
        """Whether to fill the last batch of all ranks by repeating its samples."""
        return self.world_size > 1 if self.round_up is None else self.round_up

    @property
    def order(self) -> Shuffle | RowShuffle:
        """How rows are ordered, in full."""
        shuffle = self.shuffle
        if shuffle == "full":
            return RowShuffle()

        return shuffle if isinstance(shuffle, Shuffle | RowShuffle) else Shuffle(enabled=shuffle)

    @property
    def capacity(self) -> int:
        """Samples that are read ahead; the first value, if ``buffer_size`` is None."""
        return (self.buffer_size or FIRST_BUFFER_SIZE) * max(self.dp_size, self.world_size)


def _no_such_knob(name: str, known: Sequence[str]) -> str:
    meant = _CALLED_ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    hint = f"did you mean {meant!r}? There" if meant else "there"
    return f"there is no knob {name!r}; {hint} are {', '.join(sorted(known))}"


def _shuffle_of(value: Any) -> bool | str | Shuffle | RowShuffle:
    """The setting, checked. A dict is a :class:`Shuffle`, or a :class:`RowShuffle` if it has a ``method``."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "full"):
        return value

    if isinstance(value, Shuffle | RowShuffle):
        kind, value = type(value), msgspec.structs.asdict(value)
    elif isinstance(value, dict):
        kind = RowShuffle if "method" in value else Shuffle
    else:
        raise ConfigError(f'`shuffle` is True, False, "full", a Shuffle or a RowShuffle; got {value!r}')

    try:
        found: Shuffle | RowShuffle = msgspec.convert(value, kind)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{error} in `shuffle`") from error

    return found


def _is_integer(value: object) -> bool:
    """Whether it is an integer of another library, such as numpy."""
    return hasattr(value, "__index__") and not isinstance(value, int)


class Knobs(TypedDict, total=False):
    """The keyword arguments of a loader, as :class:`LoaderConfig` explains them."""

    seed: int
    shuffle: bool | Literal["full"] | Shuffle | RowShuffle
    batch_size: int | None
    drop_last: bool
    epochs: int | None
    n_samples_per_prompt: int
    num_workers: int | None
    max_workers: int | None
    max_memory_bytes: int | None
    max_bytes_per_worker: int | None
    buffer_size: int | None
    dp_size: int
    world_size: int
    rank: int
    gradient_accumulation: int
    round_up: bool | None
    plan_packs: bool
    max_ready_bytes: int
    timeout_s: float | None
    row_timeout_s: float
    on_bad_row: Literal["raise", "skip", "quarantine"]
    max_bad_rows: int | None
    quarantine_path: str
    log_excerpts: bool
    commit: Literal["on_delivery", "on_ack"]
    cache_dir: str | None
    row_index_max_bytes: int | None
    token_cache: str | bool | None
    token_cache_max_bytes: int | None
    digest: Literal["positions", "tokens"]
    backend: Literal["asyncio", "uvloop", "trio"]
