"""How large the groups in a snapshot's buffer are."""

from __future__ import annotations

from typing import Any

__all__ = ("num_samples", "num_tokens")


def num_samples(item: dict[str, Any]) -> int:
    """Samples of an item of a group."""
    match item.get("__samples__"):
        case {"num_samples": int(number)}:
            return number
        case list() as samples:
            return len(samples)
    return 1


def num_tokens(item: dict[str, Any]) -> int:
    """Tokens of an item of a group."""
    match item:
        case {"__samples__": {"num_tokens": int(number)}}:
            return number
        case {"__samples__": list() as samples}:
            return sum(num_tokens(sample) for sample in samples if isinstance(sample, dict))
        case {"tokens": {"__ndarray__": [_, [int(length)], _]}}:
            return length
        case {"tokens": list() as tokens}:
            return len(tokens)
    return 0
