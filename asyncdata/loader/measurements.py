"""What a trainer is told: the statistics for Prometheus and OpenTelemetry, numbers for its log, batches of an epoch."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import msgspec


_LABELS = {"noted_total": "note", "unread_keys": "key", "outcome_rewards_total": "reward", "workers": "state"}
_LABEL = "reason"
_WORKER_STATES = ("starting", "idle", "busy")
_TAKEN = ["reason", "source", *_LABELS.values()]
_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_HELP = re.compile(r":ivar (\w+): (.+?)(?=\n\s*:ivar|\Z)", re.DOTALL)
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Measurement(NamedTuple):
    """A field of the statistics, or of its parts.

    :ivar field: the field's name.
    :ivar label: the name and the value of what tells the parts apart, such as ``("reason", "max_length")``.
    """

    field: str
    value: float
    label: tuple[str, str] | None = None

    @property
    def is_counter(self) -> bool:
        """Whether it never decreases."""
        return self.field.endswith("_total")


def measurements(statistics: msgspec.Struct, fields: Iterable[str] | None = None) -> list[Measurement]:
    """All numbers of the statistics (:class:`~asyncdata.Statistics`), or of some fields.

    A dict is a number for each key; the workers are counted by their state. The numbers of a mixture's parts have the
    names of :meth:`SourceStatistics.to_dict`, and the part as their label.
    """
    found: list[Measurement] = []
    for field in statistics.__struct_fields__ if fields is None else fields:
        value = getattr(statistics, field)
        if field == "by_source":
            found += _of_sources(value)
            continue

        if field == "workers":
            states = Counter(worker.state for worker in value)
            value = dict.fromkeys(_WORKER_STATES, 0) | states
        if isinstance(value, dict):
            label = _LABELS.get(field, _LABEL)
            found += [Measurement(field, number, (label, key)) for key, number in sorted(value.items())]
        else:
            found.append(Measurement(field, value))
    return found


def _of_sources(by_source: Mapping[str, Any]) -> list[Measurement]:
    """Number by number, and not part by part: in Prometheus' text the lines of a name stand together."""
    parts = {name: counts.to_dict("source") for name, counts in sorted(by_source.items())}
    fields = list(next(iter(parts.values()))) if parts else []
    return [Measurement(field, parts[name][field], ("source", name)) for field in fields for name in parts]


@cache
def help_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What each field is, by the docstring of its class; empty where Python was told to drop docstrings."""
    return {name: " ".join(text.split()) for name, text in _HELP.findall(kind.__doc__ or "")}


def prometheus_text(statistics: msgspec.Struct, labels: Mapping[str, str]) -> str:
    """The statistics in Prometheus' text format, version 0.0.4.

    :param labels: of every number.
    :raises ConfigError: for a label's name that no scraper takes, or one that the numbers have themselves.
    """
    if wrong := [name for name in labels if not _NAME.fullmatch(name) or name in _TAKEN]:
        raise ConfigError(f"labels cannot be named {wrong}: names match {_NAME.pattern}, and are none of {_TAKEN}")

    lines: list[str] = []
    helps, seen = help_of(type(statistics)), ""
    for one in measurements(statistics):
        name = f"asyncdata_{one.field}"
        if one.field != seen:
            seen = one.field
            text = helps.get(one.field, helps.get("by_source", ""))
            lines.append(f"# HELP {name} {text.translate(_ESCAPED)}".rstrip())
            lines.append(f"# TYPE {name} {'counter' if one.is_counter else 'gauge'}")
        pairs = [*labels.items(), *([one.label] if one.label else [])]
        inside = ",".join(f'{key}="{value.translate(_ESCAPED)}"' for key, value in pairs)
        lines.append(f"{name}{'{' + inside + '}' if inside else ''} {one.value}")
    return "\n".join(lines) + "\n"


def epochs_of(engine: Any) -> float:
    """Epochs that were delivered, with the part of the present one; whole ones where the part is not known."""
    position = engine.coordinator.ledger.position
    share = engine.parts[0].windows.share_before(position) if len(engine.parts) == 1 else 0.0
    number: float = min(engine.epoch + 1.0, position.epoch + share)  # packs of an epoch come when its samples are over
    return number


def metrics_of(
    engine: Any, now: Any, before: tuple[float, float], pack_length: int
) -> tuple[dict[str, float], tuple[float, float]]:
    """The numbers for a trainer's log; and the time, and the seconds of waiting by then, for the next call.

    :param before: what the last call gave.
    :param pack_length: tokens of a full pack; 0 without packing.
    """
    at, waited_s = time.monotonic(), now.data_wait_seconds_total
    found = {
        "data/epoch": epochs_of(engine),
        "data/samples": now.samples_total,
        "data/tokens": now.tokens_total,
        "data/dropped": sum(now.dropped_total.values()) + sum(now.unpacked_samples_total.values()),
        "data/wait_share": min(1.0, (waited_s - before[1]) / max(at - before[0], 1e-9)),
    }
    if room := now.packs_total * pack_length:
        found["data/pack_fill"] = now.packed_tokens_total / room
    return found, (at, waited_s)


def checked_plan(engine: Any) -> bool:
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


def num_batches(engine: Any, found: Any) -> int:
    """The batches of the current epoch.

    :param found: the number of its rows; of planned packs, a sample of it.
    """
    config = engine.config
    size = (config.batch_size or 1) * config.ranks.world_size
    if engine.batching.is_packed:
        plan = engine.batching.plans.find(engine.epoch)
        number = 0 if plan is None else plan.num_packs  # None: the data has ended
    else:
        number = found * config.n_samples_per_prompt
    return int(number // size if config.drop_last else -(-number // size))
