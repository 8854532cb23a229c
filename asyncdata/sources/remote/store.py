"""What a store does, and how one is opened: by an import path, in the process that reads. And what reads the stores
that fsspec knows, such as ``oss://`` and ``hdfs://``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, Self

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import Address, FileRef, ObjectsOfStore, digest
from asyncdata.core.messages import ReadLimits, StoreSpec
from asyncdata.core.settings import prepared, resolve_path
from asyncdata.sources.paths import GivenAddress

STORE_OF_SCHEME = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"),
    "asyncdata.sources.remote.obstore_store:ObstoreStore",
)
"""The import path of the class that opens a bucket, by the scheme of its address; others are known to fsspec."""
STORE_OF_SCHEME["hf"] = "asyncdata.sources.remote.hub_store:HubStore"
_ANY_SCHEME = "asyncdata.sources.remote.store:FsspecStore"


class ObjectStamp(msgspec.Struct, frozen=True):
    """An object as it was at the start: every read must find the same etag and version.

    :ivar etag: as the store gives it, with its quotes; empty if it gives none.
    :ivar version: of a bucket with versions; empty otherwise.
    :ivar mtime_ns: when it was written, in nanoseconds; 0 if that is not known.
    :ivar store: the number of its store in ``Job.stores``.
    """

    address: Address
    num_bytes: int
    etag: str = ""
    version: str = ""
    mtime_ns: int = 0
    store: int = 0

    @property
    def path(self) -> str:
        """The address as text."""
        return str(self.address)

    @classmethod
    def of(cls, file: FileRef) -> Self:
        """The stamp of such a file."""
        assert file.pin is not None, "it is an object of a store"
        pin = file.pin
        return cls(pin.address, file.num_bytes, pin.etag, pin.version, file.mtime_ns, pin.store)

    @property
    def identity(self) -> str:
        """How an error names this state of the object."""
        version = f", version {self.version}" if self.version else ""
        return f"{self.num_bytes} bytes, etag {self.etag or '(none)'}{version}"


def collected(stamps: Iterable[ObjectStamp], store: int) -> ObjectsOfStore:
    """The objects, of store ``store``, in columns."""
    found = ObjectsOfStore()
    for stamp in stamps:
        found.add(store, stamp.address, stamp.num_bytes, stamp.etag, stamp.version, stamp.mtime_ns)
    return found


def quoted(etag: str) -> str:
    """The etag as headers have it: listings of Azure, and manifests, leave out the quotes."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag


