"""Whether a snapshot was taken of the same data, with the same settings; and what differs, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.checkpoint.changes import content_changes, describe_change, find_changes, setting_of
from asyncdata.core.errors import ConfigError, SnapshotMismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from asyncdata.checkpoint.snapshot import Snapshot

__all__ = ("check", "differences")

_OUTCOMES = "outcomes"
"""May change without an effect on the place in the order; ``asyncdata.loader.outcomes`` checks it."""
_SETTINGS = ("data", "tokenizer", "template", "tokenize_fn", "seed", "order")


def differences(
    saved: Snapshot, order: Mapping[str, Any], fingerprints: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """What ``saved`` was taken with, and what there is now, where they differ (``fingerprint.find_changes``)."""
    return find_changes(saved.order, saved.fingerprints, order, fingerprints)


def check(
    saved: Snapshot,
    order: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
    allow_changed: Collection[str] = (),
    *,
    same_rows: bool = False,
) -> set[str]:
    """Refuse a snapshot of other data or settings, but for what is in ``allow_changed``; which settings those are.

    :param same_rows: the data's files may have other names, if their content and their order are the same. That is no
        change then.
    :raises SnapshotMismatchError: with every difference, in words and as a value.
    :raises ConfigError: if ``allow_changed`` names anything but data, tokenizer, template, tokenize_fn, seed, order and
        outcomes.
    """
    allowed = _allowed(allow_changed)
    found = differences(saved, order, fingerprints)
    faults = content_changes(*found["data"]) if "data" in found else []
    is_renamed = "data" in found and not faults
    if same_rows and faults:
        raise SnapshotMismatchError(
            "AD603 same_rows=True, but the rows are not known to be the same:\n  " + "\n  ".join(faults) + "\n"
            'Give back the files; or pass allow_changed={"data"} alone, to leave out the rest of the epoch.',
            {"data": found["data"]},
        )

    if same_rows:
        found.pop("data", None)
    refused = {name: pair for name, pair in found.items() if setting_of(name) not in allowed}
    if not refused:
        return set(map(setting_of, found))

    lines = [f"  {describe_change(name, *pair)}" for name, pair in refused.items()]
    if is_renamed and "data" in refused:
        lines.append("  The files have the same content under other names: pass same_rows=True to stay at the place.")
    override = ", ".join(f'"{name}"' for name in _SETTINGS if name in allowed | set(map(setting_of, refused)))
    raise SnapshotMismatchError(
        "AD603 this snapshot was taken with other data or settings:\n" + "\n".join(lines) + "\n"
        f"Give back what it was taken with; or, to continue anyway, pass allow_changed={{{override}}}.",
        refused,
    )


def _allowed(names: Collection[str]) -> set[str]:
    known = {*_SETTINGS, _OUTCOMES}
    unknown = [names] if isinstance(names, str) else sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"allow_changed must be a set of names out of {', '.join((*_SETTINGS, _OUTCOMES))}; got {unknown}"
        )

    return set(names)
