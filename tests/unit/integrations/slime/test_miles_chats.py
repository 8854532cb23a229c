"""What runs of miles have beyond slime's: templates by path, its tools, its modules, and what is refused by name."""

from __future__ import annotations

import json
import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError
from asyncdata.integrations.slime.config import settings_of
from asyncdata.integrations.slime.miles_chats import tool_form
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from tests.support.peers.checkouts import sglang, tool_model
from tests.support.slime_source import no_rollout, runs_in_miles, source_of
from tests.unit.tokenization import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

FORM: dict[str, Any] = {
    "tool": {"type": "function"},
    "function": {"description": None, "name": "", "parameters": None, "strict": False},
    "hidden": ["deferred"],
}
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def in_miles() -> Iterator[SimpleNamespace]:
    """miles runs us, with a model that has a template."""
    with runs_in_miles() as kinds:
        yield SimpleNamespace(kinds=kinds)


def args_of(tokenizer: Path | str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(prompt_data="p.jsonl", hf_checkpoint=str(tokenizer), apply_chat_template=True, **given)


def rendered(tokenizer: Path, row: dict[str, Any], form: dict[str, Any] | None = FORM, template: str = TEMPLATE) -> Any:
    """The prompt, or the code and the reason of the row's fault."""
    fn = SlimeTokenizeFn(str(tokenizer), apply_chat_template=True, tool_form=form,
                         apply_chat_template_kwargs={"chat_template": template})  # fmt: skip
    chunk = run(fn.open(), [json.dumps(row).encode()])
    if chunk.num_samples:
        return chunk.value("prompt", 0)

    (error,) = chunk.errors
    return error.code, error.reason


# The template


def test_the_template_of_a_path_goes_before_the_tokenizers_own(small_tokenizer, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}\r\n{{ mood }}", encoding="utf-8")
    fn = settings_of(
        args_of(small_tokenizer, chat_template_path=path, apply_chat_template_kwargs={"mood": "é"})
    ).tokenize_fn

    assert fn is not None
    assert fn.apply_chat_template_kwargs == {"mood": "é", "chat_template": "{{ messages[0].content }}\n{{ mood }}"}


def test_a_template_among_the_kwargs_goes_before_that_of_a_path(small_tokenizer):
    kwargs = {"chat_template": "{{ messages }}"}
    fn = settings_of(
        args_of(small_tokenizer, chat_template_path="/none", apply_chat_template_kwargs=kwargs)
    ).tokenize_fn

    assert fn is not None
    assert fn.apply_chat_template_kwargs == kwargs


def test_a_template_that_is_not_applied_need_not_be_there(small_tokenizer):
    settings_of(SimpleNamespace(prompt_data="p", hf_checkpoint=str(small_tokenizer), chat_template_path="/none"))


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_template_that_cannot_be_read_is_an_error_that_names_it(small_tokenizer, tmp_path, content):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--chat-template-path .*chat\.jinja cannot be read"):
        settings_of(args_of(small_tokenizer, chat_template_path=str(path)))


# What miles does to chats and tools


def test_runs_of_miles_render_as_miles_does_and_those_of_slime_as_slime_does(small_tokenizer, in_miles):
    fn = settings_of(args_of(small_tokenizer)).tokenize_fn

    assert fn is not None
    assert fn.tool_form == {"tool": {"type": "function"}, "function": {**FORM["function"], "name": "n"}, "hidden": []}
    plain = settings_of(SimpleNamespace(prompt_data="p.jsonl", hf_checkpoint=str(small_tokenizer))).tokenize_fn
    assert plain is not None
    assert plain.tool_form is None


def test_without_miles_the_form_is_no_part_of_the_fingerprint(small_tokenizer):
    fn = settings_of(args_of(small_tokenizer)).tokenize_fn

    assert fn is not None
    assert fn.tool_form is None
    assert fn.settings_digest() != SlimeTokenizeFn("x", apply_chat_template=True, tool_form=FORM).settings_digest()
    assert fn.settings_digest() == SlimeTokenizeFn("x", apply_chat_template=True).settings_digest()


def test_tools_are_completed_and_calls_are_parsed(small_tokenizer):
    call = {"function": {"name": "f", "arguments": '{"a": 7}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"name": "f", "other": 1}]
    whole = {"type": "function", "function": {"description": None, "name": "f", "parameters": None, "strict": False}}

    assert rendered(small_tokenizer, {"input": chat, "tools": tools}) == f"{json.dumps([whole])}|x|7"
    assert rendered(small_tokenizer, {"input": chat[:1], "tools": []}) == "null|x"
    assert rendered(small_tokenizer, {"input": chat[:1], "tools": tools}, form=None) == f"{json.dumps(tools)}|x"


def test_a_template_that_refuses_tools_is_given_their_functions(small_tokenizer):
    row = {"input": "x", "tools": [{"name": "f"}]}
    refuses = "{{ raise_exception('no') }}"
    template = (
        f"{{% for t in tools %}}{{% if t.function is defined %}}{refuses}{{% endif %}}{{{{ t.name }}}}{{% endfor %}}"
    )
    assert rendered(small_tokenizer, row, template=template) == "f"
    code, reason = rendered(small_tokenizer, row, template=refuses)
    assert (code, "no" in reason) == ("AD412", True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"input": "x", "tools": [3]}, "'tools'[0]"),
        ({"input": "x", "tools": [{"function": 3}]}, "'tools'[0]['function']"),
        ({"input": "x", "tools": [{"description": "d"}]}, "'tools'[0]['function']"),
        ({"input": "x", "tools": [{"name": None}]}, "'tools'[0]['function']['name']"),
        ({"input": "x", "tools": [{"name": "f", "description": 3}]}, "'tools'[0]['function']['description']"),
        ({"input": "x", "tools": [{"name": "f", "strict": None}]}, "'tools'[0]['function']['strict']"),
        ({"input": "x", "tools": [{"type": 3, "function": {"name": "f"}}]}, "'tools'[0]['type']"),
        ({"input": "x", "tools": [{"name": "f", "deferred": True}]}, "'tools'[0]['deferred']"),
        ({"input": [{"role": "assistant", "tool_calls": [3]}]}, "'input'[0]['tool_calls'][0]"),
        ({"input": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "['tool_calls'][0]['function']"),
        (
            {"input": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "['function']['arguments']",
        ),
    ],
    ids=str,
)
def test_what_miles_refuses_is_a_bad_row_that_names_the_place(small_tokenizer, row, name):
    code, reason = rendered(small_tokenizer, row)

    assert code == "AD111"
    assert name in reason


# What is refused


@pytest.mark.parametrize("kind", ["deepseek_v32", "inkling"])
def test_models_that_miles_renders_by_itself_are_refused_by_name(small_tokenizer, in_miles, kind):
    in_miles.kinds[str(small_tokenizer)] = kind
    with pytest.raises(ConfigError, match=f"chats of {kind} models .*plain prompts"):
        settings_of(args_of(small_tokenizer))


def test_a_miles_that_does_not_say_how_it_renders_is_refused(small_tokenizer, in_miles):
    del sys.modules["miles.utils.chat_template_utils.deepseek"].model_type
    with pytest.raises(ConfigError, match="cannot be found out .*plain prompts"):
        settings_of(args_of(small_tokenizer))


def test_tools_of_another_kind_of_sglang_are_refused():
    class Echo:
        model_fields: dict[str, Any] = {"function": SimpleNamespace(annotation=SimpleNamespace(model_fields={}))}

        @staticmethod
        def model_validate(tool: Any) -> Any:
            return SimpleNamespace(model_dump=lambda: dict(tool))

    with sglang(Echo), pytest.raises(ConfigError, match="version of sglang makes of tools is not known"):
        tool_form()
    with sglang(object()), pytest.raises(ConfigError, match="cannot be imported: AttributeError"):
        tool_form()
    with sglang(tool_model(defers=True)):
        assert tool_form()["hidden"] == ["defer_loading"]


# Media


def test_media_are_made_by_the_framework_that_runs_us(tmp_path, monkeypatch, in_miles):
    module = types.ModuleType("miles.utils.processing_utils")
    module.load_processor = lambda checkpoint: f"processor of {checkpoint}"
    module.process_vision_info = lambda chat, processor: {"images": [chat[0]["content"][0]["image"], processor]}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "<image>", "label": "a", "pictures": ["one"]}\n')
    with source_of(path, multimodal_keys={"image": "pictures"}, hf_checkpoint=f"of miles {tmp_path}") as source:
        (group,) = source.get_samples(1)

    assert group[0].multimodal_inputs == {"images": ["one", f"processor of of miles {tmp_path}"]}


def test_media_without_any_framework_are_refused_by_name(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "<image>", "label": "a", "pictures": ["one"]}\n')
    with source_of(path, multimodal_keys={"image": "pictures"}, hf_checkpoint="x") as source:
        with pytest.raises(ConfigError, match="asyncdata_processor"):
            source.get_samples(1)
