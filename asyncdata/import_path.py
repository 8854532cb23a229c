"""Functions and classes by the text that names them: ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from asyncdata.errors import ConfigError

__all__ = ("resolve_path",)


def resolve_path(path: str) -> Any:
    """What ``pkg.mod:attr`` names.

    :raises ConfigError: if the text is no such path, or nothing importable.
    """
    module, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in (module + "." + name).split(".")):
        raise ConfigError(f"AD420 {path!r} is no import path; write 'package.module:name'")

    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"AD420 cannot import {path!r}: {error}; pass 'package.module:name'") from error

    return value
