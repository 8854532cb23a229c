"""Content digests that must match for a snapshot to fit: of files, of settings, and what differs, in words.

Digests are pinned in tests for ever: a changed one would refuse every snapshot there is.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from asyncdata.core.errors import SourceChangedError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = (
    "MAX_LISTED_FILES",
    "FileStamp",
    "WHOLE_BYTES",
    "SizedFile",
    "canonical",
    "content_changes",
    "content_digest",
    "data_fingerprint",
    "describe_change",
    "digest",
    "file_digest",
    "find_changes",
    "setting_of",
    "stamp",
    "stamp_of",
)

MAX_LISTED_FILES = 1000
"""With more files than this, a fingerprint holds their combined digest alone: snapshots stay small."""

_EDGE_BYTES = 64 << 10
_BLOCK_BYTES = 4 << 10
_NUM_BLOCKS = 16
WHOLE_BYTES = 2 * _EDGE_BYTES + _NUM_BLOCKS * _BLOCK_BYTES
"""A file of no more bytes is digested whole."""

_MAX_WORDS = 10


class SizedFile(Protocol):
    """A file as it was when the run began: :class:`FileStamp` and ``wire.FileRef`` both are."""

    @property
    def path(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


class FileStamp(msgspec.Struct, frozen=True):
    """What ``stat`` says of a file; two equal stamps are the same unchanged file of this machine."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0


def stamp(path: str) -> FileStamp:
    """The file's stamp now.

    :raises SourceError: if it cannot be looked at.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error

    return stamp_of(path, found)


def stamp_of(path: str, found: os.stat_result) -> FileStamp:
    """The same, of what ``stat`` said."""
    return FileStamp(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def digest(*parts: bytes | str) -> str:
    """blake2b-128 of the parts, as hex. Each part's length is hashed too: ("ab", "c") is not ("a", "bc")."""
    state = blake2b(digest_size=16)
    for part in parts:
        # File names and row text may hold lone surrogates, which strict UTF-8 refuses.
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def canonical(value: Any) -> bytes:
    """The one encoding of a value made of builtins: JSON with sorted keys. Tuples and lists are alike.

    :raises TypeError: for values JSON cannot hold, and keys that are not text.
    :raises ValueError: for text that is no UTF-8.
    """
    return msgspec.json.encode(value, order="deterministic")


def file_digest(path: str, num_bytes: int) -> str:
    """Digest of a sample of the file's first ``num_bytes`` bytes: its size, both ends, and blocks between them.

    Files up to 192 KiB are read whole. Where the blocks lie follows from the size alone.

    :raises SourceChangedError: if the file is shorter.
    :raises SourceError: if it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return content_digest(fd, path, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from error


def content_digest(fd: int, path: str, num_bytes: int) -> str:
    """:func:`file_digest` of a file that is open.

    :raises SourceChangedError: if the file is shorter.
    :raises OSError: if it cannot be read.
    """
    return digest(str(num_bytes), *(_read(fd, path, *piece, num_bytes) for piece in _pieces(num_bytes)))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is sampled."""
    if num_bytes <= WHOLE_BYTES:
        yield 0, num_bytes
        return

    yield 0, _EDGE_BYTES
    between = num_bytes - 2 * _EDGE_BYTES
    for number in range(_NUM_BLOCKS):
        yield _EDGE_BYTES + between * number // _NUM_BLOCKS, _BLOCK_BYTES
    yield num_bytes - _EDGE_BYTES, _EDGE_BYTES


