"""The house rules, held by reading the package's source: who may import whom, and how long things may grow."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[2] / "asyncdata"

# A module imports from lower levels and from its own folder. A folder stands for all modules in it; "asyncdata" is the
# facade, which nothing below the command line may use.
LEVELS = {
    "errors": 0,
    "mixing": 0,
    "ours": 1,
    "plain": 0,
    "token_messages": 0,
    "version": 0,
    "extras": 1,
    "import_path": 1,
    "shortage": 1,
    "threads": 1,
    "timeouts": 1,
    "stream_digest": 1,
    "user_traceback": 1,
    "line_numbers": 0,
    "pauses": 0,
    "types": 1,
    "wire": 1,
    "frames": 2,
    "description": 1,
    "torch_random": 1,
    "columns": 2,
    "durable": 2,
    "envelope": 2,
    "filters": 2,
    "fingerprint": 2,
    "ledger": 2,
    "order": 2,
    "index_eviction": 2,
    "index_file": 2,
    "pacing": 2,
    "temporary": 2,
    "autotune": 3,
    "machine": 3,
    "metering": 5,
    "tuner": 7,
    "packing": 2,
    "buffer": 3,
    "collators": 3,
    "length_grouping": 3,
    "channel": 3,
    "config": 3,
    "iteration": 3,
    "log": 3,
    "loops": 3,
    "plan": 4,
    "planning": 5,
    "proving": 5,
    "row_index": 4,
    "shares": 3,
    "snapshot": 3,
    "restoring": 4,
    "matching": 4,
    "verifying": 5,
    "sources": 3,
    "tokenization": 3,
    "pack_state": 3,
    "pack_rules": 5,
    "planned_batches": 6,
    "pack_stage": 6,
    "pack_batches": 7,
    "bad_rows": 4,
    "noted": 4,
    "oddities": 4,
    "delivery": 4,
    "executors": 4,
    "quarantine": 4,
    "request": 4,
    "stream_pass": 4,
    "window": 4,
    "stream_windows": 5,
    "windows": 5,
    "indexing": 5,
    "planned_rows": 5,
    "token_cache": 5,
    "indexed_windows": 6,
    "canaries": 5,
    "coordinator": 5,
    "diagnostics": 5,
    "producer": 6,
    "reading": 7,
    "service": 7,
    "engine": 8,
    "face": 9,
    "loader": 10,
    "asyncdata": 11,
    "integrations": 12,
    "demo": 12,
    "testing": 12,
    "cli": 14,
    "__main__": 15,
}

# Imports across a level: (module, what it imports) -> why this one is right.
ALLOWED: dict[tuple[str, str], str] = {}

# Values in, values out: levels 0 to 2 know no event loop, no tensor and no log.
KEPT_OUT_OF_THE_CORE = {"anyio", "asyncio", "structlog", "torch", "trio"}
PURE_LEVEL = 2

# Heavy frameworks -> the words of which a file that imports one must bear one in its name.
HEAVY = {
    "datasets": {"datasets", "huggingface"},
    "pyarrow": {"arrow", "parquet", "pyarrow"},
    "ray": {"ray"},
    "torch": {"torch"},
    "transformers": {"huggingface", "transformers"},
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MEDIAN_FUNCTION_LINES = 8
P90_FUNCTION_LINES = 35


class Import(NamedTuple):
    """``module`` imports ``target``. ``lazy``: inside a function. ``typing_only``: under ``if TYPE_CHECKING``."""

    module: str
    line: int
    target: str
    lazy: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def read_package(root: Path) -> dict[str, ast.Module]:
    """Each module's syntax tree, by dotted name: ``asyncdata``, ``asyncdata.order``, ``asyncdata.sources.base``."""
    trees = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), path)
    return trees


def imports_of(trees: dict[str, ast.Module]) -> list[Import]:
    return [found for module, tree in trees.items() for found in _imports(module, tree, trees)]


