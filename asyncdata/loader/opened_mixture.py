"""The open sources of a mixture's parts, as one: what an engine sees instead of a single open source."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import AsyncDataError, ConfigError, SourceError
from asyncdata.core.messages import Job
from asyncdata.core.types import Position
from asyncdata.delivery.part_feed import PartFeed
from asyncdata.delivery.part_queue import BadRowRules
from asyncdata.delivery.quarantine import Quarantine
from asyncdata.delivery.requests import DeliveryRules
from asyncdata.loader.opening import opened_replay, opened_source
from asyncdata.order.replay_order import ReplayOrder
from asyncdata.prefetch.mixture_producer import MixtureProducer, PartSupply
from asyncdata.prefetch.windows.indexed_windows import IndexedWindows
from asyncdata.sources.file_warnings import warn_about_files
from asyncdata.sources.resolve import described
from asyncdata.sources.stream import RowStream
from asyncdata.tokenization.base import describe
from asyncdata.workers.part_executor import PartExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.outcomes.policy import PassRate
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.mix import Mix
    from asyncdata.loader.mixture_outcomes import MixtureOutcomes
    from asyncdata.loader.opening import OpenedSource
    from asyncdata.prefetch.windows.base import Windows
    from asyncdata.tokenization.part_functions import PartFunctions
    from asyncdata.workers.base import Executor

__all__ = ("OpenedMixture", "OpenedPart")

_ALIGNMENT = 64


class OpenedPart:
    """One part, open.

    :ivar config: the loader's configuration, as it holds for this part.
    :ivar replay: of a replay, the name of the part whose rows come again, and the range of their scores.
    """

    def __init__(
        self,
        name: str,
        source: OpenedSource,
        config: LoaderConfig,
        bad_rows: BadRowRules,
        replay: tuple[str, PassRate] | None = None,
    ) -> None:
        self.name = name
        self.replay = replay
        self.source = source
        self.config = config
        self.bad_rows = bad_rows
        self.executor: PartExecutor | None = None
        self.windows: Windows | None = None
        self.find_restart: Callable[[str], Position] = lambda _: Position()

    def open_windows(self, executor: PartExecutor, on_ready: Callable[[], object]) -> Windows:
        """Open its windows, on its share of the executor."""
        self.executor = executor
        windows = self.source.windows(executor, lambda: self.find_restart(self.name), on_ready)
        self.windows = windows
        return windows

    def order(self) -> dict[str, Any]:
        """The settings of its own order."""
        return self.source.order.description()


class _AllWindows:
    """The windows of all parts, as the service sees them; see :class:`~asyncdata.prefetch.windows.base.Reading`."""

    def __init__(self, windows: list[Windows]) -> None:
        self._windows = windows

    @property
    def read_s(self) -> float:
        return max(windows.read_s for windows in self._windows)

    async def run(self) -> None:
        """As the protocol says."""
        async with anyio.create_task_group() as group:
            for windows in self._windows:
                group.start_soon(windows.run)

    async def finish(self) -> None:
        """As the protocol says."""
        for windows in self._windows:
            await windows.finish()


class _AllCaches:
    """The token caches of all parts, for the statistics."""

    def __init__(self, parts: list[OpenedPart]) -> None:
        self._caches = [part.source.token_cache for part in parts]

    @property
    def num_rows_read(self) -> int:
        return sum(cache.num_rows_read for cache in self._caches if cache is not None)

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self._caches if cache is not None)


class OpenedMixture:
    """The parts, open: what an engine needs of them together. Order, canaries and windows are each part's own.

    :raises SourceError: for files that cannot be read; the message names the part.
    :raises ConfigError: for a setting that cannot work.
    """

    index = None

    def __init__(self, mix: Mix, config: LoaderConfig, functions: PartFunctions) -> None:
        self.parts: list[OpenedPart] = []
        try:
            leaves = list(zip(mix.leaves(), functions.functions, strict=True))
            for leaf, function in sorted(leaves, key=lambda item: item[0].replay is not None):  # replays last
                if leaf.replay is not None:
                    _check_can_be_replayed(self.parts, leaf.replay[0], leaf.name)
                own = leaf.part.config(config, leaf.name)
                self.parts.append(_opened(leaf.name, leaf.part.source, own, function, leaf.replay))
        except BaseException:
            self.close()
            raise

        names = [leaf.name for leaf, _ in leaves]
        self.parts.sort(key=lambda part: names.index(part.name))
        jobs = [part.source.job for part in self.parts]
        self.job = Job(
            files=[],
            tokenize=None if config.num_workers == 0 else describe(functions),
            max_row_bytes=max(job.max_row_bytes for job in jobs),
            block_bytes=0,
            slack_bytes=0,
            parts=jobs,
        )
        most = max(part.source.slot_bytes for part in self.parts)
        self.slot_bytes = -(-most // _ALIGNMENT) * _ALIGNMENT
        sizes = {part.name: sum(file.num_bytes for file in part.source.files.files) for part in self.parts}
        self.node = mix.node(sizes)
        self.mix = mix
        self.token_cache: Any = None

    def windows(
        self,
        executor: Executor,
        restart_point: Callable[[], Position] = Position,
        on_ready: Callable[[], object] = no_op,
    ) -> _AllWindows:
        """The windows of all parts."""
        opened = [
            part.open_windows(PartExecutor(executor, number, len(self.parts)), on_ready)
            for number, part in enumerate(self.parts)
        ]
        self.token_cache = _AllCaches(self.parts)
        return _AllWindows(opened)

    def producer(
        self, executor: Executor, coordinator: Coordinator, config: LoaderConfig, outcomes: MixtureOutcomes | None
    ) -> MixtureProducer:
        """What reads all parts ahead and merges them, for ``coordinator``.

        :param outcomes: decide which rows an epoch has; None: all.
        """
        producer: MixtureProducer
        supplies = []
        for part, leaf in zip(self.parts, self.node.leaves(), strict=True):
            assert part.executor is not None and part.windows is not None, "the windows are open"
            rules = DeliveryRules(
                capacity=1, max_ready_bytes=0, shows_rows=part.config.bad_rows.excerpts, digest=config.digest
            )
            feed = PartFeed(
                leaf,
                rules,
                part.bad_rows,
                bytes_left=lambda: (
                    config.limits.max_ready_bytes - producer.num_bytes - coordinator.channel.num_ready_bytes
                ),
                on_fill=lambda: producer.pump(),
                decisions=None if outcomes is None else outcomes.decisions(part.name),
            )
            canaries, num_files = part.source.canaries(part.executor), len(part.source.files.files)
            supplies.append(PartSupply(feed, part.windows, canaries, part.executor, num_files))
        producer = MixtureProducer(self.node, config.seed, supplies, executor, coordinator, epochs=config.epochs)
        feeds = {supply.feed.leaf.name: supply.feed for supply in supplies}
        for part in self.parts:
            if part.replay is not None and outcomes is not None:
                assert isinstance(part.source.order, ReplayOrder) and isinstance(part.windows, IndexedWindows)
                passes = outcomes.passes(part.name)
                passes.epoch = partial(_epoch_of, feeds[part.replay[0]])
                passes.on_decided = part.windows.refill
                part.source.order.ids_of = passes.ids_of
        return producer

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.source.close()


def _epoch_of(feed: PartFeed) -> int:
    """The epoch of the part's last sample that was merged; it does not depend on how rows are cut into chunks."""
    cursor = feed.queue.cursor
    return cursor.position.epoch if cursor.epoch_samples else max(0, cursor.position.epoch - 1)


