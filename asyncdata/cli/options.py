"""From a command's options to the library's arguments."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers.hard import HardPacking
from asyncdata.batching.packers.soft import SoftPacking
from asyncdata.batching.packers.xtuner import XTunerPacking
from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.cli.option_names import BAD_ROWS
from asyncdata.core.errors import ConfigError
from asyncdata.core.import_path import resolve_path
from asyncdata.loader.config import BadRows
from asyncdata.loader.loader import DataLoader
from asyncdata.order.shuffle import Shuffle
from asyncdata.tokenization.base import TokenizeFn
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.tokenization.functions.fixed_length import FixedLengthTokenizeFn
from asyncdata.tokenization.functions.preference import PreferenceTokenizeFn
from asyncdata.tokenization.functions.prompt import PromptTokenizeFn
from asyncdata.tokenization.functions.text import TextTokenizeFn
from asyncdata.tokenization.functions.xtuner import XTunerTokenizeFn, is_of_xtuner
from asyncdata.tokenization.resolve import resolved

if TYPE_CHECKING:
    import argparse

__all__ = ("has_tokenize_fn", "loader_of", "opened_order", "order_of", "tokenize_fn_of")

_CLASSES: dict[str, Any] = {
    "prompt": PromptTokenizeFn,
    "chat": ChatTokenizeFn,
    "text": TextTokenizeFn,
    "preference": PreferenceTokenizeFn,
    "babilong": FixedLengthTokenizeFn,
}
_PACKINGS = {kind.__name__: kind for kind in (SoftPacking, HardPacking, XTunerPacking)}
_SETTINGS = ("prompt_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "max_length", "train_on")


def order_of(args: argparse.Namespace) -> dict[str, Any]:
    """The loader's arguments that D depends on."""
    blocks = {"block_bytes": args.block_bytes, "window_blocks": args.window_blocks}
    shuffle = "full" if args.shuffle == "full" else Shuffle(enabled=args.shuffle != "none", **blocks)
    return {"seed": args.seed, "shuffle": shuffle, **{name: _knob(name, text) for name, text in args.loader}}


def _knob(name: str, text: str) -> Any:
    """An argument of the loader. A description is written as its settings; of a packing, its class says which."""
    value = _value(text)
    if name == "packing" and isinstance(value, dict) and len(value) == 1 and set(value) <= set(_PACKINGS):
        ((kind, settings),) = value.items()
        return _made(_PACKINGS[kind], settings)

    return _made(LengthGrouping, value) if name == "length_grouping" and isinstance(value, dict) else value


def opened_order(args: argparse.Namespace) -> OpenedOrder:
    """D, to look at its rows; with samples, if the command was told how to tokenize. It is to be closed."""
    return OpenedOrder(args.data, tokenize_fn_of(args) if has_tokenize_fn(args) else None, **order_of(args))


def has_tokenize_fn(args: argparse.Namespace) -> bool:
    """Whether the command is told how to tokenize."""
    return args.tokenizer is not None or args.tokenize_fn is not None


def tokenize_fn_of(args: argparse.Namespace) -> Any:
    """The tokenize function, with every name in it made a local file. Rows are prompts unless ``args.kind`` says more.

    :raises ConfigError: for a setting that cannot work.
    """
    settings = _settings(args)
    if args.tokenize_fn is not None:
        return resolved(_named(args.tokenize_fn, args.tokenizer, settings))

    kind = args.kind or "prompt"
    fields = set(_CLASSES[kind].__struct_fields__)
    if unknown := sorted(set(settings) - fields):
        raise ConfigError(
            f"{_CLASSES[kind].__name__}, for rows of the kind {kind!r}, has no setting {', '.join(unknown)}; its "
            f"settings are {', '.join(sorted(fields - {'tokenizer'}))}"
        )

    if kind != "babilong":
        return resolved(_CLASSES[kind](args.tokenizer, **settings))

    if "max_length" not in settings:
        raise ConfigError("rows of the kind 'babilong' need --max-length: the tokens of every sample")

    return resolved(FixedLengthTokenizeFn.babilong(args.tokenizer, **settings))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the classes' own names."""
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    if args.chat_template is not None:
        with open(args.chat_template, encoding="utf-8") as file:
            settings["chat_template"] = file.read()
    return settings | {name: _value(text) for name, text in args.settings}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named(path: str, tokenizer: str | None, settings: dict[str, Any]) -> Any:
    """What an import path names, with its settings."""
    here = os.getcwd()
    if here not in sys.path:  # a console script has its own folder there
        sys.path.insert(0, here)
    found = resolve_path(path)
    if isinstance(found, type) and isinstance(found, TokenizeFn):
        return _made(found, {**({} if tokenizer is None else {"tokenizer": tokenizer}), **settings})

    if is_of_xtuner(found) and not isinstance(found, TokenizeFn):
        return XTunerTokenizeFn(path, settings)

    if settings:
        raise ConfigError(f"{path} is made already and takes no settings; leave {', '.join(sorted(settings))}")

    return path


def _made(kind: type, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} cannot be made of the settings {settings}: {error}") from error


def loader_of(args: argparse.Namespace, **knobs: Any) -> DataLoader:
    """The loader, not yet started."""
    told = {"num_workers": args.num_workers} if hasattr(args, "num_workers") else {}
    bad_rows = {setting: getattr(args, name) for setting, name in BAD_ROWS.items() if hasattr(args, name)}
    told["bad_rows"] = BadRows(**bad_rows)
    return DataLoader(args.data, tokenize_fn=tokenize_fn_of(args), **{**told, **knobs, **order_of(args)})
