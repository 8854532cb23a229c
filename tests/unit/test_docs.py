"""README.md and docs/: examples run and print what a page says, the reference lists all there is, and figures exist."""

import ast
import asyncio
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import click
import pytest
import structlog

import asyncdata
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.cli.main import commands
from asyncdata.core.checksummed_file import Header
from asyncdata.delivery.ledger import Counters
from asyncdata.errors import ConfigError
from asyncdata.loader.config import STRUCTS
from tests.benchmarks.contestants import ENVIRONMENTS
from tests.benchmarks.run import FIGURES
from tests.support.faults import TARGETS
from tests.support.pages import HOME, Block, blocks_of, is_printed, reference, run_block, run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "asyncdata"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

MOVED = ("errors", "filters", "xtuner")
"""Public modules beside the package itself, whose names are on the page of the API."""

FIRST_SCREEN_LINES, CODE_COLUMNS = 40, 80

NEEDED = {
    "docs/how-to/train-with-torch.md": ["torch"],
    "docs/tutorial/run-over-videos.md": ["av", "torchvision", "transformers"],
}
"""What a page's examples need beside the packages that every check is run with."""


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """The part of a page under a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading {heading!r}"
    return re.split(rf"^#{{1,{len(found[1])}}} ", found[2], flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """What the rows of a text's tables have in backquotes in their first column."""
    return [name for row in re.findall(r"^\|([^|]+)\|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]


def table_rows(text: str) -> dict[str, list[str]]:
    """The cells after the first one, by what the first one has in backquotes."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the pages assume: prompts.jsonl and a tokenizer, as the first tutorial makes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    first = next(block for block in blocks_of(DOCS / "tutorial" / "first-loader.md") if block.language == "python")
    run_block(first, {}, "docs/tutorial/first-loader.md")
    modules = set(sys.modules)
    with structlog.testing.capture_logs():
        yield tmp_path
    for name in set(sys.modules) - modules:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


def output_of(block: Block, names: dict[str, Any], page: Path) -> str:
    """What a block prints; of a console, its commands as well."""
    if block.language == "python":
        return run_block(block, names, name_of(page))

    transcript = ""
    for command in re.findall(r"^\$ (asyncdata .*)$", block.text, re.MULTILINE):
        status, out, talk = run_command(command)
        assert status == 0, talk
        transcript += f"$ {command}\n{out}"
    return transcript


WITH_EXAMPLES = [page for page in PAGES if {block.language for block in blocks_of(page)} & {"python", "console"}]


@pytest.mark.thorough
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, folder):
    for package in NEEDED.get(name_of(page), []):
        pytest.importorskip(package)
    blocks = blocks_of(page)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.language not in {"python", "console"}:
            continue

        try:
            printed = output_of(block, names, page).replace(str(folder), HOME)
        except Exception:
            pytest.fail(f"{name_of(page)}:{block.line}\n{traceback.format_exc()}", pytrace=False)
        wanted = block.text if block.language == "console" else ""
        if not wanted and following is not None and following.language == "text" and following.line - block.end <= 3:
            wanted = following.text  # right after a block is its output
        assert is_printed(wanted, printed), f"{name_of(page)}:{block.line} prints something else:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_shell_commands_of_a_page_are_commands(page):
    for block in blocks_of(page):
        for command in re.findall(r"^asyncdata (.*)$", block.text if block.language == "sh" else "", re.MULTILINE):
            try:
                commands.main(shlex.split(command), standalone_mode=False, obj=lambda *_: None)
            except click.ClickException as error:
                pytest.fail(f"{name_of(page)}:{block.line}\n{error.format_message()}", pytrace=False)


def test_the_first_screen_is_one_and_begins_with_a_line_each_that_runs_the_demo_and_that_runs_the_checks():
    demo, checks, *_ = blocks_of(ROOT / "README.md")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert len((ROOT / "README.md").read_text("utf-8").partition("\n## ")[0].splitlines()) <= FIRST_SCREEN_LINES
    assert (demo.text.count("\n"), checks.text.count("\n")) == (1, 1)
    assert demo.text.endswith(".venv/bin/asyncdata demo\n")
    assert all(tool in checks.text for tool in ("ruff check", "ruff format --check", "mypy", "pytest"))
    for names in re.findall(r"\.\[([\w,]+)\]", checks.text):
        assert set(names.split(",")) <= set(extras)
    assert checks.text in (DOCS / "contributing.md").read_text(encoding="utf-8")


def test_the_badges_say_the_licence_and_the_python_versions_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    below = int(versions[-1].rpartition(".")[2]) + 1
    assert project["requires-python"] == f">={versions[0]},<3.{below}", "no version that was not tried"
    for page in (ROOT / "README.md", DOCS / "install.md", DOCS / "faq.md", DOCS / "tutorial" / "first-loader.md"):
        assert f"Python {versions[0]} to {versions[-1]}" in page.read_text("utf-8"), page
    facts = {"licence": project["license"], "python": " | ".join(versions)}
    badges = re.findall(r"!\[(\w+): ([^\]]+)\]\((docs/plots/badge-\w+\.svg)\)", (ROOT / "README.md").read_text("utf-8"))
    assert {name.lower(): fact for name, fact, _ in badges} == facts
    for _, fact, path in badges:
        assert f">{fact}</text>" in (ROOT / path).read_text(encoding="utf-8")


def test_the_coroutine_of_the_readme_runs(folder):
    names: dict[str, Any] = {}
    for block in blocks_of(ROOT / "README.md"):
        if block.language == "python":
            run_block(block, names, "README.md")
    generate = AsyncMock(side_effect=lambda groups: groups[:2])
    asyncio.run(names["rollouts"](generate))
    assert [len(group) for (groups,), _ in generate.await_args_list for group in groups] == [8] * 32


def anchors_of(page: Path) -> set[str]:
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    return set(anchors)


def links_of(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) if not link.startswith("https://")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_the_links_of_a_page_lead_somewhere_and_it_names_no_path_of_this_machine(page):
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors_of(target), link
    text = page.read_text(encoding="utf-8")
    here = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sys.prefix, f"/{ROOT.parts[1]}/"} - {"/"}
    assert [path for path in here if path in text] == []
    assert set(re.findall(r"/(?:home|Users)/\w+", text)) <= {HOME}


@pytest.mark.parametrize("page", PAGES[1:], ids=name_of)
def test_a_page_opens_with_what_it_is_and_its_code_is_at_most_80_columns_wide(page):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    title, empty, what, *_ = page.read_text(encoding="utf-8").splitlines()
    assert (title[:2], empty) == ("# ", "")
    assert re.match(r"(?!For (those|everybody)|After this page)\S.*[.:]( |$)", what)
    for block in blocks_of(page):
        if block.language in {"py", "python", "sh", "yaml", "toml"} and block.text not in readme:
            assert [line for line in block.text.splitlines() if len(line) > CODE_COLUMNS] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_that_is_not_run_takes_names_and_settings_that_there_are(page):
    for block in blocks_of(page):
        tree = ast.parse(block.text) if block.language == "py" else ast.Module([])
        names = {name: getattr(asyncdata, name) for name in asyncdata.__all__}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("asyncdata"):
                with suppress(ConfigError):  # a framework is not installed here
                    module = importlib.import_module(str(node.module))
                    names |= {one.name: getattr(module, one.name) for one in node.names}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            takes = inspect.signature(names.get(ast.unparse(call.func), lambda **_: None)).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
                assert {word.arg for word in call.keywords} - {None} <= takes.keys(), ast.unparse(call)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_source_files_tests_and_codes_that_a_page_names_exist(page):
    assert set(re.findall(r"\bAD\d{3}\b", page.read_text("utf-8"))) <= set(first_cells(read("errors.md")))
    for name in re.findall(r"`((?:asyncdata|tests|examples)/[\w/.-]*)`", prose_of(page)):
        assert (ROOT / name).exists(), name
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", prose_of(page)):
        text = (ROOT / path).read_text(encoding="utf-8")
        for part in name.split("::"):
            assert re.search(rf"^\s*((async )?def|class) {part}\b|^{part} = ", text, re.M), f"{path}::{name}"


def declared_and_documented() -> dict[str, tuple[list[str], list[str]]]:
    """What the source has, and what the reference has, by what it is."""
    errors, snapshots, configuration = read("errors.md"), read("snapshot-format.md"), read("configuration.md")
    api = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    used = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r"\bAD\d{3}\b", path.read_text("utf-8"))}
    in_tree = re.findall(r"\b[A-Z]\w+(?=[ \n])", errors.split("```")[1])
    settings = [name for kind in (asyncdata.LoaderConfig, *STRUCTS.values()) for name in kind.__struct_fields__]
    of_states = [*Snapshot.__struct_fields__, *Counters.__struct_fields__]
    of_statistics = section(read("statistics.md"), "Fields").partition("| dict |")[0]
    names = rf"(?:(?:{'|'.join(MOVED)})\.)?\w+"
    return {
        "public names": (
            sorted([*asyncdata.__all__, *(f"{of}.{name}" for of in MOVED for name in getattr(asyncdata, of).__all__)]),
            sorted(re.findall(rf"^<!-- generated: api ({names}) -->$", api, re.MULTILINE) + ["__version__"]),
        ),
        "settings": (sorted(settings), sorted(re.findall(r"^\| `(\w+)` \| `.*?` \| .* \|$", configuration, re.M))),
        "statistics": (sorted(asyncdata.Statistics.__struct_fields__), sorted(first_cells(of_statistics))),
        "a state": (of_states, first_cells(section(snapshots, "The state dict"))),
        "a snapshot's header": (list(Header.__struct_fields__), first_cells(section(snapshots, "The file"))),
        "errors": (sorted(asyncdata.errors.__all__), sorted({*in_tree} & {*asyncdata.errors.__all__})),
        "error codes": (sorted(used), sorted(cell for cell in first_cells(errors) if cell.startswith("AD"))),
        "events": (sorted(reference.logged_events()), sorted(table_rows(read("events.md")))),
        "commands": (list(CONTEXTS), re.findall(r"^## `(.*)`$", read("cli.md"), re.MULTILINE)),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=name_of)
def test_the_reference_in_the_repository_is_that_of_the_code(page):
    text = page.read_text(encoding="utf-8")
    if "<!-- generated: api " in text:
        pytest.importorskip("griffe", reason="needs the extra `docs`")
    assert text.count("\n<!-- generated: ") - text.count("<!-- generated: events -->") == text.count("\n<!-- end -->")
    assert text == reference.filled(text), "it is stale: python docs/site/reference.py"


def test_the_reference_lists_all_there_is_and_says_what_each_class_of_settings_takes():
    for what, (declared, documented) in declared_and_documented().items():
        assert documented == declared, what
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    signatures = dict(re.findall(r"^```python3\n([A-Z]\w+)\((.*?)\)\n```", pages, re.M | re.S))
    kinds = (getattr(module, name, None) for module in (asyncdata, asyncdata.xtuner) for name in module.__all__)
    for kind in (kind for kind in kinds if hasattr(kind, "__struct_fields__")):
        fields = [name for name in kind.__struct_fields__ if not name.startswith("_")]
        assert re.findall(r"(?:^|[\n ])(\w+):", signatures[kind.__name__]) == fields, kind


@pytest.mark.parametrize("kind", [asyncdata.LoaderConfig, asyncdata.Statistics, *STRUCTS.values()])
def test_every_field_is_explained_in_its_docstring(kind):
    assert [name for name in kind.__struct_fields__ if not re.search(rf"\b{name}\b", inspect.getdoc(kind))] == []


CONTEXTS = {context.command_path: context for context in reference.contexts_of(commands)}


@pytest.mark.parametrize("command", CONTEXTS)
def test_a_command_is_documented_as_its_help_has_it_speaks_json_and_can_be_verbose(command):
    here = table_rows(section(read("cli.md"), f"`{command}`"))
    assert {"--json", "--verbose"} < {name for names in here for name in names.split()}
    assert all(about != [""] for about in here.values())


def test_each_figure_of_the_readme_has_a_row_of_the_measurements_and_a_command_that_takes_it():
    speeds = section((ROOT / "README.md").read_text("utf-8"), "How fast it is")
    told = [row[1] for row in re.findall(r"^\| (\S[^|]*) \| ([^|]+) \|$", speeds, re.MULTILINE)]
    page = (DOCS / "explanation" / "measurements.md").read_text("utf-8")
    repeated = re.findall(r"^\| ([^|]+) \| (S\w+), [^|]+ \| `--only (S\w+)`[^|]* \| 20\d\d-\d\d-\d\d \|$", page, re.M)
    assert [figure for figure, *_ in repeated] == told != []
    for figure, row, only in repeated:
        assert row == only and row in FIGURES, figure
        number = re.findall(r"[\d.]+", figure)[0]
        results = re.findall(rf"^\| {row} \| [^|]+ \|[^|]*\| ([\d.]+) ", page, re.MULTILINE)
        digits = len(number.partition(".")[2])
        assert float(number) in [round(float(result), digits) for result in results], figure


def test_the_figures_of_the_first_screen_are_those_of_the_pages_with_their_dates():
    first = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]
    pages = "".join((DOCS / f"explanation/{name}.md").read_text("utf-8") for name in ("measurements", "reliability"))
    bullets = re.findall(r"^- (.*\*\*.*) \((20\d\d-\d\d-\d\d)\)\.$", first, re.MULTILINE)
    told = {(figure, date) for text, date in bullets for figure in re.findall(r"\*\*(.+?)\*\*", text)}
    measured = set(re.findall(r"^\| ([^|]+) \| S\w+, .*\| (20\d\d-\d\d-\d\d) \|$", pages, re.MULTILINE))
    kills = sum(map(int, re.findall(r"^\| R[12] \|.*\| (\d+) kills; 0, 0, 0 \|", pages, re.MULTILINE)))
    assert (len(bullets), {figure for figure, _ in told - measured}) == (3, {f"{kills} kills"})


# A new user comes from README.md to a training loop of their own framework in at most three pages.

HOW_TO = [page for page in PAGES if re.match(r"use-it-with-|train-with-torch|move-a-slime-run", page.name)]
INSTALL = re.compile(r'`pip install "path/to/asyncdata\[fast\]"`')


def linked_from(page: Path) -> set[Path]:
    return {(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)}


@pytest.mark.parametrize("page", HOW_TO, ids=name_of)
def test_a_training_loop_is_at_most_three_pages_away_and_can_be_installed_and_started(page):
    text, readme = page.read_text(encoding="utf-8"), ROOT / "README.md"
    programs = sorted(linked_from(page) & {*(ROOT / "examples").rglob("*.py")} - {*(ROOT / "examples").rglob("_*")})
    path = [readme, page] if page in linked_from(readme) else [readme, DOCS / "index.md", page]
    first = next(block.text for block in blocks_of(page) if "asyncdata" in block.text)
    if programs:
        path.append(programs[0])  # to copy
    elif "tokenizer" in first:
        path.append(DOCS / "tutorial" / "first-loader.md")
    assert len(path) <= 3, list(map(name_of, path))
    assert all(each.is_file() for each in path)

    installs, parts = INSTALL.search(text), [found.start() for found in re.finditer(r"^## ", text, re.MULTILINE)]
    assert installs is not None
    assert installs.start() < [*parts, len(text), len(text)][1], "it says how to install before its second part"
    for program in programs:
        code = program.read_text(encoding="utf-8")
        assert "asyncdata" in code and "__main__" in code, program


def test_every_figure_and_page_is_listed_where_it_must_be():
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) == 7}

    assert set(TARGETS) | {"R6", "R14"} == set(rows) - {"", "---"}
    named = [path for cells in rows.values() for path in re.findall(r"tests/[\w/.]+", cells[5])]
    assert len(named) > len(TARGETS)
    assert all((ROOT / path).exists() for path in named)

    page = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    parts = (page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0] for name in ("What is measured", "Time and memory"))
    explained, results = (re.findall(r"^\| (S\d+b?) \|", part, re.MULTILINE) for part in parts)

    assert explained == list(FIGURES)
    assert list(dict.fromkeys(results)) == list(FIGURES)
    assert all("==" in package for peer in ENVIRONMENTS.values() for step in peer.steps for package in step)
    reached = {(DOCS / link.partition("#")[0]).resolve() for link in links_of(DOCS / "index.md")}

    assert set(PAGES) - reached - {DOCS / "index.md", ROOT / "README.md"} == set()


@pytest.mark.thorough
def test_each_promise_is_held_by_an_integration_test_of_the_quick_selection():
    pattern = re.compile(r"`(tests/integration/[\w/]+\.py::[\w:]+)`")
    page = (ROOT / "docs/explanation/reliability.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (P\d): .*?\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    named = {promise: pattern.findall(text) for promise, text in sections}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [*command, *sum(named.values(), [])], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    quick = {line.partition("[")[0] for line in run.stdout.splitlines()}
    assert len(named) == 8
    assert [promise for promise, names in named.items() if not quick.intersection(names)] == []
