"""Which rollout is generated: told by the driver, by a rollout function, or unknown, which is logged."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import ConfigError
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import labels, no_rollout, set_rollout_id, source_of, write_prompts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 40)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    return {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}


@pytest.fixture(params=["slime", "miles"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The framework that runs us: a version that does not tell the rollout."""
    name: str = request.param
    for part in ("", ".utils", ".utils.types"):
        monkeypatch.setitem(sys.modules, name + part, types.ModuleType(name + part))
    kind = type("Sample", (SlimeSample,), {"__module__": f"{name}.utils.types"})
    vars(sys.modules[f"{name}.utils.types"])["Sample"] = kind
    return name


def not_told(prompts: Path, **given: Any) -> list[Any]:
    with capture_logs() as events, source_of(prompts, **given) as source:
        source.get_samples(2)
        if "save" in given:
            source.save(0)
    return [event for event in events if event["event"] == "rollout.not_told"]


def test_a_driver_that_tells_no_rollout_is_warned_of_once_at_the_start(prompts, given, package):
    (event,) = not_told(prompts, **given)

    assert (event["log_level"], event["package"]) == ("warning", package)
    assert "train_async.py skips" in event["effect"]


def test_the_warning_of_a_fully_asynchronous_run_names_the_data_buffer_that_keeps_its_groups(prompts, given, package):
    (event,) = not_told(prompts, **given, fully_async=True)
    _, _, path = event["effect"].partition("--custom-async-data-buffer-path ")

    assert path.startswith("asyncdata.integrations.slime.AsyncDataBuffer ")
    assert not_told(prompts, **given, fully_async=True, custom_async_data_buffer_path=path.split()[0]) == []


def test_a_driver_that_tells_its_rollouts_is_not_warned_of(prompts, given, package):
    set_rollout_id(None)  # nothing is generated yet, but it will be told
    assert not_told(prompts, **given) == []


@pytest.mark.parametrize(
    "harmless",
    [{"colocate": True}, {"save": None}, {"rollout_global_dataset": False}],
    ids=lambda given: next(iter(given)),
)
def test_there_is_no_warning_if_no_checkpoint_can_be_too_new(prompts, given, package, harmless):
    given = {key: value for key, value in (given | harmless).items() if value is not None}
    assert not_told(prompts, **given) == []


def test_without_a_framework_there_is_no_warning(prompts, given):
    assert not_told(prompts, **given) == []


def test_a_rollout_function_may_tell_the_rollout(prompts, given, package):
    """As train_async.py does: rollout 1 begins before rollout 0 is saved."""
    with source_of(prompts, **given) as source:
        source.begin_rollout(0)
        first = source.get_samples(4)
        source.begin_rollout(1)
        expected = labels(source.get_samples(4))
        source.add_samples(first[:1])
        source.save(0)
    with source_of(prompts, **given) as source:
        source.load(0)
        assert labels(source.buffer) == labels(first[:1])
        assert labels(source.get_samples(5)) == labels(first[:1]) + expected


def test_without_being_told_the_checkpoint_is_as_slimes_own(prompts, given, package):
    with source_of(prompts, **given) as source:
        source.get_samples(4)
        source.get_samples(4)
        source.save(0)
    with source_of(prompts, **given) as source:
        source.load(0)
        assert labels(source.get_samples(1)) == ["8"]


def test_what_a_rollout_function_tells_goes_before_the_driver(prompts, given):
    set_rollout_id(7)
    with source_of(prompts, **given) as source:
        source.begin_rollout(0)
        source.get_samples(4)
        source.begin_rollout(1)
        source.get_samples(4)
        source.save(0)
        source.load(0)
        assert source.sample_offset == 4


def test_after_a_load_the_next_rollout_starts_again(prompts, given):
    with source_of(prompts, **given) as source:
        source.begin_rollout(0)
        source.get_samples(4)
        source.save(0)
        source.begin_rollout(1)
        source.get_samples(4)
        source.load(0)
        source.begin_rollout(1)
        source.get_samples(4)
        source.save(0)
        source.load(0)
        assert source.sample_offset == 4


@pytest.mark.parametrize("rollout_id", [-1, None, "3", 1.0])
def test_a_rollout_is_a_whole_number(prompts, rollout_id):
    with source_of(prompts) as source, pytest.raises(ConfigError, match="rollout_id"):
        source.begin_rollout(rollout_id)
