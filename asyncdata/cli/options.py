"""Converts a command's options to the library's arguments."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from types import SimpleNamespace
from typing import Any

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers import HardPacking, SoftPacking
from asyncdata.batching.xtuner_packing import PresetPacking, XTunerPacking
from asyncdata.cli.main import BAD_ROWS, has_tokenize_fn
from asyncdata.cli.output import Output
from asyncdata.cli.rows import MixtureView, OrderView
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import RowError
from asyncdata.core.settings import resolve_path
from asyncdata.delivery.bad_rows import error_at
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix import mix_of_file
from asyncdata.order.shuffle import Shuffle
from asyncdata.tokenization.base import TokenizeFn, resolved
from asyncdata.tokenization.functions.chat import ChatTokenizeFn, PreferenceTokenizeFn
from asyncdata.tokenization.functions.dialects import fitting
from asyncdata.tokenization.functions.fixed_length import FixedLengthTokenizeFn
from asyncdata.tokenization.functions.prompt import PromptTokenizeFn
from asyncdata.tokenization.functions.text import TextTokenizeFn
from asyncdata.tokenization.rows import RowFault, decode_object
from asyncdata.tokenization.xtuner_function import XTunerTokenizeFn, is_of_xtuner

_ROWS_LOOKED_AT = 20
_KEYS = {"preference": {"chosen", "rejected"}, "babilong": {"input", "question", "target"}, "text": {"text"}}
"""The kind of rows -> the keys that they have. Chats are rows of a dialect."""

_CLASSES: dict[str, Any] = {
    "prompt": PromptTokenizeFn,
    "chat": ChatTokenizeFn,
    "text": TextTokenizeFn,
    "preference": PreferenceTokenizeFn,
    "babilong": FixedLengthTokenizeFn,
}
_PACKINGS = {kind.__name__: kind for kind in (SoftPacking, HardPacking, XTunerPacking, PresetPacking)}
_SETTINGS = ("prompt_key", "label_key", "metadata_key", "tool_key", "apply_chat_template", "max_length", "train_on")


_KNOBS = {
    "num_workers": "num_workers",
    "buffer_size": "buffer_size",
    "digest": "digest",
    "telemetry": "telemetry.folder",
    **{name: f"bad_rows.{setting}" for setting, name in BAD_ROWS.items()},
}
"""Options, by their names in Python -> the setting of the loader that each sets; ``group.setting`` for one of a group.

Those that the order depends on are in :func:`order_of`.
"""


def order_of(args: SimpleNamespace) -> dict[str, Any]:
    """The loader's arguments on which D depends."""
    blocks = {"block_bytes": args.block_bytes, "window_blocks": args.window_blocks}
    is_full = args.shuffle == "full" and not args.no_shuffle
    shuffle = "full" if is_full else Shuffle(enabled=not args.no_shuffle, **blocks)
    return {"seed": args.seed, "shuffle": shuffle, **{name: _knob(name, text) for name, text in args.loader}}


def _knob(name: str, text: str) -> Any:
    """The value of an argument of the loader. A dict is the settings of a length grouping, or of a packing class."""
    value = _value(text)
    if name == "packing" and isinstance(value, dict) and len(value) == 1 and set(value) <= set(_PACKINGS):
        ((kind, settings),) = value.items()
        return _made(_PACKINGS[kind], settings)

    return _made(LengthGrouping, value) if name == "length_grouping" and isinstance(value, dict) else value


def order_view(args: SimpleNamespace) -> OrderView:
    """D, to look at its rows; with samples, if the options say how to tokenize."""
    return OrderView(args.data, tokenize_fn_of(args) if has_tokenize_fn(args) else None, **order_of(args))


def mixture_view(args: SimpleNamespace) -> MixtureView:
    """The mixture of ``--mix``, to look at its rows."""
    return MixtureView(args.mix, _function_of(args), order_of(args))


