"""A loader's statistics as OpenTelemetry instruments."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.settings import needing
from asyncdata.loader.measurements import Measurement, help_of, measurements
from asyncdata.loader.statistics import SourceStatistics, Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdata.loader.base import BaseLoader

__all__ = ("observe",)

_OF_SOURCES = tuple(SourceStatistics(samples=0, tokens=0, epoch=0, dropped={}, wait=0.0).to_dict("source"))
_UNITS = {"seconds": "s", "bytes": "By"}
_THINGS = frozenset("samples groups tokens rows lines packs requests waits workers restarts changes".split())


def observe(loader: BaseLoader[Any, Any], meter: Any = None, attributes: Mapping[str, str] | None = None) -> None:
    """Report the loader's statistics with every export of ``meter``, until the loader is garbage-collected.

    The instruments are called as the fields of :class:`~asyncdata.Statistics`: ``asyncdata.samples`` is the counter of
    ``samples_total``, and ``asyncdata.ready_samples`` a gauge. What is a dict there has an attribute ``reason`` or
    ``note``; the numbers of a mixture's parts, such as ``asyncdata.source_samples``, have ``source``.

    :param meter: an OpenTelemetry meter. None: one of the global meter provider.
    :param attributes: of every number, such as ``{"rank": "0"}``.
    :raises ConfigError: if OpenTelemetry is not installed.
    """
    with needing("observe()", "opentelemetry-api"):
        from opentelemetry import metrics

    meter = metrics.get_meter("asyncdata") if meter is None else meter
    watched = weakref.ref(loader)
    for field in Statistics.__struct_fields__:
        for number in _OF_SOURCES if field == "by_source" else [field]:
            is_counter = Measurement(number, 0).is_counter
            make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            callback = partial(_observed, watched, field, number, dict(attributes or {}), metrics.Observation)
            name = f"asyncdata.{number.removesuffix('_total')}"
            make(name, callbacks=[callback], unit=_unit(number), description=help_of(Statistics).get(field, ""))


def _observed(
    watched: weakref.ref[BaseLoader[Any, Any]],
    field: str,
    number: str,
    attributes: dict[str, str],
    observation: Any,
    _: object,
) -> Iterator[Any]:
    loader = watched()
    for one in () if loader is None else measurements(loader.statistics(), [field]):
        if one.field == number:
            yield observation(one.value, attributes | dict([one.label] if one.label else []))


def _unit(field: str) -> str:
    """The unit in OpenTelemetry's notation: UCUM's, and the name of what is counted in braces."""
    words = field.removesuffix("_total").split("_")
    unit = next((_UNITS[word] for word in words if word in _UNITS), "")
    thing = next((word for word in reversed(words) if word in _THINGS), "")
    return unit or (f"{{{thing.removesuffix('s')}}}" if thing else "")
