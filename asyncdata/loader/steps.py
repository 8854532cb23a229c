"""How many batches an epoch has, where that is known before it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from asyncdata.loader.engine import Engine


def checked_plan(engine: Engine) -> bool:
    """Whether the batches are of planned packs; if not, they are of rows that are all samples.

    :raises ConfigError: AD443, if they are neither.
    """
    config, batching = engine.config, engine.batching
    if config.batch_size is None:
        raise ConfigError("AD443 the number of batches needs batch_size=...")

    is_changed = engine.outcomes is not None or engine.coordinator.ledger.excluded
    if not batching.is_packed and getattr(config.shuffle, "only_kept", False) and not is_changed:
        return False

    if batching.is_packed and batching.is_planned:
        return True

    raise ConfigError(
        "AD443 how many batches an epoch has is known only of planned packs (plan_packs=True), or of rows that are all "
        "samples: shuffle=RowShuffle(only_kept=True), without outcomes and excluded rows"
    )


def num_batches(engine: Engine, found: Any) -> int:
    """The batches of the current epoch.

    :param found: the number of its rows; of planned packs, a sample of it.
    """
    config = engine.config
    size = (config.batch_size or 1) * config.ranks.world_size
    if engine.batching.is_packed:
        windows: Any = engine.parts[0].windows
        plan = windows.plan(engine.epoch)
        number = 0 if plan is None else plan.num_packs  # None: the data has ended
    else:
        number = found * config.n_samples_per_prompt
    return int(number // size if config.drop_last else -(-number // size))
