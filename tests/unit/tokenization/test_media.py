"""Rows with pictures, videos or sounds are bad, or are trained without them; they are never lost without a word."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRowError,
    ChatTokenizeFn,
    DataLoader,
    FixedLengthTokenizeFn,
    PreferenceTokenizeFn,
    PromptTokenizeFn,
    TextTokenizeFn,
)
from asyncdata.tokenization.functions.prompt_rows import PromptRowFn
from asyncdata.tokenization.media import without_media
from asyncdata.tokenization.rows import MEDIA_KEYS
from tests.support.chats import CHAT
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.trained import assistant, user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PARTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] %}
{%- if part.type == 'image' or 'image' in part %}{{ '<|image_pad|>' }}
{%- elif part.type == 'thinking' %}{{ part.thinking }}{% elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As the template of a model that sees: text, or parts."""

WRITES_ALL = """\
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As the template of a model of text, which writes whatever it is given."""

TEXT = {"type": "text", "text": "What is it?"}
MEDIA = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "input_image", "image_url": "a.png"},
    {"type": "video", "video": "a.mp4"},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
    {"type": "audio", "audio": "a.wav"},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"image": "a.png"},
]
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "chat": (ChatTokenizeFn, {"messages": CHAT}),
    "prompt": (PromptTokenizeFn, {"input": "a prompt"}),
    "prompt of a chat": (lambda name, **more: PromptTokenizeFn(name, apply_chat_template=True, **more), {"input": "a"}),
    "text": (TextTokenizeFn, {"text": "a text"}),
    "pair": (PreferenceTokenizeFn, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    "fixed": (
        lambda name, **more: FixedLengthTokenizeFn(name, max_length=64, prompt="{q}", answer="{a}", pad_id=0, **more),
        {"q": "a", "a": "b"},
    ),
}


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)


def chat_with(part: Any) -> list[dict[str, Any]]:
    return [user([part, TEXT]), assistant("A cat.")]


@pytest.mark.parametrize("template", [PARTS, WRITES_ALL])
@pytest.mark.parametrize("part", MEDIA)
def test_a_content_part_that_is_a_medium_makes_a_bad_row(name: str, template: str, part: Any) -> None:
    chat = ChatTokenizeFn(name, chat_template=template)
    prompt = PromptTokenizeFn(name, apply_chat_template=True, chat_template=template)

    found = run(chat.open(), [{"messages": CHAT}, {"messages": chat_with(part)}])
    asked = run(prompt.open(), [{"input": CHAT[:2]}, {"input": chat_with(part)[:1]}])

    assert faults(found) == faults(asked) == [(1, "AD130")]
    assert "'messages'[0] has '" in found.errors[0].reason
    assert "media='leave_out'" in found.errors[0].reason


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_key_of_a_row_with_media_makes_a_bad_row(name: str, kind: str) -> None:
    make, row = FUNCTIONS[kind]
    rows = [row, *({**row, key: ["a.png"]} for key in MEDIA_KEYS), {**row, "image": {"bytes": "aGk=", "path": None}}]

    chunk = run(make(name).open(), rows)

    assert faults(chunk) == [(number, "AD130") for number in range(1, len(rows))]
    assert f"the row has '{MEDIA_KEYS[0]}'" in chunk.errors[0].reason
    assert chunk.num_samples == 1


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_key_for_media_that_is_empty_does_no_harm(name: str, kind: str) -> None:
    make, row = FUNCTIONS[kind]
    empties = [None, "", [], {}, False, True, 0, [None], [[]], {"bytes": None, "path": None}]

    chunk = run(make(name).open(), [{**row, "images": empty, "audio": empty} for empty in empties])

    assert (chunk.num_samples, chunk.errors, "media_left_out" in notes(chunk)) == (len(empties), [], False)


def test_a_key_that_a_setting_names_is_no_medium(name: str) -> None:
    fn = PromptTokenizeFn(name, prompt_key="video", label_key="audio", metadata_key="image")

    chunk = run(fn.open(), [{"video": "a prompt", "audio": [1], "image": {"docker": "a"}}])

    assert (values(chunk, "label"), values(chunk, "metadata"), chunk.errors) == ([[1]], [{"docker": "a"}], [])


@pytest.mark.parametrize("part", MEDIA)
def test_media_that_are_left_out_leave_the_text_and_are_counted(name: str, part: Any) -> None:
    fn = ChatTokenizeFn(name, chat_template=WRITES_ALL, media="leave_out", metadata_key="id")
    row = {"messages": chat_with(part), "images": ["a.png"], "id": {"n": 1}}

    chunk = run(fn.open(), [{"messages": CHAT}, row, {"messages": [user("What is it?"), assistant("A cat.")]}])

    assert (chunk.errors, notes(chunk), values(chunk, "metadata")) == (
        [],
        {"media_left_out": [1]},
        [None, {"n": 1}, None],
    )
    assert token_ids(chunk)[1] == token_ids(chunk)[2]
    assert values(chunk, "spans")[1] == values(chunk, "spans")[2]


