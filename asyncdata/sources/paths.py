"""What a user passes for the data: paths, globs, folders and lists, and addresses of objects in stores. What is printed
of an address, or stored, gives no access.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import unquote

import msgspec

from asyncdata.core.errors import ConfigError, SourceError, redacted
from asyncdata.core.identity import HTTP, Address

if TYPE_CHECKING:
    from asyncdata.sources.splits import Splits


_HUB_NAME = re.compile(r"[\w-]+/[\w.-]*[\w-]")


def find_files(
    paths: str | Sequence[str], *suffixes: tuple[str, ...], allow_repeats: bool = False, splits: Splits | None = None
) -> tuple[list[str], list[str]]:
    """The files that ``paths`` name, in order, and the problems of paths without files.

    An existing path is used literally, even if it looks like a glob.

    :param suffixes: the suffixes of a folder's files, by priority: only files with the first suffix that occurs are
        used.
    :param allow_repeats: use a file as often as it is listed.
    :param splits: None: a folder of two is refused.
    :raises ConfigError: for a file that is listed twice without ``allow_repeats``.
    """
    found: list[str] = []
    faults: list[str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        with noting(path, faults):
            found += _expand(os.path.expanduser(path), suffixes, splits)
    faults += [
        f"AD304 cannot read {path}: its path is not UTF-8, in which workers are told of it; rename it"
        for path in map(os.path.abspath, found)
        if os.fsencode(path) != path.encode(errors="replace")
    ]
    if not allow_repeats:
        refuse_repeats(found, os.path.realpath)
    return found, faults


def _refuse_address(path: str) -> None:
    if re.match(r"[A-Za-z][\w+.-]+://", path):
        raise SourceError(
            f"AD310 {path} is an address, and only files of this machine's file systems are read: mount the store or "
            "copy the file, or stream it by datasets, with HuggingFaceSource"
        )


def _expand(path: str, suffixes: Sequence[tuple[str, ...]], splits: Splits | None) -> list[str]:
    if "\0" in path:
        raise SourceError(f"AD304 cannot read {path!r}: it has a NUL in it, which no path may have")

    if not os.path.lexists(path):
        _refuse_address(path)
    if os.path.isdir(path):
        from asyncdata.sources.splits import Splits, holds

        splits = splits or Splits()
        entries = sorted(entry for entry in os.listdir(path) if not entry.startswith("."))
        for suffix in suffixes:
            found = [os.path.join(path, name) for name in entries if name.endswith(suffix)]
            below = [name for name in entries if holds(os.path.join(path, name), suffix)]
            kept = splits.kept(path, list(map(os.path.abspath, found)), suffix[0], below)
            if found:
                return [found[number] for number in kept]

        raise SourceError(f"AD306 the folder {path} holds no *{suffixes[0][0]}; name the files, or a glob")

    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]

    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise SourceError(f"AD308 {path!r} matches nothing in {os.getcwd()}")

    return found


def refuse_repeats(paths: Iterable[str], identity: Callable[[str], str] = str) -> None:
    """Refuse a file or an object that is listed twice.

    :param identity: what two paths of one file have in common.
    :raises ConfigError: naming it.
    """
    seen: set[str] = set()
    for path in paths:
        one = identity(path)
        if one in seen:
            raise ConfigError(
                f"AD309 {path} is listed twice; its rows would come twice an epoch. List it once; or, if they are to, "
                "give the list to a source with allow_repeats=True"
            )

        seen.add(one)


def is_saved_dataset(path: str) -> bool:
    """Whether ``save_to_disk`` of the library datasets wrote the folder."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def open_regular(path: str) -> int:
    """A descriptor of the file, for reading.

    :raises SourceError: if it is not a regular file, which can be read again.
    :raises OSError: if it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO's open would wait for a writer
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd

    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    raise SourceError(f"AD306 {path} is no regular file; it could not be read again on resume")


@contextmanager
def noting(path: str, faults: list[str]) -> Iterator[None]:
    """Add to ``faults`` why a file cannot be read."""
    try:
        yield
    except SourceError as error:
        faults.append(str(error))
    except OSError as error:
        faults.append(_why_unreadable(path, error))


def _why_unreadable(path: str, error: OSError) -> str:
    """The message for a file that cannot be read."""
    if error.errno == errno.ENOENT and os.path.islink(path):
        return f"AD307 {path} -> {os.readlink(path)} (missing): a broken link"

    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"AD305 cannot read {path} as uid {os.getuid()}: {error.strerror}"

    hint = f". If it is a data set on the Hugging Face hub, pass HuggingFaceSource({path!r}, split='train')"
    hint = hint if error.errno == errno.ENOENT and _HUB_NAME.fullmatch(path) else ""
    return f"AD304 cannot read {path}: {error.strerror or error}{hint}"


# Addresses of objects

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_CUT_ADDRESS = re.compile(r"(?:s3a?|gs|az|abfss?|https?|hf):/[^/]")
_AT_COMMIT = re.compile(r"(hf:/{2}[^@]+)@([0-9a-f]{40})/")
_WITH_CONTAINER = frozenset({"abfs", "abfss"})  # of container@account; the container is no user


def is_address(path: str) -> bool:
    """Whether ``path`` begins as ``s3://`` does."""
    return _ADDRESS.match(path) is not None