def _read(fd: int, path: str, offset: int, length: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(fd, length, offset)
        if not piece:
            found = os.fstat(fd).st_size
            raise SourceChangedError(
                f"AD302 {path} is not the file it was: expected {num_bytes} bytes, found {found}; "
                "put the file back, or start a new run on the new one"
            )

        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _unreadable(path: str, error: OSError) -> SourceError:
    code = "AD304" if isinstance(error, FileNotFoundError) else "AD305"
    return SourceError(f"{code} {path} cannot be read: {error.strerror}; check the path and its permissions")


def data_fingerprint(files: Sequence[SizedFile], digests: Sequence[str] | None = None) -> dict[str, Any]:
    """What the files are, by name, size and content sample, in their order; their folder does not matter.

    ``{"num_files", "num_bytes", "digest", "files": [[name, num_bytes, digest], ...]}``. Above
    :data:`MAX_LISTED_FILES`, ``files`` is empty, and ``content`` is a digest of the same without the names.

    :param digests: of the files' content, where that is known; empty for a file that has to be read.
    :raises SourceError: as :func:`file_digest`.
    """
    combined, nameless = blake2b(digest_size=16), blake2b(digest_size=16)
    listed: list[list[Any]] = []
    for file, known in zip(files, digests or [""] * len(files), strict=True):
        entry = [_name(file.path), file.num_bytes, known or file_digest(file.path, file.num_bytes)]
        combined.update(bytes.fromhex(digest(canonical(entry))))
        if len(files) <= MAX_LISTED_FILES:
            listed.append(entry)
        else:  # what is listed tells the content without the names as well
            nameless.update(bytes.fromhex(digest(canonical(entry[1:]))))

    num_bytes = sum(file.num_bytes for file in files)
    content = {} if len(files) <= MAX_LISTED_FILES else {"content": nameless.hexdigest()}
    found = {"num_files": len(files), "num_bytes": num_bytes, "digest": combined.hexdigest(), "files": listed}
    return found | content


def _name(path: str) -> str:
    """The file's own name. Names that are no UTF-8 are escaped, so that any file can be written down."""
    return os.fsencode(os.path.basename(path)).decode("utf-8", "backslashreplace")


_KINDS = ("data", "tokenizer", "template", "tokenize_fn")
_SHORT = 100
_EFFECTS = {
    "data": "the saved position would point at other rows",
    "tokenizer": "the samples to come would have other tokens than those delivered",
    "template": "the prompts to come would be rendered otherwise than those delivered",
    "tokenize_fn": "the rows to come would become other samples",
    "seed": "the rows would come in another order, some a second time and some not at all",
    "order": "the rows would come in another order, some a second time and some not at all",
}


def find_changes(
    saved_order: Mapping[str, Any],
    saved_fingerprints: Mapping[str, Any],
    order: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
) -> dict[str, tuple[Any, Any]]:
    """``{what: (saved, present)}``; what is data, tokenizer, template, tokenize_fn, seed, or ``order.`` and a setting.

    A fingerprint that either side does not know (None, absent) differs from none. Counts of the data (``order.num_*``)
    follow from the rest, so that they are named only if nothing else explains them.
    """
    pairs = {name: (saved_fingerprints.get(name), fingerprints.get(name)) for name in _KINDS}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] is not None and pair[1] is not None}
    for name in sorted(saved_order.keys() | order.keys()):
        pairs["seed" if name == "seed" else f"order.{name}"] = (saved_order.get(name), order.get(name))

    changes = {name: pair for name, pair in pairs.items() if _text(_identity(pair[0])) != _text(_identity(pair[1]))}
    counts = {name for name in changes if name.startswith("order.num_")}
    explained = any(name == "data" or name.startswith("order.") for name in changes.keys() - counts)
    return {name: pair for name, pair in changes.items() if not (explained and name in counts)}


def setting_of(change: str) -> str:
    """What has to be allowed for this change: ``order.block_bytes`` comes under ``order``, a count under ``data``."""
    return "data" if change.startswith("order.num_") else change.partition(".")[0]


def describe_change(change: str, saved: Any, present: Any) -> str:
    """One line: what differs, both values, and what would come of it."""
    words = _data_changes(saved, present) if change == "data" else []
    what = "; ".join(words) or f"saved {_short(saved)}, present {_short(present)}"
    return f"{change}: {what}: {_EFFECTS[setting_of(change)]}"


