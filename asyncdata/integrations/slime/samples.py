"""slime's own samples, made from asyncdata's, and the framework that runs the data source: slime, its relative miles,
or neither. What a row's media become: ``multimodal_inputs``, made in workers by the framework's own function or another
and carried as bytes. And samples as records of a checkpoint, with tensors, images, and the inputs that were made.

A processor may make any objects of a row's media, so ``multimodal_inputs`` are not stored: they are made again of the
row's media. A sample remembers which objects were made for it. As long as its inputs contain these and nothing else,
the record has only the row's media. Otherwise the record has the inputs too: objects that were made are stored as
references to their places, and all others in full.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from typing import Any

import msgspec

from asyncdata.core.columns import Column
from asyncdata.core.errors import ConfigError, raise_if_shortage
from asyncdata.core.plain_values import BLOCKS, from_builtins, to_builtins
from asyncdata.core.settings import resolve_path
from asyncdata.core.types import Sample
from asyncdata.core.types import Status as _Status
from asyncdata.integrations.slime.checkpoint import pieces, split
from asyncdata.integrations.slime.torch_data import ATOMS, tensors_from_plain, tensors_to_plain, with_items
from asyncdata.tokenization.rows import RowFault

_PACKAGES = ("slime", "miles")
_CURRENT = "_current_rollout_id"

_decode = msgspec.msgpack.Decoder().decode


@dataclasses.dataclass
class _SpecInfo:
    """Tokens that speculative decoding drafted and accepted."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclasses.dataclass
class _PrefixCacheInfo:
    """Tokens that the engine's prefix cache had."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclasses.dataclass
class SlimeSample:
    """Replaces slime's sample if slime is not installed: the same fields and defaults, without its methods."""

    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = dataclasses.field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = dataclasses.field(default_factory=_PrefixCacheInfo)


def resolve_sample_type() -> type[Any]:
    """The sample class of slime, or of its relative miles; :class:`SlimeSample` if neither is installed.

    If both are installed, it is the one that this process has imported.

    :raises ImportError: if one is installed, but cannot be imported.
    """
    names = [f"{package}.utils.types" for package in _PACKAGES]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Sample  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # it is installed, and cannot import something else

    return SlimeSample


def package_of(sample_type: type[Any]) -> str | None:
    """The framework of the sample class: ``slime`` or ``miles``; None if neither is installed."""
    name = sample_type.__module__.partition(".")[0]
    return name if name in _PACKAGES else None


def current_rollout_id() -> int | None:
    """The rollout that the driver says is being generated. Imports nothing: a running driver is imported already."""
    return next((found for found in _told() if isinstance(found, int)), None)


def tells_rollouts() -> bool:
    """Whether the driver says which rollout it generates: slime does since v0.3.1, miles does not."""
    return bool(_told())


def _told() -> list[Any]:
    """What each driver that tells the rollout says; it may be None."""
    hooks = (sys.modules.get(f"{package}.rollout.sample_hooks") for package in _PACKAGES)
    return [getattr(module, _CURRENT) for module in hooks if hasattr(module, _CURRENT)]


def register(kind: type[Any], package: str | None) -> None:
    """Register ``kind`` as a virtual subclass of the framework's own ``DataSource``, if that can be imported."""
    if package is None:
        return

    try:
        base = importlib.import_module(f"{package}.rollout.data_source").DataSource
    except (ImportError, AttributeError):
        return  # an older driver, or one without this class

    if not issubclass(kind, base):
        base.register(kind)