def settle_kind(args: SimpleNamespace, output: Output, *, says_prompt: bool = False) -> None:
    """Set ``args.kind`` to the kind of the rows, unless options set it, and print it.

    With ``--prompt-key`` or ``--apply-chat-template``, rows are prompts.

    :param says_prompt: also print it for prompts, the most common kind.
    :raises ConfigError: if none of the first rows is a JSON object.
    """
    if args.kind is not None or args.tokenizer is None or args.tokenize_fn is not None:
        return

    is_told = args.prompt_key is not None or args.apply_chat_template is not None
    args.kind = kind = "prompt" if is_told else _kind_of_rows(args)
    if says_prompt or kind != "prompt":
        output.say(f"rows are taken to be of the kind {kind!r}; --kind says otherwise", "dim")


def _kind_of_rows(args: SimpleNamespace) -> str:
    """The kind of the rows, by the keys of the first one that is a JSON object."""
    fault = ""
    data: Any = args.data if args.mix is None else next(mix_of_file(args.mix).leaves()).part.source
    for row in islice(OrderView(data, shuffle=False).rows(), _ROWS_LOOKED_AT):
        try:
            found = decode_object(row.raw)
        except RowFault as error:
            fault = fault or f" ({error_at(row.location, RowError(0, error.code, error.reason))})"
            continue

        kinds = (kind for kind, needed in _KEYS.items() if needed <= found.keys())
        return "chat" if fitting(found) else next(kinds, "prompt")

    raise ConfigError(f"none of the first {_ROWS_LOOKED_AT} rows is a JSON object{fault}; say what rows are by --kind")


def tokenize_fn_of(args: SimpleNamespace) -> Any:
    """The tokenize function, with local files in place of names. Rows are prompts unless ``args.kind`` says otherwise.

    :raises ConfigError: for a setting that cannot work.
    """
    settings = _settings(args)
    if args.tokenize_fn is not None:
        return resolved(_named(args.tokenize_fn, args.tokenizer, settings))

    kind = args.kind or "prompt"
    if kind != "babilong":
        return resolved(_CLASSES[kind](args.tokenizer, **settings))

    if "max_length" not in settings:
        raise ConfigError("rows of the kind 'babilong' need --max-length: the tokens of every sample")

    return resolved(FixedLengthTokenizeFn.babilong(args.tokenizer, **settings))


def _settings(args: SimpleNamespace) -> dict[str, Any]:
    """The settings that were given, by the names of the classes' fields."""
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
    """The tokenize function with this import path, with its settings."""
    here = os.getcwd()
    if here not in sys.path:  # a console script has its own folder in place of it
        sys.path.insert(0, here)
    found = resolve_path(path)
    if isinstance(found, type) and isinstance(found, TokenizeFn):
        return _made(found, {**({} if tokenizer is None else {"tokenizer": tokenizer}), **settings})

    if is_of_xtuner(found) and not isinstance(found, TokenizeFn):
        return XTunerTokenizeFn(path, settings)

    if settings:
        raise ConfigError(f"{path} is not a class and takes no settings; leave out {', '.join(sorted(settings))}")

    return path


def _made(kind: type, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} cannot be made of the settings {settings}: {error}") from error


def loader_of(args: SimpleNamespace, **knobs: Any) -> DataLoader[Any, Any]:
    """The loader that the options describe, not yet started. ``--loader`` precedes ``knobs``."""
    given: dict[str, Any] = {}
    for name, path in _KNOBS.items():
        if hasattr(args, name):
            knob, _, setting = path.partition(".")
            value = getattr(args, name)
            given[knob] = {**given.get(knob, {}), setting: value} if setting else value
    tokenize_fn = knobs.pop("tokenize_fn", None) or _function_of(args)
    source = args.data if getattr(args, "mix", None) is None else mix_of_file(args.mix)
    return DataLoader(source, tokenize_fn=tokenize_fn, **{**given, **knobs, **order_of(args)})


def _function_of(args: SimpleNamespace) -> Any:
    """The tokenize function; of a mixture, for the parts without one, and None if it is not given."""
    return tokenize_fn_of(args) if has_tokenize_fn(args) or getattr(args, "mix", None) is None else None
