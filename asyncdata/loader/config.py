"""The loader's settings: their defaults, their checks, and their meaning in one place.

The docstrings and annotations here are also the tables of ``docs/reference/configuration.md``, which is made of them.
What may be given for a setting is the signature of :class:`~asyncdata.loader.base.BaseLoader`; a test compares it too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import (
    Description,
    Exchange,
    Settings,
    checked_timeout,
    plain_integer,
    prepared,
    unknown_setting,
    wrong_value,
)
from asyncdata.delivery.outcome_policy import Outcomes
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.telemetry.settings import Telemetry
from asyncdata.workers.ray import RayExecutor

if TYPE_CHECKING:
    from asyncdata.delivery.bad_rows import BadRowPolicy
    from asyncdata.delivery.ledger import DeliveryRules

    S = TypeVar("S", bound="Description")

BUFFER_SIZE = 4000
"""Room for chunks of a thousand rows: with small ones, the trainer's process pays more than twice as much for a row."""

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Policy = Literal["raise", "skip", "quarantine"]
Order = Annotated[Any, msgspec.Meta(description='bool, `"full"`, `Shuffle` or `RowShuffle`')]


def _check_path(struct: str, name: str, path: str | None) -> None:
    if path is not None and "\0" in path:
        raise ConfigError(f"{struct}: {name}={path!r} has a NUL in it, which no path may have")


class Ranks(Description, frozen=True, kw_only=True):
    """The ranks that iterate at the same time, each with its own loader over the same data.

    They cut batches of ``world_size * batch_size`` from D, so that no two ranks have the same sample.

    :ivar rank: the rank of this loader, counted from 0.
    :ivar world_size: the number of ranks.
    :ivar gradient_accumulation: batches of each rank in an optimizer step. Length grouping balances whole steps.
    :ivar round_up: fill the last batch of all ranks by repeating its samples, so that all ranks have equally many
        batches. None: True if there is more than one rank. ``drop_last=True`` takes precedence.
    :ivar exchange: a function that all ranks call with bytes, one call after another, and that returns to each the
        bytes of all ranks, by rank: then they divide what they read and tokenize, or, for planned packs and
        ``shuffle="full"``, what they count. ``asyncdata.integrations.torch.exchange()`` is one. None: each reads all.
    :ivar exchange_timeout_s: seconds that a rank waits for the others in such a call, where they count.
    :raises ConfigError: for a value of the wrong type or out of range, or a rank that is not below ``world_size``.
    """

    rank: AtLeast0 = 0
    world_size: Positive = 1
    gradient_accumulation: Positive = 1
    round_up: bool | None = None
    exchange: Exchange = None
    exchange_timeout_s: PositiveSeconds = 600.0

    def check(self) -> None:
        """Whether there is such a rank, and the exchange can be called."""
        if not (self.exchange is None or callable(self.exchange)):
            raise ConfigError(f"Ranks: exchange is a function of bytes; got {self.exchange!r}")

        if self.rank >= self.world_size:
            raise ConfigError(
                f"Ranks: rank={self.rank} is too large for world_size={self.world_size}: ranks are counted from 0"
            )

    @property
    def rounds_up(self) -> bool:
        """Whether to fill the last batch of all ranks by repeating its samples."""
        return self.world_size > 1 if self.round_up is None else self.round_up


class Limits(Description, frozen=True, kw_only=True):
    """How much of the machine a loader may use.

    :ivar max_workers: the largest number of workers if ``num_workers`` is None; None: the CPUs that this process may
        use, where the quota of a container counts.
    :ivar max_memory_bytes: memory of the worker processes and the read-ahead together, if ``num_workers`` is None;
        None: half of the memory that is free when the loader is made.
    :ivar max_bytes_per_worker: resident memory above which a worker process is replaced between two requests, so that a
        tokenize function that leaks does not end a run. None: no check.
    :ivar max_ready_bytes: bytes read ahead, for any number of samples.
    :ivar max_media_bytes: bytes of pictures and other media that are loaded ahead, or held by the trainer. A batch that
        a call waits for is loaded in any case.
    :ivar row_timeout_s: seconds without progress after which a worker counts as hung, and is killed. Those in which it
        waits for a free core of this machine do not count.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    max_workers: Positive | None = None
    max_memory_bytes: Positive | None = None
    max_bytes_per_worker: Positive | None = None
    max_ready_bytes: Positive = 64 * 1024 * 1024
    max_media_bytes: Positive = 1024 * 1024 * 1024
    row_timeout_s: PositiveSeconds = 60.0


class Cache(Description, frozen=True, kw_only=True):
    """What a loader stores for later epochs and runs: the row index, and blocks of objects. It changes only the time.

    :ivar folder: the folder of the row index of ``shuffle="full"``. None: ``$XDG_CACHE_HOME/asyncdata`` or
        ``~/.cache/asyncdata``; an empty string: the index is not stored.
    :ivar max_row_index_bytes: limit for all row indexes in that folder, with the rows copied for them out of Parquet:
        when a loader is made, the least recently used are removed, but none that is in use. None: no limit.
    :ivar remote_max_bytes: keep the blocks that were read from object stores in ``blocks`` of ``folder``, up to so many
        bytes; the least recently used are removed. None: they are not kept.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    folder: str | None = None
    max_row_index_bytes: Positive | None = None
    remote_max_bytes: Positive | None = None

    def check(self) -> None:
        """Whether the folder can be a folder."""
        if self.remote_max_bytes is not None and self.folder == "":
            raise ConfigError("Cache: remote_max_bytes needs a folder, and folder='' says that there is none")

        _check_path("Cache", "folder", self.folder)


