"""The records of a telemetry file, one JSON object a line. ``docs/reference/statistics.md`` shows their fields.

A file begins with a :class:`RunStart`. Counts are totals, not differences: a record that is lost costs resolution, and
no count. A field that has its default is left out.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

FORMAT_VERSION = 1
"""Grows when a reader of an earlier version would misread a file. New fields and new kinds of records do not count."""

EDGES = (0, *sorted({round(2 ** (quarter / 4)) for quarter in range(121)}))
"""Lower bounds of the buckets of all histograms: bucket ``b`` has the numbers from ``b`` to below the next edge."""

MAX_VALUE = 1000
"""Characters of a text that is not a prompt, such as a label, or the start of a row."""

MAX_OF_REASON = 16
"""Dropped rows that are kept of each source and reason, and samples of each note."""

# What a reader takes for a number: any other is damage, and its line is left out. What is written is not checked.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
OrUnknown = Annotated[int, Meta(ge=-1, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e11)]
Moment = Annotated[float, Meta(ge=0, le=32_503_680_000)]
"""Seconds since 1970, before the year 3000."""


class Place(NamedTuple):
    """A place in the order: row ``row`` of window ``window`` of epoch ``epoch``, all from 0."""

    epoch: Count
    window: Count
    row: Count


class _Located(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a row is."""

    source: str = ""
    path: str = ""
    byte_offset: OrUnknown = -1
    line: Count = 0
    row_number: OrUnknown = -1


class Document(_Located, frozen=True, kw_only=True):
    """A document of a pack.

    :ivar place: of its sample in the order; ``num_tokens``: that the pack has of it.
    :ivar source: the name of its part of a mixture; empty for a single source.
    :ivar path: its file; ``line``, ``byte_offset``, ``row_number``: as of a sample.
    """

    place: Place
    num_tokens: Count


class TokenizerName(msgspec.Struct, frozen=True, omit_defaults=True):
    """A folder or a name on the hub, as a tokenize function names it."""

    name: str
    revision: str | None = None


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """``kind`` says which record it is."""


class _RowRecord(_Located, _Record, frozen=True, kw_only=True):
    """When a record of a row was written, and where the row is."""

    at: Moment


class RunStart(_Record, frozen=True, kw_only=True, tag="run"):
    """The first line of a file.

    :ivar version: of the format.
    :ivar library: version of asyncdata.
    :ivar at: when the loader began to read ahead, in seconds since 1970 (UTC).
    :ivar rank: the rank of this loader; ``world_size``: how many iterate at the same time.
    :ivar dp_size: data-parallel ranks that this one loader feeds.
    :ivar number: of this file among its rank's in the folder, from 0.
    :ivar pid: process of the loader; ``host``: its machine.
    :ivar place: where the stream began: the place of the first sample. A state that was loaded after the start, as
        inside `with`, is in the interval that ``begins`` then.
    :ivar samples: samples delivered before this start, in the runs that it resumes.
    :ivar sources: names of the parts of a mixture; empty for a single source.
    :ivar files: paths of the source, the first 100.
    :ivar num_files: how many there are.
    :ivar num_bytes: their size.
    :ivar mix_by: ``rows`` or ``tokens``: what the mixture's targets are shares of; empty for a single source.
    :ivar group_size: samples of a group.
    :ivar packing: settings of the packing by name, with its ``kind``; empty without one.
    :ivar pack_length: tokens that a pack holds; 0 without a packing.
    :ivar config: the settings that have not their default, by name. Nothing in it gives access to a store. Where rows
        are not shown, it has no text.
    :ivar tokenizer: the tokenize function; only its kind where rows are not shown.
    :ivar tokenize_fns: the same of each part of a mixture.
    :ivar tokenizers: of each part of a mixture whose rows are shown, the tokenizer of ``ids``, where it has one.
    :ivar shows_rows: False: the file has no text of any row.
    :ivar interval_s: seconds between two intervals, at most.
    :ivar max_samples: of each source, so many sampled samples are kept: those with the smallest ``key``.
    :ivar max_of_reason: the same for samples with each note, and for dropped rows of each reason.
    """

    version: Count
    library: str
    at: Moment
    rank: Count = 0
    world_size: Count = 1
    dp_size: Count = 1
    number: Count = 0
    pid: Count = 0
    host: str = ""
    place: Place = Place(0, 0, 0)
    samples: Count = 0
    sources: list[str] = []
    files: list[str] = []
    num_files: Count = 0
    num_bytes: Count = 0
    mix_by: str = ""
    group_size: Count = 1
    packing: dict[str, Any] = {}
    pack_length: Count = 0
    config: dict[str, Any] = {}
    tokenizer: str = ""
    tokenize_fns: dict[str, str] = {}
    tokenizers: dict[str, TokenizerName] = {}
    shows_rows: bool = True
    interval_s: Amount = 0.0
    max_samples: Count = 0
    max_of_reason: Count = 0


