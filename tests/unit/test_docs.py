"""README.md and docs/: every example runs and prints what its page says, and the reference lists all there is."""

import ast
import asyncio
import inspect
import itertools
import re
import shlex
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import AsyncMock

import click
import msgspec
import pytest
import structlog

import asyncdata
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.cli.arguments import commands
from asyncdata.core.checksummed_file import Header
from asyncdata.delivery.ledger import Counters
from asyncdata.loader.config import STRUCTS
from asyncdata.workers.base import WorkerState
from tests.support.knob_table import rows_of
from tests.support.pages import HOME, Block, blocks_of, is_printed, run_block, run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "asyncdata"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FIRST_SCREEN_LINES = 40

NEEDED = {"docs/how-to/train-with-torch.md": "torch", "docs/how-to/cache-tokens.md": "xxhash"}
NEEDED |= {"docs/tutorial/train-on-pictures.md": "torch"}
"""What a page's examples need beside the packages that every check is run with."""


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """The part of a page under a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading {heading!r}"
    level = len(found[1])
    return re.split(rf"^#{{1,{level}}} ", found[2], flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    """What the rows of a text's tables have in backquotes in their first column."""
    rows = re.findall(r"^\|([^|]+)\|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


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
    structlog.reset_defaults()
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
    if name_of(page) in NEEDED:
        pytest.importorskip(NEEDED[name_of(page)])
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


def test_an_output_is_compared():
    assert not is_printed("a\nb\n", "a\nc\n")
    assert not is_printed("a\n", "a\nb\n")
    assert is_printed("a ... c\n", "a b c\n")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_shell_commands_of_a_page_are_commands(page):
    for block in blocks_of(page):
        for command in re.findall(r"^asyncdata (.*)$", block.text if block.language == "sh" else "", re.MULTILINE):
            try:
                commands.main(shlex.split(command), standalone_mode=False, obj=lambda *_: None)
            except click.ClickException as error:
                pytest.fail(f"{name_of(page)}:{block.line}\n{error.format_message()}", pytrace=False)


# README.md


def test_the_first_screen_is_one_and_begins_with_a_line_each_that_runs_the_demo_and_that_runs_the_checks():
    demo, checks, *_ = blocks_of(ROOT / "README.md")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    assert (
        len((ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0].splitlines()) <= FIRST_SCREEN_LINES
    )
    assert (demo.text.count("\n"), checks.text.count("\n")) == (1, 1)
    assert demo.text.endswith(".venv/bin/asyncdata demo\n")
    assert all(tool in checks.text for tool in ("ruff check", "ruff format --check", "mypy", "pytest"))
    for names in re.findall(r"\.\[([\w,]+)\]", checks.text):
        assert set(names.split(",")) <= set(extras)
    assert checks.text in (DOCS / "contributing.md").read_text(encoding="utf-8")


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


def test_the_index_leads_to_every_page():
    reached = {(DOCS / link.partition("#")[0]).resolve() for link in links_of(DOCS / "index.md")}

    assert set(PAGES) - reached - {DOCS / "index.md", ROOT / "README.md"} == set()


@pytest.mark.parametrize("page", PAGES[1:], ids=name_of)
def test_a_page_says_whom_it_is_for_and_what_one_can_do_after_it(page):
    title, empty, whom, what, *_ = page.read_text(encoding="utf-8").splitlines()

    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"For (those|everybody)\b.*\.$", whom)
    assert re.match(r"After this page you .*[.,:]?$", what)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_source_files_tests_and_codes_that_a_page_names_exist(page):
    assert set(re.findall(r"\bAD\d{3}\b", page.read_text("utf-8"))) <= set(first_cells(read("errors.md")))
    for name in re.findall(r"`((?:asyncdata|tests|examples)/[\w/.-]*)`", prose_of(page)):
        assert (ROOT / name).exists(), name
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", prose_of(page)):
        text = (ROOT / path).read_text(encoding="utf-8")

        for part in name.split("::"):
            is_there = re.search(rf"^\s*(?:(?:async )?def|class) {part}\b|^{part} = ", text, re.MULTILINE)
            assert is_there, f"{path}::{name}"


FIGURE = re.compile(r'^\| ([A-Z]+\d*) \| .* \| ([^|]+) \| `(?:pytest -m "" )?(tests/[^`]+)` \|$', re.MULTILINE)


def figures_of(page: Path) -> dict[tuple[str, str], str]:
    """What was reached, by the figure's name and the tests that it comes from."""
    return {(name, tests): reached for name, reached, tests in FIGURE.findall(page.read_text(encoding="utf-8"))}


