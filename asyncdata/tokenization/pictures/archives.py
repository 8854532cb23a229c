"""Members of zip and tar files, by paths that lead through them. Each process keeps the indexes of a few archives."""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial

_ARCHIVE = re.compile(r"(?i)(.+?\.(?:zip|tar))/(.+)", re.DOTALL)
_KEPT = 8

Member = tuple[int, "Callable[[], bytes]"]
"""The number of a member's bytes, and what reads them."""


def member_of(path: str) -> Member | None:
    """The member of a zip or tar file at a path such as ``a.zip/b.png``; None if the path leads through no such file.

    :raises OSError: if there is no such member; otherwise what the readers of archives raise.
    """
    start = 0
    while found := _ARCHIVE.match(path, start):
        start, archive = found.end(1), path[: found.end(1)]
        if os.path.isfile(archive):
            about = os.stat(archive)
            members = _members(archive, (about.st_mtime_ns, about.st_size), os.getpid())
            member = members.get(posixpath.normpath(found[2]))
            if member is None:
                raise FileNotFoundError(f"{archive} has no member {found[2]!r:.200}")

            return member
    return None


@lru_cache(_KEPT)
def _members(archive: str, state: tuple[int, int], process: int) -> dict[str, Member]:
    """The members by their names.

    :param state: of the file: one that has changed is read again; so it is in a forked ``process``.
    """
    if not archive.lower().endswith(".tar"):
        zipped = zipfile.ZipFile(archive)
        return {
            posixpath.normpath(each.filename): (each.file_size, partial(zipped.read, each)) for each in zipped.filelist
        }

    found: dict[str, Member] = {}
    with tarfile.open(archive, "r:") as tar:
        while each := tar.next():
            if each.isreg() and not each.issparse():
                read = partial(_read, archive, each.offset_data, each.size)
                found[posixpath.normpath(each.name)] = each.size, read
            tar.members = []  # type: ignore[attr-defined]  # they would take more memory than what is kept
    return found


def _read(path: str, start: int, num_bytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(num_bytes)
