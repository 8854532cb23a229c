"""Filters of the rollout buffer: which of the groups that were given back come next. The public import path."""

from __future__ import annotations

from asyncdata.delivery.buffer_filters import (
    BalancedByMetadata,
    ByMetadata,
    ByReward,
    ByStaleness,
    Chain,
    has_reward_spread,
    reset_response,
)
from asyncdata.delivery.rollout_buffer import first_in_first_out

__all__ = (
    "BalancedByMetadata",
    "ByMetadata",
    "ByReward",
    "ByStaleness",
    "Chain",
    "first_in_first_out",
    "has_reward_spread",
    "reset_response",
)
