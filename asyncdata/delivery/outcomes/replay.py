"""Which rows a replay serves once more, and in which order: a pure function of the memory, the seed and a name.

For a part of a mixture whose rows are those of another part, chosen by their scores. Its pass is decided as an epoch's
exclusions are: at its start, and then written down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncdata.order.permutation import order_keys
from asyncdata.order.splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from asyncdata.delivery.outcomes.policy import Ids, OutcomeTable, PassRate

__all__ = ("chosen_ids", "in_order")


def chosen_ids(outcomes: OutcomeTable, where: PassRate) -> Ids:
    """The ids of the rows with scores that ``where`` keeps, ascending."""
    return outcomes.ids[(outcomes.num_scores >= where.after) & where.keeps(outcomes)]


def in_order(ids: Ids, *, seed: int, name: str, number: int) -> Ids:
    """The rows of one pass in its order.

    A row's place among the others follows from its id alone, so that another row that joins them moves none.

    :param name: of the part; two parts have different orders.
    :param number: of the pass, counted from 0.
    """
    key = np.uint64(order_keys(seed, number, f"replay {name}")[0])
    return ids[np.argsort(mix(ids * np.uint64(GOLDEN) + key))]
