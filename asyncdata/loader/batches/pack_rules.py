"""How a loader makes packs, from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers import SinglePacking
from asyncdata.batching.rules import PLANNED_PACKINGS, PackRules
from asyncdata.batching.xtuner_packing import LoaderPacking
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from asyncdata.loader.config import LoaderConfig


def rules_of(
    config: LoaderConfig, packing: LoaderPacking | None, grouping: LengthGrouping | None, *, is_filtered: bool
) -> PackRules:
    """How a loader makes packs.

    :raises ConfigError: if settings for rollouts are given, too, or for a packing that cannot be planned.
    """
    is_packing = hasattr(packing, "max_length") and not callable(packing)  # classes and collators can be called
    if packing is not None and not is_packing:
        raise ConfigError(f"packing is SoftPacking(max_length=...) or another packing; got {packing!r}")

    if not isinstance(grouping, LengthGrouping | None):
        raise ConfigError(f"length_grouping is LengthGrouping(...); got {grouping!r}")

    refused = {
        "n_samples_per_prompt": config.n_samples_per_prompt > 1,
        'commit="on_ack"': config.commit == "on_ack",
        "buffer_filter": is_filtered,
    }
    if names := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"packing and length_grouping are for training, {', '.join(names)} for rollouts: leave one of them out"
        )

    if config.batch_size is None:
        raise ConfigError("packing and length_grouping need batch_size=...: packs of each rank in a batch")

    has_xtuners_order = grouping is not None and grouping.method == "xtuner"
    return PackRules(
        packing=packing or SinglePacking(),
        grouping=grouping,
        seed=config.seed,
        rank=config.ranks.rank,
        world_size=config.ranks.world_size,
        batch_size=config.batch_size,
        accumulation=config.ranks.gradient_accumulation,
        is_planned=config.plan_packs or has_xtuners_order or isinstance(packing, PLANNED_PACKINGS),
        round_up=not config.drop_last and config.ranks.round_up is not False,
    )


def with_length(collate_fn: Any, packing: LoaderPacking) -> Any:
    """One of our collators of packs with the packing's ``max_length``, and room for its dummy."""
    longest = packing.max_length
    if not isinstance(collate_fn, Description) or isinstance(packing, SinglePacking):
        return collate_fn

    own: int | None = collate_fn.max_length  # type: ignore[attr-defined]
    dummy, multiple = getattr(collate_fn, "dummy", None), getattr(collate_fn, "segment_multiple_of", 1)
    if own is None:
        num_more = 0 if dummy is None else -(-len(dummy.tokens) // multiple) * multiple
        return structs.replace(collate_fn, max_length=longest + num_more)

    if own != longest and (dummy is None or own < longest):
        raise ConfigError(
            f"AD450 {type(packing).__name__} has max_length={longest}, and {type(collate_fn).__name__} has "
            f"max_length={own}: leave it out of the collator, which then takes that of the packing"
        )

    return collate_fn
