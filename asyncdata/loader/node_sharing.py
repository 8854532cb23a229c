"""Decides whether the ranks of a node share the tokenizing, and what identifies the job that they share."""

from __future__ import annotations

import os
import sys
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from asyncdata.core.digest import canonical, digest
from asyncdata.core.log import get_logger
from asyncdata.loader.open_token_cache import library_versions
from asyncdata.prefetch.node_share.folder import NodeFolder, root_of_node
from asyncdata.prefetch.node_share.sharing import Sharing
from asyncdata.sources.iterable import ExampleStream
from asyncdata.tokenization.base import has_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.opening import OpenedSource
    from asyncdata.workers.base import Executor

__all__ = ("sharing_of",)

_log = get_logger(__name__)
_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_RUN = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What launchers set alike for all processes of a run, and differently for two runs at the same time."""
_OF_FILES = ("data", "indices", "sizes", "stamps")
"""Settings of readers that name files. What is in these is in the fingerprint; each rank may have its own copies."""
_REMEDY = (
    "Ranks(share_node=True), or LOCAL_WORLD_SIZE in the environment, as torchrun sets it: then the ranks of a node "
    "share the work. With packing: plan_packs=True; without: shuffle=RowShuffle(only_kept=True); or one "
    "Cache(tokens=...) for all ranks, filled by one of them before"
)
_REMEDY_OF_FUNCTIONS = "a version of the tokenize function, as in `tokenize.version = 1`, so that results can be shared"
_REMEDY_OF_MIXTURES = "one Cache(tokens=...) for all ranks, filled by one of them before"


def sharing_of(
    config: LoaderConfig,
    source: OpenedSource,
    executor: Executor,
    function: Any,
    fingerprints: Callable[[], dict[str, Any]],
) -> Sharing | None:
    """How this rank shares what it tokenizes with the others of its node; None, after a warning, if it does not.

    For ranks of which each needs all rows. Those of a mixture do not share.

    :param fingerprints: returns digests of the data and of the tokenize function; called later, in another thread.
    """
    ranks = config.ranks
    if config.cache.tokens or (ranks.world_size == 1 and not ranks.share_node):
        return None

    is_mixture = bool(source.job.parts)
    num_ranks = 1 if is_mixture else _num_ranks(config, source)
    if num_ranks < 2:
        if ranks.world_size > 1 or is_mixture:
            remedy = _REMEDY_OF_MIXTURES if is_mixture else _REMEDY
            _log.warning("loader.every_rank_tokenizes", world_size=ranks.world_size, remedy=remedy)
        return None

    if not has_fingerprint(function):
        _log.warning("loader.every_rank_tokenizes", world_size=ranks.world_size, remedy=_REMEDY_OF_FUNCTIONS)
        return None

    limits = config.limits  # a rank is at most max_ready_bytes ahead of one that has begun at the same place
    open_folder = partial(_open, source, function, fingerprints)
    return Sharing(open_folder, num_ranks, limits.max_ready_bytes, limits.row_timeout_s, executor.slots)


def _num_ranks(config: LoaderConfig, source: OpenedSource) -> int:
    """How many ranks of this node share; 1 if that is not known, or if they might have other data."""
    wanted = config.ranks.share_node
    if wanted is not None and not isinstance(wanted, bool):
        return wanted

    local = os.environ.get(_LOCAL_WORLD_SIZE, "")
    num_ranks = int(local) if local.isdecimal() else config.ranks.world_size if wanted else 1
    is_certain = not isinstance(source.files, ExampleStream)  # of examples only the name of their function is known
    return num_ranks if wanted or (wanted is None and is_certain) else 1


def _open(source: OpenedSource, function: Any, fingerprints: Callable[[], dict[str, Any]]) -> NodeFolder:
    reader, job = source.files.reader, source.job
    what = {
        "user": os.geteuid(),
        "run": [os.environ.get(name, "") for name in _RUN],
        "fingerprints": fingerprints(),
        "code": _code_of(function),
        "versions": library_versions(),
        "order": source.order.description(),
        "reader": [reader.identity, {name: value for name, value in reader.settings.items() if name not in _OF_FILES}],
        "job": [job.max_row_bytes, job.block_bytes, job.slack_bytes, job.with_token_sums],
    }
    return NodeFolder(root_of_node(), digest(canonical(what)))


def _code_of(function: Any) -> str:
    """The digest of the file that has the function: it may be edited, between two runs, without a new version."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    path = getattr(module, "__file__", None)
    if not path:
        return ""

    with open(path, "rb") as file:
        return blake2b(file.read(), digest_size=16).hexdigest()
