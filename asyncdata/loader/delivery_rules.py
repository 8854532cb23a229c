"""The rules of delivery that a configuration gives, and the coordinator that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.requests import DeliveryRules
from asyncdata.telemetry.watched import WatchedCoordinator

if TYPE_CHECKING:
    from asyncdata.loader.config import LoaderConfig

__all__ = ("coordinator_class", "delivery_rules")


def coordinator_class(config: LoaderConfig) -> type[Coordinator]:
    """The coordinator of a loader: one that can be watched, if it is recorded."""
    return WatchedCoordinator if config.telemetry.is_on else Coordinator


def delivery_rules(config: LoaderConfig, *, is_packed: bool) -> DeliveryRules:
    """The rules of a configuration; packs drop what is left of an epoch by themselves."""
    return DeliveryRules(
        capacity=config.capacity,
        max_ready_bytes=config.limits.max_ready_bytes,
        samples_per_group=config.n_samples_per_prompt,
        epochs=config.epochs,
        drop_last=config.drop_last and not is_packed,
        bad_row_stops=config.bad_rows.policy == "raise",
        max_bad_rows=config.bad_rows.max,
        commit_on_ack=config.commit == "on_ack",
        digest=config.digest,
        shows_rows=config.bad_rows.excerpts,
    )
