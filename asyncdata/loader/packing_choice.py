"""Decides from a loader's settings how samples are packed, and which rows a rank tokenizes. It is decided once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.batching.online.rules import PackRules
from asyncdata.batching.packers.unpacked import SinglePacking
from asyncdata.batching.packers.xtuner import XTunerPacking
from asyncdata.batching.planned.plan import Plan
from asyncdata.core.errors import ConfigError
from asyncdata.loader.batches.online_batches import OnlineBatching
from asyncdata.loader.batches.pack_batches import collating_documents, collating_samples
from asyncdata.loader.batches.planned_batches import PlannedBatching
from asyncdata.loader.batches.sample_batches import SampleBatching
from asyncdata.order.rank_share import Share
from asyncdata.order.shuffle import RowShuffle
from asyncdata.prefetch.windows.indexed_windows import IndexedWindows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.packers.base import Packing
    from asyncdata.loader.batches.batching import Batching
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.windows.base import Reading

__all__ = ("PackingChoice",)


class PackingChoice(NamedTuple):
    """How a loader packs samples.

    :ivar rules: how packs are made; None without packing and grouping.
    :ivar plan: how packs are planned before their rows are read; None: they are made from samples as they come.
    :ivar share: the rows that this rank tokenizes; None: all.
    :ivar packs_samples: whether batches have packs; False: samples, which may be grouped by length.
    """

    rules: PackRules | None
    plan: Plan | None
    share: Share | None
    packs_samples: bool

    @classmethod
    def of(
        cls, config: LoaderConfig, packing: Packing | None, grouping: LengthGrouping | None, *, is_filtered: bool
    ) -> PackingChoice:
        """The choice for these settings.

        :param is_filtered: whether the loader has a buffer filter.
        :raises ConfigError: for settings that do not work together.
        """
        rules = _rules_of(config, packing, grouping, is_filtered=is_filtered)
        plan = _plan_of(config, rules)
        share = _share_of(config, rules, plan)
        if config.digest == "tokens" and (plan is not None or share is not None):
            raise ConfigError(
                'digest="tokens" needs every rank to tokenize every row, and here each has rows of its own: the digest '
                'would be another one on each. digest="positions" has how many tokens every sample has'
            )

        return cls(rules, plan, share, packing is not None)

    def batching(
        self,
        config: LoaderConfig,
        collate_fn: Callable[[list[Any]], Any],
        windows: Reading,
        functions: Iterable[Any],
    ) -> Batching:
        """What makes the batches.

        :param functions: the tokenize functions.
        :raises ConfigError: if one of them makes prompts, and they are to be packed.
        """
        if self.rules is None:
            return SampleBatching(config, collate_fn)

        if self.packs_samples:
            _refuse_prompts(functions)

        collate = (collating_documents if self.packs_samples else collating_samples)(collate_fn)
        if self.plan is None:
            return OnlineBatching(self.rules, config, collate)

        assert isinstance(windows, IndexedWindows), "a plan needs a row index"
        return PlannedBatching(windows, config, collate)


def _refuse_prompts(functions: Iterable[Any]) -> None:
    for function in functions:
        if getattr(function, "makes_prompts", False):
            name = type(function).__name__
            raise ConfigError(
                f"AD416 packs are for training, and {name} makes prompts without labels, so that every token of them "
                "would be trained: use ChatTokenizeFn for chats or TextTokenizeFn for text, or leave packing out"
            )


def _rules_of(
    config: LoaderConfig, packing: Packing | None, grouping: LengthGrouping | None, *, is_filtered: bool
) -> PackRules | None:
    """How a loader makes packs; None without packing and grouping.

    :param is_filtered: whether the loader has a buffer filter.
    :raises ConfigError: if settings for rollouts are given, too.
    """
    if packing is None and grouping is None:
        return None

    _check(config, is_filtered=is_filtered)
    return PackRules(
        packing=packing or SinglePacking(),
        grouping=grouping,
        seed=config.seed,
        rank=config.ranks.rank,
        world_size=config.ranks.world_size,
        batch_size=config.batch_size or 1,
        accumulation=config.ranks.gradient_accumulation,
    )


def _plan_of(config: LoaderConfig, rules: PackRules | None) -> Plan | None:
    """How packs are planned before their rows are read; None if packs are made from samples as they come.

    :raises ConfigError: for a packing that cannot be planned.
    """
    if rules is None:
        if config.plan_packs:
            raise ConfigError("plan_packs=True plans packs: it needs a packing or a length_grouping")

        return None

    is_xtuners = rules.grouping is not None and rules.grouping.method == "xtuner"
    if not (config.plan_packs or is_xtuners or isinstance(rules.packing, XTunerPacking)):
        return None

    return Plan(
        packing=rules.packing,
        grouping=rules.grouping,
        world_size=rules.world_size,
        batch_size=rules.batch_size,
        accumulation=rules.accumulation,
        round_up=not config.drop_last and config.ranks.round_up is not False,
    )


def _share_of(config: LoaderConfig, rules: PackRules | None, plan: Plan | None) -> Share | None:
    """The rows that this rank tokenizes; None: all, as it cannot know its own rows before.

    All also if bad rows are passed over: a bad row that only its own rank finds would shift that rank's rows.
    """
    if config.ranks.world_size == 1 or (rules is not None and plan is None):
        return None

    order = config.order
    ends_at_bad_row = config.bad_rows.policy == "raise"
    is_known = plan is not None or (isinstance(order, RowShuffle) and order.only_kept and ends_at_bad_row)
    if not is_known:
        return None

    size = (config.batch_size or 1) // config.n_samples_per_prompt
    return Share(rank=config.ranks.rank, world_size=config.ranks.world_size, batch_size=max(1, size))


def _check(config: LoaderConfig, *, is_filtered: bool) -> None:
    refused = {
        "n_samples_per_prompt": config.n_samples_per_prompt > 1,
        'commit="on_ack"': config.commit == "on_ack",
        "buffer_filter": is_filtered,
    }
    names = [name for name, is_given in refused.items() if is_given]
    if names:
        raise ConfigError(
            f"packing and length_grouping are for training, {', '.join(names)} for rollouts: leave one of them out"
        )

    if config.batch_size is None:
        raise ConfigError("packing and length_grouping need batch_size=...: packs of each rank in a batch")
