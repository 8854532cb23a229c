"""AsyncDataPlugin in axolotl's own plugin manager. ASYNCDATA_AXOLOTL names a checkout of it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata.integrations.axolotl
from asyncdata import ConfigError
from asyncdata.integrations.axolotl import LoaderPlugin
from tests.support.frameworks.axolotl import ROWS, STEPS, VARIABLE, page_makes_a_loader
from tests.support.frameworks.killed_runs import assert_resumed, checkout, run_trainer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "addict", "yaml")


def test_a_killed_training_of_axolotl_continues_with_exactly_the_next_batch(tmp_path: Path) -> None:
    checkout(VARIABLE, "src/axolotl/integrations/base.py", PACKAGES)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": n}) + "\n" for n in range(ROWS)))

    module = "tests.support.frameworks.axolotl"
    whole = run_trainer(module, tmp_path, "whole")
    killed = run_trainer(module, tmp_path, "killed", kill_at=6)
    resumed = run_trainer(module, tmp_path, "killed", resume=True)

    assert_resumed(whole, killed, resumed, saved_at=4, steps=STEPS)
    assert whole["knows_the_key"], "axolotl's configuration has asyncdata_loader"


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
