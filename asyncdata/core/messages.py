"""What crosses between the trainer's process and a worker: requests, replies, and their frames.

Every value is a msgspec Struct of numbers, text and packed bytes. Every request has the ``slot`` that it refers to,
and the ``part`` of the mixture that it is for. Nothing here needs numpy, so that a worker starts without it. Packed
integers are in native byte order: both ends are on one machine."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from asyncdata.core.identity import FileRefs


class TokenizeSpec(msgspec.Struct, frozen=True):
    """A tokenize function by its import path, so that a worker can make its own.

    ``settings`` is None for a plain function, else the arguments of the class at ``path``.
    """

    path: str
    settings: dict[str, Any] | None = None


class ReaderSpec(msgspec.Struct, frozen=True):
    """How a worker reads blocks: the class at the import path ``path``, made of the job and ``settings``.

    :ivar tag: the reader's fixed name in the keys of row indexes, so that the class may move to another module; empty:
        ``path`` is that name.
    """

    path: str
    settings: dict[str, Any] = {}
    tag: str = ""

    @property
    def identity(self) -> str:
        """The reader's name in keys."""
        return self.tag or self.path


class ReadLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a store is read.

    :ivar max_reads: requests in flight at a time, in each process that reads.
    :ivar max_bytes: bytes in flight at a time.
    :ivar retry_timeout_s: seconds from a request's first try in which it may be tried again.
    """

    max_reads: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    retry_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 120.0


class BlockCacheSpec(msgspec.Struct, frozen=True):
    """Where blocks of objects are kept on the local disk, and how many bytes of them."""

    folder: str
    max_bytes: int


class StoreSpec(msgspec.Struct, frozen=True):
    """How a process that reads opens a store: the class at the import path ``path``, made of ``url`` and ``options``.

    Both may give access to the store, so neither is shown.
    """

    path: str
    url: str
    options: dict[str, Any] = {}
    limits: ReadLimits = ReadLimits()
    cache: BlockCacheSpec | None = None

    def __repr__(self) -> str:
        return f"StoreSpec({self.path!r}, ...)"

    def with_cache(self, kept: BlockCacheSpec) -> StoreSpec:
        """The same store, whose blocks are kept there."""
        return msgspec.structs.replace(self, cache=kept)


LINES = ReaderSpec("asyncdata.sources.line_scanner:LineReader", tag="lines")
"""The reader of lines that end with a line feed."""

REMOTE_LINES = ReaderSpec("asyncdata.sources.remote.line_reader:RemoteLineReader", tag="lines")
"""The same of objects in stores."""


# A column of int32 says two things of a row: a number that is not negative, or that the row is a special case. Every
# function below takes an int, or an array of numpy.

NOT_IN_SLOT = -1
"""The start of a row whose text is not, or not completely, in the slot: it is read by its place."""

TOO_LONG = -1
"""The length of a row that is longer than ``max_row_bytes``."""

EXCLUDED = -2
"""The length of a row that is left out: it is not read, and a reply says nothing of it."""

EXCLUDED_REASON = "excluded"
"""The reason under which such rows are counted."""

JOURNAL_REASON = "journal"
"""The reason of a row that killed workers before, according to the journal in the snapshot."""

ON_PURPOSE = frozenset({EXCLUDED_REASON, JOURNAL_REASON, "drop_last"})
"""Reasons of rows that a setting leaves out by name, or of which the log has told before."""

_MASS_SHARE, _MASS_LEAST = 0.05, 20


def reason_mark(number: int) -> int:
    """How the row index marks a row that yields no sample, for reason ``number`` of its reply."""
    return min(number + 2, 255) if number else 1


def is_mass(num_dropped: Any, num_rows: Any) -> Any:
    """Whether so many rows must not be dropped without a word."""
    return (num_dropped >= _MASS_LEAST) & (num_dropped > _MASS_SHARE * num_rows)


def expected_elsewhere(num_tokens: Any) -> Any:
    """The expected number of tokens of a row that another rank tokenizes."""
    return -1 - num_tokens


def is_elsewhere(expected: Any) -> Any:
    """Whether another rank tokenizes the row."""
    return expected < 0


def num_expected_elsewhere(expected: Any) -> Any:
    """The number of tokens that :func:`expected_elsewhere` was given."""
    return -1 - expected


READ_COUNTS = struct.Struct("=QQQQ")


class ReadCounts:
    """How many requests were answered or tried again, and what the local disk had. Any thread may count.

    :param memory: 32 bytes, with the counts so far; None: memory of its own. One process writes there at a time.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._numbers = memoryview(bytearray(READ_COUNTS.size) if memory is None else memory).cast("B").cast("Q")
        self._lock = threading.Lock()

    @property
    def num_reads(self) -> int:
        """Requests that were answered."""
        return self._numbers[0]

    @property
    def num_retried(self) -> int:
        """Tries that failed and were followed by another."""
        return self._numbers[1]

    @property
    def num_cached(self) -> int:
        """Blocks that were read from the local disk instead."""
        return self._numbers[2]

    @property
    def num_cache_failures(self) -> int:
        """Blocks that could not be read from the local disk or kept there, or were damaged."""
        return self._numbers[3]

    def add_cached(self, *, has_failed: bool = False) -> None:
        """Count one block of the local disk."""
        with self._lock:
            self._numbers[2 + has_failed] += 1

    def add(self, *, is_retry: bool) -> None:
        """Count one request."""
        with self._lock:
            self._numbers[is_retry] += 1