def test_a_promise_names_tests_that_prove_it_and_the_figures_of_the_page_of_reliability():
    told = figures_of(DOCS / "explanation" / "reliability.md")
    repeated = [
        item for page in (DOCS / "promises").glob("*.md") for item in figures_of(page).items() if item[0] in told
    ]

    for page in (DOCS / "promises").glob("*.md"):
        proof = section(page.read_text(encoding="utf-8"), "The proof")
        assert re.search(r"`tests/[\w/]+\.py::[\w:]+`", proof), name_of(page)
    assert len(repeated) > 10
    assert [(figure, reached) for figure, reached in repeated if told[figure] != reached] == []


def declared_and_documented() -> dict[str, tuple[list[str], list[str]]]:
    """What the source has, and what the reference has, by what it is."""
    api, errors, snapshots = read("api.md"), read("errors.md"), read("snapshot-format.md")
    tables, of_workers = read("statistics.md").split("## As flat numbers")[0].split("A worker's record:")
    headings = [name.strip("`") for name in re.findall(r"^### (.*)$", api, re.MULTILINE)]
    used = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r"\bAD\d{3}\b", path.read_text("utf-8"))}
    methods = [name for name in vars(asyncdata.TokenizeFn) if not name.startswith("_")]
    of_methods = [cell.partition("(")[0] for cell in first_cells(section(api, "`TokenizeFn`"))]
    counters = [name for name in Counters.__struct_fields__ if name != "mixture"]  # a snapshot has it beside them
    kinds = [name for name in asyncdata.__all__ if issubclass(of_type(getattr(asyncdata, name)), BaseException)]
    in_tree = re.findall(r"\b[A-Z]\w+(?=[ \n])", errors.split("```")[1])
    return {
        "public names": (
            sorted(asyncdata.__all__),
            sorted({*headings, *first_cells(section(api, "Errors")), "__version__"}),
        ),
        "methods of a tokenize function": (methods, [name for name in of_methods if name in methods]),
        "statistics": (sorted(asyncdata.Statistics.__struct_fields__), sorted(first_cells(tables))),
        "a worker's record": (list(WorkerState.__struct_fields__), first_cells(of_workers)),
        "a state": (
            ["format", *Snapshot.__struct_fields__, *counters],
            first_cells(section(snapshots, "The state dict")),
        ),
        "a snapshot's header": (list(Header.__struct_fields__), first_cells(section(snapshots, "The file"))),
        "errors": (sorted(kinds), sorted({*in_tree} & {*kinds})),
        "error codes": (sorted(used), sorted(cell for cell in first_cells(errors) if cell.startswith("AD"))),
        "commands": (list(CONTEXTS), re.findall(r"^## `(.*)`$", read("cli.md"), re.MULTILINE)),
    }


def of_type(value: Any) -> type:
    return value if isinstance(value, type) else type(value)


def test_the_reference_lists_all_there_is_and_nothing_else():
    for what, (declared, documented) in declared_and_documented().items():
        assert documented == declared, what
    assert "`__version__`" in read("api.md")
    assert "`asyncdata_<field>`" in read("statistics.md").split("## As flat numbers")[1]


def signature_of(function: Any) -> str:
    """As ``name(a, *, b=1)``: without types, and without self."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in {"self", "cls"}
    ]
    return function.__name__ + str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def signatures_of(kind: type) -> Iterator[str]:
    """The methods and properties that the library gives a class; a Struct's fields are another matter."""
    for name in set(dir(kind)) - set(getattr(kind, "__struct_fields__", ())):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_") or not isinstance(member, property | classmethod | FunctionType):
            continue
        yield f"`{name}`" if isinstance(member, property) else signature_of(getattr(member, "__func__", member))


LOADERS = (asyncdata.DataLoader, asyncdata.AsyncDataLoader, asyncdata.LoaderConfig, asyncdata.Statistics)
VALUES = (asyncdata.Sample, asyncdata.Position, asyncdata.SourceLocation)


@pytest.mark.parametrize("kind", [*LOADERS, *VALUES])
def test_every_method_is_documented_with_its_signature(kind):
    here = section(read("api.md"), f"`{kind.__name__}`")
    if kind is asyncdata.AsyncDataLoader:
        here += section(read("api.md"), "`DataLoader`")  # which says what is alike

    assert [signature for signature in signatures_of(kind) if signature not in here] == []


def described(*endings: str) -> list[Any]:
    return [getattr(asyncdata, name) for name in asyncdata.__all__ if name.endswith(endings)]


TOKENIZE_FNS = [kind for kind in described("TokenizeFn") if kind is not asyncdata.TokenizeFn]
PACKINGS_AND_COLLATORS = described("Packing", "Grouping", "Collator")
RECORDS = [*VALUES, asyncdata.Document, asyncdata.JsonlSource, asyncdata.Shuffle]