class BadRows(Description, frozen=True, kw_only=True):
    """What is done with a row of which no sample can be made.

    :ivar policy: ``raise`` an error; ``skip`` the row and count it by its code; or ``quarantine`` it: skip it, and
        append it to the file ``path``.
    :ivar max: bad rows that may be passed over in a run and the runs it resumes; one more is an error. None: no limit.
    :ivar path: the JSONL file of ``quarantine``.
    :ivar excerpts: whether errors of bad rows, the log and the quarantine file may quote a row. False leaves out
        excerpts, quoted values and messages of the tokenize function; place and code stay.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    policy: Policy = "raise"
    max: AtLeast0 | None = 100
    path: str = "quarantine.jsonl"
    excerpts: bool = True

    def check(self) -> None:
        """Whether the path can be a file."""
        _check_path("BadRows", "path", self.path)


class LoaderConfig(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a loader. Settings marked *order* change the sequence D; all others may change at a restart.

    With a length grouping, ``world_size`` and ``batch_size * gradient_accumulation`` also decide the order of packs.

    :ivar seed: *order.* Any integer; another seed is another order.
    :ivar shuffle: *order.* True mixes windows of blocks, False keeps the order of the files, ``"full"`` is an exact
        permutation of all rows, which needs a pass over the data. A :class:`~asyncdata.Shuffle` says how large blocks
        and windows are, a :class:`~asyncdata.RowShuffle` how rows are ordered one by one.
    :ivar batch_size: samples per batch of a ``for`` loop, of each rank; packs, with a ``packing``. A multiple of
        ``n_samples_per_prompt``. A loop needs it.
    :ivar drop_last: drop a short last batch (of all ranks) instead of delivering it. Dropped samples are counted.
    :ivar epochs: number of epochs after which the data ends; None: no end.
    :ivar n_samples_per_prompt: samples per group.
    :ivar num_workers: worker processes. None starts with one, and adds more while the trainer waits for them. 0 uses
        a thread of this process, where any callable may be the tokenize function.
    :ivar buffer_size: read-ahead, not the shuffle buffer of Hugging Face's ``datasets``, and without influence on the
        order: samples of the stream that are prepared before they are asked for, per data-parallel rank. Each becomes a
        group of ``n_samples_per_prompt``. None: 4000.
    :ivar dp_size: data-parallel ranks that this one loader feeds: ``buffer_size * dp_size`` samples of the stream are
        read ahead, or ``buffer_size * world_size`` if that is more.
    :ivar timeout_s: seconds that a call waits for data before it raises PrefetchTimeoutError; None and infinity: no
        limit. While the loader is opened, a store that fails is asked again for so long at most.
    :ivar plan_packs: *order.* Count the tokens of all rows first, in the row index, and plan an epoch's packs from
        them. Each rank then tokenizes only its own packs. Needs an order of single rows, such as ``shuffle="full"``.
        With XTuner's packs or order, packs are always planned.
    :ivar commit: ``on_delivery``, or ``on_ack``: groups that were not acknowledged are delivered again after a restart.
    :ivar digest: what the running digest in the state covers: ``positions``, with the number of tokens of each sample;
        or ``tokens``, each token, which costs a worker 0.6 us for a sample of 190 tokens. ``asyncdata verify``
        compares the digests of two runs.
    :ivar event_loop: the event loop of the loader's own thread; ``uvloop`` and ``trio`` must be installed.
    :ivar ranks: which rank this loader is, if each rank has its own.
    :ivar limits: what the loader may use of the machine.
    :ivar cache: what is stored for later epochs and runs.
    :ivar bad_rows: what is done with a row of which no sample can be made. ``"skip"`` is short for
        ``BadRows(policy="skip")``.
    :ivar executor: workers on other machines: :class:`~asyncdata.RayExecutor`. None: processes of this machine, as many
        as ``num_workers`` says.
    :ivar outcomes: remember the scores that ``report`` is given, and leave rows out of later epochs by them. None: off.
    :ivar telemetry: where the run is recorded. ``"runs/a"`` is short for ``Telemetry(folder="runs/a")``.
    :ivar progress: how a wait of more than two seconds is shown: a ``bar`` on stderr, or in a notebook; ``lines`` on
        stderr; the event ``loader.waiting``, with ``log``; or not at all. ``auto`` is ``bar`` on rank 0 if stderr is a
        terminal or this is a notebook, and ``log`` elsewhere.
    :ivar max_policy_lag: how many versions older than ``policy_version`` a response in the rollout buffer may be; then
        ``too_old`` says what is done with its group. None: any age.
    """

    seed: int = 42
    shuffle: Order = True
    batch_size: Positive | None = None
    drop_last: bool = False
    epochs: Positive | None = None
    n_samples_per_prompt: Positive = 1
    num_workers: AtLeast0 | None = None
    buffer_size: Positive | None = None
    dp_size: Positive = 1
    timeout_s: PositiveSeconds | None = None
    plan_packs: bool = False
    commit: Literal["on_delivery", "on_ack"] = "on_delivery"
    digest: Literal["positions", "tokens"] = "positions"
    event_loop: Literal["asyncio", "uvloop", "trio"] = "asyncio"
    ranks: Ranks = Ranks()
    limits: Limits = Limits()
    cache: Cache = Cache()
    bad_rows: BadRows = BadRows()
    executor: RayExecutor | None = None
    outcomes: Outcomes | None = None
    telemetry: Telemetry = Telemetry()
    progress: Literal["auto", "bar", "lines", "log", "none"] = "auto"
    max_policy_lag: AtLeast0 | None = None

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> LoaderConfig:
        """The configuration that ``knobs`` describe. A struct may be a dict of its settings, as in YAML.

        :raises ConfigError: naming the setting that is unknown, of the wrong type, or out of range.
        """
        for name in knobs:
            if name not in cls.__struct_fields__:
                raise ConfigError(_no_such_knob(name, cls.__struct_fields__))

        values = {name: plain_integer(value) for name, value in knobs.items()}
        if "timeout_s" in values:
            values["timeout_s"] = checked_timeout(values["timeout_s"])
        for name, kind in STRUCTS.items():
            if name in values and not (name in _OFF_BY_DEFAULT and values[name] is None):
                values[name] = _struct_of(kind, name, values[name])
        values["shuffle"] = _shuffle_of(values.get("shuffle", True))
        config = cls(**{name: _converted(name, value) for name, value in values.items()})

        if config.executor is not None and config.num_workers is not None:
            raise ConfigError(
                f"AD495 num_workers={config.num_workers} is the number of worker processes without an executor: leave "
                "it out, and use RayExecutor(num_workers=..., local_workers=...)"
            )

        needed = config.event_loop if config.event_loop != "asyncio" else None
        if needed is not None and importlib.util.find_spec(needed) is None:
            raise ConfigError(f"event_loop={needed!r} needs {needed}, which is not installed: pip install {needed}")

        if config.batch_size is not None and config.batch_size % config.n_samples_per_prompt:
            raise ConfigError(
                f"batch_size={config.batch_size} is no multiple of n_samples_per_prompt={config.n_samples_per_prompt}; "
                "a batch holds whole groups"
            )

        return config

    @property
    def order(self) -> Shuffle | RowShuffle:
        """How rows are ordered, in full."""
        shuffle = self.shuffle
        if shuffle == "full":
            return RowShuffle()

        return shuffle if isinstance(shuffle, Shuffle | RowShuffle) else Shuffle(enabled=shuffle)

    @property
    def capacity(self) -> int:
        """Samples that are read ahead."""
        return (self.buffer_size or BUFFER_SIZE) * max(self.dp_size, self.ranks.world_size)

    def delivery_rules(self, bad_rows: BadRowPolicy, *, packs: bool) -> DeliveryRules:
        """The settings that delivery depends on.

        :param packs: whether samples are packed: packs drop what is left of an epoch by themselves.
        """
        from asyncdata.delivery.ledger import DeliveryRules  # with numpy, for which the first import would wait

        return DeliveryRules(
            capacity=self.capacity,
            max_ready_bytes=self.limits.max_ready_bytes,
            samples_per_group=self.n_samples_per_prompt,
            epochs=self.epochs,
            drop_last=self.drop_last and not packs,
            bad_rows=bad_rows,
            commit_on_ack=self.commit == "on_ack",
            digest=self.digest,
            leaves_gaps=packs,
        )


