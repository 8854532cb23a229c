"""Stand-ins for packages that a framework imports and a machine without a GPU cannot have."""

import importlib.machinery
import sys
from types import ModuleType


class Anything:
    """What such a package would have: it can be imported from it, made, and called, as a decorator is."""

    def __init__(self, *_, **__): ...

    def __call__(self, *_, **__):
        return self


class _Finder:
    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, *_):
        if not any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _attribute(spec.name, name)
        return module

    def exec_module(self, module): ...


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {"__module__": module})


def stand_in_for(*packages):
    """Let these packages be imported from now on, with all their modules, whether or not they are installed."""
    sys.meta_path.insert(0, _Finder(packages))


def stand_in_module(patch, name, **attributes):
    """For a test: a module with nothing but this, in packages that are made where they are not imported."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules or depth == len(parts):
            patch.setitem(sys.modules, path, ModuleType(path))
        if depth > 1:
            patch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path], raising=False)
    vars(sys.modules[name]).update(attributes)
