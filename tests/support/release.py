"""Builds what a release consists of, and checks it as its users meet it: ``python -m tests.support.release FOLDER``.

In the folder are then ``dist/`` with the sdist and the wheel, ``sbom.cdx.json`` and ``licences.md``. Nothing is
uploaded. pip must reach a package index. The first check that fails ends the program with its output.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

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
    """One line for each package whose licence, by what it says, is unknown, or neither permissive nor reviewed."""
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


ROOT = Path(__file__).parents[2]
TYPED = ("tests/typing/api.py", "examples/01_async_rollout.py", "examples/02_sync_trainer.py")
"""Programs of users, which are type-checked against the installed wheel."""
OF_THE_OWNER = ("authors", "maintainers", "urls")
"""Metadata that no one but the project's owner knows."""
NOT_LISTED = {"torch"}
"""Not in the SBOM: which build of it is installed, and with which libraries, is the user's choice."""


def main(folder: Path) -> None:
    """Build, check, and say what was found."""
    shutil.rmtree(folder, ignore_errors=True)
    dist = folder / "dist"
    _say("builds", call(sys.executable, "-m", "build", "--outdir", dist, ROOT).splitlines()[-1])
    call(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    _say("metadata", "twine check --strict passed")
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        python = environment(scratch / "user", str(wheel))
        demo = call(python.parent / "asyncdata", "demo", "--rows", "2000", cwd=scratch)  # it kills a run and resumes it
        _say("wheel", f"in an empty environment: {demo.strip().splitlines()[-1]}")
        check_types(python, scratch / "program")
        python = environment(scratch / "all", f"{wheel}[{','.join(listed_extras())}]")
        _say("licences", describe(python, folder))
    for missing in left_to_the_owner(project()):
        _say("to do", f"project.{missing} in pyproject.toml is empty; only the owner of the project can fill it in")
    _say("done", str(folder))


def project() -> dict[str, Any]:
    """The table ``project`` of ``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def left_to_the_owner(metadata: dict[str, object]) -> list[str]:
    """The metadata that is empty; authors or maintainers are enough."""
    people = {"authors", "maintainers"}
    empty = [name for name in OF_THE_OWNER if not metadata.get(name)]
    return [name for name in empty if name not in people or people <= set(empty)]


def check_contents(sdist: Path, wheel: Path) -> None:
    """Every file of the repository is in the sdist, and every file of the package, and nothing else, in the wheel."""
    tracked = set(call("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(sdist) as archive:
        held = {member.partition("/")[2] for member in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {member for member in archive.namelist() if ".dist-info/" not in member}
    package = {path for path in tracked if path.startswith("asyncdata/")}
    for what, missing in (
        ("the sdist lacks", missing_from(held, tracked)),
        ("the wheel lacks", missing_from(packed, package)),
        ("the wheel has too much", missing_from(tracked, packed)),
    ):
        if missing:
            raise SystemExit(f"{what}: {', '.join(missing)}")
    _say("contents", f"{len(tracked)} files in the sdist, {len(packed)} in the wheel")


def missing_from(held: set[str], wanted: set[str]) -> list[str]:
    """What is wanted and not held, by name."""
    return sorted(wanted - held)


def environment(folder: Path, *requirements: str) -> Path:
    """A new environment with these requirements and nothing else, not even pip; its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *requirements)
    return python


def check_types(python: Path, folder: Path) -> None:
    """Programs of users have no type errors under mypy and pyright, which find the types by ``py.typed``."""
    folder.mkdir()
    names = [shutil.copy(ROOT / path, folder) for path in TYPED]
    for command in (("mypy", "--strict", "--python-executable", python), ("pyright", "--pythonpath", python)):
        _say(command[0], call(sys.executable, "-m", *command, *names, cwd=folder).strip().splitlines()[-1])


def listed_extras() -> list[str]:
    """The extras that ``all`` consists of, but for those that are not listed."""
    (all_of_them,) = project()["optional-dependencies"]["all"]
    return sorted(set(all_of_them.partition("[")[2].rstrip("]").split(",")) - NOT_LISTED)


def describe(python: Path, folder: Path) -> str:
    """Write the SBOM of the environment, and the licences in it; ends the program if one is unknown or not reviewed."""
    sbom = folder / "sbom.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--mc-type", "library"]
    call(*command, "--pyproject", ROOT / "pyproject.toml", "--output-file", sbom, python)
    (folder / "licences.md").write_text(table(sbom), encoding="utf-8")
    licences = of_sbom(sbom)
    if found := faults(licences):
        raise SystemExit("\n".join(found))

    return f"of {len(licences)} packages, with the extras {', '.join(listed_extras())}: all permissive or reviewed"


def call(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; one that fails ends the program with all it said."""
    environ = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
