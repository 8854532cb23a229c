"""What `asyncdata snapshot show` prints of the outcome memory, and of the parts of a mixture: small, and builtins."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from asyncdata.checkpoint.saved_mixture import SavedMixture
    from asyncdata.delivery.outcomes.state import OutcomeState

__all__ = ("summary_of_outcomes", "summary_of_parts")


def summary_of_outcomes(state: OutcomeState | msgspec.UnsetType) -> dict[str, Any] | None:
    """Rows, scores, bytes and digest of a memory; None if there is none.

    The bytes are those of the file, or those of the text in the snapshot.
    """
    if state is msgspec.UNSET:
        return None

    text = None if state.memory is None else state.memory.encode()
    return {
        "num_rows": state.num_rows,
        "num_scores": state.num_scores,
        "num_bytes": state.num_bytes if text is None else len(text),
        "digest": state.digest if text is None else blake2b(text, digest_size=16).hexdigest(),
        "is_in_file": text is None,
    }


def summary_of_parts(mixture: SavedMixture | msgspec.UnsetType) -> dict[str, Any]:
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
            "outcomes": summary_of_outcomes(part.outcomes),
        }
        for name, part in sorted((mixture.parts | mixture.parked).items())
    }
