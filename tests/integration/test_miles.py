"""Rows as miles' own code reads and renders them, and its data source beside ours.

Needs a checkout of miles, which ASYNCDATA_MILES names.
"""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.miles_chats import tool_form
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from asyncdata.integrations.slime.sample import from_record, to_record
from tests.support.miles import miles_folder, miles_importable, miles_module, sglang, tool_model
from tests.support.slime_source import labels, no_rollout, numbers, slimes_args, write_prompts
from tests.unit.tokenization import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}"
    "{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
    "<|end|>{% endfor %}{{ extra }}"
)
FUNCTIONS_ONLY = (
    "{% for tool in tools or [] %}{% if tool.function is defined %}{{ raise_exception('functions only') }}{% endif %}"
    "{{ tool.name }}: {{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def miles() -> SimpleNamespace:
    """miles' reader, and its data source."""
    data, source = miles_module("utils.data"), miles_module("rollout.data_source")
    return SimpleNamespace(dataset=data.Dataset, source=source, sample=miles_module("utils.types").Sample)


@pytest.fixture(scope="module")
def form(miles: SimpleNamespace) -> dict[str, Any]:
    with sglang():
        return tool_form()


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(small_tokenizer, model_max_length=10**9)


def theirs(miles: SimpleNamespace, path: Path, tokenizer: Any, fn: SlimeTokenizeFn) -> list[str] | None:
    """The samples of miles' dataset; None where its start fails."""
    try:
        dataset = miles.dataset(
            str(path),
            tokenizer,
            None,
            fn.max_length,
            prompt_key=fn.prompt_key,
            multimodal_keys=fn.multimodal_keys,
            label_key=fn.label_key,
            tool_key=fn.tool_key,
            apply_chat_template=fn.apply_chat_template,
            apply_chat_template_kwargs=fn.apply_chat_template_kwargs,
        )
    except Exception:  # whatever it is, training does not start
        return None
    return [json.dumps([each.prompt, each.label, each.metadata]) for each in dataset.samples]


def ours(fn: SlimeTokenizeFn, line: bytes) -> list[str]:
    chunk = run(fn.open(), [line])
    columns = ("prompt", "label", "metadata")
    found = [[chunk.value(name, n) for name in columns] for n in range(chunk.num_samples)]
    return [json.dumps([prompt, label, metadata or {}]) for prompt, label, metadata in found]


TEXT = st.text(st.sampled_from("ab \n{}é"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
FUNCTION = st.fixed_dictionaries(
    {"name": TEXT},
    optional={"description": st.none() | TEXT, "parameters": JSON, "strict": st.booleans(), "unknown": JSON},
)
TOOL = FUNCTION | st.fixed_dictionaries(
    {"function": FUNCTION}, optional={"type": st.sampled_from(["function", "other"]), "unknown": JSON}
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=2)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS | ARGUMENTS.map(json.dumps)})},
    optional={"type": st.just("function"), "id": TEXT},
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={"content": st.none() | TEXT, "tool_calls": st.none() | st.lists(CALL, max_size=2)},
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "name": TEXT}),
)
TOOLS = st.lists(TOOL, max_size=2)
ROW = st.fixed_dictionaries(
    {"input": TEXT | st.lists(MESSAGE, min_size=1, max_size=3), "label": JSON},
    optional={"tools": TOOLS | TOOLS.map(json.dumps), "metadata": st.dictionaries(TEXT, JSON, max_size=1)},
)
ODD_MESSAGE = st.fixed_dictionaries({"role": st.just("assistant")}, optional={"tool_calls": JSON, "content": JSON})
ODD_ROW = st.fixed_dictionaries(
    {"input": st.lists(ODD_MESSAGE, min_size=1, max_size=2), "label": JSON},
    optional={"tools": st.lists(JSON | st.fixed_dictionaries({"function": JSON}), max_size=2)},
)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@relaxed
@given(row=ROW, template=st.sampled_from([TEMPLATE, FUNCTIONS_ONLY]), applies=st.booleans())
def test_any_row_of_the_right_shape_is_rendered_as_miles_renders_it(
    miles, form, tokenizer, small_tokenizer, tmp_path, row, template, applies
):
    kwargs = {"chat_template": template, "extra": "x"}
    fn = SlimeTokenizeFn(str(small_tokenizer), label_key="label", apply_chat_template=applies,
                         apply_chat_template_kwargs=kwargs, tool_form=form)  # fmt: skip
    line = json.dumps(row).encode()
    path = tmp_path / "row.jsonl"
    path.write_bytes(line + b"\n")

    assert ours(fn, line) == (theirs(miles, path, tokenizer, fn) or [])


@relaxed
@given(row=ODD_ROW)
def test_a_row_that_miles_refuses_is_a_bad_one(miles, form, tokenizer, small_tokenizer, tmp_path, row):
    kwargs = {"chat_template": TEMPLATE, "extra": "x"}
    fn = SlimeTokenizeFn(str(small_tokenizer), label_key="label", apply_chat_template=True,
                         apply_chat_template_kwargs=kwargs, tool_form=form)  # fmt: skip
    line = json.dumps(row).encode()
    path = tmp_path / "row.jsonl"
    path.write_bytes(line + b"\n")
    expected = theirs(miles, path, tokenizer, fn)

    if expected is None:
        assert ours(fn, line) == []
    else:
        assert ours(fn, line) in (expected, [])  # a value that pydantic turns into another is bad here


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


