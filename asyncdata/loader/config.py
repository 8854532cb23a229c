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
"""Knobs by the names that other loaders give them."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class LoaderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every knob of a loader. Those marked *order* make another sequence D; all others may change at a restart.

    With a length grouping, ``world_size`` and ``batch_size * gradient_accumulation`` decide the order of packs as well.

    :ivar seed: *order.* Any integer.
    :ivar shuffle: *order.* True mixes windows of blocks, False keeps the order of the files, ``"full"`` is an exact
        permutation of all rows, which needs a pass over the data. A :class:`~asyncdata.Shuffle` says how large blocks
        and windows are, a :class:`~asyncdata.RowShuffle` how rows are ordered one by one.
    :ivar batch_size: samples per batch of a ``for`` loop; a multiple of ``n_samples_per_prompt``.
    :ivar drop_last: drop a short last batch (of all ranks) instead of delivering it. What is dropped is counted.
    :ivar epochs: after so many the data ends; None goes on for ever.
    :ivar n_samples_per_prompt: samples per group.
    :ivar num_workers: worker processes; None begins with one, and has more for as long as the trainer waits for them;
        0 works in a thread of this process, where any callable will do as tokenize function.
    :ivar max_workers: how many None may make of it; None for the CPUs this process may use.
    :ivar max_memory_bytes: memory that worker processes and what is read ahead may take together, where their number is
        not given; None for half of what is free when the loader is made.
    :ivar max_bytes_per_worker: resident memory of a worker process, from which on it is replaced by another between two
        requests: a tokenize function that leaks does not end a run. None does not look.
    :ivar buffer_size: samples of the stream read ahead per data-parallel rank; each becomes a group of
        ``n_samples_per_prompt``. None begins with 1000, and reads further ahead where that spares the trainer waits.
    :ivar dp_size: data-parallel ranks that are fed; ``buffer_size * dp_size`` samples of the stream are read ahead.
    :ivar world_size: ranks that iterate at the same time, each with a loader of its own over the same data. They cut
        batches of ``world_size * batch_size`` from D, so that none has a sample of another.
    :ivar rank: which of them this loader is, from 0 on.
    :ivar gradient_accumulation: batches of each rank in an optimizer step. Length grouping balances whole steps.
    :ivar round_up: fill the last batch of all ranks by repeating its own samples, so that all have as many batches.
        None: where there is more than one rank. ``drop_last`` goes before it.
    :ivar plan_packs: *order.* Count the tokens of all rows first, in the row index, and plan an epoch's packs from
        them. Each rank then tokenizes its own packs and no others. Needs an order of single rows, such as
        ``shuffle="full"``. Where XTuner's packs or order are asked for, they are planned in any case.
    :ivar max_ready_bytes: bytes read ahead, whatever the number of samples.
    :ivar timeout_s: how long a call waits for data before it raises PrefetchTimeoutError; None and infinity wait for
        ever.
    :ivar row_timeout_s: a worker without progress for so long is hung, and is killed.
    :ivar on_bad_row: ``raise``, ``skip`` (counted by code), or ``quarantine`` (and written to ``quarantine_path``).
    :ivar max_bad_rows: how many may be passed over in a run; None does not limit them.
    :ivar quarantine_path: a JSONL file that bad rows are appended to.
    :ivar log_excerpts: whether errors of bad rows, the log and the quarantine file may show what stands in a row. False
        leaves excerpts, quoted values and messages of the tokenize function out; place and code stay.
    :ivar commit: ``on_delivery``, or ``on_ack``: what was not acknowledged is delivered again after a restart.
    :ivar cache_dir: where the row index of ``shuffle="full"`` is kept; None takes ``$XDG_CACHE_HOME/asyncdata`` or
        ``~/.cache/asyncdata``, and an empty string keeps nothing.
    :ivar row_index_max_bytes: of all row indexes there, with the rows that were copied for them: when a loader is made,
        those that were not used for longest are removed. None does not limit them.
    :ivar token_cache: keep what the tokenize function makes of rows, and read it in later epochs and runs: in this
        folder, or, if True, in ``tokens`` beside the row index. Changes nothing but the time. None: do not.
    :ivar token_cache_max_bytes: of all token caches in that folder: what was not used for longest is removed, and
        nothing more is written where that does not do. None does not limit them.
    :ivar digest: what the running digest in the state is of: ``positions``, and how many tokens each sample has; or
        ``tokens``, every one of them, which costs a worker 0.6 us for a sample of 190. ``asyncdata verify`` compares
        the digests of two runs.
    :ivar backend: the loop of the service's thread: ``asyncio``, ``uvloop`` or ``trio``.
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
                f"rank={config.rank} is none of world_size={config.world_size} ranks, which are counted from 0"
            )

        return config

    @property
    def rounds_up(self) -> bool:
        """Whether the last batch of all ranks is filled by repeating its samples."""
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
        """Samples that are read ahead; at first, where ``buffer_size`` is None."""
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
    """Whether it is an integer of another library, such as numpy's."""
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
