"""Decides from a loader's settings how samples are packed, and which rows a rank tokenizes. It is decided once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.loader.sample_batches import Batching, Making
from asyncdata.order.shuffle import RowShuffle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.planned import PackRules
    from asyncdata.batching.xtuner_packing import LoaderPacking
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.order.order import Share


class PackingChoice(NamedTuple):
    """How a loader packs samples.

    :ivar rules: how packs are made; None without packing and grouping.
    :ivar share: the rows that this rank tokenizes; None: all.
    :ivar packs_samples: whether batches have packs; False: samples, which may be grouped by length.
    """

    rules: PackRules | None
    share: Share | None
    packs_samples: bool

    @classmethod
    def of(
        cls, config: LoaderConfig, packing: LoaderPacking | None, grouping: LengthGrouping | None, *, is_filtered: bool
    ) -> PackingChoice:
        """The choice for these settings.

        :param is_filtered: whether the loader has a buffer filter.
        :raises ConfigError: for settings that do not work together.
        """
        rules = None
        if packing is not None or grouping is not None:
            from asyncdata.loader.pack_batches import rules_of

            rules = rules_of(config, packing, grouping, is_filtered=is_filtered)
        elif config.plan_packs:
            raise ConfigError("plan_packs=True plans packs: it needs a packing or a length_grouping")

        share = _share_of(config, rules)
        choice = cls(rules, share, packing is not None)
        if config.digest == "tokens" and (choice.plan is not None or share is not None):
            raise ConfigError(
                'digest="tokens" needs every rank to tokenize every row, and here each has rows of its own: the digest '
                'would be another one on each. digest="positions" has how many tokens every sample has'
            )

        return choice

    @property
    def plan(self) -> PackRules | None:
        """How packs are planned before their rows are read; None: they are made from samples as they come."""
        return self.rules if self.rules is not None and self.rules.is_planned else None

    @property
    def is_in_order(self) -> bool:
        """Whether each row of D is at its place in a batch: samples as they come, or planned packs."""
        return self.rules is None or self.rules.is_planned

    def batching(self, making: Making) -> Batching:
        """What makes the batches.

        :raises ConfigError: if one of them makes prompts, and they are to be packed (AD416), or for a collator of packs
            without packs, or of samples with them (AD405), or with another ``max_length`` than the packing (AD450).
        """
        collate_fn: Any = making.collate
        if not callable(collate_fn):
            raise ConfigError(f"collate_fn is a function of a list of samples or packs; got {collate_fn!r}")

        takes_packs = getattr(collate_fn, "takes_packs", self.packs_samples)  # a user's own may take either
        if takes_packs != self.packs_samples:
            raise ConfigError(
                f"AD405 {type(collate_fn).__name__} makes batches of packs, and this loader makes none: give it "
                "packing=SoftPacking(max_length=...), or take PaddedCollator"
                if takes_packs
                else f"AD405 {type(collate_fn).__name__} makes batches of samples, and this loader packs them: take "
                "PackedCollator, or leave out packing"
            )

        if self.packs_samples:
            _refuse_prompts(part.opening.function for part in making.parts)
        if self.rules is None:
            return Batching(making)

        from asyncdata.loader.pack_batches import OnlineBatching, PlannedBatching, with_length
        from asyncdata.read_ahead.indexed_windows import IndexedWindows

        making = making._replace(collate=with_length(collate_fn, self.rules.packing))
        if not self.rules.is_planned:
            return OnlineBatching(making, self.rules)

        windows = making.parts[0].windows
        assert isinstance(windows, IndexedWindows) and windows.plans is not None, "a plan needs a row index"
        return PlannedBatching(making, windows.plans)


def _refuse_prompts(functions: Iterable[Any]) -> None:
    for function in functions:
        if getattr(function, "makes_prompts", False):
            raise ConfigError(
                f"AD416 packs are for training, and {type(function).__name__} makes prompts without labels, so that "
                "every token of them would be trained: use ChatTokenizeFn for chats or TextTokenizeFn for text, or "
                "leave packing out"
            )


def _share_of(config: LoaderConfig, rules: PackRules | None) -> Share | None:
    """The rows that this rank tokenizes; None: all, as it cannot know its own rows before.

    All also if bad rows are passed over: a bad row that only its own rank finds would shift that rank's rows. Or if
    outcomes leave rows out, which shifts those behind them.
    """
    is_planned = rules is not None and rules.is_planned
    if config.ranks.world_size == 1 or (rules is not None and not is_planned):
        return None

    order = config.order
    is_known = config.bad_rows.policy == "raise" and config.outcomes is None
    if not (is_planned or (isinstance(order, RowShuffle) and order.only_kept and is_known)):
        return None

    from asyncdata.order.order import Share

    size = (config.batch_size or 1) // config.n_samples_per_prompt
    return Share(rank=config.ranks.rank, world_size=config.ranks.world_size, batch_size=max(1, size))
