"""Has the ranks of a run divide the scans of their windows."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import canonical, digest
from asyncdata.read_ahead.windows.shared_scans import SharedScans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.opened_source import OpenedPart


def shared_scans(config: LoaderConfig, parts: Sequence[OpenedPart]) -> SharedScans:
    """The scans of the parts' windows, from now on divided by ``config.ranks.exchange``.

    :raises ConfigError: if nothing can be divided (AD487).
    """
    if config.executor is not None:
        raise ConfigError(
            "AD487 Ranks(exchange=...) divides what workers of this machine read: leave executor out, or leave "
            "exchange out"
        )

    identity = cache(lambda: digest(canonical(list(map(_identity, parts)))))
    scans = SharedScans(config.ranks, identity)
    are_divided = [part.windows.share(scans, number) for number, part in enumerate(parts)]
    if not any(are_divided):
        raise ConfigError(
            "AD487 Ranks(exchange=...) divides windows of blocks, and there are none here: data that are read from "
            'front to back have none, nor have parts of a mixture with shuffle="full". Use shuffle=True, or leave '
            "exchange out"
        )

    return scans


def _identity(part: OpenedPart) -> list[object]:
    """What the scans of a part depend on. Data that grow are other data when the next rank looks at them."""
    found, source = part.fingerprints(), part.source
    if source.growth is not None:
        del found["data"]
    return [found, source.order.description(), source.job.max_row_bytes, source.job.with_token_sums]
