"""Which licences the dependencies may have: permissive ones, and those that were reviewed one by one."""

import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

__all__ = ("faults", "of_installed", "of_sbom", "table")

PERMISSIVE = frozenset(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU PSF-2.0 "
    "Python-2.0 Unlicense Zlib".split()
)
"""They ask for their text to be kept, and for no more."""

REVIEWED = {
    "certifi": ("MPL-2.0", "a list of certificates, used unmodified; the licence is of its files only"),
    "fastokens": ("", "its metadata names none; its LICENSE is Apache-2.0, its NOTICES add PCRE's, which is BSD"),
    "protobuf": ("", "an SBOM does not say what its metadata does: BSD-3-Clause"),
    "ray": ("", "an SBOM does not say what its metadata does: Apache-2.0"),
    "soxr": ("LGPL-2.1-or-later", "only of an extra; used unmodified, as a package that a user can replace"),
    "tqdm": ("MPL-2.0 AND MIT", "used unmodified, through huggingface_hub; MPL is of single files"),
}
"""Other licences that were read, by package: the licence, and why it is no obstacle. Another one is a fault again."""

_SAID = {
    "Apache-2.0": "Apache|Apache 2|Apache 2.0|Apache License 2.0|Apache License, Version 2.0|Apache Software License",
    "BSD-3-Clause": "3-Clause BSD License|BSD|BSD License",
    "ISC": "ISC License|ISC License (ISCL)",
    "MIT": "MIT License",
    "MPL-2.0": "Mozilla Public License 2.0 (MPL 2.0)",
    "PSF-2.0": "Python Software Foundation License",
}
_WORDS = {word: licence for licence, words in _SAID.items() for word in words.split("|")}
"""What packages wrote before there were SPDX expressions. A "BSD License" has two or three clauses, both permissive."""


def faults(licences: dict[str, list[str]]) -> list[str]:
    """One line for each package whose licence is unknown, or neither permissive nor reviewed.

    :param licences: by name of a package, what it says of its licence.
    """
    found = []
    for name, told in sorted(licences.items()):
        licence = spdx(told)
        if _is_permissive(licence) or (name in REVIEWED and REVIEWED[name][0] == licence):
            continue

        if not licence:
            found.append(f"{name}: no known licence; it says {told}")
        else:
            found.append(f"{name}: {licence} is not in the list of permissive licences, and was not reviewed")
    return found


def spdx(told: Iterable[str]) -> str:
    """What a package says of its licence, as an SPDX expression; empty if that is not known.

    An expression is believed first. Several classifiers may be of several parts, so all of them must hold.
    """
    words = [each.rpartition(" :: ")[2].strip() for each in told]
    known = {_WORDS.get(word, word) for word in words if word in _WORDS or _is_expression(word)}
    expressions = [each for each in known if " " in each]
    return expressions[0] if expressions else " AND ".join(sorted(known))


def _is_expression(word: str) -> bool:
    parts = [part.strip("()") for part in re.split(r" (?:AND|OR|WITH) ", word)]
    return all(part in PERMISSIVE or re.fullmatch(r"[A-Za-z0-9.]+(?:-[A-Za-z0-9.+]+)+", part) for part in parts)


def _is_permissive(expression: str) -> bool:
    """Whether one of the alternatives has permissive licences only."""
    alternatives = (alternative.split(" AND ") for alternative in expression.split(" OR "))
    return any(all(part.strip("()") in PERMISSIVE for part in parts) for parts in alternatives)


def of_installed(names: Iterable[str]) -> dict[str, list[str]]:
    """What these packages of this environment say of their licences: an expression, classifiers, or a text."""
    found = {}
    for name in names:
        about = metadata.metadata(name)
        classifiers = [each for each in about.get_all("Classifier", []) if each.startswith("License ::")]
        texts = [*about.get_all("License-Expression", []), *classifiers, *about.get_all("License", [])]
        found[canonicalize_name(name)] = [text for text in texts if text and "\n" not in text]
    return found


def of_sbom(path: Path) -> dict[str, list[str]]:
    """The same of the components of a CycloneDX SBOM."""
    return {canonicalize_name(each["name"]): _told(each) for each in _components(path)}


def _components(path: Path) -> list[dict[str, Any]]:
    components: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["components"]
    return components


def _told(component: dict[str, Any]) -> list[str]:
    licences = component.get("licenses", [])
    given = [each.get("expression") or each["license"].get("id") or each["license"]["name"] for each in licences]
    return [each for each in given if "\n" not in each]


def table(path: Path) -> str:
    """The components of a CycloneDX SBOM with their licences, as Markdown."""
    rows = []
    for each in sorted(_components(path), key=lambda each: str(each["name"]).lower()):
        licence = spdx(_told(each)) or "not in its metadata"
        remark = REVIEWED.get(canonicalize_name(each["name"]), ("", ""))[1]
        rows.append(f"| {each['name']} | {each['version']} | {licence} | {remark} |")
    return "\n".join(["| package | version | licence | remark |", "|---|---|---|---|", *rows, ""])
