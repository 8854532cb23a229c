"""What to say where a package is missing that only some features need."""

from __future__ import annotations

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
