"""The pages on slime: the reference lists all there is, and what pages quote or tell the reader to set is so."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata.integrations.hf_adapter import AsyncDatasetAdapter, HFDatasetAdapterBase
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.checkpoint import SlimeState
from asyncdata.integrations.slime.config import PREFIX, Options, settings_of
from asyncdata.integrations.slime.rollout_ledger import Numbering
from tests.support.slime_source import source_of, write_prompts
from tests.unit.test_docs import (
    DOCS,
    PACKAGE,
    blocks_of,
    first_cells,
    prose_of,
    read,
    section,
    signature_of,
    table_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

MOVE = DOCS / "how-to" / "move-a-slime-run.md"
MIGRATE = DOCS / "how-to" / "migrate-to-the-dataset-adapter.md"
INTEGRATIONS = sorted((PACKAGE / "integrations" / "slime").glob("*.py"))


def table(heading: str, title: str) -> dict[str, list[str]]:
    """The rows of the one table of a section whose first column has this title."""
    text = section(read("slime.md"), heading)
    found = re.search(rf"^\| {re.escape(title)} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"no table of {title!r} under {heading!r}"
    return table_rows(found[1])


# The reference is complete


def test_every_key_is_documented_with_its_default():
    rows = table("Keys", "key")

    defaults = {}
    for field in msgspec.structs.fields(Options):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        defaults[f"{PREFIX}{field.name}"] = f"`{default}`"
    assert {name: cells[0] for name, cells in rows.items()} == defaults


def test_every_choice_of_a_key_is_documented_and_no_other():
    rows = table("Keys", "key")

    for field in msgspec.structs.fields(Options):
        kind = msgspec.inspect.type_info(field.type)
        for part in getattr(kind, "types", (kind,)):
            if isinstance(part, msgspec.inspect.LiteralType):
                assert set(re.findall(r"`(\w+)`", rows[f"{PREFIX}{field.name}"][1])) == set(part.values), field.name


class Recorder:
    """Arguments that remember what they were asked for."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)
        self.__dict__["asked"] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            object.__getattribute__(self, "__dict__")["asked"].add(name)
        return object.__getattribute__(self, name)


def test_every_argument_that_is_read_is_documented_and_no_other():
    args = Recorder(prompt_data="p.jsonl", use_hf_datasets=True)
    settings_of(args)
    asked = args.asked - {"asked"}

    assert set(table("slime's arguments", "argument")) == asked


def test_every_default_of_an_argument_is_documented():
    rows = table("slime's arguments", "argument")
    defaults = {name: default for path in INTEGRATIONS for name, default in defaults_of(path) if name in rows}

    assert len(defaults) > 15
    assert {name: ast.literal_eval(rows[name][0].strip("`")) for name in defaults} == defaults


