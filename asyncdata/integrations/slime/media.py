"""``multimodal_inputs`` of a row's media: made in workers, by slime's own function or another, and carried as bytes."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

from asyncdata.core.columns import Column
from asyncdata.core.errors import ConfigError, raise_if_shortage
from asyncdata.core.imports import resolve_path
from asyncdata.core.plain_values import BLOCKS, from_builtins, to_builtins
from asyncdata.integrations.slime.groups import pieces, split
from asyncdata.integrations.slime.sample import package_of, resolve_sample_type
from asyncdata.integrations.slime.torch_data import tensors_from_plain, tensors_to_plain
from asyncdata.tokenization.rows import RowFault

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
