"""Resolves a path, a glob, a folder or a list to files, and explains why a file cannot be read. The splits of a folder
are told by the names of its files, as the Hugging Face hub does.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_log = get_logger(__name__)
_SPLITS = {"train": "train training", "validation": "validation valid dev val", "test": "test testing eval evaluation"}
_SPLIT_OF_WORD = {word: split for split, words in _SPLITS.items() for word in words.split()}
"""The words by which the hub tells splits in names of files and folders."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")


class Splits:
    """Which files of a folder are read: the files of one split, and of none.

    :param known: of data that grow, the files that were there before: new splits are left out, and that is logged once.
        Files that are read are added. None: two splits are refused.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._known = None if known is None else set(known)
        self._told: set[tuple[str, str]] = set()

    def kept(self, folder: str, paths: Sequence[str], suffix: str, below: Iterable[str]) -> list[int]:
        """The numbers of the files that are read.

        :param paths: the folder's files, in order, whose names end with ``suffix``.
        :param below: names of folders in it that have files, too.
        :raises SourceError: AD312, naming a glob of each split.
        """
        found = list(map(_split_of, paths))
        splits = {split: [path for path, its in zip(paths, found, strict=True) if its == split] for split in set(found)}
        left_out: set[str] = set()
        if self._known is None:
            _refuse_many(folder, splits, suffix, below)
        elif len(splits.keys() - {""}) > 1:
            left_out = {split for split, its in splits.items() if split and self._known.isdisjoint(its)}
            for split in sorted(left_out):
                if (folder, split) not in self._told:
                    self._told.add((folder, split))
                    more = {"num_files": len(splits[split]), "path": splits[split][0]}
                    _log.warning("source.split_left_out", folder=folder, split=split, **more)
        kept = [number for number, split in enumerate(found) if split not in left_out]
        if self._known is not None:
            self._known.update(paths[number] for number in kept)
        return kept


def _refuse_many(folder: str, splits: dict[str, list[str]], suffix: str, below: Iterable[str]) -> None:
    names = {split: [path.rpartition("/")[2] for path in its] for split, its in splits.items() if split}
    for name in sorted(below) if names or not splits else ():
        if split := _split_of(name):
            names.setdefault(split, []).append(f"{name}/*{suffix}")
    if len(names) > 1:
        folder = folder.rstrip("/")
        globs = ", ".join(f"paths='{folder}/{_glob(split, names, suffix)}'" for split in sorted(names))
        raise SourceError(
            f"AD312 the folder {folder} holds the splits {', '.join(sorted(names))}, and a run trains on one: name it, "
            f"{globs}; or all of its files, paths='{folder}/*{suffix}'"
        )


def _split_of(path: str) -> str:
    """The split that a file's or a folder's name tells, as on the hub; empty if it tells none, or several."""
    name = path.rpartition("/")[2]
    words = re.split(r"[-._ 0-9]+", name)
    found = {_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD}
    shard = _SHARD.match(name) if words[0] in _SPLIT_OF_WORD else None
    return "" if len(found) != 1 else shard[1] if shard else found.pop()


def _glob(split: str, names: dict[str, list[str]], suffix: str) -> str:
    """What matches the files of a split and no others; its first file, if nothing so simple does."""
    own, others = names[split], [name for other in names if other != split for name in names[other]]
    for glob_ in (f"{split}-*{suffix}", f"{split}*{suffix}", f"*{split}{suffix}"):
        if all(fnmatchcase(name, glob_) for name in own) and not any(fnmatchcase(name, glob_) for name in others):
            return glob_ if len(own) > 1 else own[0]
    return own[0]


def holds(folder: str, suffix: tuple[str, ...]) -> bool:
    """Whether a folder that is named as a split has such files."""
    return bool(_split_of(folder)) and os.path.isdir(folder) and any(n.endswith(suffix) for n in os.listdir(folder))


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
        from asyncdata.sources.paths import Splits, holds

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
