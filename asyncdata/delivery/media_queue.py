"""Media: the heavy columns of samples, which workers load shortly before they are delivered, within a limit of bytes.

What a plan says of a sample decides its place; its media are loaded in the order of D, and are forgotten with it.
Samples that are packed as they come leave the channel without media. These are loaded in the order of the packs, once
it is known, and given when a pack is delivered.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections import Counter, deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from asyncdata.core.columns import FRAMES, Columns, MediaRef, decoded
from asyncdata.core.columns import Column as Declared
from asyncdata.core.errors import BadRowError, get_logger
from asyncdata.core.messages import Column, RowError, Tokenized
from asyncdata.core.threads import identity
from asyncdata.core.types import Position, Sample, SampleRange, Tokens
from asyncdata.delivery.bad_rows import BadRowPolicy, bad_row_error
from asyncdata.delivery.chunk import Chunk
from asyncdata.delivery.items import Bell, Item, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping

    from asyncdata.delivery.ledger import Returned

_log = get_logger(__name__)
_OTHER_TOKENS = (
    "the row has other tokens than when it was planned: plan() does not do the same each time, or the file has changed"
)
_OTHER_COLUMN = "the row has another %s than when it was planned: what it names has changed"
_OTHER_LENGTH = (
    "the row has %d tokens, and had %d when they were counted: the function's two states do not agree, or what the row "
    "says of its media is wrong"
)
_NOT_TRAINED = -100
_OF_ROW = ("prompt", "tokens", "labels", "label", "metadata", "extra")
IDS = "input_ids"
"""Stands among the columns that a load gives where the plan has only counted tokens."""


class MediaBudget:
    """The bytes of media that are being loaded, that wait, or that the trainer holds.

    :param bell: rung, in any thread, when arrays are freed.
    :ivar num_loaded: samples whose media were loaded; ``num_bytes``: their bytes; ``load_s``: seconds of work.
    :ivar num_failed: samples whose media could not be loaded.
    :ivar token_bytes: the most bytes that media had for each token, of samples whose plan says nothing of their size.
    """

    def __init__(self, max_bytes: int, bell: Bell) -> None:
        self.max_bytes = max_bytes
        self.num_loaded = self.num_bytes = self.num_failed = 0
        self.load_s = self.token_bytes = 0.0
        self._bell = bell
        self._held: dict[int, int] = {}  # bytes, by the id of the array that owns them
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()  # arrays are freed in any thread, and a deque needs no lock
        self._sum, self._is_told = 0, False

    @property
    def held(self) -> int:
        """Bytes of arrays that are in memory."""
        with self._lock:
            while self._freed:
                self._sum -= self._held.pop(self._freed.popleft())
            return self._sum

    def hold(self, arrays: Columns, load_s: float) -> None:
        """Count the bytes of these arrays until no view of them is left."""
        self.num_loaded, self.load_s = self.num_loaded + 1, self.load_s + load_s
        self.num_bytes += sum(map(self._keep, arrays.values()))

    def count(self, batch: Any, names: Collection[str]) -> None:
        """Count the arrays of these names in a batch, too, as long as they are held."""
        for array in _arrays_in(batch, names):
            self._keep(array)

    def _keep(self, array: Any) -> int:
        """Count an array, NumPy's or torch's, and return its bytes."""
        while isinstance(getattr(array, "base", None), np.ndarray):
            array = array.base
        num_bytes = int(array.nbytes)
        _ = self.held  # ids of arrays that are free may be given again
        with self._lock:
            is_new = id(array) not in self._held
            self._held[id(array)] = num_bytes
            self._sum += num_bytes if is_new else 0
        if is_new:
            weakref.finalize(array, self._free, id(array)).atexit = False
        return num_bytes

    def tell_if_over(self) -> None:
        """Say once that more is held than the limit, and more is loaded, as a call waits for it."""
        held = self.held
        if held > self.max_bytes and not self._is_told:
            self._is_told = True
            _log.warning("media.over_limit", held_bytes=held, limit_bytes=self.max_bytes)

    def _free(self, key: int) -> None:
        self._freed.append(key)
        self._bell.ring()


class Wanted(NamedTuple):
    """A sample whose media are to be loaded.

    :ivar key: what knows it here.
    :ivar planned: gives the columns that it has.
    :ivar tokens: those that it must have; None: a rollout may have changed them.
    :ivar num_reserved: bytes that are reserved for it.
    """

    key: Hashable
    ref: MediaRef
    planned: Callable[[], Mapping[str, Any]]
    tokens: Tokens | None = None
    num_reserved: int = 0

    @property
    def is_of_unknown_size(self) -> bool:
        """Whether the plan says nothing of its media."""
        return len(self.ref.counts) == 1 and _is_counted(self.ref)


class _Whole(Columns):
    """The arrays of a sample whose plan has only counted its tokens, and all that the row has beside them.

    :ivar row: a chunk of this sample alone.
    """

    __slots__ = ("row",)

    row: Chunk


class _Staged(NamedTuple):
    """A sample whose media are loaded as soon as there is room.

    :ivar number: of the stream, how many samples the channel has had before it, and those that were dropped since then.
    """

    wanted: Wanted
    number: float = math.inf


class MediaQueue:
    """The items of one channel that wait for media. The coordinator's lock is held at each call.

    :param columns: those that are loaded, by name.
    :param policies: what is done with samples whose media cannot be loaded, by the part of a mixture.
    :param channel: takes the next item, which is ready.
    :param for_packs: whether samples are packed before their media are loaded.
    :ivar num_waiting: samples that are not ready.
    :ivar needed: samples of packs that a call waits for.
    """

    def __init__(
        self,
        budget: MediaBudget,
        columns: Mapping[str, Declared],
        policies: Mapping[str, BadRowPolicy],
        channel: Any,
        *,
        for_packs: bool,
    ) -> None:
        self.budget = budget
        self.num_waiting = 0
        self.needed: set[Hashable] = set()
        self._for_packs = for_packs
        self._columns, self._policies, self._emit = columns, policies, channel.emit
        self._num_bad: Counter[str] = Counter()
        self._items: deque[Item] = deque()
        self._staged: deque[_Staged] = deque()
        self._returned: deque[Wanted] = deque()  # of groups of the rollout buffer
        self._missing: set[Hashable] = set()  # samples whose media are wanted or being loaded
        self._found: dict[Hashable, Columns | RowError] = {}
        self._num_samples = self._num_dropped = self._num_reserved = 0

    @property
    def num_lacking(self) -> int:
        """Samples that wait for their media, or for samples before them that do."""
        return self.num_waiting + len(self.needed)

    def _ref_of(self, chunk: Any, sample: int) -> MediaRef | None:
        """Where the media of a sample of the stream come from; None if it has none."""
        counts = chunk.value("media", sample)
        if not counts:
            return None

        beside = {IDS: 4, FRAMES: 1}
        sizes = {name: beside.get(name) or self._columns[name].num_bytes(1) for name in counts}
        num_bytes = sum(count * sizes[name] for name, count in counts.items())
        counts.pop(FRAMES, None)
        own, number = chunk.own(sample)
        ref: MediaRef = own.media_ref(number, num_bytes)._replace(counts=tuple(counts.items()))
        return ref

    def push(self, item: Item) -> None:
        """Take the next item of the order."""
        if isinstance(item, Run) and not self._for_packs:
            for sample in range(item.start, item.stop):
                ref = self._ref_of(item.chunk, sample)
                if ref is not None:
                    planned = partial(item.chunk.arrays, sample)
                    wanted = Wanted((id(item.chunk), sample), ref, planned, item.chunk.tokens_of(sample))
                    self._staged.append(_Staged(wanted, self._num_samples + sample - item.start))
                    self._missing.add(wanted.key)
            self._num_samples += item.stop - item.start
            self.num_waiting += item.stop - item.start
        self._items.append(item)
        self._advance()

    # Samples of packs that are made of samples as they come.

    def load(self, now: Iterable[Sample], later: Iterable[Sample]) -> bool:
        """Have the media of packed samples loaded, in this order; return whether those of ``now`` are there.

        :param now: a call waits for them; the others are loaded as far as there is room.
        """
        now = list(now)
        wanted = _wanted_of(chain(now, later))
        self.needed = {key for key in (one.position for one in now) if key in wanted and key not in self._found}
        is_asked = self._found.keys() | self._missing
        self._staged = deque(_Staged(one) for key, one in wanted.items() if key not in is_asked)
        return not self.needed

    def give(self, samples: Iterable[Sample], num_passed: int) -> tuple[dict[Any, Sample], Counter[str]] | None:
        """Copies of packed samples with their media, which are forgotten here; None if they are not all loaded.

        :param num_passed: bad rows that were passed over before.
        :returns: the copies, by position; and how many of them have zeros, as their media could not be loaded, by code.
        :raises AsyncDataError: if one of these may not be passed over.
        """
        packed = {sample.position: sample for sample in samples}
        wanted = _wanted_of(packed.values())
        if not wanted.keys() <= self._found.keys():
            return None

        found = {key: self._found[key] for key in wanted}
        faults = [(packed[key], one) for key, one in found.items() if isinstance(one, RowError)]
        errors = []
        for number, (sample, fault) in enumerate(faults):
            part = sample.source_name or ""
            policy, stops = self._policy_of(part)
            assert sample.source is not None
            errors.append((policy, bad_row_error(sample.source, fault, shows_row=policy.shows_row)))
            if stops if part else policy.stops_after(num_passed + number):
                raise policy.stop_error(errors[-1][1])

        for policy, error in errors:
            policy.pass_over(error)
        given = {key: copy.copy(packed[key]) for key in wanted}
        for key, sample in given.items():
            self._give(sample, self._found.pop(key), wanted[key].ref)
        return given, Counter(f"bad row {fault.code}" for _, fault in faults)

    # What is loaded.

    def next(self, num_taken: int, demand: int) -> Wanted | None:
        """The next sample to load, if there is room for it, or if a call waits for it; its bytes are reserved.

        :param num_taken: samples of the channel that are delivered.
        :param demand: how many more samples a call waits for.
        """
        if self._returned:
            return self._reserved(self._returned.popleft(), 0)

        if not self._staged:
            return None

        wanted, number = self._staged[0]
        num_bytes = wanted.ref.num_media
        if wanted.is_of_unknown_size:  # the first is loaded alone
            rate = self.budget.token_bytes
            num_bytes = math.ceil(num_bytes / 4 * rate) if rate else self.budget.max_bytes
        is_room = self.budget.held + self._num_reserved + num_bytes <= self.budget.max_bytes
        if not (is_room or number - self._num_dropped - num_taken < demand or wanted.key in self.needed):
            return None

        if not is_room:
            self.budget.tell_if_over()
        self._staged.popleft()
        self._missing.add(wanted.key)
        return self._reserved(wanted, num_bytes)

    def _reserved(self, wanted: Wanted, num_bytes: int) -> Wanted:
        wanted = wanted._replace(num_reserved=max(num_bytes, wanted.ref.num_media))
        self._num_reserved += wanted.num_reserved
        return wanted

    def put(self, wanted: Wanted, found: Tokenized | RowError) -> None:
        """The media of a sample are loaded, or cannot be."""
        self._num_reserved -= wanted.num_reserved
        columns = found if isinstance(found, RowError) else self._loaded(wanted, found)
        self.budget.num_failed += isinstance(columns, RowError)
        self._found[wanted.key] = columns
        self._missing.discard(wanted.key)
        self.needed.discard(wanted.key)
        self._advance()

    def _loaded(self, wanted: Wanted, reply: Tokenized) -> Columns | RowError:
        if reply.errors:
            return reply.errors[0]

        tokens = np.frombuffer(reply.tokens, np.int32)
        if _is_counted(wanted.ref) and wanted.tokens is not None and len(tokens) != len(wanted.tokens):
            return RowError(0, "AD424", _OTHER_LENGTH % (len(tokens), len(wanted.tokens)))

        if not _is_counted(wanted.ref) and wanted.tokens is not None and not np.array_equal(tokens, wanted.tokens):
            return RowError(0, "AD424", _OTHER_TOKENS)

        # Each sample has a reply of its own, so its memory is free when the sample is.
        found = decoded({key: memoryview(one.data) for key, one in reply.columns.items() if key.startswith("@")})
        planned = wanted.planned()
        for name, column in found.declared.items():
            if column.phase == "plan" and name in planned and not np.array_equal(found[name], planned[name]):
                return RowError(0, "AD424", _OTHER_COLUMN % name)

        loaded = {column: found[name] for name, column in found.declared.items() if column.phase == "load"}
        arrays = Columns(loaded)
        if _is_counted(wanted.ref):
            arrays = _Whole(loaded)
            arrays.row = Chunk(_copied(reply), Position(0), 1, cast("Any", None), ends_epoch=False)
            if wanted.is_of_unknown_size:
                self.budget.token_bytes = max(self.budget.token_bytes, _num_bytes(arrays) / len(tokens))
        arrays.media = wanted.ref
        self.budget.hold(arrays, reply.busy_s)
        return arrays

    def _advance(self) -> None:
        """Emit what is ready."""
        while self._items:
            item = self._items.popleft()
            if self._for_packs or not isinstance(item, Run):
                self._emit(item)
                continue

            rest = self._emit_ready(item)
            if rest is not None:
                self._items.appendleft(rest)
                return

    def _emit_ready(self, run: Run) -> Run | None:
        """Emit the samples of a run up to the first that is not ready; return the rest of it."""
        chunk, start = run.chunk, run.start
        for sample in range(run.start, run.stop):
            key = id(chunk), sample
            found = self._found.get(key)
            if key in self._missing or isinstance(found, RowError):
                if start < sample:
                    self._emit_run(Run(chunk, start, sample))
                    start = sample
                if key in self._missing:
                    return Run(chunk, sample, run.stop)

                assert isinstance(found, RowError)
                own, number = chunk.own(sample)
                self._emit(own.bad_sample(number, found, *self._policy_of(own.source)))
                if not chunk.has_every_row:
                    del self._found[key]
                    start += 1
                    self.num_waiting -= 1
                    self._num_dropped += 1
        if start < run.stop:
            self._emit_run(Run(chunk, start, run.stop))
        return None

    def _policy_of(self, source: str) -> tuple[BadRowPolicy, bool]:
        self._num_bad[source] += 1
        policy = self._policies[source]
        return policy, policy.stops_after(self._num_bad[source] - 1)

    def _emit_run(self, run: Run) -> None:
        self.num_waiting -= run.stop - run.start
        self._emit(run)

    def attach(self, samples: SampleRange, delivered: list[Sample]) -> None:
        """Give delivered samples their arrays, which those of a group share; those for packs only say where from."""
        for number, sample in enumerate(delivered):
            row = samples.row(number)
            found = self._found.get((id(samples.chunk), row))
            ref = found.media if isinstance(found, Columns) else None
            if ref is None and (found is not None or self._for_packs):
                ref = self._ref_of(samples.chunk, row)
            if ref is not None:
                self._give(sample, Columns({}) if found is None else found, ref)

    def _give(self, sample: Sample, found: Columns | RowError, ref: MediaRef) -> None:
        """Give a sample its arrays.

        If they could not be loaded, it keeps its length, as its pack is made: nothing of it is trained.
        """
        if isinstance(found, _Whole):
            whole = Sample(SampleRange(found.row, 0, 1, 0, 0, 1), 0)
            for name in _OF_ROW:
                setattr(sample, name, getattr(whole, name))
            ref = ref._replace(num_media=_num_bytes(found))
        if isinstance(found, RowError):
            counts = ref.counts
            if _is_counted(ref):
                counts, sample.tokens = (), np.zeros(len(sample.tokens), np.int32)
            found = Columns({self._columns[name]: self._columns[name].zeros(count) for name, count in counts})
            sample.labels = np.full(len(sample.tokens), _NOT_TRAINED, np.int32)
        planned = sample.columns if isinstance(sample.columns, Columns) else Columns({})
        sample.columns = planned.with_media(found, ref)

    def restore(self, groups: Iterable[Returned]) -> tuple[bool, tuple[Returned, BadRowPolicy, BadRowError] | None]:
        """Give groups of the rollout buffer their media again, or have them loaded.

        :returns: whether all have them; and a group whose media cannot be loaded, with what is done with it and why.
        """
        is_ready = True
        for item in groups:
            first = item.group[0]
            columns = first.columns
            if not isinstance(columns, Columns) or columns.media is None or not columns.lacks_media:
                continue

            ref = columns.media
            found = self._found.pop(ref, None)
            if isinstance(found, Columns):
                for sample in item.group:
                    sample.columns = columns.with_media(found, ref)
            elif found is not None:
                assert first.source is not None
                policy = self._policies[ref.part]
                return False, (item, policy, bad_row_error(first.source, found, shows_row=policy.shows_row))
            else:
                is_ready = False
                if ref not in self._missing:
                    self._missing.add(ref)
                    self._returned.append(Wanted(ref, ref, partial(identity, columns)))
        return is_ready, None

    def forget(self, run: Run) -> None:
        """The run is delivered, and will not be again."""
        for sample in range(run.start, run.stop):
            self._found.pop((id(run.chunk), sample), None)


def _is_counted(ref: MediaRef) -> bool:
    """Whether the plan has only counted the tokens of a row: the load gives all its fields."""
    return any(name == IDS for name, _ in ref.counts)


def _arrays_in(batch: Any, names: Collection[str]) -> Iterator[Any]:
    """The arrays of these names in dicts, lists, and objects of XTuner; those of samples count already."""
    if isinstance(batch, list | tuple):
        for one in batch:
            yield from _arrays_in(one, names)
    elif isinstance(batch, dict) or type(batch).__name__ == "SequenceContext":
        for name, value in (batch if isinstance(batch, dict) else vars(batch)).items():
            if name in names and hasattr(value, "nbytes"):
                yield value
            elif not hasattr(value, "nbytes"):
                yield from _arrays_in(value, names)


def _copied(reply: Tokenized) -> Tokenized:
    """The reply without arrays, in memory of its own: what is kept of a row must not keep its pixels."""
    texts = {
        name: Column(bytes(one.data), bytes(one.ends))
        for name, one in reply.columns.items()
        if not name.startswith("@")
    }
    return msgspec.structs.replace(reply, tokens=bytes(reply.tokens), token_ends=bytes(reply.token_ends), columns=texts)


def _num_bytes(arrays: Columns) -> int:
    return sum(array.nbytes for array in arrays.values())


def _wanted_of(samples: Iterable[Sample]) -> dict[Position | None, Wanted]:
    """The packed samples that have media, by their positions."""
    refs = ((sample, getattr(sample.columns, "media", None)) for sample in samples)
    return {
        one.position: Wanted(one.position, ref, partial(identity, one.columns), one.tokens)
        for one, ref in refs
        if ref is not None
    }
