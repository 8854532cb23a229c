"""Programs of users under pyright's strict checks; the command ``mypy`` checks those of ``tests/typing``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from tests.support.release import ROOT, TYPED


def test_every_typed_program_is_checked_in_a_release_too():
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests/typing").glob("*.py")} <= set(TYPED)


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_no_error(tmp_path):
    for path in TYPED:
        shutil.copy(ROOT / path, tmp_path)
    settings = {"include": ["."], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    if "errors," not in done.stdout:
        pytest.skip(f"pyright cannot be started here: {done.stdout[-300:]}{done.stderr[-300:]}")

    assert "0 errors, 0 warnings" in done.stdout, done.stdout
