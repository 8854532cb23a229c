"""Tells the splits of a folder by the names of its files, as the Hugging Face hub does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from asyncdata.core.errors import SourceError, get_logger

_BY_PYTHON = "read it with Python, by IterableSource"
_BY_DATASETS = "read it with HuggingFaceSource('{}', data_files=..., split='train')"
_NO_DATA = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the data: git lfs pull"),
    (rb"(\.\./)*(\.git)?/annex/objects/", "a pointer of git-annex, not the data: git annex get"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|!--|html|head|\?xml|error)", "HTML or XML, such as the page of an error"),
    (rb"\xfd7zXZ\0", "compressed with xz, which is not read: decompress it, or use zstd"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed with bz2, which is not read: decompress it, or use zstd"),
    (rb"(?s)PK\x03\x04.{26}(\[Content_Types|_rels/|docProps/|xl/)", f"an Excel workbook: {_BY_PYTHON}"),
    (rb"PK(\x03\x04|\x05\x06)", f"a zip archive: unzip it, or {_BY_PYTHON}"),
    (rb"(?s)(?=.{257}ustar)[^\0]{1,100}\0", "a tar archive: unpack it"),
    (rb"ARROW1\0\0|\xff{4}", f"Arrow: {_BY_DATASETS.format('arrow')}"),
    (rb"\x80[\x02-\x05]", f"a pickle, which may run any code: {_BY_PYTHON}"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed twice: decompress it once"),
)
"""What is no data file, by the first bytes of its text: no JSON begins so."""
_NO_DATA_BY_NAME = {
    **dict.fromkeys((".csv", ".tsv"), f"CSV: {_BY_DATASETS.format('csv')}, or {_BY_PYTHON}"),
    **dict.fromkeys((".pkl", ".pickle"), _NO_DATA[-2][1]),
}
"""The same of texts that have no first bytes of their own, by the suffix, if they do not begin as JSON does."""


def why_no_data(path: str, head: bytes) -> str:
    """What a file is if it cannot be one with rows, and the way out; empty for all others.

    :param head: its first bytes, decompressed.
    """
    for pattern, what in _NO_DATA:
        if re.match(pattern, head):
            return what

    return _NO_DATA_BY_NAME.get(os.path.splitext(path)[1].lower(), "")


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