def _imports(
    module: str, node: ast.AST, known: dict[str, ast.Module], *, lazy: bool = False, typing_only: bool = False
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, known):
            yield Import(module, child.lineno, target, lazy, typing_only)
        in_function = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        under_guard = typing_only or (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"))
        yield from _imports(module, child, known, lazy=in_function, typing_only=under_guard)


def _targets(node: ast.AST, known: dict[str, ast.Module]) -> list[str]:
    """What one statement imports; ``import_module("a.b")`` counts. Relative imports are ruff's business (TID252)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]

    if isinstance(node, ast.ImportFrom):
        source = node.module or ""
        inner = [f"{source}.{alias.name}" for alias in node.names]
        return sorted({name if name in known else source for name in inner})

    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]

    return []


def _inside(module: str) -> str:
    """``asyncdata.sources.base`` -> ``sources.base``; the facade keeps its name."""
    return module.partition(".")[2] or module


def _room(module: str) -> str:
    return _inside(module).split(".")[0]


def _level(module: str) -> int:
    return LEVELS.get(_room(module), max(LEVELS.values()))


def level_breaches(imports: list[Import]) -> list[str]:
    breaches = []
    for found in imports:
        if found.typing_only or found.target.split(".")[0] != "asyncdata" or _room(found.target) == _room(found.module):
            continue
        if (_inside(found.module), _room(found.target)) in ALLOWED:
            continue
        if _level(found.target) >= _level(found.module):
            breaches.append(f"{found}, which is not below it")
    return breaches


def knots(imports: list[Import], trees: dict[str, ast.Module], facades: set[str]) -> list[list[str]]:
    """The sets of modules that import one another, directly or round about. ``__init__`` files are left out."""
    graph: dict[str, set[str]] = {module: set() for module in trees if module not in facades}
    for found in imports:
        if found.module in graph and found.target in graph:
            graph[found.module].add(found.target)
    reach = {module: _reachable(module, graph) for module in graph}
    tied = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return sorted(sorted(knot) for knot in tied if knot)


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in graph[todo.pop()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


def core_breaches(imports: list[Import]) -> list[str]:
    return [
        f"{found}, but is of level {_level(found.module)}"
        for found in imports
        if _level(found.module) <= PURE_LEVEL and found.target.split(".")[0] in KEPT_OUT_OF_THE_CORE
    ]


def heavy_breaches(imports: list[Import]) -> list[str]:
    breaches = []
    for found in imports:
        words = HEAVY.get(found.target.split(".")[0])
        if words is None:
            continue
        if not words & set(found.module.split(".")[-1].split("_")):
            breaches.append(f"{found}, but its name has none of {sorted(words)}")
        if not (found.lazy or found.typing_only):
            breaches.append(f"{found} outside a function")
    return breaches


def function_lengths(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The lines of each function's body, its docstring left out."""
    lengths = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                lengths[f"{module}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - body[0].lineno + 1
    return lengths


def words_that_do_not_belong(root: Path) -> list[str]:
    unwanted = re.compile(r"\bsleep\(|\bimport pickle|\bpickle\.|\bTODO\b|\bFIXME\b|\bXXX\b")
    return [
        f"{path.relative_to(root.parent)}:{number}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if unwanted.search(line)
    ]


def facades_of(root: Path) -> set[str]:
    return {".".join(path.parent.relative_to(root.parent).parts) for path in root.rglob("__init__.py")}


TREES = read_package(PACKAGE)
IMPORTS = imports_of(TREES)


def test_every_module_has_a_level():
    assert {_room(module) for module in TREES} - set(LEVELS) == set()


def test_a_module_imports_only_from_lower_levels_and_its_own_folder():
    assert level_breaches(IMPORTS) == []


def test_every_exception_to_the_levels_is_used():
    used = {(_inside(found.module), _room(found.target)) for found in IMPORTS}

    assert set(ALLOWED) - used == set()


def test_no_modules_import_one_another_not_even_for_types():
    assert knots(IMPORTS, TREES, facades_of(PACKAGE)) == []


def test_the_core_knows_no_event_loop_no_tensor_and_no_log():
    assert core_breaches(IMPORTS) == []


def test_heavy_frameworks_are_imported_inside_functions_of_files_that_bear_their_name():
    assert heavy_breaches(IMPORTS) == []


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {str(path): len(path.read_bytes().splitlines()) for path in PACKAGE.rglob("*.py")}

    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = function_lengths(TREES)
    percentiles = statistics.quantiles(lengths.values(), n=10, method="inclusive")

    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_FUNCTION_LINES
    assert percentiles[8] <= P90_FUNCTION_LINES


def test_nothing_sleeps_pickles_or_is_left_to_do():
    assert words_that_do_not_belong(PACKAGE) == []


def test_the_rules_find_what_they_forbid(tmp_path):
    files = {
        "__init__.py": "",
        "errors.py": "import anyio\nif TYPE_CHECKING:\n    from asyncdata import plain",
        "plain.py": "def f():\n    from asyncdata.errors import E\n    from asyncdata.errors import F",
        "order.py": "import asyncdata.ledger\nfrom asyncdata import AsyncDataLoader",
        "ledger.py": "import importlib\nray = importlib.import_module('ray.data')",
        "sources/__init__.py": "",
        "sources/base.py": "import asyncdata.order\nfrom asyncdata.sources import jsonl\nimport asyncdata.channel",
        "sources/jsonl.py": "def f():\n    '''Doc\n\n    more'''\n    time.sleep(1)\n    return 1",
        "channel.py": "# TODO later\ndef f():\n    import torch",
    }
    for name, text in files.items():
        path = tmp_path / "asyncdata" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = tmp_path / "asyncdata"
    trees = read_package(root)
    imports = imports_of(trees)

    assert level_breaches(imports) == [
        "asyncdata.order:1 imports asyncdata.ledger, which is not below it",
        "asyncdata.order:2 imports asyncdata, which is not below it",
        "asyncdata.plain:2 imports asyncdata.errors, which is not below it",
        "asyncdata.plain:3 imports asyncdata.errors, which is not below it",
        "asyncdata.sources.base:3 imports asyncdata.channel, which is not below it",
    ]
    assert knots(imports, trees, facades_of(root)) == [["asyncdata.errors", "asyncdata.plain"]]
    assert core_breaches(imports) == ["asyncdata.errors:1 imports anyio, but is of level 0"]
    assert heavy_breaches(imports) == [
        "asyncdata.channel:3 imports torch, but its name has none of ['torch']",
        "asyncdata.ledger:2 imports ray.data, but its name has none of ['ray']",
        "asyncdata.ledger:2 imports ray.data outside a function",
    ]
    assert function_lengths({"asyncdata.sources.jsonl": trees["asyncdata.sources.jsonl"]}) == {
        "asyncdata.sources.jsonl:1 f": 2
    }
    assert words_that_do_not_belong(root) == [
        "asyncdata/channel.py:1: # TODO later",
        "asyncdata/sources/jsonl.py:5: time.sleep(1)",
    ]