class SampleRecord(_RowRecord, frozen=True, kw_only=True, tag="sample"):
    """A delivered sample, chosen by its place alone, so that all ranks and restarts choose the same ones.

    :ivar at: when it was written, in seconds since 1970.
    :ivar key: a hash of its place and source. A reader keeps the ``max_samples`` of each source with the smallest keys.
    :ivar place: its place in the order.
    :ivar source: the name of its part of a mixture; empty for a single source.
    :ivar path: its file; ``byte_offset`` and ``num_bytes``: its row there. -1: not known.
    :ivar line: the line of the row, counted from 1, where the source knows it; else 0.
    :ivar row_number: the row's number, counted from 0, in a file of numbered rows; -1: the file has none.
    :ivar num_tokens: its tokens; ``num_trained``: how many of them are trained, -1 if the sample has no labels.
    :ivar trained: the trained tokens, as spans ``[start, stop)``; the first 256 of them.
    :ivar ids: its first tokens; ``is_cut`` says whether there are more.
    :ivar text: the prompt, cut.
    :ivar label: its label, as JSON text, cut; ``metadata``: its metadata, as JSON text, cut.
    :ivar is_cut: whether anything was cut.
    :ivar notes: what was noted of it, such as ``truncated``.
    """

    key: Count
    place: Place
    num_bytes: OrUnknown = -1
    num_tokens: Count = 0
    num_trained: OrUnknown = -1
    trained: list[tuple[Count, Count]] = []
    ids: list[Count] = []
    text: str = ""
    label: str = ""
    metadata: str = ""
    is_cut: bool = False
    notes: list[str] = []


class DroppedRow(_RowRecord, frozen=True, kw_only=True, tag="dropped_row"):
    """A row that yielded no sample, and is not bad; chosen like a sample, for each reason. Some are read ahead only.

    :ivar at: when it was written, in seconds since 1970.
    :ivar key: a hash of its place in its source. A reader keeps the ``max_of_reason`` of each source and reason with
        the smallest.
    :ivar reason: why it was dropped.
    :ivar place: its place in the order; in a mixture, the place of the sample which follows it in its part.
    :ivar source: the name of its part of a mixture; empty for a single source.
    :ivar path: its file; ``line``, ``byte_offset``, ``row_number``: as of a sample.
    :ivar num_bytes: of the row; -1: not known, or rows are not shown.
    """

    key: Count
    reason: str
    place: Place
    num_bytes: OrUnknown = -1


class SourceCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Totals of one part of a mixture, in this run and in those that it resumed.

    :ivar samples: samples delivered; ``tokens``: of their prompts; ``epoch``: the part's own epoch.
    :ivar dropped: its rows that yielded no sample, by reason.
    :ivar noted: its rows that were kept and noted, such as truncated ones, by name of the note; of this start only.
    :ivar wait_s: seconds that calls of this start waited for its next sample.
    :ivar target: its share of the mixture now, 0 to 1.
    """

    samples: Count = 0
    tokens: Count = 0
    epoch: Count = 0
    dropped: dict[str, Count] = {}
    noted: dict[str, Count] = {}
    wait_s: Amount = 0.0
    target: Amount = 0.0


class RewardCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Totals of one of several rewards, of this start.

    :ivar groups: groups that were reported; ``scores``: their scores; ``skipped``: those that were None.
    :ivar degenerate: groups of at least two scores that were all equal.
    :ivar total: sum of the scores.
    """

    groups: Count = 0
    scores: Count = 0
    skipped: Count = 0
    degenerate: Count = 0
    total: float = 0.0

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))

    def __add__(self, other: RewardCounts) -> RewardCounts:
        return RewardCounts(*map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def __sub__(self, other: RewardCounts) -> RewardCounts:
        return RewardCounts(*map(operator.sub, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class Interval(_Record, frozen=True, kw_only=True, tag="interval"):
    """Totals and the current state, at the end of an interval.

    Of the *stream*: in this run and in those that it resumed. With ``world_size`` above 1, all ranks count the whole
    stream, so they are equal in all, and not to be added. Of the *start*: since this file's start, of this rank.

    :ivar at: seconds since 1970 (UTC); ``elapsed_s``: since the start, on a clock that is never set back.
    :ivar begins: whether the stream begins here, at the start or elsewhere after a restore: what came before it is not
        to be compared with it.
    :ivar place: the place of the next sample.
    :ivar samples: stream: samples delivered; ``groups``: their groups; ``tokens``: tokens of
        those groups' prompts, each counted once.
    :ivar dropped: stream: rows that yielded no sample, by reason; ``noted``: rows that were noted, by name of the note.
    :ivar unread: start: rows that have each unread key, among those that were looked at.
    :ivar bad_rows: stream: bad rows passed over; they are in ``dropped``, too.
    :ivar by_source: totals of each part of a mixture.
    :ivar packs: stream: packs of all ranks; ``packed_tokens``: their tokens, without padding.
    :ivar unpacked: stream: samples in no pack, by reason.
    :ivar pack_fill: start: packs of this rank, by how full they are, in percent, rounded down to a multiple of 5;
        ``pack_documents``: histogram of their documents.
    :ivar pack: the first 64 documents of the interval's first pack.
    :ivar calls: start: calls for data; ``waits``: those that had to wait. Readiness is
        ``1 - waits / calls``.
    :ivar wait_s: start: seconds of waiting until now, by what was missing: ``start`` of the workers, the row ``index``,
        ``read`` of a window, ``tokenize``, or a ``cpu`` for the workers. The rest of the time belongs to the trainer.
    :ivar first_s: start: the share of the first call in them, which is start-up.
    :ivar waiting_s: for how long a call has been waiting now; 0 if none is.
    :ivar held_s: start: seconds for which samples were ready, and other code held the event loop of the call that
        awaited them. No waits: they are in ``step_s``.
    :ivar step_s: start: seconds between calls, without the waits: the trainer's own time. Divided by ``calls``, it is
        the step time if data were free.
    :ivar step_ms: start: histogram of those times, in milliseconds; ``wait_ms``: of the waits that have ended, but for
        that of the first call.
    :ivar lengths: start: histogram of the tokens of delivered samples, each prompt counted once.
    :ivar ready: samples that a call would get at once, of ``capacity``; ``in_flight``: rows that workers have.
    :ivar has_no_room: whether the workers wait for the trainer: the read-ahead is full.
    :ivar workers: worker processes; ``busy``: those with a request; ``starting``: those that are not ready yet.
    :ivar memory_bytes: resident memory of the loader's process; ``worker_memory_bytes``: of its workers on this
        machine, where pages that they share count in each. 0: not known.
    :ivar work_s: start: seconds that workers needed for tokenizing, as they report.
    :ivar restarts: start: workers that were replaced.
    :ivar buffered: groups given back that wait to be served.
    :ivar returned: start: groups given back.
    :ivar staleness: start: histogram of how many groups were delivered from the stream between the delivery of a group
        and the moment it was given back; ``version_lags``: of how many versions their oldest policy was behind the
        newest that was given back, for samples with ``extra["policy_version"]``.
    :ivar group_sizes: start: groups whose scores were reported without a key, by how many scores each had.
    :ivar degenerate: start: scored groups of at least two scores that were all equal.
    :ivar rewards: start: the scores of each of several rewards, by key.
    :ivar indexed_rows: rows in the row index.
    :ivar media_loaded: start: samples whose media workers have loaded; ``media_bytes``: what they have, in bytes;
        ``media_s``: seconds that workers needed for them; ``media_failed``: samples whose media cannot be loaded.
    :ivar lost: start: what was not recorded, by reason.
    """

    at: Moment
    elapsed_s: Amount
    place: Place
    begins: bool = False
    samples: Count = 0
    groups: Count = 0
    tokens: Count = 0
    dropped: dict[str, Count] = {}
    noted: dict[str, Count] = {}
    unread: dict[str, Count] = {}
    bad_rows: Count = 0
    by_source: dict[str, SourceCounts] = {}
    packs: Count = 0
    packed_tokens: Count = 0
    unpacked: dict[str, Count] = {}
    pack_fill: dict[Count, Count] = {}
    pack_documents: dict[Count, Count] = {}
    pack: list[Document] = []
    calls: Count = 0
    waits: Count = 0
    wait_s: dict[str, Amount] = {}
    first_s: dict[str, Amount] = {}
    waiting_s: Amount = 0.0
    held_s: Amount = 0.0
    step_s: Amount = 0.0
    step_ms: dict[Count, Count] = {}
    wait_ms: dict[Count, Count] = {}
    lengths: dict[Count, Count] = {}
    ready: Count = 0
    capacity: Count = 0
    in_flight: Count = 0
    has_no_room: bool = False
    workers: Count = 0
    busy: Count = 0
    starting: Count = 0
    memory_bytes: Count = 0
    worker_memory_bytes: Count = 0
    work_s: Amount = 0.0
    restarts: Count = 0
    buffered: Count = 0
    returned: Count = 0
    staleness: dict[Count, Count] = {}
    version_lags: dict[Count, Count] = {}
    group_sizes: dict[Count, Count] = {}
    degenerate: Count = 0
    rewards: dict[str, RewardCounts] = {}
    indexed_rows: Count = 0
    media_loaded: Count = 0
    media_bytes: Count = 0
    media_s: Amount = 0.0
    media_failed: Count = 0
    lost: dict[str, Count] = {}


class BadRowRecord(_RowRecord, frozen=True, kw_only=True, tag="bad_row"):
    """A bad row that was found, in the order of finding.

    :ivar at: seconds since 1970.
    :ivar code: the error's code; ``reason``: its text, cut; empty where rows are not shown.
    :ivar place: its place in the order, where that is known.
    :ivar source: the name of its part of a mixture; empty for a single source.
    :ivar path: its file; ``line``, ``byte_offset``, ``row_number``: as of a sample.
    :ivar excerpt: its start; empty where rows are not shown.
    """

    code: str
    reason: str = ""
    place: Place | UnsetType = UNSET
    excerpt: str = ""


class Event(_Record, frozen=True, kw_only=True, tag="event"):
    """An event of the library's log, such as ``worker.lost``; ``docs/reference/events.md`` has them.

    :ivar at: seconds since 1970.
    :ivar name: the event.
    :ivar level: ``info``, ``warning`` or ``exception``.
    :ivar fields: its fields: numbers and short texts. Where rows are not shown, numbers only.
    """

    at: Moment
    name: str
    level: str = "info"
    fields: dict[str, Any] = {}


class End(_Record, frozen=True, kw_only=True, tag="end"):
    """The last line, after the last interval. A file of a process that was killed has none.

    :ivar at: seconds since 1970.
    :ivar reason: why the loader was closed.
    :ivar error: the error that ended the run: its kind and message, cut; where rows are not shown, its kind, code and
        place. Empty if the last call for data had an answer, and no error left the `with`.
    """

    at: Moment
    reason: str = ""
    error: str = ""


Record = RunStart | SampleRecord | DroppedRow | Interval | BadRowRecord | Event | End

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Record).decode
