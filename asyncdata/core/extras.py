"""Packages that only some features need: imported on first use, and what to say where one is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ("from_clone", "made_on_first_use", "missing_package")


def from_clone(extra: str) -> str:
    """How to install an extra of asyncdata, whose name on the package index is not ours yet."""
    return f'pip install ".[{extra}]" in a clone of asyncdata'


def missing_package(what: str, package: str, error: ImportError) -> ConfigError:
    """The error for ``what``, which needs ``package``, which cannot be imported.

    :param what: the feature, as the user knows it: ``token_cache``, ``Parquet``.
    :param package: the name by which pip knows it.
    :param error: what the import raised; a package may be there and broken, so its message is shown.
    """
    return ConfigError(f"{what} needs {package} ({error}): pip install {package}")


def made_on_first_use(module: str, package: str, makers: Mapping[str, Callable[[], type]]) -> Callable[[str], type]:
    """The ``__getattr__`` of a module with classes whose base classes are those of ``package``.

    A class is made once, also for two threads, and is an attribute of the module from then on.

    :param module: the module's ``__name__``.
    :param package: the name by which pip knows it.
    :param makers: the name of each class -> what imports the package and makes the class.
    """

    def find(name: str) -> type:
        if name not in makers:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        try:
            made = makers[name]()
        except ImportError as error:
            raise missing_package(name, package, error) from error

        made.__module__ = module  # pickle looks it up there
        kind: type = vars(sys.modules[module]).setdefault(name, made)
        return kind

    return find
