"""What a loader is told about the recording of its run."""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description
from asyncdata.core.threads import no_op


class Telemetry(Description, frozen=True, kw_only=True):
    """Where a run is recorded, and how much of it. It changes nothing else, and cannot stop a run.

    :ivar folder: where each start of each rank writes a file of its own. None: nothing is recorded.
    :ivar max_bytes: limit for each file. Samples, bad rows and events get half of it; when the rest becomes scarce,
        intervals become longer.
    :ivar samples: delivered samples that are kept of the whole run, with their tokens; shared by the parts of a
        mixture. 0: none.
    :ivar interval_s: seconds between two records of the totals; less while the run is short.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    folder: str | None = None
    max_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 * 1024 * 1024
    samples: Annotated[int, msgspec.Meta(ge=0)] = 64
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.folder is not None

    def check(self) -> None:
        """Whether the folder can be one."""
        if self.folder is not None and ("\0" in self.folder or not self.folder):
            raise ConfigError(f"Telemetry: folder={self.folder!r} is no path")


class NoRecorder:
    """The recorder of a loader that is not recorded."""

    start = called = failed = returned = scored = close = staticmethod(no_op)

    def lost(self) -> dict[str, int]:
        """Nothing."""
        return {}