def groups_of(
    samples: Iterable[Sample], kind: type[Any], size: int, first_group_index: int, first_index: int
) -> list[list[Any]]:
    """A group of fresh samples for each of ``samples``.

    A sample's ``extra["multimodal_inputs"]``, if a processor has made them, become ``multimodal_inputs``. The pictures
    and arrays in them are shared, so that they are not copied; no other mutable object is, not even with ``samples``.
    All other fields of slime's sample have their defaults.

    :param kind: slime's sample, or one like it.
    :param size: samples of a group.
    :param first_group_index: ``group_index`` of the first group; the next groups have the next numbers.
    :param first_index: ``index`` of the first sample; the next samples have the next numbers.
    """
    groups = []
    for group_index, sample in enumerate(samples, first_group_index):
        fields = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata}
        tokens = sample.tokens.tolist()
        copies = {name: _copies(value, size) for name, value in fields.items()}
        if (extra := sample.extra) and (inputs := extra.get("multimodal_inputs")) is not None:
            copies["multimodal_inputs"] = [containers_of(inputs) for _ in range(size)]
        group = []
        for number in range(size):
            made = kind()
            made.group_index, made.index = group_index, first_index + number
            made.tokens = tokens.copy()
            for name, values in copies.items():
                setattr(made, name, values[number])
            group.append(made)
        groups.append(group)
        first_index += size
    return groups


def containers_of(value: Any) -> Any:
    """A copy of nested containers with the same objects in them."""
    return with_items(value, containers_of) if isinstance(value, dict | list | tuple) else value


def _copies(value: Any, num_copies: int) -> list[Any]:
    """Deep copies of a JSON value. Decoding it for each copy is several times faster than ``copy.deepcopy``."""
    if type(value) in ATOMS:
        return [value] * num_copies

    if type(value) is dict or type(value) is list:
        if not value or ATOMS.issuperset(map(type, value.values() if type(value) is dict else value)):
            return [value.copy() for _ in range(num_copies)]

        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            text = msgspec.msgpack.encode(value)
            if _decode(text) == value:
                return [_decode(text) for _ in range(num_copies)]

    return [copy.deepcopy(value) for _ in range(num_copies)]  # NaN, lone surrogates, and values other than JSON


# Their media

Process = Callable[[dict[str, list[Any]]], Any]

INPUTS = Column("multimodal_inputs", "uint64", "item", phase="load")
"""Carries the inputs. Its items have 8 bytes, so that arrays in it are aligned."""

_CANNOT_BE_SENT = (TypeError, AttributeError, OverflowError, UnicodeEncodeError, RecursionError)
_ITEM_BYTES = 8


def import_by_path(path: str) -> Any:
    """The object with an import path, ``package.module.name`` as in slime, or ``package.module:name``.

    :raises ConfigError: if there is no such object.
    """
    return resolve_path(path if ":" in path else ":".join(path.rsplit(".", 1)))


def process_of(args: Any, path: str | None, package: str | None) -> Process:
    """The function that makes ``multimodal_inputs`` of a row's media.

    :param path: the import path of a function of (args, media); None: as the framework makes them.
    :param package: ``slime`` or ``miles``; None if neither is installed.
    :raises ConfigError: if it cannot be imported.
    """
    if path is None:
        return partial(_process_as_slime, args, package or "slime")

    return partial(import_by_path(path), args)


class _Arguments(argparse.Namespace):
    """``args`` in a worker, without the values that only the process of the data source has."""

    def __init__(self, args: dict[str, Any], left_out: list[str]) -> None:
        super().__init__(**args)
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        if name != "_left_out" and name in self._left_out:
            raise ConfigError(f"args.{name} is not known in a worker")

        raise AttributeError(name)


def to_worker(args: Any, path: str | None) -> dict[str, Any]:
    """What :func:`opened_in_worker` needs to make the function of :func:`process_of`, as JSON values."""
    plain, left_out = {}, []
    for name in (name for name in dir(args) if not name.startswith("__")):
        try:
            plain[name] = to_builtins(getattr(args, name))
            msgspec.json.encode(plain[name])
        except _CANNOT_BE_SENT:
            plain.pop(name, None)
            left_out.append(name)
    package = package_of(resolve_sample_type())
    return {"args": plain, "left_out": left_out, "path": path, "package": package}


def opened_in_worker(processing: dict[str, Any]) -> Process:
    """The function of which :func:`to_worker` has told.

    :raises ConfigError: if it cannot be imported here.
    """
    args = {name: from_builtins(value) for name, value in processing["args"].items()}
    return process_of(_Arguments(args, processing["left_out"]), processing["path"], processing["package"])


