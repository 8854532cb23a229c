"""AsyncDataPlugin under axolotl's own command, where axolotl is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata.integrations.axolotl
from asyncdata import ConfigError
from asyncdata.integrations.axolotl import LoaderPlugin
from tests.support.frameworks.axolotl import STEPS, page_makes_a_loader, train, write_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture
def axolotl(tmp_path: Path) -> Path:
    """The files of the page, in a folder to train in."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import axolotl.train"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"axolotl cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    write_page(tmp_path)
    return tmp_path


def test_the_page_trains_and_a_killed_training_continues_with_exactly_the_next_batch(axolotl: Path) -> None:
    """By its files, it was killed in a save: the newest checkpoint has no state of the trainer."""
    whole = train(axolotl, "whole")
    train(axolotl, "killed", kill_at=6)
    saved, torn = (axolotl / "killed" / f"checkpoint-{step}" for step in (4, 6))
    shutil.copytree(saved, torn, ignore=shutil.ignore_patterns("trainer_state.json"))
    resumed = train(axolotl, "killed")

    assert len(whole) == STEPS
    assert resumed == whole


def test_the_function_of_the_page_makes_a_loader(tmp_path: Path) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"it needs {package}")
    with page_makes_a_loader(tmp_path) as loader:
        assert loader.config.batch_size == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asyncdata_loader": None}, "AD462 the configuration has no asyncdata_loader"),
        ({"max_steps": None}, "AD462 the configuration has no max_steps, and a loader has no length. For n epochs"),
        ({"sample_packing": True}, "AD462 sample_packing is not followed, leave it out: the loader packs"),
        ({"val_set_size": 0.1}, "AD462 val_set_size is not followed, leave it out: the plugin makes no validation"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    class Config(SimpleNamespace):
        def get(self, name: str) -> Any:
            return getattr(self, name, None)

    with pytest.raises(ConfigError, match=message):
        LoaderPlugin().check(Config(**{"asyncdata_loader": "my_data.make_loader", "max_steps": 9, **changes}))


@pytest.mark.parametrize(("name", "module"), [("AsyncDataPlugin", "axolotl"), ("AsyncDataArgs", "pydantic")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(vars(asyncdata.integrations.axolotl), name, raising=False)

    with pytest.raises(ConfigError, match=f"{name} needs axolotl"):
        getattr(asyncdata.integrations.axolotl, name)
