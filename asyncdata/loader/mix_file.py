"""A mixture from a file: TOML, YAML or JSON, for the command line and for frameworks that are set up by files.

::

    quota = 1000

    [parts.math]
    source = "math/*.jsonl"
    weight = 5

    [parts.web]
    mix = "web.toml"                # another such file, or its content
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tomllib
from collections.abc import Mapping
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import open_regular
from asyncdata.core.settings import unknown_setting
from asyncdata.loader.mix import Mix, Part

_OF_MIX = ("by", "quota", "stages", "temperature", "on_mix_change")
_OF_PART = ("source", "mix", "weight", "tokenize_fn", "bad_rows", "when_done", "max_epochs", "shuffle")
_MAX_DEPTH = 8


def mix_of_file(path: str | os.PathLike[str]) -> Mix:
    """The mixture that a file describes. Paths in it are relative to its folder.

    :raises ConfigError: if it cannot be read, or describes none.
    """
    return _mix_of(os.path.expanduser(os.fspath(path)), 0)


def _mix_of(path: str, depth: int) -> Mix:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"AD470 {path}: mixtures are nested more than {_MAX_DEPTH} deep; does a file name itself?")

    content = _read(path)
    try:
        return _mix(content, os.path.dirname(path), depth)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from error


def _read(path: str) -> Any:
    try:
        with open_regular(path) as file:
            data = file.read()
        if path.endswith(".toml"):
            return tomllib.loads(data.decode())

        return json.loads(data) if path.endswith(".json") else _yaml(data, path)
    except OSError as error:
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, JSON and UTF-8
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error}") from error


def _yaml(data: bytes, path: str) -> Any:
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"AD470 a mixture is a file that ends in .toml, .yaml or .json; got {path}")

    if importlib.util.find_spec("yaml") is None:
        raise ConfigError(f"AD470 {path} needs PyYAML, which is not installed: pip install pyyaml; or use TOML")

    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error}") from error


def _mix(content: Any, folder: str, depth: int) -> Mix:
    if not isinstance(content, Mapping) or not isinstance(content.get("parts"), Mapping):
        raise ConfigError("AD470 a mixture has `parts`: a table of parts by name")

    _refuse_unknown(content, ("parts", *_OF_MIX), "a mixture")
    settings = {name: content[name] for name in _OF_MIX if content.get(name) is not None}
    if "stages" in settings:
        settings["stages"] = _stages(settings["stages"])
    return Mix(
        {str(name): _part(str(name), part, folder, depth) for name, part in content["parts"].items()}, **settings
    )


def _part(name: str, content: Any, folder: str, depth: int) -> Part:
    if isinstance(content, str | list):
        content = {"source": content}
    if not isinstance(content, Mapping) or ("source" in content) == ("mix" in content):
        raise ConfigError(f"AD470 part {name!r} has a `source`, or a `mix`")

    _refuse_unknown(content, _OF_PART, f"part {name!r}")
    settings = {key: value for key, value in content.items() if key not in ("source", "mix") and value is not None}
    inner = content.get("mix")
    if isinstance(inner, str):
        return Part(_mix_of(os.path.join(folder, os.path.expanduser(inner)), depth + 1), **settings)

    source = _mix(inner, folder, depth + 1) if inner is not None else _paths(content["source"], folder)
    return Part(source, **settings)


def _paths(source: Any, folder: str) -> Any:
    if isinstance(source, list):
        return [_paths(path, folder) for path in source]

    if not isinstance(source, str):
        raise ConfigError(f"AD470 a source in a file is a path or a list of paths; got {source!r}")

    is_local = "://" not in source
    return os.path.join(folder, os.path.expanduser(source)) if is_local else source


def _stages(stages: Any) -> dict[Any, Any]:
    """The stages, whose keys are texts in TOML and JSON; the text "parts" stands for the weights of the parts."""
    if not isinstance(stages, Mapping):
        raise ConfigError("AD470 `stages` is a table of weights by the number of delivered samples")

    return {
        int(start) if isinstance(start, str) and start.replace("_", "").isdecimal() else start: (
            None if weights == "parts" else weights
        )
        for start, weights in stages.items()
    }


def _refuse_unknown(content: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in content:
        if name not in known:
            raise ConfigError(f"AD470 {unknown_setting(str(name), known, of=what)}")
