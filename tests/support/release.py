"""Builds what a release consists of, and checks it as its users meet it: ``python -m tests.support.release FOLDER``.

In the folder are then ``dist/`` with the sdist and the wheel, ``sbom.cdx.json`` and ``licences.md``. Nothing is
uploaded. pip must reach a package index. The first check that fails ends the program with its output.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from tests.support.licences import faults, of_sbom, table

__all__ = ("left_to_the_owner", "missing_from")

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
    """Write the SBOM of the environment, and the licences in it.

    :raises SystemExit: if one of the licences is unknown or was not reviewed.
    """
    sbom = folder / "sbom.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--mc-type", "library"]
    call(*command, "--pyproject", ROOT / "pyproject.toml", "--output-file", sbom, python)
    (folder / "licences.md").write_text(table(sbom), encoding="utf-8")
    licences = of_sbom(sbom)
    if found := faults(licences):
        raise SystemExit("\n".join(found))

    return f"of {len(licences)} packages, with the extras {', '.join(listed_extras())}: all permissive or reviewed"


def call(*command: object, cwd: Path | None = None) -> str:
    """What a command prints.

    :raises SystemExit: with all it said, if it fails.
    """
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
