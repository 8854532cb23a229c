"""Places in an epoch: one that means nothing any more is left, and one that is not there is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError
from asyncdata.core.log import get_logger

if TYPE_CHECKING:
    from asyncdata.integrations.slime.rollout_ledger import Numbering

__all__ = ("leave_epoch", "refuse_beyond")

_log = get_logger(__name__)


def leave_epoch(numbering: Numbering, changed: str, num_left_out: int | None) -> Numbering:
    """The numbering at the next epoch's start, as its place in the current epoch is no longer valid; this is logged.

    An epoch that has not begun is not left.

    :param num_left_out: prompts of the epoch that are not delivered; None if that is not known.
    """
    if numbering.sample_offset == 0:
        return numbering

    if num_left_out != 0:
        _log.warning(
            "snapshot.rows_left_out",
            epoch=numbering.epoch_id,
            changed=[changed],
            num_delivered=numbering.sample_offset,
            num_left_out=num_left_out,
        )
    return numbering.after(0, 1, numbering.epoch_id + 1, 0)


def refuse_beyond(numbering: Numbering, num_prompts: int | None) -> None:
    """Refuse a place that an epoch does not have.

    :param num_prompts: of an epoch; None: fewer than that, however many they are.
    :raises ConfigError: saying so.
    """
    if num_prompts is None or numbering.sample_offset > num_prompts:
        found = "fewer" if num_prompts is None else num_prompts
        raise ConfigError(f"sample_offset is {numbering.sample_offset}, and an epoch has {found} prompts")