def _check_can_be_replayed(parts: list[OpenedPart], of: str, replay: str) -> None:
    files = next(part.source.files for part in parts if part.name == of)
    if isinstance(files, RowStream):
        raise ConfigError(
            f"AD474 {replay!r} is a Replay of {of!r}, whose data is read from front to back, and a replay reads single "
            f'rows: give {of!r} shuffle="full", or decompress or convert its data'
        )


def _opened(
    name: str, source: Any, config: LoaderConfig, function: Any, replay: tuple[str, PassRate] | None
) -> OpenedPart:
    settings = config.bad_rows
    quarantine = Quarantine.opened(settings.path if settings.policy == "quarantine" else None).add
    rules = BadRowRules(settings.policy == "raise", settings.max, settings.excerpts, quarantine)
    try:
        if replay is None:
            opened = opened_source(described(source), config, function, quarantine)
        else:
            config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, tokens=None))
            opened = opened_replay(described(source), config, function, ReplayOrder(config.seed, *replay))
    except (SourceError, ConfigError) as error:
        raise _of_part(error, name) from error

    warn_about_files(opened.files)
    return OpenedPart(name, opened, config, rules, replay)


def _of_part(error: AsyncDataError, name: str) -> AsyncDataError:
    """The error, with the name of the part in front of its message."""
    code, _, rest = str(error).partition(" ")
    has_code = code.startswith("AD") and code[2:].isdigit()
    text = f"{code} part {name!r} of the mixture: {rest}" if has_code else f"part {name!r} of the mixture: {error}"
    return type(error)(text)
