"""What `asyncdata snapshot show` prints of a snapshot: small whatever the buffer holds, and builtins."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.checkpoint.snapshot import load_with_header
from asyncdata.core.plain_values import unpacked

if TYPE_CHECKING:
    from asyncdata.checkpoint.saved_mixture import SavedMixture
    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.delivery.outcomes.memory import OutcomeState


def describe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """:func:`describe` of the snapshot in the file, with the file's size and when it was written (Unix time)."""
    path = os.path.abspath(path)
    header, snapshot = load_with_header(path)
    return {"path": path, "num_bytes": os.path.getsize(path), "created": header.created, **describe(snapshot)}


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """A summary of builtins, small whatever the buffer holds: what ``asyncdata snapshot show`` prints."""
    epoch, window, row = snapshot.position
    data = snapshot.fingerprints.get("data")
    short = {name: value for name, value in data.items() if name != "files"} if isinstance(data, dict) else data
    return {
        "schema": snapshot.schema,
        "library": snapshot.library,
        "epoch": epoch,
        "window": window,
        "row": row,
        "counters": snapshot.counters,
        "order": snapshot.order,
        "fingerprints": {**snapshot.fingerprints, "data": short},
        "num_buffered_groups": len(snapshot.buffer),
        "num_buffered_samples": sum(_num_samples(item) for group in snapshot.buffer for item in unpacked(group)),
        "num_buffered_tokens": sum(_num_tokens(item) for group in snapshot.buffer for item in unpacked(group)),
        "num_leased_groups": len(snapshot.leases),
        "num_acked": len(snapshot.acked),
        "num_journalled_rows": len(snapshot.journal),
        "num_excluded_rows": len(snapshot.excluded or ()),
        "num_canaries": len(snapshot.canaries),
        "outcomes": _outcomes(snapshot.outcomes),
        "parts": _parts(snapshot.mixture),
    }


def _outcomes(state: OutcomeState | msgspec.UnsetType) -> dict[str, Any] | None:
    """Rows, scores, and bytes and digest of the text of a memory; None if there is none."""
    if state is msgspec.UNSET:
        return None

    text = "".join((state.memory or "", *state.by_key.values())).encode()
    return {
        "num_rows": state.num_rows,
        "num_scores": state.num_scores,
        "num_bytes": len(text),
        "digest": blake2b(text, digest_size=16).hexdigest(),
    }


def _parts(mixture: SavedMixture | msgspec.UnsetType) -> dict[str, Any]:
    """How far each part was delivered, by name; empty without a mixture. Parked parts are there, too."""
    if mixture is msgspec.UNSET:
        return {}

    return {
        name: {
            "epoch": part.cursor.position.epoch,
            "num_samples": part.cursor.num_samples,
            "num_tokens": part.cursor.num_tokens,
            "drops": part.cursor.drops,
            "is_parked": name in mixture.parked,
            "outcomes": _outcomes(part.outcomes),
        }
        for name, part in sorted((mixture.parts | mixture.parked).items())
    }


def _num_samples(item: dict[str, Any]) -> int:
    """Samples of an item of a group."""
    match item.get("__samples__"):
        case {"num_samples": int(number)}:
            return number
        case list() as samples:
            return len(samples)
    return 1


def _num_tokens(item: dict[str, Any]) -> int:
    """Tokens of an item of a group."""
    match item:
        case {"__samples__": {"num_tokens": int(number)}}:
            return number
        case {"__samples__": list() as samples}:
            return sum(_num_tokens(sample) for sample in samples if isinstance(sample, dict))
        case {"tokens": {"__ndarray__": [_, [int(length)], _]}}:
            return length
        case {"tokens": list() as tokens}:
            return len(tokens)
    return 0