MEDIA_ROWS = [
    {"input": "see <image> and <image>", "pictures": ["a", "b"]},
    {"input": [{"role": "user", "content": "<image>"}], "pictures": [{"path": "a"}]},
    {"input": [{"role": "user", "content": [{"type": "image", "image": "a"}]}], "pictures": []},
    {"input": "<image>", "pictures": []},
    {"input": "none"},
    {"input": "none", "pictures": []},
]  # fmt: skip


@pytest.mark.parametrize("row", MEDIA_ROWS, ids=str)
@pytest.mark.parametrize("applies", [True, False])
def test_media_are_put_into_chats_as_miles_puts_them(miles, form, tokenizer, small_tokenizer, tmp_path, row, applies):
    fn = SlimeTokenizeFn(str(small_tokenizer), multimodal_keys={"image": "pictures"}, apply_chat_template=applies,
                         apply_chat_template_kwargs={"chat_template": TEMPLATE}, tool_form=form)  # fmt: skip
    line = json.dumps(row).encode()
    path = tmp_path / "row.jsonl"
    path.write_bytes(line + b"\n")
    expected = theirs(miles, path, tokenizer, fn)

    assert ours(fn, line) == expected or (expected is None and len(ours(fn, line)) <= 1)


# The data source


@contextlib.contextmanager
def source_in_miles(path: Path, **given: Any) -> Iterator[AsyncDataSource]:
    """Ours, where miles is what runs it."""
    more = {"asyncdata_num_workers": 0, "asyncdata_timeout_s": 240.0, "asyncdata_cache": {"folder": ""}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(miles_importable(str(miles_folder())))
        if "sglang" not in sys.modules:
            stack.enter_context(sglang())
        source = AsyncDataSource(slimes_args(**{"prompt_data": str(path), "label_key": "label", **more, **given}))
        try:
            yield source
        finally:
            source.close()


def miles_source(miles: SimpleNamespace, path: Path, **given: Any) -> Any:
    args = {"prompt_data": str(path), "label_key": "label", "chat_template_path": None, **given}
    with miles_importable(str(miles_folder())):
        return miles.source.RolloutDataSourceWithBuffer(slimes_args(**args))


def content(groups: list[list[Any]]) -> list[Any]:
    return [[sample.to_dict() for sample in group] for group in groups]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    tool = {"name": "add", "parameters": {"type": "object"}}
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    rows = [
        {
            "input": [
                {"role": "user", "content": f"what is {n}?"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "1"},
            ],
            "label": str(n),
            **({"tools": [tool]} if n % 2 else {}),
        }
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("shuffled", [True, False])
def test_five_epochs_are_those_of_miles_with_a_template_of_its_own(miles, chats, small_tokenizer, tmp_path, shuffled):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    given = {
        "hf_checkpoint": str(small_tokenizer),
        "apply_chat_template": True,
        "apply_chat_template_kwargs": {"extra": "!"},
        "chat_template_path": str(template),
        "rollout_shuffle": shuffled,
        "n_samples_per_prompt": 2,
        "rollout_max_prompt_len": 200,
    }
    expected = miles_source(miles, chats, **given)
    with source_in_miles(chats, **given) as source:
        assert len(source.dataset) == len(expected.dataset) > 0
        for number in (5, 7, 3, 12, 12, 12, 9):
            assert content(source.get_samples(number)) == content(expected.get_samples(number))
        assert "a=1;" in source.dataset[0].prompt
        assert [sample.prompt for sample in source.dataset.samples] == [s.prompt for s in expected.dataset.samples]


def test_a_run_of_miles_goes_on_with_ours_and_back(miles, tmp_path, small_tokenizer):
    path = write_prompts(tmp_path / "p.jsonl", 20)
    given = {"rollout_shuffle": True, "hf_checkpoint": str(small_tokenizer)}
    given |= {"save": str(tmp_path), "load": str(tmp_path)}
    reference = miles_source(miles, path, **given)
    expected = [(labels(groups), numbers(groups)) for groups in (reference.get_samples(7) for _ in range(6))]
    found = []
    for rollout_id in range(6):
        if rollout_id % 2:
            source = miles_source(miles, path, **given)
            source.load(rollout_id - 1)
            groups = source.get_samples(7)
            source.save(rollout_id)
        else:
            with source_in_miles(path, **given) as source:
                source.load(rollout_id - 1)
                groups = source.get_samples(7)
                source.save(rollout_id)
        found.append((labels(groups), numbers(groups)))

    assert found == expected


def test_ours_is_an_instance_of_miles_data_source_with_its_samples(miles, tmp_path):
    with capture_logs() as events, source_in_miles(write_prompts(tmp_path / "p.jsonl", 3), save="x") as source:
        assert isinstance(source, miles.source.DataSource)
        (group,) = source.get_samples(1)
        assert type(group[0]) is miles.sample
        group[0].reset_for_retry()
        assert from_record(to_record(group[0]), miles.sample) == group[0]
    assert ["rollout.not_told"] == [event["event"] for event in events if event["log_level"] == "warning"]


def test_models_whose_chats_miles_renders_by_itself_are_refused_by_name(miles, tmp_path, small_tokenizer, chats):
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


def test_media_are_made_by_miles_own_code(miles, tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "see <image>", "label": "a", "pictures": ["one"]}\n')
    module = miles_module("utils.processing_utils")
    monkeypatch.setattr(module, "load_processor", lambda checkpoint: Processor())
    given = {"multimodal_keys": {"image": "pictures"}, "hf_checkpoint": f"a checkpoint {tmp_path}"}
    with source_in_miles(path, **given) as source:
        (group,) = source.get_samples(1)

    assert group[0].multimodal_inputs == {"images": ["picture one"], "videos": None}
    assert group[0].prompt[0]["content"][1] == {"type": "image", "image": "one"}