@cache
def _fields() -> dict[str, Any]:
    return {field.name: field for field in msgspec.structs.fields(LoaderConfig)}


def _converted(name: str, value: Any) -> Any:
    field = _fields()[name]
    try:
        return msgspec.convert(value, prepared(field.type))
    except msgspec.ValidationError as error:
        raise ConfigError(wrong_value(field, value, error)) from error


STRUCTS: dict[str, type[Description]] = {
    "ranks": Ranks,
    "limits": Limits,
    "cache": Cache,
    "bad_rows": BadRows,
    "executor": RayExecutor,
    "outcomes": Outcomes,
    "telemetry": Telemetry,
}
_OFF_BY_DEFAULT = ("executor", "outcomes")


class Place(NamedTuple):
    """Where a setting is.

    :ivar knob: the knob of the loader.
    :ivar setting: the setting of that struct; None: the knob itself.
    """

    knob: str
    setting: str | None

    def __str__(self) -> str:
        return self.knob if self.setting is None else f"{self.knob}={STRUCTS[self.knob].__name__}({self.setting}=...)"


_CALLED_ELSEWHERE = {
    "cache_dir": Place("cache", "folder"),
    "gradient_accumulation_steps": Place("ranks", "gradient_accumulation"),
    "num_epochs": Place("epochs", None),
    "num_train_epochs": Place("epochs", None),
    "num_replicas": Place("ranks", "world_size"),
    "num_shards": Place("ranks", "world_size"),
    "per_device_train_batch_size": Place("batch_size", None),
    "prefetch": Place("buffer_size", None),
    "prefetch_factor": Place("buffer_size", None),
    "num_proc": Place("num_workers", None),
    "timeout": Place("timeout_s", None),
    "workers": Place("num_workers", None),
}
"""Names in other loaders."""


