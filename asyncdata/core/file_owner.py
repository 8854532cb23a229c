"""Checks that only this user can write to a file in a cache folder: files of other users are never trusted."""

from __future__ import annotations

import errno
import os
import stat

from asyncdata.core.errors import ConfigError

__all__ = ("check_ours", "refuse_foreign", "why_foreign")


def why_foreign(found: os.stat_result) -> str:
    """What is wrong with the owner or the mode of a file or folder; empty if nothing is."""
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid})"

    return "can be written by every user" if found.st_mode & stat.S_IWOTH else ""


def refuse_foreign(fd: int, path: str) -> None:
    """Look at an open file or folder.

    :raises PermissionError: if another user may have written it.
    """
    if reason := why_foreign(os.fstat(fd)):
        raise PermissionError(errno.EPERM, f"it {reason}", path)


def check_ours(path: str, setting: str, *, is_folder: bool) -> None:
    """Look at what is in the place of a file or folder of a cache, if anything is.

    :param setting: the setting that chooses the place.
    :raises ConfigError: if it is a link or anything else, or another user may have written it.
    :raises OSError: if it cannot be looked at.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return

    is_kind = stat.S_ISDIR if is_folder else stat.S_ISREG
    reason = why_foreign(found) if is_kind(found.st_mode) else f"is no {'folder' if is_folder else 'file'}, or a link"
    if reason:
        raise ConfigError(f"AD611 {path} {reason}: remove it, or choose a folder of your own by {setting}")
