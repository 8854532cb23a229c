"""Reads the result of a user's function: the tokens and columns of a sample, or the reason of a drop."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.tokenization.spans import NOT_TRAINED, encode_spans, trained_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("Result", "read_result", "read_xtuner_result")

_FIELDS = ("prompt", "label", "metadata")
_MAX_REASON = 200
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask")
_WEIGHTS = ("loss_weights", "loss_weight", "loss_scale")  # masks, if they are only 0 and 1
_XTUNER_COUNTS = ("num_tokens", "proxy_attn_flops")  # computed from the tokens, so not stored


class Result(NamedTuple):
    """A sample: its tokens, and its columns as JSON text."""

    tokens: array[int]
    columns: dict[str, bytes]


def read_result(result: Any) -> Result | str:
    """Read the result of a plain function: a sample, or the reason of a drop.

    :raises TypeError, ValueError, OverflowError, RecursionError: if it is neither.
    """
    if isinstance(result, str) and len(result) > _MAX_REASON:
        raise TypeError(
            f"a text of {len(result):,} characters; a text is the reason to drop the row, of at most {_MAX_REASON} "
            "characters. To keep the row, return its token ids"
        )

    if result is None or isinstance(result, str):
        return (result or "tokenize_fn").encode("ascii", "backslashreplace").decode()

    return _sample(dict(result) if isinstance(result, Mapping) else {"input_ids": result})


def read_xtuner_result(result: Any) -> Result | str:
    """Read a result of XTuner's protocol: always a dict, and without labels or a mask every token is trained.

    :raises TypeError, ValueError, OverflowError, RecursionError: if it is not a sample.
    """
    if not isinstance(result, Mapping):
        raise TypeError(f"{type(result).__name__}; need a dict with 'input_ids'")

    if result.get("num_tokens") == 0:
        return "num_tokens_0"

    return _sample(dict(result), _XTUNER_COUNTS, trains_all=True)


def _sample(fields: dict[str, Any], left_out: tuple[str, ...] = (), *, trains_all: bool = False) -> Result:
    tokens = _tokens(fields)
    for name in left_out:
        fields.pop(name, None)
    labels = _labels(fields, tokens)
    if labels is None and trains_all:
        labels = tokens
    columns = {} if labels is None else {"spans": encode_spans(trained_runs(labels))}
    columns |= {name: _json(fields.pop(name)) for name in _FIELDS if name in fields}
    if fields:
        columns["extra"] = _json(fields)
    return Result(tokens, columns)


def _tokens(fields: dict[str, Any]) -> array[int]:
    name = next((name for name in ("input_ids", "tokens") if name in fields), None)
    if name is None:
        raise TypeError(f"a dict without 'input_ids': it has {sorted(map(str, fields))}")

    tokens = array("i", _list(name, fields.pop(name)))
    if len(tokens) and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)} is negative")

    return tokens


def _list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | bytearray) or not (hasattr(values, "tolist") or hasattr(values, "__iter__")):
        need = f"a list of {name}"
        if name in ("input_ids", "tokens"):
            need = "a list of token ids, or a dict with 'input_ids'"
        raise TypeError(f"{type(values).__name__}; need {need}")

    return list(values.tolist() if hasattr(values, "tolist") else values)


def _labels(fields: dict[str, Any], tokens: array[int]) -> Sequence[int] | None:
    """The labels that the fields give, as labels or as masks; None if they do not."""
    given, source = fields.pop("labels", None), "labels"
    labels = None if given is None else _checked_labels(_list("labels", given), tokens)
    for name in (*_MASKS, *_WEIGHTS):
        mask = fields.pop(name, None)
        if mask is None:
            continue

        flags = _flags(name, _list(name, mask), len(tokens))
        found = [token if flag else NOT_TRAINED for token, flag in zip(tokens, flags, strict=True)]
        if labels is not None and labels != found:
            place = next(place for place, pair in enumerate(zip(labels, found, strict=True)) if pair[0] != pair[1])
            raise ValueError(f"{source} and {name} differ at token {place}; return one of them, or the same in both")

        labels, source = found, name
    return labels


def _flags(name: str, values: list[Any], num_tokens: int) -> list[Any]:
    wrong = next((value for value in values if value not in (0, 1)), None)
    if wrong is not None:
        way_out = "; weights are not supported yet: return labels" if name in _WEIGHTS else ""
        raise ValueError(f"{name} has {wrong!r:.40}, and must be 0 or 1 for each token{way_out}")

    if len(values) != num_tokens:
        raise ValueError(
            f"{name} has {len(values)} values for {num_tokens} tokens; it needs one for each token, also of the prompt"
        )

    return values


def _checked_labels(labels: list[Any], tokens: array[int]) -> list[int]:
    if len(labels) != len(tokens):
        raise ValueError(f"{len(labels)} labels for {len(tokens)} tokens")

    wrong = [number for number, label in enumerate(labels) if label not in (tokens[number], NOT_TRAINED)]
    if not wrong:
        return labels

    if any(label != NOT_TRAINED for label in labels[:-1]) and all(
        label in (id, NOT_TRAINED) for label, id in _with_next(labels, tokens)
    ):
        raise ValueError("the labels are shifted: each is the next token; return them unshifted, collators shift them")

    raise ValueError(
        f"labels[{wrong[0]}] is {labels[wrong[0]]}, and the token {tokens[wrong[0]]}; a label must be the token itself "
        f"where it is trained, and {NOT_TRAINED} elsewhere"
    )


def _with_next(labels: list[Any], tokens: array[int]) -> Iterator[tuple[Any, int]]:
    """Pairs of each label and the token after its own; the last label has no such token."""
    return zip(labels, [*tokens[1:], NOT_TRAINED], strict=True)


def _json(value: Any) -> bytes:
    """JSON text with NaN and lone surrogates, which rows may also contain."""
    return json.dumps(value).encode("ascii")
