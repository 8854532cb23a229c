"""A loader's state in a shape that torch's checkpoints store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("from_torch_state", "to_torch_state")

_KEY = "asyncdata"


def to_torch_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """``{"asyncdata": text}``, of a loader's state dict.

    A distributed checkpoint loads only keys that the target object has, and a fresh loader's state lacks keys that it
    may have later. So there is always one key.
    """
    return {_KEY: json.dumps(state)}


def from_torch_state(state: Mapping[str, Any]) -> Any:
    """The inverse of :func:`to_torch_state`. Other values are returned unchanged: they may be a loader's state dict.

    :raises SnapshotError: if the text is not JSON.
    """
    if not isinstance(state, dict) or list(state) != [_KEY]:
        return state

    try:
        return json.loads(state[_KEY])
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"AD602 this state_dict cannot be loaded: its text is damaged: {error}") from error
