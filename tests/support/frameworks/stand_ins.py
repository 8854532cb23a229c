"""Stand-ins for packages that a framework imports and a machine without a GPU cannot have."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class Anything:
    """What such a package would have: it can be imported from it, made, and called, as a decorator is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _Finder:
    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: Any) -> Any:
        if not any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _attribute(spec.name, name)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _attribute(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {"__module__": module})


def stand_in_for_missing(*packages: str) -> None:
    """As :func:`stand_in_for`, for those of the packages that are not installed."""
    stand_in_for(*(name for name in packages if importlib.util.find_spec(name) is None))


def stand_in_for(*packages: str) -> None:
    """Let these packages be imported from now on, with all their modules, whether or not they are installed."""
    sys.meta_path.insert(0, _Finder(packages))  # type: ignore[arg-type]


def stand_in_module(patch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """For a test: a module with nothing but this, in packages that are made where they are not imported."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules or depth == len(parts):
            patch.setitem(sys.modules, path, ModuleType(path))
        if depth > 1:
            patch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path], raising=False)
    vars(sys.modules[name]).update(attributes)