if TYPE_CHECKING:
    from collections.abc import Sequence

    Data = bytes | memoryview
else:
    Data = memoryview  # what is decoded is a view of the frame: no byte of a sample is copied

NO_SLOT = -1
"""The slot of a request that needs none."""

MAX_FRAME_BYTES = 1 << 30
"""A longer frame is a broken peer; it is refused before memory is taken for it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told once, before its first request. Without a spec, the function is there already.

    ``with_token_sums`` asks for the CRC-32 of each sample's tokens. A mixture has a job for each of its ``parts``.
    ``stores`` are for the objects among ``files``. ``keeps_rows`` asks for the rows of samples with media beside
    them, as they cannot be read again.
    """

    files: FileRefs
    tokenize: TokenizeSpec | None
    max_row_bytes: int
    block_bytes: int
    slack_bytes: int
    reader: ReaderSpec = LINES
    with_token_sums: bool = False
    parts: list[Job] = []
    stores: list[StoreSpec] = []
    keeps_rows: bool = False

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks of objects are kept on the local disk."""
        return any(store.cache for job in (self, *self.parts) for store in job.stores)

    @property
    def stride(self) -> int:
        """Bytes of a slot for one block: the byte before it, the block, and the over-read."""
        return 1 + self.block_bytes + self.slack_bytes


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a file: the rows whose offset is in ``[start, stop)``.

    A row's offset is where its first byte is, or, in files whose rows are numbered, its number.
    """

    file_id: int
    start: int
    stop: int


class Overflow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is not completely in its slot: ``row`` of the request lies at ``offset`` of the file.

    Where rows were copied, it is also at ``copy_offset``, in bytes, of the copy numbered ``copy_id``; else that is -1.
    """

    row: int
    file_id: int
    offset: int
    copy_id: int = -1
    copy_offset: int = 0


class Scan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read ``blocks`` into the slot, one after the other from ``base`` on, a stride each at most; find their rows.

    ``has_slot`` says that no other request reads into the slot: then they may take all of it. ``with_samples`` asks for
    the samples of all rows instead of their text: nothing is put into the slot.
    """

    slot: int
    base: int
    blocks: list[Block]
    with_samples: bool = False
    part: int = 0
    has_slot: bool = False