def packed_inputs(process: Callable[[], Process], media: dict[str, list[Any]]) -> bytes:
    """The inputs made of a row's media, as bytes; empty if they have to be made in the process of the data source.

    :param process: opens the function that makes them.
    :raises RowFault: AD457, if the media cannot be read.
    """
    try:
        return _packed(process()(media))
    except (ConfigError, ImportError):
        return b""  # raised again there, as an error of settings and not of a row
    except Exception as error:  # a user's function may raise anything
        raise_if_shortage(error)
        raise RowFault("AD457", f"multimodal_inputs cannot be made: {type(error).__name__}: {error}") from None


def _packed(inputs: Any) -> bytes:
    """Values that a checkpoint can store as bytes, with arrays and pixels beside them; empty for other values.

    :raises OSError: if a picture that is not decoded yet is damaged.
    """
    try:
        found = pieces(to_builtins(tensors_to_plain(inputs, "$"), form=BLOCKS), msgspec.msgpack.encode)
    except _CANNOT_BE_SENT:
        return b""

    return b"".join((*found, bytes(-sum(map(len, found)) % _ITEM_BYTES)))


def unpack(array: Any) -> Any:
    """The inputs in ``array``, uint64, that :func:`packed_inputs` made. Nothing in them is a view of it."""
    head, blocks = split(memoryview(bytearray(array)))
    return tensors_from_plain(from_builtins(msgspec.msgpack.decode(head), blocks))


# As slime makes them


def _process_as_slime(args: Any, package: str, media: dict[str, list[Any]]) -> Any:
    """The result of slime's ``process_vision_info`` for a chat with ``media``.

    That function reads only the media of a chat, so one message with all of them is enough.

    :param media: ``{"images": [...], "videos": [...], "audios": [...]}``, with the row's values.
    :raises ConfigError: if the model's processor cannot be loaded. slime would continue without the images.
    """
    parts = [
        item if isinstance(item, dict) else {"type": name.removesuffix("s"), name.removesuffix("s"): item}
        for name, items in media.items()
        for item in items
    ]
    chat = [{"role": "user", "content": parts}]
    return _framework(package).process_vision_info(chat, _processor(package, args.hf_checkpoint))


def _framework(package: str) -> Any:
    """The module for media of slime, or of miles, if miles runs the data source."""
    name = f"{package}.utils.processing_utils"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # it is installed, and cannot import something else

        raise ConfigError(
            f"multimodal_inputs are made by {name}, which is not installed; give asyncdata_processor: the import path "
            "of a function of (args, media) that makes them"
        ) from error


@cache
def _processor(package: str, checkpoint: str) -> Any:
    processor = _framework(package).load_processor(checkpoint)
    if processor is None:
        raise ConfigError(
            f"multimodal_keys need a processor, and {checkpoint} has none that loads without code of its own; give "
            "asyncdata_processor: the import path of a function of (args, media) that makes multimodal_inputs"
        )

    return processor


# Their records

MEDIA = "asyncdata_media"
"""The attribute of a sample with its row's media."""

MADE = "asyncdata_made"
"""The attribute with the objects that were made of them, in containers that no rollout changes."""

KEPT_INPUTS = "__multimodal_inputs__"
"""In a record: inputs that differ from those made of the row's media."""

_MADE_AT, _ESCAPED = "__made__", "__is__"
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
    return {**record, "multimodal_inputs": None, KEPT_INPUTS: record["multimodal_inputs"]} if has_inputs else record


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
    fields = {name: value for name, value in record.items() if name != KEPT_INPUTS}
    if KEPT_INPUTS in record:
        fields["multimodal_inputs"] = record[KEPT_INPUTS]
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
        if KEPT_INPUTS in record:
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

    return value is made or (type(value) is type(made) and type(made) in ATOMS and value == made)


def _places(made: Any, place: list[Any]) -> list[tuple[int, list[Any]]]:
    """The place of each object that was made, by its identity."""
    if isinstance(made, dict | tuple):
        items = made.items() if isinstance(made, dict) else enumerate(made)
        return [found for key, item in items for found in _places(item, [*place, key])]

    return [] if type(made) in ATOMS else [(id(made), place)]


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
