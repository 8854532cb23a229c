"""What the package needs is what its docs name, with lower bounds, and no more than that is installed with it."""

import contextlib
import re
import tomllib
from importlib import metadata
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import asyncdata
from asyncdata.core.settings import from_clone
from tests.support.audit import installed, verdict
from tests.support.release import ROOT, faults, left_to_the_owner, missing_from, of_installed

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {extra: [*map(Requirement, texts)] for extra, texts in PROJECT["optional-dependencies"].items()}
(ALL,) = EXTRAS.pop("all")
FOR_DEVELOPERS = {"bench", "docs", "lint", "package", "test"}


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements}


def needed(name: str, found: set[str]) -> set[str]:
    """All that pip would install for a package without extras, itself included; what is not installed ends there."""
    if name not in found:
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            for each in map(Requirement, metadata.requires(name) or []):
                if each.marker is None or each.marker.evaluate({"extra": ""}):
                    needed(canonicalize_name(each.name), found)
    return found


def test_the_core_and_the_extras_need_what_the_pages_name():
    ranges: dict[str, set[str]] = {}
    for requirement in sum(EXTRAS.values(), CORE):
        assert {each.operator for each in requirement.specifier} & {">=", "==", "~="}, requirement
        ranges.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))

    assert {name: found for name, found in ranges.items() if len(found) > 1} == {}

    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    section = page.partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", section, re.MULTILINE)

    assert [name for name, _ in rows] == sorted(names(CORE))

    found: set[str] = set()
    for name in names(CORE):
        needed(name, found)

    # tokenizers needs huggingface_hub, which needs PyYAML: both today, and maybe not tomorrow.
    users = set().union(*(names(EXTRAS[extra]) for extra in set(EXTRAS) - FOR_DEVELOPERS))
    optional = users - {"huggingface-hub", "pyyaml"} | {"transformers"}
    assert len(found) > len(CORE)
    assert not found & optional

    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    told = {extra: re.findall(r"`([^`]+)`", packages) for extra, packages in rows}

    assert told == {"all": [], **{extra: sorted(names(needed_by)) for extra, needed_by in EXTRAS.items()}}
    assert (ALL.name, ALL.extras) == ("asyncdata", set(EXTRAS) - FOR_DEVELOPERS)


@pytest.mark.thorough
def test_what_is_said_to_install_it_works_from_a_clone_and_names_no_host_of_an_index():
    patterns = ("*.*", ".ci/*", "docs/**/*", "examples/**/*", "asyncdata/**/*.py", "tests/**/*.py")
    kinds = {".md", ".py", ".ini", ".toml", ".yml", ".sh", ""}
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file() and path.suffix in kinds}
    # The name on the package index is not ours: a path, or a dot in the clone.
    unwanted = re.compile(r"""pip install (?:-\S+ )*["'`]*asyncdata\b|(?i:\bpypi\.(?:org|python)|python(?=hosted))""")
    assert len(paths) > 500
    assert [path.name for path in sorted(paths) if unwanted.search(path.read_text(encoding="utf-8"))] == []
    assert from_clone("fast").startswith('pip install ".[fast]" in a clone')


def test_the_version_is_the_same_in_both_places_and_the_metadata_invents_no_person_and_no_address():
    assert PROJECT["version"] == asyncdata.__version__
    assert left_to_the_owner(PROJECT) == ["authors", "maintainers", "urls"]
    assert left_to_the_owner({**PROJECT, "maintainers": [{"name": "Ada"}]}) == ["urls"]
    assert left_to_the_owner({**PROJECT, "authors": [{"name": "Ada"}], "urls": {"Source": "https://a"}}) == []
    assert missing_from({"a", "b"}, {"b", "d", "c"}) == ["c", "d"], "what an archive lacks"


def test_every_installed_dependency_of_a_user_has_a_permissive_or_reviewed_licence():
    found: set[str] = set()
    for name in names(CORE).union(*(names(EXTRAS[extra]) for extra in set(EXTRAS) - FOR_DEVELOPERS - {"torch"})):
        needed(name, found)
    licences = of_installed(found & {canonicalize_name(each.metadata["Name"]) for each in metadata.distributions()})
    assert len(licences) > 15
    assert faults(licences) == []


def test_an_audit_that_could_not_be_done_is_no_audit_that_found_nothing():
    unknown = "ERROR:pip_audit._cli:msgspec: Dependency not found on PyPI and could not be audited: msgspec (0.19.0)"
    offline = "requests.exceptions.ConnectionError: Max retries exceeded with url: /v1/query"
    assert verdict(0, "No known vulnerabilities found", 3) == (0, "audit: 3 packages, no known fault")
    assert verdict(1, "Found 2 known vulnerabilities in 1 package\njinja2 3.0 ...", 3).status == 1
    for said in (unknown, offline, f"No known vulnerabilities found\n{unknown}", ""):
        found = verdict(1, said, 3)
        assert found.status == 2
        assert found.text.startswith("audit: NOT DONE. The advisory service cannot be reached")
        assert found.text.endswith(said.splitlines()[-1] if said else "pip-audit said nothing")
    found = installed()
    assert any(re.fullmatch(r"msgspec==[\d.]+", line, re.IGNORECASE) for line in found)
    assert not any(line.startswith("asyncdata==") for line in found), "the package itself is not audited"