class Tokenize(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tokenize rows that lie in a slot. ``starts`` (slot offsets) and ``lengths`` are int32, in the rows' order.

    ``expected``, int32 of shape (num_rows,), is how many tokens each row has, where they are counted already. A row
    that another rank tokenizes has the code of ``row_codes.expected_elsewhere``. The reply has it too, and leaves such
    rows out. ``is_load`` asks for their media. ``rows`` are the rows themselves, where they are in no slot.
    ``looks`` are the rows whose unread keys are asked for.
    """

    slot: int
    starts: bytes
    lengths: bytes
    overflow: list[Overflow] = []
    expected: bytes = b""
    part: int = 0
    is_load: bool = False
    rows: list[Data] = []
    looks: list[int] = []


class Index(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Find the rows of ``blocks``, and look at them as far as ``check`` says.

    ``check``: ``none``, ``json`` (is it a JSON object?), or ``samples`` (does the tokenize function keep it?). The rows
    numbered in ``lost``, which brought down workers, are not looked at. ``spool`` is a file the rows are copied to;
    their offsets are then those in it. Where it ``is_kept`` for later runs, it is on the disk before the reply comes.
    """

    blocks: list[Block]
    check: str
    lost: list[int] = []
    spool: str = ""
    slot: int = NO_SLOT
    is_kept: bool = False
    part: int = 0


class Permute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Shuffle ``range(num_rows)`` as Python's ``random.Random(seed)`` does."""

    num_rows: int
    seed: int
    slot: int = NO_SLOT
    part: int = 0


class PackRows(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put rows into packs, knowing only how many tokens they have: as ``asyncdata.batching.planned`` does.

    ``lengths`` is int32, a row's tokens; ``sizes`` (int64) how many of the rows each data set has. ``packing`` is a
    packing's name and settings. The rows come in the order of ``method``, ``seed`` and ``epoch``, as in a RowShuffle.
    ``weights``, linear and quadratic, say what a pack costs; without them it costs what its rows do, by ``costs``, as
    in :class:`Indexed`, or, without these, what the packing says. ``names`` are those of the files, if they are needed.
    """

    lengths: bytes
    sizes: bytes
    packing: dict[str, Any]
    weights: tuple[float, float] | None
    method: str
    seed: int
    epoch: int
    slot: int = NO_SLOT
    part: int = 0
    costs: bytes = b""
    names: list[str] = []


class OrderPacks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Order packs, knowing only what they cost (float64): as ``asyncdata.batching.planned`` does.

    ``grouping`` has a grouping's settings; without it packs are shuffled as torch does, or, if not ``shuffled``, stay.
    """

    costs: bytes
    grouping: dict[str, Any] | None
    shuffled: bool
    world_size: int
    accumulation: int
    seed: int
    epoch: int
    slot: int = NO_SLOT
    part: int = 0


Request = Scan | Tokenize | Index | Permute | PackRows | OrderPacks


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker has loaded its tokenize function and takes requests."""

    pid: int


class Scanned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rows found, block by block in the request's order.

    ``counts`` is int32 of shape (num_blocks,). ``starts`` (in the slot, or a code of ``row_codes``), ``lengths`` (-1:
    longer than ``max_row_bytes``) and ``offsets`` (from the block's start on) are int32 of shape (num_rows,).
    ``samples`` are those of the rows, if they were asked for, and not too much for one reply.
    """

    counts: bytes
    starts: bytes
    lengths: bytes
    offsets: bytes
    num_blank: int
    samples: Tokenized | None = None


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One JSON value per kept row: ``data`` holds them end to end, ``ends`` (uint32) where each stops."""

    data: Data
    ends: Data


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """A bad row of the request. The caller knows its file and offset."""

    row: int
    code: str
    reason: str
    excerpt: str = ""
    traceback: str = ""


Unread = tuple[int, int, str | None]
"""How many rows have an unread key, the first of them, and the beginning of its value; None: it is only counted."""

MAX_KEYS = 20
"""Unread keys that are named of a source. Rows may have any number of them."""

NOT_WRITTEN = "_not_written"
"""How the notes end of rows of which a template does not write something."""


class Tokenized(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The samples of a request, as packed columns.

    ``tokens`` is int32, all samples end to end; ``token_ends`` (uint32) is where each stops; ``kept`` (int32) the
    row of each sample, empty when every row was kept. A row is kept, in ``drops`` (reason -> rows, int32), or in
    ``errors``; or, by the request's ``expected``, in none of them. ``notes`` is of kept rows, as ``drops``: what is
    to be counted. ``busy_s`` is the work in it: seconds of CPU time. ``token_sums`` (uint32) has the CRC-32 of each
    sample's tokens, where the job asks for it; else it is empty. ``num_mended`` of the rows were not what they were
    in their copy. ``num_elsewhere`` of the rows were tokenized by other ranks, with their window. ``unread``: keys that
    are not read, of some rows that were looked at. ``is_padded``: the worker has left out fields that Arrow added.
    """

    tokens: Data
    token_ends: Data
    kept: Data
    columns: dict[str, Column]
    drops: dict[str, Data]
    errors: list[RowError]
    busy_s: float
    expected: Data = b""
    notes: dict[str, Data] = {}
    token_sums: Data = b""
    num_mended: int = 0
    num_elsewhere: int = 0
    unread: dict[str, Unread] = {}
    is_padded: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The whole request failed, and would fail again: not a row's fault.

    ``row`` is the row of the request that caused it, if one did; ``place`` where it lies, if the request was
    an :class:`Index`; and ``excerpt`` its start.
    """

    kind: str
    message: str
    traceback: str = ""
    row: int = -1
    excerpt: str = ""
    place: Overflow | None = None


class Short(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request failed as the system has no more of something: no row's fault, and another worker may do better.

    ``reason`` is what the system said; ``row``, ``excerpt`` and ``place`` are as in :class:`Failed`. The read-ahead
    sees none of these: the pool asks again, and answers with a :class:`Failed` if that never helps.
    """

    reason: str
    traceback: str = ""
    row: int = -1
    excerpt: str = ""
    place: Overflow | None = None


class Indexed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rows found, block by block in the request's order.

    ``counts`` is int32 of shape (num_blocks,); ``lengths`` and ``offsets`` (from the block's start on) are int32 of
    shape (num_rows,); ``marks``, uint8 of that shape, says what each is: 0 good, 2 no JSON object, else it yields no
    sample: ``row_codes.reason_mark`` says for which reason of ``drops``; 1 also for a bad row.
    It is empty where all are good. ``drops`` counts rows that yield no sample, by reason; ``errors`` has the bad ones.
    ``num_tokens``, int32 of that shape, has each row's tokens, 0 for no sample; it is empty without a
    tokenizing pass. ``costs``, float64 of that shape, is what the tokenize function says that each row costs, NaN where
    it says nothing; it is empty if it says nothing of any.
    """

    counts: bytes
    offsets: bytes
    lengths: bytes
    marks: bytes
    num_blank: int
    drops: dict[str, int] = {}
    errors: list[RowError] = []
    num_tokens: bytes = b""
    costs: bytes = b""


class Permuted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A permutation, uint32 of shape (num_rows,)."""

    rows: bytes


class Packed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Packs, in the order of packing: as in ``asyncdata.batching.packs.Packs``.

    ``offsets`` is int64, ``costs`` float64; ``rows``, ``starts`` and ``stops``, of the pieces, are int32. ``samples``
    and ``tokens`` count what was not packed, by reason.
    """

    offsets: bytes
    rows: bytes
    starts: bytes
    stops: bytes
    costs: bytes
    samples: dict[str, int]
    tokens: dict[str, int]


Reply = Ready | Scanned | Tokenized | Indexed | Permuted | Packed | Failed | Short

encode = msgspec.msgpack.Encoder().encode


def decode_reply(body: Data | bytearray) -> Reply:
    """The reply of a frame's body, without the columns that only align others."""
    reply: Reply = _decode_reply(body)
    if isinstance(reply, Tokenized):
        reply.columns.pop("", None)
    return reply


decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_spec = msgspec.msgpack.Decoder(TokenizeSpec | None).decode


HEADER = struct.Struct("<IQ")  # body length in bytes, request id

_FIXARRAY, _BIN32, _MAP32 = 0x90, b"\xc6", b"\xdf"
_PACKED = frozenset({"tokens", "token_ends"})
_LARGE, _ALIGNMENT = 1 << 16, 16
_PADDING: tuple[bytes, ...] = (encode(""), bytes([_FIXARRAY | 2]))
_encoder = msgspec.msgpack.Encoder()


def frame(request_id: int, message: msgspec.Struct | None) -> bytearray:
    """``message`` with its header, ready to be sent."""
    data = bytearray(HEADER.size)
    _encoder.encode_into(message, data, HEADER.size)
    HEADER.pack_into(data, 0, len(data) - HEADER.size, request_id)
    return data


def pieces(request_id: int, reply: Reply) -> Sequence[Data | bytearray]:
    """The frame of ``reply``, in pieces: the samples of a request are sent from where they lie."""
    if not isinstance(reply, Tokenized):
        return [frame(request_id, reply)]

    body: list[Data] = [bytes([_FIXARRAY | 1 + len(reply.__struct_fields__)]), encode(Tokenized.__name__)]
    for name, value in msgspec.structs.asdict(reply).items():
        if name == "columns":
            body += _columns_of(value, sum(map(len, body)))
        else:
            body += _binary(value) if name in _PACKED else [encode(value)]
    return [HEADER.pack(sum(map(len, body)), request_id), *body]


def _binary(data: Data) -> list[Data]:
    return [_BIN32 + len(data).to_bytes(4), data]


def _columns_of(columns: dict[str, Column], offset: int) -> list[Data]:
    """The columns, from this offset of the body on.

    Large ones are aligned by a column without a name before them, so that their reader needs no copy.
    """
    found: list[Data] = []
    num_columns, offset = len(columns), offset + 5
    for name, column in columns.items():
        head = encode(name) + bytes([_FIXARRAY | 2])
        if len(column.data) >= _LARGE:
            num_columns += 1
            filler = [*_PADDING, *_binary(bytes(-(offset + 12 + len(head) + 5) % _ALIGNMENT)), *_binary(b"")]
            found += filler
            offset += sum(map(len, filler))
        entry = [head, *_binary(column.data), *_binary(column.ends)]
        found += entry
        offset += sum(map(len, entry))
    return [_MAP32 + num_columns.to_bytes(4), *found]
