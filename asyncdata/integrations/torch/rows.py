"""Rows that a framework tokenizes itself, as map-style datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.integrations.torch.views import LoaderOrderView, LoaderRowView
from asyncdata.loader.loader import DataLoader
from asyncdata.order.shuffle import RowShuffle
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.types import Sample
    from asyncdata.tokenization.base import TokenizeFn

__all__ = ("order_view_of_rows", "row_view_of_rows")


def order_view_of_rows(
    source: Any,
    settings: Mapping[str, Any],
    *,
    item: Callable[[Sample], Any],
    stop: int | None = None,
    tokenize_fn: TokenizeFn | None = None,
    only_kept: bool = False,
) -> LoaderOrderView:
    """The view of a loader of untokenized rows; the loader is closed with it.

    :param settings: ``rows_per_epoch``, and knobs of a :class:`~asyncdata.DataLoader`. ``shuffle`` is ``"full"`` by
        default; without it and without ``rows_per_epoch``, the rows come in the order of the files, and are counted.
    :param item: makes the item of a row's sample.
    :param stop: only the first ``stop`` rows.
    :param tokenize_fn: another function than :class:`~asyncdata.RowFn`, for one that drops rows.
    :param only_kept: rows that it drops have no number in an order that counts its rows.
    :raises ConfigError: for settings that cannot work.
    :raises SourceError: for files that cannot be read.
    """
    rows_per_epoch = settings.get("rows_per_epoch")
    knobs = _knobs(settings, stop, needs_index=not rows_per_epoch, only_kept=only_kept)
    return LoaderOrderView(DataLoader(source, tokenize_fn=tokenize_fn or RowFn(), **knobs), rows_per_epoch, item=item)


def row_view_of_rows(
    source: Any,
    settings: Mapping[str, Any],
    *,
    item: Callable[[Sample], Any],
    stop: int | None = None,
    max_gap: int = 256,
    tokenize_fn: TokenizeFn | None = None,
) -> LoaderRowView:
    """The view of a loader of untokenized rows, for any order of indices; the loader is closed with it.

    :param settings: see :func:`order_view_of_rows`; without ``shuffle`` the rows are in the order of the files.
    :param item: makes the item of a row's sample.
    :param stop: only the first ``stop`` rows.
    :param max_gap: see :class:`~asyncdata.integrations.torch.RowView`.
    :param tokenize_fn: another function than :class:`~asyncdata.RowFn`; rows that it drops have no number.
    :raises ConfigError: for settings that cannot work.
    :raises SourceError: for files that cannot be read.
    """
    knobs = _knobs(settings, stop, needs_index=True, only_kept=tokenize_fn is not None)
    loader = DataLoader(source, tokenize_fn=tokenize_fn or RowFn(), **knobs)
    return LoaderRowView(loader, settings.get("rows_per_epoch"), item=item, max_gap=max_gap)


def _knobs(
    settings: Mapping[str, Any], stop: int | None, *, needs_index: bool, only_kept: bool = False
) -> dict[str, Any]:
    """The settings that are a loader's, with a ``shuffle`` that has what is needed."""
    knobs: dict[str, Any] = {"shuffle": "full", **settings}
    knobs.pop("rows_per_epoch", None)
    shuffle = knobs["shuffle"]
    shuffle = msgspec.to_builtins(shuffle) if isinstance(shuffle, RowShuffle) else shuffle
    if isinstance(shuffle, Mapping) and "method" in shuffle:
        last = shuffle.get("stop") if stop is None else stop
        knobs["shuffle"] = {**shuffle, "stop": last, "only_kept": only_kept or bool(shuffle.get("only_kept"))}
        return knobs

    is_shuffled = bool(shuffle)
    if stop is not None or (needs_index and not is_shuffled) or (only_kept and shuffle == "full"):
        knobs["shuffle"] = RowShuffle(method="keyed" if is_shuffled else "none", stop=stop, only_kept=only_kept)
    return knobs