def place_of(name: str) -> Place | None:
    """Where the setting is that has this name elsewhere, or inside a struct; None if there is none."""
    inside = (Place(knob, name) for knob, kind in STRUCTS.items() if name in kind.__struct_fields__)
    return _CALLED_ELSEWHERE.get(name) or next(inside, None)


def _no_such_knob(name: str, known: Sequence[str]) -> str:
    if (place := place_of(name)) and place.setting is not None:
        return f"there is no setting {name!r}; it is `{place}`"

    return unknown_setting(name, known, of="", meant=place and place.knob)


def _struct_of(kind: type[S], name: str, value: Any) -> S:
    """A struct of settings, checked: itself, a dict, or its first setting alone."""
    if isinstance(value, kind):
        return value

    if kind is BadRows and isinstance(value, str):
        value = {"policy": value}
    if kind is Telemetry and isinstance(value, str | os.PathLike):
        value = {"folder": os.fspath(value)}
    if not isinstance(value, Mapping):
        short = {BadRows: "'skip' or another policy, ", Telemetry: "a folder, "}.get(kind, "")
        raise ConfigError(f"`{name}` is {short}{kind.__name__}(...), or a dict of its settings; got {value!r}")

    for setting in value:
        if setting not in kind.__struct_fields__:
            meant = place.setting if (place := place_of(str(setting))) and place.knob == name else None
            raise ConfigError(unknown_setting(str(setting), kind.__struct_fields__, of=f"`{name}`", meant=meant))

    return kind(**value)


def _shuffle_of(value: Any) -> bool | str | Shuffle | RowShuffle:
    """The setting, checked. A dict is a :class:`Shuffle`, or a :class:`RowShuffle` if it has a ``method``."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "full"):
        return value

    if isinstance(value, Shuffle | RowShuffle):
        return value

    if not isinstance(value, Mapping):
        raise ConfigError(f'`shuffle` is True, False, "full", a Shuffle or a RowShuffle; got {value!r}')

    try:
        return (RowShuffle if "method" in value else Shuffle)(**value)
    except (ConfigError, TypeError) as error:  # a TypeError: a key that is no text
        raise ConfigError(f"{error} in `shuffle`") from error


# What a batch is, for type checkers: what ``collate_fn`` returns, or a list of samples or packs.

BatchT_co = TypeVar("BatchT_co", covariant=True)

if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    from asyncdata.core.types import Sample

    Item_co = WithDefault("Item_co", default=Sample, covariant=True)
    B_co = WithDefault("B_co", default=list[Item_co], covariant=True)

    class PackingOf(Protocol[Item_co]):
        """A packing, and what a batch is a list of with it."""

        @property
        def _item(self) -> Item_co: ...
else:
    Item_co = TypeVar("Item_co", covariant=True)  # a default needs Python 3.13
    B_co = TypeVar("B_co", covariant=True)
