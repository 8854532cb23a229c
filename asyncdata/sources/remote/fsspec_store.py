"""Everything else that fsspec knows, such as ``oss://`` and ``hdfs://``: for stores that obstore cannot read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from asyncdata.core.digest import digest
from asyncdata.core.errors import ConfigError
from asyncdata.core.file_refs import Address
from asyncdata.sources.remote.address import GivenAddress
from asyncdata.sources.remote.store import ObjectStamp, Store, StoreError

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
