"""The cache of blocks of objects that a loader's settings ask for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.errors import ConfigError
from asyncdata.core.file_owner import check_ours
from asyncdata.core.specs import BlockCacheSpec
from asyncdata.sources.base import Files

if TYPE_CHECKING:
    from asyncdata.loader.config import Cache
    from asyncdata.sources.base import Blocks

    BlocksT = TypeVar("BlocksT", bound=Blocks)

__all__ = ("with_block_cache",)


def with_block_cache(files: BlocksT, cache: Cache) -> BlocksT:
    """The opened source, whose objects are kept on the local disk if ``cache`` asks for it.

    :raises ConfigError: if the folder cannot be made, or belongs to another user.
    """
    opened: object = files
    if cache.remote_max_bytes is not None and isinstance(opened, Files) and _has_objects(opened):
        folder = cache_folder() if cache.folder is None else cache.folder
        path = os.path.join(os.path.abspath(os.path.expanduser(folder)), "blocks")
        try:
            check_ours(path, "Cache(folder=...)", is_folder=True)
            os.makedirs(path, 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"AD345 blocks of objects cannot be kept in {path}: {error.strerror or error}; set Cache(folder=...) "
                "to a folder that can be written, or leave remote_max_bytes out"
            ) from error

        opened.keep_blocks(BlockCacheSpec(path, cache.remote_max_bytes))
    return files


def _has_objects(files: Files) -> bool:
    return any(file.pin is not None for file in files.files)