def test_a_row_that_is_dropped_has_no_note(name: str) -> None:
    fn = ChatTokenizeFn(name, media="leave_out", max_length=3)

    chunk = run(fn.open(), [{"messages": CHAT, "images": ["a.png"]}])

    assert (drops(chunk), notes(chunk)) == ({"max_length": [0]}, {})


def test_an_answer_that_is_only_a_medium_is_not_trained_as_an_empty_one(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=WRITES_ALL, media="leave_out")

    assert faults(run(fn.open(), [{"messages": [user("Draw."), assistant([{"type": "image"}])]}])) == [(0, "AD132")]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ([{"type": "image"}, TEXT], "What is it?"),
        ([{"type": "image"}, "words", TEXT], "wordsWhat is it?"),
        ([{"type": "image"}], ""),
        ({"type": "image_url", "image_url": "a"}, ""),
        ([{"text": "words", "image": "a"}], "words"),
        ([{"type": "image"}, {"type": "thinking", "thinking": "a"}], [{"type": "thinking", "thinking": "a"}]),
        ([TEXT], [TEXT]),
        ("<|image_pad|> <image>", "<|image_pad|> <image>"),
        (None, None),
    ],
)
def test_what_is_left_of_a_content(content: Any, left: Any) -> None:
    for chat in ([user(content)], json.dumps([user(content)])):
        row = json.dumps({"m": chat, "images": ["a"], "image": {"a": 1}, "n": [1, "[{bad"]}).encode()

        assert json.loads(without_media(row, ["images"])) == {"m": [user(left)], "image": {"a": 1}, "n": [1, "[{bad"]}


def test_a_message_with_its_own_media_is_as_one_with_parts(name: str) -> None:
    row = {"messages": [{**user("What is it?"), "images": ["a.png"]}, assistant("A cat.")]}

    assert faults(run(ChatTokenizeFn(name).open(), [row])) == [(0, "AD130")]
    chunk = run(ChatTokenizeFn(name, media="leave_out").open(), [row])
    assert (chunk.errors, notes(chunk)) == ([], {"media_left_out": [0]})


def test_rows_for_a_framework_keep_their_media(name: str) -> None:
    fn = PromptRowFn(name, prompt_key="prompt", apply_chat_template=True, chat_template=PARTS, max_length=64)
    row = {"prompt": chat_with({"type": "image"})[:1], "images": ["a.png"]}

    chunk = run(fn.open(), [row])

    assert (values(chunk, "extra"), chunk.errors) == ([row], [])


def test_a_text_that_names_a_placeholder_is_text(name: str) -> None:
    chunk = run(
        ChatTokenizeFn(name, chat_template=PARTS).open(), [{"messages": [user("<|image_pad|>"), assistant("a")]}]
    )

    assert (chunk.num_samples, chunk.errors, notes(chunk)) == (1, [], {})


def test_chats_in_bulk_and_one_by_one_find_the_same_media(name: str) -> None:
    rows = [{"messages": CHAT}] * 40 + [{"messages": CHAT, "videos": ["a"]}, {"messages": chat_with(MEDIA[0])}] * 4
    tokenizer = ChatTokenizeFn(name, chat_template=PARTS).open()

    at_once = run(tokenizer, rows)  # the shapes of the chats are proven by now

    assert faults(at_once) == [(number, "AD130") for number in range(40, 48)]
    assert [faults(run(tokenizer, [row])) for row in rows[40:]] == [[(0, "AD130")]] * 8


def test_a_loader_names_the_row_and_counts_what_is_left_out(jsonl_file: Callable[..., Path], name: str) -> None:
    path = jsonl_file([{"input": "a"}, {"input": "b", "images": ["a.png"]}])
    knobs: dict[str, Any] = {"shuffle": False, "num_workers": 0, "epochs": 1}

    with DataLoader(str(path), tokenize_fn=PromptTokenizeFn(name), **knobs) as loader:
        loader.get_next_batch(1)
        with pytest.raises(BadRowError, match=r"AD130 .*:2 .*the row has 'images'.*media='leave_out'") as caught:
            loader.get_next_batch(1)
    with DataLoader(str(path), tokenize_fn=PromptTokenizeFn(name, media="leave_out"), **knobs) as loader:
        prompts = [sample.prompt for sample in loader.get_next_batch(2)]
        noted = loader.statistics().noted_total

    assert (caught.value.line, prompts, noted) == (2, ["a", "b"], {"media_left_out": 1})
