"""Programs of users, and the tutorials, under mypy's and pyright's strict checks."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.release import ROOT, TYPED

pytestmark = pytest.mark.thorough
TUTORIALS = sorted(set((ROOT / "docs" / "tutorial").glob("*.md")) - {ROOT / "docs/tutorial/run-over-videos.md"})
"""But the one that makes videos, with PyAV and transformers, which say no types."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the programs of ``tests/typing``, and one of each tutorial: all its Python, from top to bottom."""
    folder = tmp_path_factory.mktemp("programs")
    for path in TYPED:
        shutil.copy(ROOT / path, folder)
    for page in TUTORIALS:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        (folder / f"tutorial_{page.stem.replace('-', '_')}.py").write_text("\n".join(blocks), encoding="utf-8")
    return folder


def test_every_typed_program_is_checked_in_a_release_too():
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests/typing").glob("*.py")} <= set(TYPED)


@pytest.mark.parametrize(
    ("checker", "options", "success"),
    [
        ("mypy", ("--strict", "--python-version", "3.11", "."), "Success: no issues found in"),
        ("pyright", ("--pythonpath", sys.executable), "0 errors, 0 warnings"),
    ],
)
def test_a_strict_checker_finds_no_error(programs, checker, options, success):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: it is in the extra lint")
    (programs / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", checker, *options]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=600, check=False)
    assert len(list(programs.glob("*.py"))) == len(TYPED) + len(TUTORIALS) > 6
    assert success in done.stdout, done.stdout + done.stderr
