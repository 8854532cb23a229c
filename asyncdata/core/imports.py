"""Functions and classes by the text that names them: ``package.module:name``, or a fixed tag; and missing packages."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from asyncdata.core.errors import ConfigError


def from_clone(extra: str) -> str:
    """How to install an extra of asyncdata, whose name on the package index is not ours yet."""
    return f'pip install ".[{extra}]" in a clone of asyncdata'


def missing_package(what: str, package: str, error: ImportError) -> ConfigError:
    """The error for ``what``, which needs ``package``, which cannot be imported.

    :param what: the feature, as the user knows it: ``attach``, ``Parquet``.
    :param package: the name by which pip knows it.
    :param error: what the import raised; a package may be there and broken, so its message is shown.
    """
    return ConfigError(f"{what} needs {package} ({error}): pip install {package}")


def resolve_path(path: str) -> Any:
    """What ``pkg.mod:attr`` names.

    :raises ConfigError: if the text is not an import path, or cannot be imported.
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


def is_loaded_instance(value: Any, path: str) -> bool:
    """Whether ``value`` is an instance of the class ``pkg.mod:Class``, without importing its module.

    Who has an instance has imported the module. So what only some runs need is not imported by those that only ask.
    """
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def tag_of(value: Any) -> str:
    """The name of a class, a function or a callable object in fingerprints and keys.

    It is the class's or function's own attribute ``tag``, which stays when the code moves to another module; else the
    import path. A subclass has no tag but its own: it may give other tokens.
    """
    owner = value if hasattr(value, "__qualname__") else type(value)
    tag = getattr(owner, "__dict__", {}).get("tag")
    return tag if isinstance(tag, str) and tag else f"{getattr(owner, '__module__', '')}:{owner.__qualname__}"
