"""``multimodal_inputs`` in a checkpoint: made again of the row's media; what a rollout has added is stored.

A processor may make any objects of a row's media, so these are not stored. A sample remembers which objects were made
for it. As long as its inputs contain these and nothing else, the record has only the row's media. Otherwise the record
has the inputs too: objects that were made are stored as references to their places, and all others in full.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from asyncdata.integrations.slime.sample import from_record, to_record

if TYPE_CHECKING:
    from collections.abc import Callable

    Process = Callable[[dict[str, list[Any]]], Any]

__all__ = ("MEDIA", "remember", "sample_of", "sample_to_record")

MEDIA = "asyncdata_media"
"""The attribute of a sample with its row's media."""

MADE = "asyncdata_made"
"""The attribute with the objects that were made of them, in containers that no rollout changes."""

INPUTS = "__multimodal_inputs__"
"""In a record: inputs that differ from those made of the row's media."""

_MADE_AT, _ESCAPED = "__made__", "__is__"
_ATOMS = frozenset((str, int, float, bool, type(None)))
_UNKNOWN = object()


def remember(sample: Any, media: Any) -> None:
    """Note that the sample's current ``multimodal_inputs`` were made of its row's ``media``."""
    setattr(sample, MEDIA, media)
    setattr(sample, MADE, _frozen(sample.multimodal_inputs))


def sample_to_record(sample: Any) -> dict[str, Any]:
    """:func:`~asyncdata.integrations.slime.sample.to_record` of a sample that may have inputs; large arrays as blocks.

    :raises TypeError: for a value that no snapshot can store, also one that a rollout has put into the inputs.
    """
    made = getattr(sample, MADE, _UNKNOWN)
    if getattr(sample, MEDIA, None) is None:
        return to_record(_without(sample), in_blocks=True)

    inputs, sample = sample.multimodal_inputs, _without(sample)
    sample.multimodal_inputs = None
    if _is_same(inputs, made):
        return to_record(sample, in_blocks=True)

    sample.multimodal_inputs = _referring(inputs, dict(_places(made, [])))
    record = to_record(sample, in_blocks=True)
    return {**record, "multimodal_inputs": None, INPUTS: record["multimodal_inputs"]}


def _without(sample: Any) -> Any:
    """A copy without the attribute of the objects that were made."""
    if not hasattr(sample, MADE):
        return sample

    sample = copy.copy(sample)
    delattr(sample, MADE)
    return sample


def sample_of(
    record: dict[str, Any], sample_type: type[Any], process: Process | None, blocks: memoryview | None
) -> Any:
    """The sample with this record. Inputs that were not stored are made again.

    :param process: makes ``multimodal_inputs`` of a row's media; None if rows have no media.
    :raises Exception: of any kind, if it is not a record, or the media now become other objects.
    """
    fields = {name: value for name, value in record.items() if name != INPUTS}
    if INPUTS in record:
        fields["multimodal_inputs"] = record[INPUTS]
    sample = from_record(fields, sample_type, blocks)
    media = getattr(sample, MEDIA, None)
    if media is None:
        return sample

    inputs = sample.multimodal_inputs
    if process is not None:
        sample.multimodal_inputs = process(media)
    remember(sample, media)
    if INPUTS in record:
        sample.multimodal_inputs = _resolved(inputs, _frozen(sample.multimodal_inputs))
    return sample


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
    if isinstance(value, dict):
        found = {key: _referring(item, places) for key, item in value.items()}
        return {_MADE_AT: None, _ESCAPED: found} if _MADE_AT in found else found

    if isinstance(value, list | tuple):
        items = [_referring(item, places) for item in value]
        return tuple(items) if isinstance(value, tuple) else items

    return {_MADE_AT: places[id(value)]} if id(value) in places else value


def _resolved(value: Any, made: Any) -> Any:
    """The inverse of :func:`_referring`, with the objects of ``made``."""
    if isinstance(value, dict):
        place = value.get(_MADE_AT)
        if place is not None:
            for key in place:
                made = made[key]
            return made

        return {key: _resolved(item, made) for key, item in value.get(_ESCAPED, value).items()}

    if isinstance(value, list | tuple):
        items = [_resolved(item, made) for item in value]
        return tuple(items) if isinstance(value, tuple) else items

    return value
