"""miles' own code, from the folder that ASYNCDATA_MILES names: what ours is compared with.

miles imports the engine that serves its models, for the types of requests. Where sglang is not installed, stand-ins
have the fields of its ``Tool``, as sglang 0.5 has them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "ASYNCDATA_MILES"
PROTOCOL = "sglang.srt.entrypoints.openai.protocol"


def miles_folder() -> Path:
    """A checkout of miles. Skips the test where there is none."""
    folder = Path(os.environ.get(VARIABLE) or "/no folder")
    if not (folder / "miles" / "utils" / "data.py").is_file():
        pytest.skip(f"nothing to compare with: {VARIABLE} names no checkout of miles")

    return folder


def miles_module(name: str) -> ModuleType:
    """miles' module ``name``, as ``utils.data``. It is not left in ``sys.modules``, where ours would find it."""
    for needed in ("torch", "ray", "transformers", "PIL"):
        pytest.importorskip(needed, reason=f"miles needs {needed}")
    return _load(str(miles_folder()), f"miles.{name}")


@cache
def _load(folder: str, name: str) -> ModuleType:
    with miles_importable(folder):
        return importlib.import_module(name)


_loaded: dict[str, ModuleType] = {}


@contextlib.contextmanager
def miles_importable(folder: str) -> Iterator[None]:
    """``import miles`` works, and gives the same modules each time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(folder)
        if importlib.util.find_spec("sglang") is None:
            stack.enter_context(sglang())
        for name in ("httpx", "torch_memory_saver"):
            if importlib.util.find_spec(name) is None:
                stack.enter_context(_stand_in({name: {"AsyncClient": object, "torch_memory_saver": None}}))
        sys.modules.update(_loaded)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("miles", "miles_plugins")]:
                _loaded[name] = sys.modules.pop(name)


@contextlib.contextmanager
def sglang(tool: Any = None) -> Iterator[None]:
    """``sglang`` can be imported, as far as miles needs it.

    :param tool: its ``Tool``; None: that of :func:`tool_model`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        found[name] = {"__path__": []}
    found["sglang.srt.entrypoints.openai"]["encoding_dsv4"] = ModuleType("encoding_dsv4")
    found[PROTOCOL] = {"Tool": tool or tool_model()}
    with _stand_in(found):
        yield


def tool_model(*, defers: bool = False) -> Any:
    """sglang's ``Tool``.

    :param defers: as later releases have it, with a field that is left out where it is not set.
    """
    pydantic = pytest.importorskip("pydantic", reason="the stand-in for sglang needs pydantic")
    fields: dict[str, Any] = {
        "description": (str | None, None),
        "name": (str, ...),
        "parameters": (object | None, None),
        "strict": (bool, False),
    }
    if not defers:
        function = pydantic.create_model("Function", **fields)
        return pydantic.create_model("Tool", type=(str, "function"), function=(function, ...))

    base = pydantic.create_model("Base", **fields, defer_loading=(bool | None, None))

    class Deferring(base):  # type: ignore[misc, valid-type]
        @pydantic.model_serializer(mode="wrap")  # type: ignore[untyped-decorator]
        def without_none(self, handler: Any) -> Any:
            found = handler(self)
            if self.defer_loading is None:
                del found["defer_loading"]
            return found

    return pydantic.create_model(
        "Tool", type=(str, "function"), function=(Deferring, ...), defer_loading=(bool | None, None)
    )


@contextlib.contextmanager
def _stand_in(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    for name, attributes in modules.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(attributes)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
