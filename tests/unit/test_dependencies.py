"""What the package needs is what its docs name, with lower bounds, and no more than that is installed with it."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.audit import installed, verdict

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {extra: [*map(Requirement, texts)] for extra, texts in PROJECT["optional-dependencies"].items()}


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements}


def needed(name: str, found: set[str]) -> set[str]:
    """All that pip would install for a package without extras, itself included; what is not installed ends there."""
    if name not in found:
        found.add(name)
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            texts = []
        for each in map(Requirement, texts):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                needed(canonicalize_name(each.name), found)
    return found


@pytest.mark.parametrize("requirement", [*CORE, *sum(EXTRAS.values(), [])], ids=str)
def test_every_dependency_has_a_lower_bound(requirement: Requirement) -> None:
    assert {each.operator for each in requirement.specifier} & {">=", "==", "~="}


def test_the_core_needs_what_the_page_names_and_nothing_else() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    section = page.partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.MULTILINE)

    assert [name for name, _ in rows] == sorted(names(CORE))


def test_the_core_pulls_in_no_extra() -> None:
    found: set[str] = set()
    for name in names(CORE):
        needed(name, found)

    users = {"zstd", "parquet", "hf", "cache", "gigatoken", "fastokens", "torch"}
    optional = set().union(*(names(EXTRAS[extra]) for extra in users)) | {"ray", "transformers"}
    assert len(found) > len(CORE)
    assert not found & optional


def test_an_audit_that_could_not_be_done_is_no_audit_that_found_nothing() -> None:
    unknown = "ERROR:pip_audit._cli:msgspec: Dependency not found on PyPI and could not be audited: msgspec (0.19.0)"
    offline = "requests.exceptions.ConnectionError: Max retries exceeded with url: /v1/query"

    assert verdict(0, "No known vulnerabilities found", 3) == (0, "audit: 3 packages, no known fault")
    assert verdict(1, "Found 2 known vulnerabilities in 1 package\njinja2 3.0 ...", 3).status == 1
    for said in (unknown, offline, f"No known vulnerabilities found\n{unknown}", ""):
        found = verdict(1, said, 3)
        assert found.status == 2
        assert found.text.startswith("audit: NOT DONE. The advisory service cannot be reached")
        assert found.text.endswith(said.splitlines()[-1] if said else "pip-audit said nothing")


def test_what_is_audited_is_what_is_installed_but_for_the_package_itself() -> None:
    found = installed()

    assert any(re.fullmatch(r"msgspec==[\d.]+", line, re.IGNORECASE) for line in found)
    assert not any(line.startswith("asyncdata==") for line in found)
