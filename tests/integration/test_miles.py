"""miles' own data source beside ours: rows, tools, templates, order and checkpoints.

What miles delivers is recorded in ``tests/golden``; ASYNCDATA_MILES may name a checkout of it (see ``records``).
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import ConfigError
from asyncdata.integrations.slime.miles_chats import tool_form
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from asyncdata.integrations.slime.sample import from_record, to_record
from tests.support.peers.checkouts import importable, module_of, sglang, tool_model
from tests.support.peers.records import Case, cases_of, plain
from tests.support.peers.rollouts import args_of, samples_of, saved, served, write_lines, write_rows
from tests.support.slime_source import no_rollout, runs_in_miles, source_of, write_prompts
from tests.unit.tokenization import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncdata.integrations.slime import AsyncDataSource

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


@pytest.mark.parametrize("case", cases_of("miles_order"), ids=str)
def test_five_epochs_are_those_of_miles_with_a_template_of_its_own(tmp_path: Path, case: Case) -> None:
    path, args = write_rows(tmp_path, case.given), args_of(tmp_path, case.given["args"])
    with runs_in_miles(), source_of(path, **args) as source:
        found = served(source, case.given["requests"])

    assert plain(found) == case.delivered(tmp_path)


@pytest.mark.parametrize("case", cases_of("miles_checkpoint"), ids=str)
def test_a_run_of_miles_goes_on_with_ours_and_back(tmp_path: Path, case: Case) -> None:
    expected = case.delivered(tmp_path)
    with runs_in_miles():
        assert plain(saved(tmp_path, case.given, source_of, [state for _, state in expected])) == expected


@pytest.mark.parametrize("case", cases_of("miles_rows"), ids=str)
def test_rows_are_rendered_as_miles_renders_them(tmp_path: Path, case: Case) -> None:
    """A value that pydantic turns into another is a bad row here; and so is what miles does not start with."""
    args = args_of(tmp_path, case.given["args"] | {"asyncdata_processor": "tests.support.slime_source.process_media"})
    with runs_in_miles(), source_of(write_lines(tmp_path, case.given["lines"]), **args) as source:
        found = plain(samples_of(source))

    expected = [sample for samples in case.delivered(tmp_path) for sample in samples or ()]
    assert found == [sample for sample in expected if not case.given.get("odd") or sample in found]
    assert found


def ours(fn: SlimeTokenizeFn, line: bytes) -> list[str]:
    chunk = run(fn.open(), [line])
    columns = ("prompt", "label", "metadata")
    found = [[chunk.value(name, n) for name in columns] for n in range(chunk.num_samples)]
    return [json.dumps([prompt, label, metadata or {}]) for prompt, label, metadata in found]


@pytest.mark.parametrize("defers", [False, True])
def test_tools_have_the_form_of_the_release_that_is_installed(small_tokenizer, defers):
    model = tool_model(defers=defers)
    with sglang(model):
        found = tool_form()
    tools = [
        {"function": {"parameters": {"a": 1}, "name": "f"}},
        {"type": "function", "function": {"name": "g"}, "x": 1},
    ]
    fn = SlimeTokenizeFn(str(small_tokenizer), apply_chat_template=True, tool_form=found,
                         apply_chat_template_kwargs={"chat_template": "{{ tools | tojson }}"})  # fmt: skip
    (sample,) = ours(fn, json.dumps({"input": "a", "tools": tools}).encode())

    assert found["hidden"] == (["defer_loading"] if defers else [])
    assert json.loads(json.loads(sample)[0]) == [model.model_validate(tool).model_dump() for tool in tools]
    assert list(json.loads(json.loads(sample)[0])[0]) == list(model.model_validate(tools[0]).model_dump())
    hidden = [{"function": {"name": "f", "defer_loading": True}}]
    assert len(ours(fn, json.dumps({"input": "a", "tools": hidden}).encode())) == (0 if defers else 1)


# What calls miles' own code, which ASYNCDATA_MILES names


@contextlib.contextmanager
def source_in_miles(path: Path | str, **given: Any) -> Iterator[AsyncDataSource]:
    """Ours, where miles is what runs it."""
    with importable("miles"), sglang(), source_of(path, **given) as source:
        yield source


def test_ours_is_an_instance_of_miles_data_source_with_its_samples(tmp_path):
    data_source, kind = module_of("miles", "rollout.data_source"), module_of("miles", "utils.types").Sample
    with capture_logs() as events, source_in_miles(write_prompts(tmp_path / "p.jsonl", 3), save="x") as source:
        assert isinstance(source, data_source.DataSource)
        (group,) = source.get_samples(1)
        assert type(group[0]) is kind
        group[0].reset_for_retry()
        assert from_record(to_record(group[0]), kind) == group[0]
    assert ["rollout.not_told"] == [event["event"] for event in events if event["log_level"] == "warning"]


def test_models_whose_chats_miles_renders_by_itself_are_refused_by_name(tmp_path):
    chats = write_rows(tmp_path, {"rows": 2, "chats": True})
    for kind, name in (("deepseek_v32", "deepseek_v32"), ("inkling_mm_model", "inkling")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ConfigError, match=rf"chats of {name} models .*plain prompts"):
            with source_in_miles(chats, hf_checkpoint=str(folder), apply_chat_template=True):
                pass
        with source_in_miles(chats, hf_checkpoint=str(folder)) as source:
            assert source.get_samples(1)[0][0].prompt[0]["content"] == "what is 0?"


class Processor:
    """As miles calls one that takes media out of chats by itself."""

    def extract_media(self, prompt: Any) -> Any:
        return {
            "images": [f"picture {part['image']}" for message in prompt for part in message["content"]],
            "videos": None,
        }


def test_media_are_made_by_miles_own_code(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "see <image>", "label": "a", "pictures": ["one"]}\n')
    module = module_of("miles", "utils.processing_utils")
    monkeypatch.setattr(module, "load_processor", lambda checkpoint: Processor())
    given = {"multimodal_keys": {"image": "pictures"}, "hf_checkpoint": f"a checkpoint {tmp_path}"}
    with source_in_miles(path, **given) as source:
        (group,) = source.get_samples(1)

    assert group[0].multimodal_inputs == {"images": ["picture one"], "videos": None}
    assert group[0].prompt[0]["content"][1] == {"type": "image", "image": "one"}