@pytest.mark.parametrize("kind", [*PACKINGS_AND_COLLATORS, *TOKENIZE_FNS, *RECORDS])
def test_every_field_is_documented_and_every_default_of_a_description(kind):
    here = section(read("api.md"), f"`{kind.__name__}`")
    fields = getattr(kind, "_fields", None) or [name for name in kind.__struct_fields__ if not name.startswith("_")]
    assert first_cells(here) == list(fields)
    if kind in RECORDS:
        return

    rows = table_rows(here)
    for field in msgspec.structs.fields(kind):
        if field.required:
            assert rows[field.name][0] == "", field.name
        else:
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            assert rows[field.name][0].strip("`").replace('"', "'") == repr(default), field.name


def test_the_tables_of_knobs_are_what_the_declaration_says():
    page = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", read("configuration.md"))
    of_groups = {kind: table_lines(section(page, f"`{kind.__name__}`")) for kind in STRUCTS.values()}
    lines = table_lines(page)

    for kind, rows in of_groups.items():
        assert rows == [str(row) for row in rows_of(kind)]
    assert sorted(lines[: -sum(map(len, of_groups.values()))]) == sorted(map(str, rows_of(asyncdata.LoaderConfig)))


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `")]


def logged_events() -> dict[str, tuple[str, set[str]]]:
    """What the package logs: event -> level and fields; "None" stands for fields that are given as a dict."""
    events = {}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if logged := re.fullmatch(r"(?:self\.)?_log\.(\w+ing|info|exception)", ast.unparse(call.func)):
            level = logged[1].replace("exception", "error")
            events[ast.literal_eval(call.args[0])] = level, {str(keyword.arg) for keyword in call.keywords}
    return events


@pytest.mark.thorough
def test_every_event_is_documented_with_its_level_and_fields_and_no_other():
    rows, logged = table_rows(read("events.md")), logged_events()
    documented = {name: (cells[0], set(re.findall(r"`(\w+)`", cells[1]))) for name, cells in rows.items()}
    of_dicts = {name: fields for name, (_, fields) in logged.items() if "None" in fields}

    assert {name: documented[name] for name in documented if name not in of_dicts} == {
        name: found for name, found in logged.items() if name not in of_dicts
    }
    assert of_dicts.keys() == {"row.bad", "row.bad_again", "rows.dropped"}
    for name, fields in of_dicts.items():
        assert documented[name][0] == logged[name][0]
        assert documented[name][1] > fields - {"None"}


def contexts_of(command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """A context of each command, without those that have commands themselves."""
    context = click.Context(command, parent, command.name, **command.context_settings)
    if not isinstance(command, click.Group):
        yield context
        return

    for child in command.commands.values():
        yield from contexts_of(child, context)


CONTEXTS = {context.command_path: context for context in contexts_of(commands)}


@pytest.mark.parametrize("command", CONTEXTS)
def test_a_command_is_documented_as_its_help_has_it_speaks_json_and_can_be_verbose(command):
    context, here = CONTEXTS[command], section(read("cli.md"), f"`{command}`")
    records = [param.get_help_record(context) for param in context.command.params]
    rows = [(names.replace("|", r"\|"), " ".join(about.split())) for names, about in records]

    assert re.findall(r"^\| `(.*)` \| (.*) \|$", here, re.MULTILINE) == rows
    assert " ".join(context.command.help.split()) in " ".join(here.split())
    assert {"--json", "--verbose"} < {name for names, _ in rows for name in names.split()}
    assert all(about for _, about in rows)


# A new user comes from README.md to a training loop of their own framework in at most three pages.

HOW_TO = [page for page in PAGES if re.match(r"use-it-with-|train-with-torch|move-a-slime-run", page.name)]
INSTALL = re.compile(r'`pip install "path/to/asyncdata\[fast\]"`')


def linked_from(page: Path) -> set[Path]:
    return {(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)}


def test_the_frameworks_are_found():
    names = {page.stem.removeprefix("use-it-with-") for page in HOW_TO}

    assert {"move-a-slime-run", "train-with-torch", "trl", "verl"} < names
    assert len(names) >= 13


@pytest.mark.parametrize("page", HOW_TO, ids=name_of)
def test_a_training_loop_is_at_most_three_pages_away_and_can_be_installed_and_started(page):
    text, readme = page.read_text(encoding="utf-8"), ROOT / "README.md"
    programs = sorted(
        path for path in linked_from(page) if path.suffix == ".py" and path.is_relative_to(ROOT / "examples")
    )
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
