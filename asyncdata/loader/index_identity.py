"""Where the row index of a loader is stored, and what it depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.digest import canonical, digest
from asyncdata.tokenization.base import fingerprints_of, has_fingerprint

if TYPE_CHECKING:
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.sources.base import Blocks

    Function = Any

__all__ = ("index_folder", "index_identity")


def index_folder(config: LoaderConfig) -> str:
    """The folder of the row index; empty if it is not stored."""
    folder = cache_folder() if config.cache.folder is None else config.cache.folder
    return folder and f"{folder}/index"


def index_identity(files: Blocks, job: Job, check: str, function: Function) -> str:
    """The digest of all that the index depends on; empty if that is not known."""
    if check == "samples" and not has_fingerprint(function):
        return ""

    what = {
        "data": files.fingerprint()["digest"],
        "reader": [
            job.reader.identity,
            {name: job.reader.settings[name] for name in job.reader.settings if name != "stamps"},
        ],
        "limits": [job.block_bytes, job.max_row_bytes],
        "check": check,
        "function": fingerprints_of(function) if check == "samples" else None,
    }
    return digest(canonical(what))
