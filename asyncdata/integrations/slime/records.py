"""slime's samples as records of a checkpoint, with tensors, images, and the inputs that a processor made.

A processor may make any objects of a row's media, so ``multimodal_inputs`` are not stored: they are made again of the
row's media. A sample remembers which objects were made for it. As long as its inputs contain these and nothing else,
the record has only the row's media. Otherwise the record has the inputs too: objects that were made are stored as
references to their places, and all others in full.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.plain_values import BLOCKS, from_builtins, to_builtins
from asyncdata.integrations.slime.torch_data import tensors_from_plain, tensors_to_plain, with_items

if TYPE_CHECKING:
    from asyncdata.integrations.slime.media import Process

MEDIA = "asyncdata_media"
"""The attribute of a sample with its row's media."""

MADE = "asyncdata_made"
"""The attribute with the objects that were made of them, in containers that no rollout changes."""

INPUTS = "__multimodal_inputs__"
"""In a record: inputs that differ from those made of the row's media."""

_MADE_AT, _ESCAPED = "__made__", "__is__"
_ATOMS = frozenset((str, int, float, bool, type(None)))
_PLAIN = list[str | int | float | bool | None]
_UNKNOWN = object()


def remember(sample: Any, media: Any) -> None:
    """Note that the sample's current ``multimodal_inputs`` were made of its row's ``media``."""
    setattr(sample, MEDIA, media)
    setattr(sample, MADE, _frozen(sample.multimodal_inputs))


def to_record(sample: Any) -> dict[str, Any]:
    """Every attribute of one of slime's samples as plain builtins (``core.plain_values``).

    Plain values are as in slime's ``to_dict``: the status as its value, the counts as dicts. Nothing is shared but
    large arrays, which are a ``plain_values.Block``.

    :raises TypeError: for a value that no snapshot can store, such as a set or a lock, also one that a rollout has put
        into the inputs; the message names it.
    """
    default = type(sample)()
    values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    values |= getattr(sample, "__dict__", {})
    made = values.pop(MADE, _UNKNOWN)
    has_inputs = False
    if values.get(MEDIA) is not None:
        inputs = values["multimodal_inputs"]
        has_inputs = not _is_same(inputs, made)
        values["multimodal_inputs"] = _referring(inputs, dict(_places(made, []))) if has_inputs else None
    record = {name: _to_plain(value, getattr(default, name, None), f"$.{name}") for name, value in values.items()}
    return {**record, "multimodal_inputs": None, INPUTS: record["multimodal_inputs"]} if has_inputs else record


def _to_plain(value: Any, default: Any, path: str) -> Any:
    if type(value) is list and (plain := _plain_list(value)) is not None:
        return plain

    if type(value) is type(default) and isinstance(value, Enum):
        value = value.value
    elif type(value) is type(default) and dataclasses.is_dataclass(value):
        value = vars(value)
    return to_builtins(tensors_to_plain(value, path), path, form=BLOCKS)


def _plain_list(value: list[Any]) -> list[Any] | None:
    """A copy, if all items are plain, as in thousands of tokens and log-probabilities; otherwise None."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(value, _PLAIN)
    return None


def from_record(
    record: dict[str, Any], sample_type: type[Any], process: Process | None = None, blocks: memoryview | None = None
) -> Any:
    """The inverse of :func:`to_record`. Keys for which the class has no field become attributes.

    :param sample_type: slime's sample, or one like it.
    :param process: makes ``multimodal_inputs`` again of a row's media; None if rows have no media.
    :param blocks: the bytes of large arrays, if they are not in the record.
    :raises Exception: of any kind, if it is not a record, or the media now become other objects.
    """
    fields = {name: value for name, value in record.items() if name != INPUTS}
    if INPUTS in record:
        fields["multimodal_inputs"] = record[INPUTS]
    sample = sample_type()
    for name, plain in fields.items():
        value: Any = _plain_list(plain) if type(plain) is list else None
        if value is None:
            value = tensors_from_plain(from_builtins(plain, blocks))
        default = getattr(sample, name, None)
        if isinstance(default, Enum) and value is not None:
            value = type(default)(value)
        elif dataclasses.is_dataclass(default) and isinstance(value, dict):
            vars(default).update(value)
            continue
        setattr(sample, name, value)
    media = getattr(sample, MEDIA, None)
    if media is not None:
        inputs = sample.multimodal_inputs
        if process is not None:
            sample.multimodal_inputs = process(media)
        remember(sample, media)
        if INPUTS in record:
            sample.multimodal_inputs = _resolved(inputs, _frozen(sample.multimodal_inputs))
    return sample


# Inputs that were made, and inputs as they are


def _frozen(value: Any) -> Any:
    """The same objects in immutable containers."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}

    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _is_same(value: Any, made: Any) -> bool:
    """Whether ``value`` contains the same objects as ``made``, and no others."""
    if isinstance(made, dict):
        if not isinstance(value, dict) or value.keys() != made.keys():
            return False
        return all(_is_same(value[key], item) for key, item in made.items())

    if isinstance(made, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(made):
            return False
        return all(map(_is_same, value, made))

    return value is made or (type(value) is type(made) and type(made) in _ATOMS and value == made)


def _places(made: Any, place: list[Any]) -> list[tuple[int, list[Any]]]:
    """The place of each object that was made, by its identity."""
    if isinstance(made, dict | tuple):
        items = made.items() if isinstance(made, dict) else enumerate(made)
        return [found for key, item in items for found in _places(item, [*place, key])]

    return [] if type(made) in _ATOMS else [(id(made), place)]


def _referring(value: Any, places: dict[int, list[Any]]) -> Any:
    """``value`` with each object that was made replaced by its place."""
    if isinstance(value, dict | list | tuple):
        found = with_items(value, lambda item: _referring(item, places))
        return {_MADE_AT: None, _ESCAPED: found} if isinstance(found, dict) and _MADE_AT in found else found

    return {_MADE_AT: places[id(value)]} if id(value) in places else value


def _resolved(value: Any, made: Any) -> Any:
    """The inverse of :func:`_referring`, with the objects of ``made``."""
    place = value.get(_MADE_AT) if isinstance(value, dict) else None
    if place is not None:
        return functools.reduce(operator.getitem, place, made)

    if isinstance(value, dict | list | tuple):
        kept = value.get(_ESCAPED, value) if isinstance(value, dict) else value
        return with_items(kept, lambda item: _resolved(item, made))

    return value
