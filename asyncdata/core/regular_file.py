"""Opens a file, and nothing else that may stand in its place: a FIFO blocks, and reading a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import io

__all__ = ("open_regular", "refuse_others")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> io.BufferedReader:
    """The file, opened to read bytes.

    :param flags: more flags of ``os.open``.
    :raises OSError: if it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags | os.O_NONBLOCK))
    try:
        refuse_others(file.fileno(), path)
    except OSError:
        file.close()
        raise

    return file


def refuse_others(fd: int, path: str | os.PathLike[str]) -> None:
    """Check that an open file is a regular one.

    :raises OSError: if it is a folder, a FIFO, a socket or a device.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