class StoreError(Exception):
    """One failed request to a store.

    :ivar kind: ``transient`` (another try may succeed), ``changed`` (the object is another one), ``missing``,
        ``denied``, ``elsewhere`` (it is redirected to where a server may not send us), or ``permanent``.
    :ivar request_id: by which the store's operator finds the request; empty if it gave none.
    :ivar retry_after_s: how long the store asks to wait; 0 if it does not say.
    :ivar is_throttled: whether it asks for fewer requests.
    """

    def __init__(
        self, kind: str, message: str, *, request_id: str = "", retry_after_s: float = 0.0, is_throttled: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.is_throttled = is_throttled


def kind_of_status(status: int) -> str:
    """The kind of :class:`StoreError` of a request that http has refused."""
    kinds = {401: "denied", 403: "denied", 404: "missing", 412: "changed", 416: "changed"}
    return kinds.get(status, "transient" if status in {408, 425, 429} or status >= 500 else "permanent")


def is_throttled(status: int) -> bool:
    """Whether this status of http asks for fewer requests."""
    return status in {429, 503}


class Store(Protocol):
    """An open bucket. Each method makes one try; :class:`~asyncdata.sources.remote.reads.Reads` makes many reads at a
    time, and tries again. Any thread may call any method.
    """

    def pinned(self, key: str) -> str:
        """The key by which the content can never change, where the store has such: that of a commit. Otherwise ``key``.

        :raises StoreError: if the store cannot be asked.
        """
        return key

    def list(self, prefix: str) -> Iterable[ObjectStamp]:
        """The objects whose keys begin with ``prefix``, each once, in any order.

        :raises StoreError: if they cannot be listed; also by the iterator.
        """

    def head(self, key: str) -> ObjectStamp:
        """The state of one object now.

        :raises StoreError: if it cannot be looked at.
        """

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)`` of the object as it was when it was stamped.

        :raises StoreError: if they cannot be read; ``changed`` if the object is another one now.
        """

    def write(self, key: str, data: bytes) -> None:
        """Write the object in one step: a reader sees all of it, or what was there before.

        :raises StoreError: if it cannot be written.
        """

    def copy(self, key: str, to: str) -> None:
        """Copy the object ``key`` to the key ``to``.

        :raises StoreError: if it cannot be copied; ``missing`` if there is none.
        """

    def close(self) -> None:
        """Close connections, unless the library of the store does so."""


def store_spec(given: GivenAddress, storage_options: Mapping[str, Any]) -> StoreSpec:
    """How to open the bucket of an address.

    :param storage_options: passed through to the store, but for the fields of
        :class:`~asyncdata.core.messages.ReadLimits`, and ``store``, the import path of another class for it.
    :raises ConfigError: for a limit that is out of range.
    """
    path = storage_options.get("store") or STORE_OF_SCHEME.get(given.address.scheme, _ANY_SCHEME)
    own = {name: value for name, value in storage_options.items() if name in ReadLimits.__struct_fields__}
    try:
        limits = msgspec.convert(own, prepared(ReadLimits))
    except msgspec.ValidationError as error:
        raise ConfigError(f"storage_options: {error}") from error

    options = {name: value for name, value in storage_options.items() if name not in own and name != "store"}
    return StoreSpec(path, given.url, options, limits)


def open_store(spec: StoreSpec) -> Store:
    """Open the bucket, in the process that reads it."""
    store: Store = resolve_path(spec.path)(spec.url, spec.options)
    return store


# What fsspec knows

_TAGS = ("etag", "checksum", "sha256", "md5hash", "content_md5", "crc32c", "md5")
_VERSIONS = ("versionid", "version_id", "generation")
_TIMES = ("mtime", "lastmodified", "last_modified", "updated", "modified", "timemodified", "created")
_PASSING = frozenset({"ClientError", "TransportError", "HTTPException", "RequestException", "ConnectionError"})


class FsspecStore(Store):
    """See :class:`~asyncdata.sources.remote.store.Store`.

    fsspec has no read of a version. So an object is looked at again after each read, which costs a further request.

    :param url: the bucket's address.
    :param options: the keyword arguments of the file system.
    :raises ConfigError: AD310 if fsspec does not know the scheme; AD342 if a package is missing or refuses an option.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._root = GivenAddress.parse(url).address
        scheme = self._root.scheme
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(scheme, **{"skip_instance_cache": True, **options})
        except ImportError as error:
            raise ConfigError(f"AD342 {scheme}:// needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"AD310 no store is known for {self._root.root}: neither obstore nor fsspec knows {scheme}://. Mount "
                "the store, copy the files, or name a class for it: storage_options={'store': 'package.module:Class'}"
            ) from error
        except TypeError:  # its message may show the value of a setting
            raise ConfigError(
                f"AD342 the file system of {scheme}:// refuses storage_options ({', '.join(sorted(options))})"
            ) from None
        except OSError as error:  # of a library that the package needs, such as Java's for hdfs://
            raise ConfigError(
                f"AD342 {scheme}:// cannot be opened: {str(error).splitlines()[0]}; install what its package "
                "needs, or mount the store"
            ) from error

    def list(self, prefix: str) -> Iterable[ObjectStamp]:
        folder = self._path(prefix.rpartition("/")[0])
        top = self._path("").rstrip("/")
        with self._refusing():
            self._files.invalidate_cache()
            found = [
                self._stamp(path[len(top) :].lstrip("/"), info)
                for path, info in self._files.find(folder, detail=True).items()
            ]
        return [stamp for stamp in found if stamp.address.key.startswith(prefix)]

    def head(self, key: str) -> ObjectStamp:
        path = self._path(key)
        with self._refusing():
            self._files.invalidate_cache(self._files._parent(path))  # noqa: SLF001 - fsspec's own way to say "its folder"
            return self._stamp(key, self._files.info(path))

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        with self._refusing():
            data: bytes = self._files.cat_file(self._path(found.address.key), start=start, end=stop)
        now = self.head(found.address.key)
        if (now.num_bytes, now.etag, now.version) != (found.num_bytes, found.etag, found.version):
            raise StoreError("changed", f"it is now another object: {now.identity}")

        if len(data) != stop - start:
            raise StoreError("transient", f"{len(data)} bytes were read instead of {stop - start}")

        return data

    def write(self, key: str, data: bytes) -> None:
        with self._refusing():
            self._files.pipe_file(self._path(key), data)

    def copy(self, key: str, to: str) -> None:
        with self._refusing():
            self._files.cp_file(self._path(key), self._path(to))

    def _path(self, key: str) -> str:
        stripped: str = self._files._strip_protocol(f"{self._root.root}/{key}")  # noqa: SLF001 - what url_to_fs uses
        return stripped

    def _stamp(self, key: str, info: Mapping[str, Any]) -> ObjectStamp:
        """The object, by what the file system says of it.

        :raises StoreError: if it says nothing that differs after a change.
        """
        given = {name.lower(): value for name, value in info.items()}
        tag = next((f"{name}:{given[name]}" for name in _TAGS if given.get(name)), "")
        version = next((str(given[name]) for name in _VERSIONS if given.get(name)), "")
        mtime_ns = next((_nanoseconds(given[name]) for name in _TIMES if given.get(name)), 0)
        if not (tag or version or mtime_ns):
            raise StoreError(
                "permanent",
                f"AD343 {self._root.scheme}:// gives no etag, checksum or time of an object (only "
                f"{', '.join(sorted(given))}), so that a change could not be noticed; copy the files to another store",
            )

        tag = tag or ("" if version else f"time:{mtime_ns}")
        return ObjectStamp(
            Address(self._root.scheme, self._root.bucket, key), int(info["size"]), tag, version, mtime_ns
        )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise StoreError("missing", "there is no such object") from None
        except PermissionError as error:
            raise StoreError("denied", error.strerror or "it may not be read") from None
        except StoreError:
            raise
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            kind = "transient" if isinstance(error, OSError) or names & _PASSING else "permanent"
            raise StoreError(kind, type(error).__name__) from error


def _nanoseconds(time: Any) -> int:
    """A time as file systems give it, to the microsecond: a datetime, seconds, or text."""
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return int(digest(time)[:14], 16)  # no time to reckon with, but another one after a change
    seconds = time.timestamp() if isinstance(time, datetime) else float(time)
    return round(seconds * 1e6) * 1000