def defaults_of(path: Path) -> list[tuple[str, Any]]:
    """What ``getattr(args, "name", default)`` says in a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        (call.args[1].value, ast.literal_eval(call.args[2]))
        for call in calls
        if ast.unparse(call.func) == "getattr" and ast.unparse(call.args[0]) == "args" and len(call.args) == 3
        if isinstance(call.args[1], ast.Constant)
    ]


def test_every_method_and_attribute_of_the_data_source_is_documented(tmp_path):
    methods, attributes = table("The class", "method"), table("The class", "attribute")

    names = [name for name in dir(AsyncDataSource) if not name.startswith("_")] + ["__len__"]
    callables = [getattr(AsyncDataSource, name) for name in names if callable(getattr(AsyncDataSource, name))]
    assert set(methods) == set(map(signature_of, callables))
    with source_of(write_prompts(tmp_path / "p.jsonl", 1)) as source:
        public = {name for name in vars(source) if not name.startswith("_")}
    assert set(attributes) == public | {name for name in names if not callable(getattr(AsyncDataSource, name))}


def test_every_method_of_a_dataset_is_documented():
    base = table("Datasets", "method of `HFDatasetAdapterBase`")
    ours = table("Datasets", "member of `AsyncDatasetAdapter`")

    abstract = [getattr(HFDatasetAdapterBase, name) for name in HFDatasetAdapterBase.__abstractmethods__]
    assert set(base) == set(map(signature_of, abstract))
    members = {name: member for name, member in vars(AsyncDatasetAdapter).items() if not name.startswith("_")}
    own = {name: member for name, member in members.items() if name not in HFDatasetAdapterBase.__abstractmethods__}
    assert set(ours) == {signature_of(member) if callable(member) else name for name, member in own.items()}


def test_the_layout_of_a_checkpoint_is_documented():
    assert set(table("Checkpoints", "key of slime's file")) == {*Numbering.__struct_fields__, "metadata"}
    assert list(table("Checkpoints", "field of `slime`")) == list(SlimeState.__struct_fields__)


def test_every_number_of_its_own_is_documented(tmp_path):
    with source_of(None) as source:
        numbers = set(source.statistics())

    assert set(first_cells(section(read("slime.md"), "Numbers"))) == {
        *numbers,
        "asyncdata_dropped_groups_<reason>_total",
    }


def test_every_code_of_the_integrations_is_in_their_reference():
    used = {code for path in INTEGRATIONS for code in re.findall(r"\bAD\d{3}\b", path.read_text(encoding="utf-8"))}

    assert used - set(re.findall(r"\bAD\d{3}\b", read("slime.md"))) == set()


# What pages tell the reader to set


def settings_blocks() -> list[Any]:
    pages = sorted(page for page in DOCS.rglob("*.md") if "asyncdata.integrations.slime" in page.read_text("utf-8"))
    return [
        pytest.param(block.text, id=f"{page.stem}:{block.line}")
        for page in pages
        for block in blocks_of(page)
        if block.language == "yaml"
    ]


@pytest.mark.parametrize("text", settings_blocks())
def test_the_settings_files_of_the_pages_are_taken(text):
    settings = dict(re.findall(r"^(\w+): +(.*?) *(?:#.*)?$", text, re.MULTILINE))
    values = {
        name: json.loads(value) if re.match(r"[\d\[{]|true|false", value) else value for name, value in settings.items()
    }

    assert len(values) == text.count("\n")
    settings_of(SimpleNamespace(prompt_data="p.jsonl", **values))


# What pages quote


@cache
def messages() -> tuple[str, ...]:
    """Every text of the package, with ``\\0`` for what is put into it."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def quoted() -> list[str]:
    """What the table of troubles says that our messages say."""
    rows = re.findall(r"^\| ([^|]*) \|", section(MOVE.read_text(encoding="utf-8"), "Troubleshooting"), re.MULTILINE)
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return [text for text in texts if re.match(r"AD\d{3}\b|\w+Error: ", text)]


def is_written(text: str) -> bool:
    """Whether a message has these words, with anything for each ``...``."""
    pieces = [piece for piece in re.split(r" ?\.\.\. ?", re.sub(r"^\w+Error: ", "", text)) if piece]
    pattern = ".*".join(map(re.escape, pieces))
    return bool(pieces) and any(re.search(pattern, message, re.DOTALL) for message in messages())


@pytest.mark.thorough
@pytest.mark.parametrize("text", quoted())
def test_a_symptom_is_in_the_words_of_our_messages(text):
    assert is_written(text)


@pytest.mark.thorough
def test_symptoms_are_found_and_compared():
    assert len(quoted()) > 10
    assert is_written("AD510 no data for ...")
    assert not is_written("AD510 no data since ...")
    assert not is_written("AD430 no data for ...")


@pytest.mark.parametrize("page", [MOVE, MIGRATE], ids=lambda page: page.stem)
def test_every_key_that_a_page_names_is_one(page):
    named = set(re.findall(rf"\b{PREFIX}(\w+)\b", prose_of(page)))

    assert named <= set(Options.__struct_fields__)
    assert named
