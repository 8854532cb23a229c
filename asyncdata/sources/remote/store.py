"""What a store does, and how one is opened: by an import path, in the process that reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.file_refs import Address, FileRef, ObjectsOfStore
from asyncdata.core.imports import resolve_path
from asyncdata.core.messages import ReadLimits, StoreSpec
from asyncdata.core.settings import prepared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncdata.sources.remote.address import GivenAddress

STORE_OF_SCHEME = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"),
    "asyncdata.sources.remote.obstore_store:ObstoreStore",
)
"""The import path of the class that opens a bucket, by the scheme of its address; others are known to fsspec."""
STORE_OF_SCHEME["hf"] = "asyncdata.sources.remote.hub_store:HubStore"
_ANY_SCHEME = "asyncdata.sources.remote.fsspec_store:FsspecStore"


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
        ...

    def head(self, key: str) -> ObjectStamp:
        """The state of one object now.

        :raises StoreError: if it cannot be looked at.
        """
        ...

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)`` of the object as it was when it was stamped.

        :raises StoreError: if they cannot be read; ``changed`` if the object is another one now.
        """
        ...

    def write(self, key: str, data: bytes) -> None:
        """Write the object in one step: a reader sees all of it, or what was there before.

        :raises StoreError: if it cannot be written.
        """
        ...

    def copy(self, key: str, to: str) -> None:
        """Copy the object ``key`` to the key ``to``.

        :raises StoreError: if it cannot be copied; ``missing`` if there is none.
        """
        ...

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