def _identity(value: Any) -> Any:
    """Fingerprints with a digest are known by it, so that what is listed beside it may change."""
    return value["digest"] if isinstance(value, dict) and "digest" in value else value


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)  # not canonical(): text from a snapshot may hold lone surrogates
    except (TypeError, ValueError, RecursionError):
        return f"<a {type(value).__name__} that JSON cannot hold, at {id(value):#x}>"  # like nothing else: refused


def _short(value: Any) -> str:
    text = "(unset)" if value is None else _text(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


class _Fingerprint(msgspec.Struct):
    num_files: int
    num_bytes: int
    digest: str
    files: list[tuple[str, int, str]] = []
    content: str | None = None


def _data_changes(saved: Any, present: Any) -> list[str]:
    """A phrase for each file that differs, at most ten and a count of the rest."""
    pair = _fingerprints(saved, present)
    if pair is None:
        return []

    before, after = pair
    words = _file_changes(before, after) if before.files and after.files else []
    return _few(words or [f"{_size(before)} -> {_size(after)}, of other content"])


def _fingerprints(saved: Any, present: Any) -> tuple[_Fingerprint, _Fingerprint] | None:
    """None for what is no fingerprint of files: a source may have one of its own kind."""
    try:
        return msgspec.convert(saved, _Fingerprint), msgspec.convert(present, _Fingerprint)
    except (msgspec.ValidationError, UnicodeError):
        return None


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= _MAX_WORDS else [*words[:_MAX_WORDS], f"and {len(words) - _MAX_WORDS} more"]


def content_changes(saved: Any, present: Any) -> list[str]:
    """Why two fingerprints of data, whose names differ, are not known to be of the same rows; empty where they are.

    They are where the files have the same sizes and the same content, sampled, in the same order.
    """
    pair = _fingerprints(saved, present)
    if pair is None:
        return ["this kind of data is not known by its content"]

    before, after = pair
    if before.num_files != after.num_files:
        return [f"{before.num_files} -> {after.num_files} files"]

    if before.files and after.files:
        return _few(_content_changes(before, after))

    if before.content is None or after.content is None:
        return [f"{_size(before)}: the snapshot does not know their content apart from their names"]

    return [] if before.content == after.content else [f"{_size(before)} -> {_size(after)}, of other content"]


def _content_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    words = []
    for number, (old, new) in enumerate(zip(before.files, after.files, strict=False), 1):
        if old[1:] != new[1:]:
            was = f"file {number} was {old[0]} ({old[1]} bytes) and is {new[0]} ({new[1]} bytes)"
            words.append(was if old[1] != new[1] else f"{was}, of other content")
    return words


def _file_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    olds = {name: (num_bytes, sample) for name, num_bytes, sample in before.files}
    news = {name: (num_bytes, sample) for name, num_bytes, sample in after.files}
    if len(olds) != len(before.files) or len(news) != len(after.files):
        return _place_changes(before, after)

    words = [_change(name, olds[name], news[name]) for name in olds if name in news and olds[name] != news[name]]
    words += [f"{name} is missing" for name in olds if name not in news]
    words += [f"{name} is new" for name in news if name not in olds]
    if not words and list(olds) != list(news):
        words = [f"the files come in another order ({', '.join(list(olds)[:3])} -> {', '.join(list(news)[:3])})"]
    return words


def _place_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    """Where names repeat, as in ``a/train.jsonl b/train.jsonl``, a file is known by its place."""
    words = [] if before.num_files == after.num_files else [f"{before.num_files} -> {after.num_files} files"]
    for number, (old, new) in enumerate(zip(before.files, after.files, strict=False), 1):
        if old[0] != new[0]:
            words.append(f"file {number} was {old[0]} and is {new[0]}")
        elif old != new:
            words.append(_change(f"{new[0]} (file {number})", old[1:], new[1:]))
    return words


def _change(name: str, old: tuple[int, str], new: tuple[int, str]) -> str:
    if old[0] != new[0]:
        return f"{name} size {old[0]} -> {new[0]} bytes"

    return f"{name} has other content (size {new[0]} as before)"


def _size(fingerprint: _Fingerprint) -> str:
    return f"{fingerprint.num_files} files of {fingerprint.num_bytes} bytes"
