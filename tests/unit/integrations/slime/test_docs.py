"""The pages on slime: the reference lists all there is, and what pages quote or tell the reader to set is so."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.parts import PREFIX, Options, settings_of
from tests.support.slime_source import source_of
from tests.unit.test_docs import (
    DOCS,
    PACKAGE,
    blocks_of,
    first_cells,
    read,
    section,
    table_rows,
)

INTEGRATIONS = sorted((PACKAGE / "integrations" / "slime").glob("*.py"))


def table(heading, title):
    """The rows of the one table of a section whose first column has this title."""
    text = section(read("slime.md"), heading)
    found = re.search(rf"^\| {re.escape(title)} \|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"no table of {title!r} under {heading!r}"
    return table_rows(found[1])


def test_every_key_is_documented_with_its_default():
    rows = table("Keys", "key")
    defaults = {}
    for field in msgspec.structs.fields(Options):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        defaults[f"{PREFIX}{field.name}"] = f"`{default}`"
    assert {name: cells[0] for name, cells in rows.items()} == defaults


class Recorder(SimpleNamespace):
    """Arguments that remember what they were asked for."""

    def __getattribute__(self, name):
        if not name.startswith("__"):
            asked.add(name)
        return super().__getattribute__(name)


asked = set()


def test_every_argument_that_is_read_is_documented_and_no_other():
    asked.clear()
    settings_of(Recorder(prompt_data="p.jsonl", use_hf_datasets=True))
    assert set(table("slime's arguments", "argument")) == asked


def test_every_number_of_its_own_is_documented():
    with source_of(None) as source:
        numbers = {*source.statistics(), "asyncdata_dropped_groups_<reason>_total"}
    assert set(first_cells(section(read("slime.md"), "Numbers"))) == numbers


def test_every_code_of_the_integrations_is_in_their_reference():
    used = {code for path in INTEGRATIONS for code in re.findall(r"\bAD\d{3}\b", path.read_text(encoding="utf-8"))}
    assert used <= set(re.findall(r"\bAD\d{3}\b", read("slime.md")))


def settings_blocks():
    pages = sorted(page for page in DOCS.rglob("*.md") if "asyncdata.integrations.slime" in page.read_text("utf-8"))
    blocks = [(page, block) for page in pages for block in blocks_of(page) if block.language == "yaml"]
    return [pytest.param(block.text, id=f"{page.stem}:{block.line}") for page, block in blocks]


@pytest.mark.parametrize("text", settings_blocks())
def test_the_settings_files_of_the_pages_are_taken(text):
    settings = dict(re.findall(r"^(\w+): +(.*?) *(?:#.*)?$", text, re.MULTILINE))
    values = {
        name: json.loads(value) if re.match(r"[\d\[{]|true|false", value) else value for name, value in settings.items()
    }
    assert len(values) == text.count("\n")
    settings_of(SimpleNamespace(prompt_data="p.jsonl", **values))
