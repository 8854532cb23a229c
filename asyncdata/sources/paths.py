"""Resolves a path, a glob, a folder or a list to files, and explains why a file cannot be read."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from asyncdata.sources.splits import Splits

_HUB_NAME = re.compile(r"[\w-]+/[\w.-]*[\w-]")


def find_files(
    paths: str | Sequence[str],
    *suffixes: tuple[str, ...],
    allow_repeats: bool = False,
    splits: Splits | None = None,
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

    hint = f". {_from_the_hub(path)}" if error.errno == errno.ENOENT and _HUB_NAME.fullmatch(path) else ""
    return f"AD304 cannot read {path}: {error.strerror or error}{hint}"


def _from_the_hub(name: str) -> str:
    return f"If it is a data set on the Hugging Face hub, pass HuggingFaceSource({name!r}, split='train')"
