"""Rows with pictures, videos or sounds are bad, or are trained without them; they are never lost without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, PromptTokenizeFn
from tests.support.chats import CHAT
from tests.support.function_kinds import KINDS, chat_prompt
from tests.support.parts import MEDIA_KEYS, PromptRowFn, without_media
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.functions.test_chat import SEES, WRITES_ALL
from tests.unit.tokenization.trained import assistant, user

TEXT = {"type": "text", "text": "What is it?"}


MEDIA = [
    *({"type": kind} for kind in ("image", "video", "audio")),
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "input_image", "image_url": "a.png"},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"image": "a.png"},
]


def chat_with(part: Any) -> list[dict[str, Any]]:
    return [user([part, TEXT]), assistant("A cat.")]


@pytest.mark.parametrize("template", [SEES, WRITES_ALL], ids=["sees", "writes all"])
def test_a_content_part_that_is_a_medium_makes_a_bad_row(name, template):
    named = [user("<|image_pad|>"), assistant("a")]  # which is text
    chats = [CHAT, named, *[CHAT] * 40, *(chat_with(part) for part in MEDIA)]
    bad = [(number, "AD130") for number in range(42, len(chats))]
    tokenizer = ChatTokenizeFn(name, chat_template=template).open()

    found = run(tokenizer, [{"messages": chat} for chat in chats])
    asked = run(chat_prompt(name, chat_template=template).open(), [{"input": chat[:2]} for chat in chats])

    assert faults(found) == faults(asked) == bad
    assert [faults(run(tokenizer, [{"messages": chat}])) for chat in chats[42:]] == [[(0, "AD130")]] * len(MEDIA)
    assert "'messages'[0] has '" in found.errors[0].reason
    assert "media='leave_out'" in found.errors[0].reason


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_key_of_a_row_with_media_makes_a_bad_row_and_an_empty_one_does_no_harm(name, kind):
    full = [{key: ["a.png"]} for key in MEDIA_KEYS] + [{"image": {"bytes": "aGk=", "path": None}}]
    empty = [None, "", [], {}, False, True, 0, [None], [[]], {"bytes": None, "path": None}]
    rows = [{**kind.row, "images": each, "audio": each} for each in empty]

    chunk = run(kind.make(name).open(), [*rows, *({**kind.row, **each} for each in full)])

    assert faults(chunk) == [(len(rows) + number, "AD130") for number in range(len(full))]
    assert f"the row has '{MEDIA_KEYS[0]}'" in chunk.errors[0].reason
    assert (chunk.num_samples, notes(chunk)) == (len(rows), {})


def test_a_key_that_a_setting_names_is_no_medium_and_rows_for_a_framework_keep_theirs(name):
    fn = PromptTokenizeFn(name, prompt_key="video", label_key="audio", metadata_key="image")
    rows = PromptRowFn(name, prompt_key="prompt", apply_chat_template=True, chat_template=SEES, max_length=64)
    row = {"prompt": chat_with({"type": "image"})[:1], "images": ["a.png"]}

    chunk = run(fn.open(), [{"video": "a prompt", "audio": [1], "image": {"docker": "a"}}])
    kept = run(rows.open(), [row])

    assert (values(chunk, "label"), values(chunk, "metadata"), chunk.errors) == ([[1]], [{"docker": "a"}], [])
    assert (values(kept, "extra"), kept.errors) == ([row], [])


def test_media_that_are_left_out_leave_the_text_and_are_counted(name):
    fn = ChatTokenizeFn(name, chat_template=WRITES_ALL, media="leave_out", metadata_key="id")
    rows = [{"messages": chat_with(part), "images": ["a.png"], "id": {"n": 1}} for part in MEDIA]
    plain = {"messages": [user("What is it?"), assistant("A cat.")]}
    beside = {"messages": [{**user("What is it?"), "images": ["a.png"]}, assistant("A cat.")]}

    chunk = run(fn.open(), [plain, *rows, beside])

    assert (chunk.errors, notes(chunk)) == ([], {"media_left_out": [*range(1, len(rows) + 2)]})
    assert values(chunk, "metadata") == [None, *[{"n": 1}] * len(rows), None]
    assert token_ids(chunk) == [token_ids(chunk)[0]] * (len(rows) + 2)
    assert values(chunk, "spans") == [values(chunk, "spans")[0]] * (len(rows) + 2)
    assert faults(run(ChatTokenizeFn(name).open(), [beside])) == [(0, "AD130")]

    nothing_else = {"messages": [user("Draw."), assistant([{"type": "image"}])]}
    assert faults(run(fn.open(), [nothing_else])) == [(0, "AD132")], "it is no empty answer"
    short = run(ChatTokenizeFn(name, media="leave_out", max_length=3).open(), [{"messages": CHAT, "images": ["a.png"]}])
    assert (drops(short), notes(short)) == ({"max_length": [0]}, {}), "a row that is dropped has no note"


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ([{"type": "image"}, TEXT], "What is it?"), ([{"type": "image"}, "words", TEXT], "wordsWhat is it?"),
        ([{"type": "image"}], ""), ({"type": "image_url", "image_url": "a"}, ""),
        ([{"text": "words", "image": "a"}], "words"),
        ([{"type": "image"}, {"type": "thinking", "thinking": "a"}], [{"type": "thinking", "thinking": "a"}]),
        ([TEXT], [TEXT]), ("<|image_pad|> <image>", "<|image_pad|> <image>"), (None, None),
    ],
)  # fmt: skip
def test_what_is_left_of_a_content(content, left):
    for chat in ([user(content)], json.dumps([user(content)])):
        row = json.dumps({"m": chat, "images": ["a"], "image": {"a": 1}, "n": [1, "[{bad"]}).encode()

        assert json.loads(without_media(row, ["images"])) == {"m": [user(left)], "image": {"a": 1}, "n": [1, "[{bad"]}
