"""What a loader cannot do with workers on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig

__all__ = ("check_cluster",)

_COPIES = "asyncdata.sources.spool:SpoolReader"


def check_cluster(config: LoaderConfig, job: Job) -> None:
    """Refuse what needs a disk of this machine.

    :raises ConfigError: AD496.
    """
    if config.executor is None:
        return

    if any(one.cache is not None for one in (job, *job.parts)):
        raise ConfigError(
            "AD496 the token cache is written by workers that share a disk, and workers on other nodes do not: leave "
            "Cache(tokens=...) out, or leave executor out"
        )

    if any(one.reader.path == _COPIES for one in (job, *job.parts)):
        raise ConfigError(
            "AD496 single rows of this source are read from copies on the disk of this machine, which other nodes do "
            "not see: use shuffle=True, which reads whole blocks; or JSONL files, whose rows need no copies; or leave "
            "executor out"
        )
