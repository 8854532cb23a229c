"""Lines in files, folders and stores that grow: what each epoch covers, and how workers learn of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from asyncdata.core.errors import ConfigError, SourceChangedError, SourceError, get_logger
from asyncdata.core.files import TemporaryFolder
from asyncdata.core.identity import FileRef, base_name
from asyncdata.core.messages import LINES, REMOTE_LINES, Job, ReadCounts, ReaderSpec, StoreSpec
from asyncdata.core.settings import Count, Number, prepared, resolve_path
from asyncdata.sources.base import FileBlocks
from asyncdata.sources.files import data_fingerprint, file_digest, stamp

_log = get_logger(__name__)
_PIECE_BYTES = 1 << 16


class SavedListing(msgspec.Struct, frozen=True):
    """What an epoch covers.

    :ivar files: of each file or object, in their order: its name, the bytes that are covered, and the digest of these.
    """

    epoch: Number
    files: list[tuple[str, Count, str]]


GrowthState = list[SavedListing]
"""What a snapshot keeps: the listings of the epochs that have begun, or of the one that begins."""


class Listing(NamedTuple):
    """What an epoch covers, as files, as a fingerprint, and as a snapshot keeps it."""

    refs: list[FileRef]
    fingerprint: dict[str, Any]
    saved: list[tuple[str, int, str]]

    @classmethod
    def of(cls, refs: list[FileRef]) -> Listing:
        """The listing of these files."""
        return cls(refs, data_fingerprint(refs), [(base_name(ref.path), ref.num_bytes, ref.digest) for ref in refs])


class GrowingBlocks(FileBlocks):
    """Files whose rows an epoch covers as far as they are there, in whole lines, when it begins to be read.

    A file keeps its number, and a row its offset: new files come after those that were there.

    :param found: the files, or objects, as they are now; ``find`` finds them again.
    :param shared: the folder in which ranks agree on what an epoch covers: the first one to get there writes it. Empty:
        there is one rank.
    :raises SourceError: if there is no whole line.
    """

    def __init__(
        self,
        found: Iterable[FileRef],
        block_bytes: int,
        max_row_bytes: int,
        reader: ReaderSpec | None,
        stores: Sequence[StoreSpec],
        find: Callable[[], Iterable[FileRef]],
        shared: str,
    ) -> None:
        refs = [_extended(ref, None) for ref in found]
        if not any(ref.num_bytes for ref in refs):
            raise SourceError(
                f"AD201 no whole line yet in {len(refs)} files: {', '.join(ref.path for ref in refs[:5])}"
            )

        super().__init__(refs, block_bytes, max_row_bytes, reader, stores)
        self._find, self._shared = find, shared
        self._lock = threading.Lock()
        self._first = 0  # of earlier epochs it is not known any more what they covered
        self._base, self._is_new = Listing.of(refs), True
        self._listings: dict[int, Listing] = {}
        self._opened: FileBlocks | None = None
        self._num_told = 0
        self._folder = TemporaryFolder("grows")
        inner = reader or (REMOTE_LINES if stores else LINES)
        told = os.path.join(self._folder.path, "files")
        self.reader = ReaderSpec(
            "asyncdata.sources.growing:GrowingReader", {"listing": told, "inner": inner.path}, tag="growing"
        )
        self._tell(refs)

    def at(self, epoch: int) -> FileBlocks:
        """What ``epoch`` covers. It is looked up when this is asked first; then it never changes.

        :raises SourceChangedError: if what was there before has changed.
        """
        with self._lock:
            found = self._listings.get(epoch)
            if found is None:
                before = list(self.refs)
                refs = before if self._is_new else self._grown(before)
                refs = self._agreed(epoch, refs, [] if self._is_new else before) if self._shared else refs
                if epoch > max(self._listings, default=-1):  # else the workers know more
                    self._tell(refs)
                found = Listing.of(refs)
                self._listings, self._is_new = {**self._listings, epoch: found}, False
                num_bytes = sum(ref.num_bytes for ref in refs)
                _log.info("source.listed", epoch=epoch, num_files=len(refs), num_bytes=num_bytes)
            if self._opened is None or self._opened.refs is not found.refs:
                self._opened = FileBlocks(found.refs, self.block_bytes, self.max_row_bytes, self.reader)
            return self._opened

    def check_known(self, epoch: int) -> None:
        """Whether ``epoch`` would cover what it has covered, if it has begun before.

        :raises ConfigError: AD311, if that is not known any more.
        """
        if epoch < self._first and not self._shared:
            raise ConfigError(
                f"AD311 set_epoch({epoch}): what that epoch covered is not known any more. A state keeps that of its "
                f"own epoch, here {self._first}, and of later ones. All are kept by a folder, "
                'JsonlSource(..., grows="run/files"); or begin anew with a new loader'
            )

    def _grown(self, before: list[FileRef]) -> list[FileRef]:
        """The present files: the earlier ones in their order, and then the new ones."""
        FileBlocks(before, self.block_bytes, self.max_row_bytes).check_unchanged()
        now: dict[str, FileRef | None] = {ref.path: ref for ref in self._find()}
        refs = []
        for old in before:
            ref = now.pop(old.path, None)
            if ref is None or (old.pin is not None and ref.digest != old.digest):
                raise SourceChangedError(
                    f"AD303 {old.path} {'is gone' if ref is None else 'is another object now'}; with grows, what an "
                    "epoch has had stays: put it back, or start a new run"
                )

            refs.append(_extended(ref, old))
        return [*refs, *(_extended(ref, None) for ref in now.values() if ref is not None)]

    def _agreed(self, epoch: int, refs: list[FileRef], before: list[FileRef]) -> list[FileRef]:
        """What the first rank has written of this epoch; this one writes it if it is the first."""
        path = os.path.join(os.path.expanduser(self._shared), f"epoch-{epoch}.files")
        own = f"{path}.{uuid4().hex}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(own, "xb") as file:
                file.write(msgspec.msgpack.encode(refs))
                os.fsync(file.fileno())
            try:
                with suppress(FileExistsError):
                    os.link(own, path)  # whole, or not at all
            finally:
                os.unlink(own)
            with open(path, "rb") as file:
                found = msgspec.msgpack.decode(file.read(), type=prepared(list[FileRef]))
        except (OSError, UnicodeEncodeError, msgspec.DecodeError) as error:
            raise SourceError(f"AD311 the ranks cannot agree by {path} what epoch {epoch} covers: {error}") from error

        here, paths = {ref.path for ref in self._find()}, [ref.path for ref in found]
        # Of an earlier epoch there are fewer.
        is_other = any(path != ref.path for path, ref in zip(paths, before, strict=False))
        if is_other or not here.issuperset(paths):
            raise SourceChangedError(
                f"AD311 {path} was written by a rank, or a run, that has other files than this one, or in another "
                f"order: {len(paths)} files, of which the first is {paths[0]}; here {len(refs)} files, of which the "
                f"first is {refs[0].path}. Give each run a folder of its own, and all its ranks the same state"
            )

        return list(map(_as_here, found))

    def _tell(self, refs: list[FileRef]) -> None:
        """Tell the workers, before a request names what is new."""
        self.files = self.refs = refs
        path, self._num_told = self.reader.settings["listing"], self._num_told + 1
        try:
            with open(f"{path}.new", "wb") as file:
                file.write(msgspec.msgpack.encode(refs))
            os.utime(f"{path}.new", ns=(self._num_told,) * 2)  # clocks are coarse: by this, workers notice it
            os.replace(f"{path}.new", path)
        except (OSError, UnicodeEncodeError) as error:  # names of objects may be any text
            raise SourceError(f"AD311 the workers cannot be told by {path} which files there are: {error}") from error

    def close(self) -> None:
        """Remove what tells the workers."""
        self._folder.close()

    # What a snapshot keeps.

    def fingerprint(self, found: dict[int, Listing] | None = None) -> dict[str, Any]:
        """The first epoch whose listing is kept; or the one that :meth:`matched` has found."""
        listings = found or self._listings
        return listings[min(listings)].fingerprint if listings else self._base.fingerprint

    def saved(self, epoch: int) -> GrowthState:
        """The state of a restart in ``epoch``; listings that it does not need are forgotten."""
        with self._lock:
            known = self._listings or {epoch: self._base}  # as at() begins with it
            first = epoch if epoch in known else max((one for one in known if one < epoch), default=min(known))
            known = {one: known[one] for one in sorted(known) if one >= first}
            if self._listings:
                self._listings, self._first = known, max(self._first, min(known))
        return [SavedListing(one, listing.saved) for one, listing in known.items()]

    def matched(self, saved: GrowthState) -> dict[int, Listing] | None:
        """The listings of a snapshot; None if what they cover is not there any more. Nothing changes."""
        unused: dict[str, list[FileRef]] = {}
        for ref in self._find():
            unused.setdefault(base_name(ref.path), []).append(ref)
        files: list[FileRef] = []
        found: dict[int, Listing] = {}
        for listing in sorted(saved, key=lambda one: one.epoch):
            refs = []
            for number, (name, num_bytes, digest) in enumerate(listing.files):
                among = files[number : number + 1] or unused.get(name, [])
                here = next((one for one in among if _covers(one, num_bytes, digest)), None)
                if here is None:
                    return None

                if number == len(files):
                    files.append(here)
                    unused[name].remove(here)
                refs.append(replace(here, num_bytes=num_bytes, digest=digest))
            found[listing.epoch] = Listing.of(refs)
        return found or None

    def take(self, found: dict[int, Listing]) -> None:
        """Continue with these listings."""
        with self._lock:
            self._listings, self._is_new, self._first = found, False, min(found)
            self._tell(self._listings[max(self._listings)].refs)


def _extended(now: FileRef, before: FileRef | None) -> FileRef:
    """A file as far as it has whole lines; an object as it is."""
    if now.pin is not None:
        return now if before is None else before

    start = 0 if before is None else before.num_bytes
    end = _end_of_lines(now.path, start, now.num_bytes)
    if before is not None and end == start:
        return before

    return replace(now, num_bytes=end, digest=file_digest(now.path, end))


def _end_of_lines(path: str, start: int, stop: int) -> int:
    """Where the last whole line ends in ``[start, stop)``, of which ``start`` is the end of one."""
    try:
        with open(path, "rb", buffering=0) as file:
            while stop > start:
                first = max(start, stop - _PIECE_BYTES)
                found = os.pread(file.fileno(), stop - first, first).rfind(b"\n")
                if found >= 0:
                    return first + found + 1

                stop = first
    except OSError as error:
        raise SourceError(f"AD304 cannot read {path}: {error.strerror or error}") from error

    return start


def _covers(ref: FileRef, num_bytes: int, digest: str) -> bool:
    if ref.pin is not None:
        return (ref.num_bytes, ref.digest) == (num_bytes, digest)

    return ref.num_bytes >= num_bytes and file_digest(ref.path, num_bytes) == digest


def _as_here(ref: FileRef) -> FileRef:
    """A file that another rank has listed, as this one sees it."""
    if ref.pin is not None:
        return ref

    if file_digest(ref.path, ref.num_bytes) != ref.digest:
        raise SourceChangedError(f"AD303 {ref.path} has other content here than for the rank that has listed it")

    return replace(stamp(ref.path), num_bytes=ref.num_bytes, digest=ref.digest)


class GrowingReader:
    """The :class:`~asyncdata.sources.files.BlockReader`, or ``WideReader``, of a source that grows.

    :param listing: the file that has the files; it is replaced when there are more.
    :param inner: the import path of the reader of lines.
    """

    def __init__(self, job: Job, listing: str, inner: str) -> None:
        self._job, self._listing, self._inner = job, listing, resolve_path(inner)
        self._watch: tuple[Callable[[], object], ReadCounts] | None = None
        self._seen = 0
        self._reader: Any = None
        self._now()

    def _now(self) -> Any:
        if os.stat(self._listing).st_mtime_ns != self._seen:
            if self._reader is not None:
                self._reader.check()
            with open(self._listing, "rb") as file:
                self._seen = os.fstat(file.fileno()).st_mtime_ns
                files = msgspec.msgpack.decode(file.read(), type=prepared(list[FileRef]))
            if self._reader is not None:
                self._reader.close()
            self._reader = self._inner(replace(self._job, files=files))
            if self._watch is not None:
                self._reader.watch(*self._watch)
        return self._reader

    def __getattr__(self, name: str) -> Any:
        """Everything else is asked of the reader of the present files."""
        return getattr(self._now(), name)

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        """Watch the requests of this reader and of those that replace it."""
        self._watch = on_progress, counts
        self._reader.watch(on_progress, counts)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