def names_objects(paths: str | Sequence[str]) -> bool:
    """Whether ``paths`` are addresses of objects.

    :raises ConfigError: if only some of them are, or if they are no paths, or none.
    """
    are_addresses = {is_address(path) for path in texts_of(paths)}
    if len(are_addresses) > 1:
        raise ConfigError("AD320 some paths are addresses of objects, and others are files; a source reads one kind")

    return True in are_addresses


def texts_of(paths: str | Sequence[str]) -> list[str]:
    """The paths of a source, or its addresses, as a list.

    :raises ConfigError: if they are no paths, or none, or an address that lacks a slash.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in listed):
        raise ConfigError(f"the paths of a source are a path or a list of paths; got {paths!r}")

    if not listed:
        raise ConfigError("the list of a source's paths is empty: name at least one file, folder or glob")

    texts = [os.fspath(path) for path in listed]
    for text in texts:
        if _CUT_ADDRESS.match(text) and not os.path.lexists(text):
            raise ConfigError(f"AD320 {text!r} lacks a slash, as a Path leaves it out: give an address as text")

    return texts


def commits_in(paths: Iterable[str]) -> dict[str, str]:
    """The commits that addresses name: ``{"hf://datasets/user/name": commit}``."""
    found = filter(None, map(_AT_COMMIT.match, paths))
    return {match[1]: match[2] for match in found}


class GivenAddress(NamedTuple):
    """An address as a user gives it.

    :ivar url: the bucket's address with user, password and query: secret, for the store only.
    """

    address: Address
    url: str

    def __repr__(self) -> str:
        return f"GivenAddress({self.address})"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take an address apart. Only http has queries: in other stores, ``?`` and ``#`` are parts of a key.

        :raises ConfigError: if it names no bucket or host, or has credentials that its store does not read there.
        """
        found = _ADDRESS.match(text)
        if found is None:
            raise ConfigError("AD320 this is not an address of an object, as s3://bucket/key is")

        scheme, rest = found.group(1).lower(), text[found.end() :]
        query = ""
        if scheme in HTTP:
            rest, _, _ = rest.partition("#")
            rest, mark, query = rest.partition("?")
            query = mark + query
        authority, _, key = rest.partition("/")
        user, at, host = authority.rpartition("@")
        if scheme in _WITH_CONTAINER and ":" not in user:
            user, at, host = "", "", authority
        signature = "" if scheme in HTTP else key.partition("?")[2]
        if (user and scheme not in HTTP) or _is_cut_login(host) or redacted(signature) != signature:
            raise ConfigError(
                f"AD320 an address of {scheme}:// has credentials in it, which are not read there: pass them by "
                "storage_options, or by the environment, as the store's own tools read them"
            )

        if not host:
            raise ConfigError(f"AD320 {scheme}://... names no bucket or host: an address is {scheme}://bucket/key")

        address = Address(scheme, host.lower() if scheme in HTTP else host, unquote(key) if scheme in HTTP else key)
        return cls(address, f"{scheme}://{user}{at}{host}{query}")


def _is_cut_login(host: str) -> bool:
    """Whether this is what stands before a ``/`` in a password, and no host with a port."""
    _, colon, port = host.rpartition("]")[2].rpartition(":")
    return bool(colon) and not port.isdigit()


def without_secrets(path: str) -> str:
    """The path, or the address without user, password and query, and without what else may be a secret."""
    if not is_address(path):
        return path

    try:
        return redacted(str(GivenAddress.parse(path).address))
    except ConfigError:
        return "(an address)"


def shown(source: msgspec.Struct) -> str:
    """The ``repr`` of a source, with the names of its storage options only, and paths without secrets."""
    values = msgspec.structs.asdict(source)
    options = values.pop("storage_options")
    if options:
        values["storage_options"] = f"{{{', '.join(sorted(options))}}}"
    paths = values.pop("paths")
    texts = [without_secrets(str(path)) for path in (paths if isinstance(paths, list | tuple) else [paths])]
    fields = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(source).__name__}({(texts if isinstance(paths, list | tuple) else texts[0])!r}, {fields})"
