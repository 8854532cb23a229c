"""The house rules: who may import whom, how long things may grow, what the package weighs, and what it imports."""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import asyncdata
from asyncdata import errors, filters, xtuner
from asyncdata.demo import tokenizer_folder
from tests.support.release import ROOT

PACKAGE = ROOT / "asyncdata"
TESTS = PACKAGE.parent / "tests"

# From the ground up: a folder imports, also for types, only from folders that stand before it. "asyncdata" is the
# facade, which nothing below it may use.
FOLDERS = (
    *("core", "order", "tokenization", "sources", "delivery", "workers", "batching", "checkpoint", "read_ahead"),
    *("telemetry", "loader", "asyncdata", "integrations", "report", "cli", "__main__"),
)

# Files beside the folders: public import paths, each of which stands where the folder stands whose names it gives.
FILES = {"errors": "core", "xtuner": "batching", "filters": "loader", "verifying": "loader", "demo": "integrations"}

# They know no event loop and no tensor: values in, values out.
WITHOUT_AN_EVENT_LOOP = {"order", "tokenization", "sources", "delivery", "batching", "checkpoint"}
EVENT_LOOPS = {"anyio", "asyncio", "trio"}

# Heavy frameworks -> the words of which a file that imports one must bear one in its name, or its folder in its own.
HEAVY = {name: {name} for name in ("obstore", "ray", "torch", "torchtitan", "verl")} | {
    "datasets": {"datasets", "huggingface", "transformers"},
    "pyarrow": {"arrow", "parquet", "pyarrow"},
    "transformers": {"huggingface", "transformers"},
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MEDIAN_FUNCTION_LINES = 8
P90_FUNCTION_LINES = 35

# Ratchets: tests hold promises through what users import. Each number may only become smaller.
MAX_TEST_LINES = 57_909
MAX_INNER_IMPORTS = 151
PUBLIC = ("asyncdata", *(f"asyncdata.{name}" for name in FILES))


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
    """Each module's syntax tree, by dotted name: ``asyncdata``, ``asyncdata.sources.base``."""
    paths = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8"), path) for name, path in paths.items()}


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


def _folder(module: str) -> str:
    return _inside(module).split(".")[0]


def _floor(module: str) -> int:
    folder = _folder(module)
    return FOLDERS.index(FILES.get(folder, folder))


def knots(imports: list[Import], trees: dict[str, ast.Module], facades: set[str]) -> list[str]:
    """The modules that import one another, directly or round about, and those that import them; no ``__init__``."""
    graph: dict[str, set[str]] = {module: set() for module in trees if module not in facades}
    for found in imports:
        if found.module in graph and found.target in graph:
            graph[found.module].add(found.target)
    while ends := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in ends:
            del graph[module]
    return sorted(graph)


def heavy_breaches(imports: list[Import]) -> list[str]:
    breaches = []
    for found in imports:
        words = HEAVY.get(found.target.split(".")[0])
        if words is None:
            continue
        if not words & set(re.split(r"[._]", _inside(found.module))):
            breaches.append(f"{found}, but neither its name nor its folder's has one of {sorted(words)}")
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


def inner_imports(trees: dict[str, ast.Module]) -> list[str]:
    """The statements that import from a module which is not for users; ``asyncdata.integrations.x`` is for them."""
    is_public = re.compile(rf"({'|'.join(map(re.escape, PUBLIC))}|asyncdata\.integrations(\.\w+)?)")
    return [
        f"{name}:{node.lineno} imports from {source}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for source in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if source.split(".")[0] == "asyncdata" and not is_public.fullmatch(source)
    ]


def facades_of(root: Path) -> set[str]:
    return {".".join(path.parent.relative_to(root.parent).parts) for path in root.rglob("__init__.py")}


TREES = read_package(PACKAGE)
IMPORTS = [found for module, tree in TREES.items() for found in _imports(module, tree, TREES)]


def test_a_folder_imports_only_from_folders_before_it_values_know_no_event_loop_and_frameworks_are_lazy():
    ours = [found for found in IMPORTS if found.target.split(".")[0] == "asyncdata"]
    assert [str(found) for found in ours if _floor(found.target) > _floor(found.module)] == [], "it is not below it"
    assert knots(IMPORTS, TREES, facades_of(PACKAGE)) == []
    of_loops = [found for found in IMPORTS if found.target.split(".")[0] in EVENT_LOOPS]
    assert [str(found) for found in of_loops if _folder(found.module) in WITHOUT_AN_EVENT_LOOP] == []
    assert heavy_breaches(IMPORTS) == []
    folders = {module: tree for module, tree in TREES.items() if module in facades_of(PACKAGE)}
    assert {_folder(module) for module in TREES} == {*FOLDERS, *FILES}
    assert [module for module, tree in folders.items() if not ast.get_docstring(tree)] == []


def test_files_and_functions_are_short_and_nothing_in_them_sleeps_pickles_or_is_left_to_do():
    texts = {str(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    unwanted = r"\bsleep\(|\bimport pickle|\bpickle\.|\bTODO\b|\bFIXME\b|\bXXX\b"
    functions = function_lengths(TREES)
    percentiles = statistics.quantiles(functions.values(), n=10, method="inclusive")
    assert {path: text.count("\n") for path, text in texts.items() if text.count("\n") > MAX_FILE_LINES} == {}
    assert {name: lines for name, lines in functions.items() if lines > MAX_FUNCTION_LINES} == {}
    assert statistics.median(functions.values()) <= MEDIAN_FUNCTION_LINES
    assert percentiles[8] <= P90_FUNCTION_LINES
    assert {path: found for path, text in texts.items() if (found := re.findall(unwanted, text))} == {}


def test_the_package_and_the_tests_do_not_grow_and_tests_reach_into_no_more_inner_modules():
    assert sum(len(path.read_bytes().splitlines()) for path in TESTS.rglob("*.py")) <= MAX_TEST_LINES
    assert len(inner_imports(read_package(TESTS))) <= MAX_INNER_IMPORTS
    assert sum(map(lines_of, PACKAGE.rglob("*.py"))) <= MAX_LINES


MAX_LINES = 39_985
MAX_PLAIN_LINES = 10_475
"""What a loader over JSONL with PromptTokenizeFn and two workers imports into the trainer's process."""

WINGS = (
    "batching.online", "batching.packers", "batching.planned", "cli", "delivery.media_queue", "delivery.merger",
    "delivery.outcome_memory", "delivery.quarantine", "integrations", "loader.exclusions", "loader.loader_media",
    "loader.mix", "loader.mixture_engine", "loader.opened_rows", "loader.outcomes", "loader.proving",
    "loader.recording", "loader.wait_progress", "order.mixture", "read_ahead.mixture",
    "read_ahead.ranks", "read_ahead.row_index", "read_ahead.indexed_windows", "read_ahead.stream_windows", "report",
    "sources.arrow", "sources.growing", "sources.remote.reads", "sources.remote.store", "sources.text_stream",
    "telemetry.recorder", "tokenization.pictures", "workers.inline", "workers.ray.executor", "workers.request_handler",
)  # fmt: skip
"""What is imported only where its setting is set."""

PLAIN = """
import sys
from asyncdata import DataLoader, JsonlSource, PromptTokenizeFn

path, folder = sys.argv[1:]
settings = {"tokenize_fn": PromptTokenizeFn(folder), "num_workers": 2, "batch_size": 8, "epochs": 1}
with DataLoader(JsonlSource(path), **settings) as loader:
    batches = iter(loader)
    next(batches)
    state, numbers = loader.state_dict(), loader.statistics().to_dict()
with DataLoader(JsonlSource(path), **settings) as loader:
    loader.load_state_dict(state)
    for batch in loader:
        pass
print(*(name for name in sys.modules if name.partition(".")[0] == "asyncdata"))
"""


def lines_of(path: Path) -> int:
    """Lines with code: no comments, docstrings and blank lines."""
    between = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    silent = between | {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        if token.type not in silent and not (token.type == tokenize.STRING and before in between):
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}:
            before = token.type
    return len(lines)


def test_a_plain_loader_imports_no_wing_and_less_than_what_was_decided(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"input": "What is {n} + 7?"}}\n' for n in range(40)))
    command = [sys.executable, "-c", PLAIN, str(data), str(tokenizer_folder())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=PACKAGE.parent).stdout
    names = [name.removeprefix("asyncdata.") for name in printed.split() if name != "asyncdata"]
    files = [PACKAGE.joinpath(*name.split(".")) for name in names]
    paths = [path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py" for path in files]
    assert len(names) > 50
    assert [name for name in names if name.startswith(WINGS)] == []
    assert sum(map(lines_of, paths)) + lines_of(PACKAGE / "__init__.py") <= MAX_PLAIN_LINES


def modules_after(statements: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys\n{statements}\nprint(*sys.modules)"]
    return {*subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()}


def test_a_public_name_resolves_and_says_what_it_is_and_another_is_an_attribute_error():
    for name in asyncdata.__all__:
        assert getattr(asyncdata, name).__doc__, name
        assert name in dir(asyncdata)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = asyncdata.no_such_name


@pytest.mark.parametrize("module", [errors, filters, xtuner])
def test_the_names_of_a_public_module_are_a_sorted_list_and_are_explained(module):
    assert module.__name__.rpartition(".")[2] in dir(asyncdata)
    assert list(module.__all__) == sorted(set(module.__all__), key=str.casefold)
    assert all(getattr(module, name).__doc__ for name in module.__all__)
    assert not {*module.__all__} & {*asyncdata.__all__}


def test_importing_the_package_its_public_modules_and_every_public_name_imports_no_more_than_that():
    imported = modules_after("import asyncdata") - modules_after("import __future__, importlib, typing")
    assert imported == {"asyncdata", "asyncdata.core"}
    imported = modules_after("import asyncdata\nasyncdata.errors.EndOfData")
    ours = {name for name in imported if name.startswith("asyncdata.")}
    assert ours == {"asyncdata.core", "asyncdata.core.errors", "asyncdata.errors"}
    imported = modules_after("import asyncdata\nfor name in asyncdata.__all__: getattr(asyncdata, name)")
    assert "asyncdata.loader.loader" in imported
    assert imported & HEAVY.keys() == set()
