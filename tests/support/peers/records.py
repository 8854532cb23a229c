"""What peers deliver, as records in ``tests/golden``: inputs that we made, what a peer's own code made of them, and the
commit of the peer. They hold facts, and no code.

A test takes its cases from a record, and so needs no checkout. Where a variable names one, each case is also delivered
anew, and must be as it was recorded. ``python -m tests.support.peers slime=COMMIT ...`` delivers all cases of a peer
anew, and writes them: after a new commit, or after an input was added as ``[input, null]``.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest


class Checkout(NamedTuple):
    """The variable that names it, one of its files, and its packages."""

    variable: str
    file: str
    packages: tuple[str, ...]


CHECKOUTS = {
    "slime": Checkout("ASYNCDATA_SLIME", "slime/utils/data.py", ("slime",)),
    "miles": Checkout("ASYNCDATA_MILES", "miles/utils/data.py", ("miles", "miles_plugins")),
    "xtuner": Checkout("ASYNCDATA_XTUNER", "xtuner/v1/datasets/packing.py", ("xtuner", "mmengine")),
    "babilong": Checkout("ASYNCDATA_BABILONG", "babilong/babilong_utils.py", ("babilong",)),
}


def folder_of(peer: str) -> Path | None:
    """The checkout of a peer. None if the variable is not set."""
    named = os.environ.get(CHECKOUTS[peer].variable)
    assert not named or Path(named, CHECKOUTS[peer].file).is_file(), f"{CHECKOUTS[peer].variable}={named}: not {peer}"
    return Path(named) if named else None


def needs_checkout(peer: str) -> Path:
    """The checkout of a peer. Skips the test where there is none."""
    folder = folder_of(peer)
    return folder or pytest.skip(f"nothing to run: {CHECKOUTS[peer].variable} names no checkout of {peer}")


@cache
def module_of(peer: str, name: str) -> ModuleType:
    """A module of a peer, as ``utils.data``. It is not left in ``sys.modules``, where ours would find it."""
    needs_checkout(peer)
    with importable(peer):
        return importlib.import_module(f"{peer}.{name}")


@cache
def xtuners_pictures() -> ModuleType:
    """The module of XTuner's function for Qwen3-VL, without the parts that need torchvision and its stores."""
    folder, package = needs_checkout("xtuner"), "xtuner.v1.datasets.mllm_tokenize_fn"
    sizes = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    contents: dict[str, dict[str, Any]] = {package: {"__path__": [str(folder.joinpath(*package.split(".")))]}}
    contents["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = {"smart_resize": sizes}
    contents["xtuner.v1.utils.oss_utils"] = {"get_oss_backend": None}
    with importable("xtuner"):
        vars(sys.modules["xtuner.v1.utils"])["trim_memory"] = bool
        del sys.modules["xtuner.v1.datasets.utils"]  # which stands in for what packing needs of it
        with stand_ins(contents):
            return importlib.import_module(f"{package}.qwen3_vl_tokenize_fn")


@cache
def xtuners_preset() -> ModuleType:
    """XTuner's module of packs that a folder names, for which others of its modules have a stand-in."""
    with importable("xtuner"):
        vars(sys.modules["xtuner.v1.utils"])["profile_time"] = contextlib.nullcontext
        vars(sys.modules["xtuner.v1.datasets.utils"])["get_longest"] = None
        del sys.modules["xtuner.v1.datasets.preset_pack"]
        return importlib.import_module("xtuner.v1.datasets.preset_pack")


_loaded: dict[str, ModuleType] = {}


@contextlib.contextmanager
def importable(peer: str) -> Iterator[None]:
    """``import slime`` works, and gives the same modules each time."""
    folder = needs_checkout(peer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(str(folder))
        if peer == "miles" and importlib.util.find_spec("sglang") is None and "sglang" not in sys.modules:
            stack.enter_context(sglang())
        stack.enter_context(stand_ins(_contents(peer, folder)))
        sys.modules.update(_of(peer, _loaded))
        try:
            yield
        finally:
            for name in _of(peer, sys.modules):
                _loaded[name] = sys.modules.pop(name)


def _of(peer: str, modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    return {name: module for name, module in modules.items() if name.partition(".")[0] in CHECKOUTS[peer].packages}


def _contents(peer: str, folder: Path) -> dict[str, dict[str, Any]]:
    if peer != "xtuner":
        unused: dict[str, dict[str, Any]] = {"httpx": {"AsyncClient": object}}
        unused["torch_memory_saver"] = {"torch_memory_saver": None}
        return {name: contents for name, contents in unused.items() if importlib.util.find_spec(name) is None}

    # XTuner's packages import its whole trainer.
    logger = logging.getLogger("xtuner")
    logs = {"get_logger": lambda: logger, "is_local_rank0": lambda: True, "log_rank0": logger}
    # The real one keeps plans in /dev/shm, for ever.
    plans = {"_get_mmap_dir": lambda: Path("/nonexistent"), "ndarray_to_mmap": lambda array, group: array}
    packages = "xtuner", "xtuner.v1", "xtuner.v1.datasets", "xtuner.v1.utils"
    found = {name: {"__path__": [str(folder.joinpath(*name.split(".")))]} for name in packages}
    found["xtuner.v1.utils"] |= {"IGNORE_INDEX": -100, **logs}
    found |= {"mmengine": {}, "mmengine.dist": {"sync_random_seed": int}, "xtuner.v1.datasets.utils": plans}
    unused_of = {"jsonl": "JsonlDataset", "vlm_jsonl": "VLMJsonlDataset", "preset_pack": "PresetPackDataset"}
    found |= {f"xtuner.v1.datasets.{module}": {name: object} for module, name in unused_of.items()}
    return found | {"xtuner.v1.utils.executor": {"SharedPoolExecutor": object}}


@contextlib.contextmanager
def sglang(tool: Any = None) -> Iterator[None]:
    """``sglang`` can be imported, as far as miles needs it; its ``Tool`` is that of :func:`tool_model`, or another."""
    packages = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai")
    found: dict[str, dict[str, Any]] = {name: {"__path__": []} for name in packages}
    found[packages[-1]]["encoding_dsv4"] = ModuleType("encoding_dsv4")
    with stand_ins(found | {f"{packages[-1]}.protocol": {"Tool": tool or tool_model()}}):
        yield


def tool_model(*, defers: bool = False) -> Any:
    """sglang's ``Tool``, with the fields of sglang 0.5; or with one of later releases, left out where it is not set."""
    pydantic = pytest.importorskip("pydantic", reason="the stand-in for sglang needs pydantic")
    fields = {"description": (str | None, None), "name": (str, ...), "parameters": (object | None, None)}
    fields["strict"] = (bool, False)
    if not defers:
        function = pydantic.create_model("Function", **fields)
        return pydantic.create_model("Tool", type=(str, "function"), function=(function, ...))

    deferred = (bool | None, None)
    base = pydantic.create_model("Base", **fields, defer_loading=deferred)

    class Deferring(base):  # type: ignore[misc, valid-type]
        @pydantic.model_serializer(mode="wrap")  # type: ignore[untyped-decorator]
        def without_none(self, handler: Any) -> Any:
            found = handler(self)
            if self.defer_loading is None:
                del found["defer_loading"]
            return found

    return pydantic.create_model("Tool", type=(str, "function"), function=(Deferring, ...), defer_loading=deferred)


@contextlib.contextmanager
def stand_ins(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Modules with these contents, until the end."""
    for name, attributes in modules.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(attributes)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


FOLDER = Path(__file__).parents[2] / "golden"


class Record(NamedTuple):
    """Whose it is, and what the peer's code delivers of an input in a folder."""

    peer: str
    deliver: Callable[..., Any]


RECORDS: dict[str, Record] = {}


def recorded(name: str, peer: str) -> Callable[[Any], Any]:
    """Makes a record of what a function delivers; it is called with a folder and the items of an input."""

    def register(deliver: Any) -> Any:
        RECORDS[name] = Record(peer, deliver)
        return deliver

    return register


class Case:
    """An input, and what the peer delivered of it."""

    def __init__(self, record: str, number: int, given: dict[str, Any], delivered: Any) -> None:
        self.record, self.number, self.given, self._delivered = record, number, given, delivered

    def __str__(self) -> str:
        return str(self.number)

    def delivered(self, folder: Path) -> Any:
        """From the record; and from the checkout, where there is one."""
        record = RECORDS[self.record]
        if folder_of(record.peer) is not None:
            (folder / record.peer).mkdir()
            fresh = plain(record.deliver(folder / record.peer, **self.given))
            assert fresh == self._delivered, f"tests/golden/{self.record}.json is not what {record.peer} delivers"
        return self._delivered


def cases_of(name: str) -> list[Case]:
    """The cases of a record, in its order."""
    cases = json.loads((FOLDER / f"{name}.json").read_bytes())["cases"]
    return [Case(name, number, *case) for number, case in enumerate(cases)]


def write_record(name: str, commit: str, folder: Path) -> None:
    """Run the peer's code, and write what it delivered."""
    record = RECORDS[name]
    needs_checkout(record.peer)
    cases = []
    for case in cases_of(name):
        place = folder / name / str(case)
        place.mkdir(parents=True)
        cases.append(json.dumps([case.given, record.deliver(place, **case.given)]))
    head = json.dumps({"peer": record.peer, "commit": commit})[:-1]
    (FOLDER / f"{name}.json").write_text(f'{head}, "cases": [\n' + ",\n".join(cases) + "\n]}\n")


def plain(value: Any) -> Any:
    """A value as a record has it."""
    return json.loads(json.dumps(value))


def digest(value: Any) -> str:
    """Of what is too long for a record; NaN equals itself."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
