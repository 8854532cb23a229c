"""What snapshots say: a summary of one, small whatever the buffer holds; and whether two runs saw one stream, by their
digests.
"""

from __future__ import annotations

import os
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.checkpoint.restore import describe_change, find_changes, saved_digest, setting_of
from asyncdata.checkpoint.snapshot import Snapshot, load_with_header
from asyncdata.core.plain_values import unpacked
from asyncdata.core.types import Position

if TYPE_CHECKING:
    from asyncdata.checkpoint.saved_mixture import SavedMixture
    from asyncdata.delivery.chunk import StreamDigest
    from asyncdata.delivery.outcome_memory import OutcomeState


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


class Verdict(StrEnum):
    """The result of comparing two runs."""

    SAME = "same"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs by their snapshots.

    :ivar verdict: ``same``: the same samples; ``different``; ``undecided``: the digests cannot tell.
    :ivar reasons: the reasons, as sentences.
    :ivar compares: what the compared digests cover: ``tokens``, ``positions`` (and numbers of tokens),
        ``positions only``, or ``nothing``.
    :ivar num_ahead: samples of the stream that the second run has seen more than the first.
    :ivar positions: the first position of D that each has not delivered, as ``epoch:window:row``.
    :ivar num_samples: samples of the stream that each has seen.
    :ivar changes: settings and fingerprints that differ -> a description of the change.
    """

    verdict: Verdict
    reasons: list[str]
    compares: str
    num_ahead: int
    positions: tuple[str, str]
    num_samples: tuple[int, int]
    changes: dict[str, str] = {}


def compare(first: Snapshot, second: Snapshot) -> Comparison:
    """Compare the streams that led to two snapshots.

    :raises SnapshotError: if a digest has a wrong layout, or does not cover the whole run.
    """
    found = find_changes(first.order, first.fingerprints, second.order, second.fingerprints)
    changes = {name: describe_change(name, *pair) for name, pair in found.items()}
    digests = saved_digest(first), saved_digest(second)
    verdict, reasons, compares = _judged(*digests, set(found))
    counts = _seen(first), _seen(second)
    return Comparison(
        verdict=verdict,
        reasons=reasons,
        compares=compares,
        num_ahead=counts[1] - counts[0],
        positions=(str(Position(*first.position)), str(Position(*second.position))),
        num_samples=counts,
        changes=changes,
    )


def _seen(snapshot: Snapshot) -> int:
    number = snapshot.counters.get("num_groups", 0)
    return number if isinstance(number, int) else 0


_Judged = tuple[Verdict, list[str], str]


def _judged(first: StreamDigest, second: StreamDigest, changed: set[str]) -> _Judged:
    parts = sorted({setting_of(name) for name in changed} & {"data", "seed", "order"})
    other_order = [f"their positions are of other orders: {', '.join(parts)} differ"] if parts else []
    if first.num_samples != second.num_samples:
        return Verdict.UNDECIDED, _ahead(first, second, bool(changed)) + other_order, "nothing"

    compares = _compared(first, second)
    difference = _difference(first, second, compares)
    if difference:
        return Verdict.DIFFERENT, [difference, *other_order], compares

    if other_order and compares != "tokens":
        other_order.append('which rows these were was not hashed: digest="tokens" would tell')
        return Verdict.UNDECIDED, other_order, compares

    return Verdict.SAME, [f"they saw {_PROVEN[compares]}"], compares


_PROVEN = {
    "tokens": "the same positions in the same order, token for token",
    "positions": "the same positions in the same order, and as many tokens at each; which tokens was not hashed",
    "positions only": "the same positions in the same order; their tokens were not hashed alike",
}


def _compared(first: StreamDigest, second: StreamDigest) -> str:
    if first.of != second.of or first.tokens is None or second.tokens is None:
        return "positions only"

    return first.of


def _difference(first: StreamDigest, second: StreamDigest, compares: str) -> str:
    """The difference between digests of equally many samples; empty if there is none."""
    if first.positions != second.positions:
        return "they saw other positions"

    if first.order != second.order:
        return "they saw the same positions in another order"

    if compares != "positions only" and first.tokens != second.tokens:
        what = "other tokens" if compares == "tokens" else "samples of other numbers of tokens"
        return f"at the same positions, in the same order, they saw {what}"

    return ""


def _ahead(first: StreamDigest, second: StreamDigest, is_changed: bool) -> list[str]:
    """The reasons if one run has seen more samples."""
    shorter, ahead = ("first", "second") if first.num_samples < second.num_samples else ("second", "first")
    number = abs(first.num_samples - second.num_samples)
    reasons = [f"the {ahead} run is ahead by {number} samples, and a digest of more samples says nothing of fewer"]
    if not is_changed:
        reasons.append("all settings and fingerprints agree, so both follow one order")
    reasons.append(f"let the {shorter} run deliver {number} samples more, and compare again")
    return reasons
