"""Rows as slime and miles read them: what the records of ``test_slime_and_miles`` lack, and what is said of bad ones.

Tokens, media, tools of odd shapes, and the names of what is wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from asyncdata import BadRowError, ConfigError, PromptTokenizeFn
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from tests.support.peers.checkouts import sglang, tool_model
from tests.support.slime_source import args_for, runs_in_miles, source_of

NOWHERE = "/there/is/no/such/tokenizer"
TOOL = {"type": "function", "function": {"name": "look"}}
CHAT = [{"role": "user", "content": "why"}]
RENDERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MEDIA: dict[str, Any] = {
    "multimodal_keys": {"image": "pictures", "video": "clips", "audio": "sounds"},
    "asyncdata_processor": "tests.support.slime_source.as_they_are",
}
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text or ('[' ~ p.type ~ ']') }}{% endfor %}{% endfor %}"
MILES = (
    "{{ tools | tojson }}{% for m in messages %}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """A function that gives the samples of rows, or raises what is wrong with the first bad one."""

    def samples(*rows: Any, **given: Any) -> list[Any]:
        path = tmp_path / "rows.jsonl"
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"\n".join(lines))
        with source_of(path, **{"label_key": None, "asyncdata_bad_rows": "raise", **given}) as source:
            return list(source.dataset.samples)

    return samples


def with_template(folder: Path | str, text: str | None = None, **given: Any) -> dict[str, Any]:
    kwargs = {} if text is None else {"chat_template": text}
    return {"hf_checkpoint": str(folder), "apply_chat_template": True, "apply_chat_template_kwargs": kwargs, **given}


# Tokenizers and templates


@pytest.mark.parametrize(
    "settings", [{"rollout_max_prompt_len": 5}, {"asyncdata_pretokenize": True}, {"apply_chat_template": True}], ids=str
)
def test_where_it_is_needed_a_missing_tokenizer_is_refused_before_any_work(prompts, settings):
    with pytest.raises(ConfigError, match="AD413"):
        AsyncDataSource(args_for(prompts, hf_checkpoint=NOWHERE, **settings))


def test_a_template_alone_needs_no_vocabulary(read, small_tokenizer, tmp_path):
    shutil.copytree(small_tokenizer, tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text("{}")

    (sample,) = read({"input": "why"}, **with_template(tmp_path / "t"))

    assert sample.prompt == RENDERED.format("why")


def test_a_template_that_asks_for_today_is_told_the_given_date(read, small_tokenizer):
    given = with_template(small_tokenizer, "{{ strftime_now('%Y') }}")

    assert read({"input": "a"}, **given, asyncdata_today="1999-01-31")[0].prompt == "1999"
    with pytest.raises(ConfigError, match="AD411"):
        read({"input": "a"}, **given)
    with pytest.raises(ConfigError, match="today"):
        read({"input": "a"}, **given, asyncdata_today="tomorrow")


def test_tokens_are_kept_only_if_asked_for_and_for_text_without_media(read, small_tokenizer):
    encode = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json")).encode
    rows = [{"input": "why not"}, {"input": CHAT}, {"input": ""}]
    given = {"hf_checkpoint": str(small_tokenizer), "rollout_max_prompt_len": 99}

    plain = read(*rows, **given, asyncdata_pretokenize=True)

    assert [sample.tokens for sample in plain] == [encode("why not").ids, [], []]
    assert all(type(token) is int for token in plain[0].tokens)
    assert [sample.tokens for sample in read(*rows, **given)] == [[], [], []]
    given |= with_template(small_tokenizer, PARTS, asyncdata_pretokenize=True, **MEDIA)
    seen, text = read({"input": "<image>?", "pictures": ["a"]}, {"input": "what?"}, **given)
    assert (seen.prompt, seen.tokens) == ("[image]?", [])  # the rollout must count the images' own tokens
    assert (text.tokens, text.multimodal_inputs) == (encode(text.prompt).ids, None)


def test_half_a_surrogate_pair_is_bad_only_where_tokens_are_made(read, small_tokenizer):
    row = b'{"input": "a \\ud83d"}'

    assert read(row, **with_template(small_tokenizer))[0].prompt == RENDERED.format("a \ud83d")
    for settings in ({"rollout_max_prompt_len": 50}, {"asyncdata_pretokenize": True}):
        with pytest.raises(BadRowError, match="AD107"):
            read(row, **with_template(small_tokenizer), **settings)


def test_a_text_that_the_tokenizer_refuses_is_a_bad_row(read, tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="no such token")).save(str(tmp_path / "tokenizer.json"))
    given = {"hf_checkpoint": str(tmp_path), "asyncdata_pretokenize": True}
    rows = [{"input": "a"}, {"input": "x"}, {"input": []}]

    assert [sample.tokens for sample in read(*rows, **given, asyncdata_bad_rows="skip")] == [[0], []]
    with pytest.raises(BadRowError, match="AD421"):
        read(*rows, **given)


# Metadata, tools and media


def test_tools_go_into_metadata_that_is_empty_or_an_object(read):
    empty = (b"{ }", b"0.0", b"-0", b"[ ]", b'""', b"null", b"0e5", b"false")
    found = read(*(b'{"input": "a", "tools": ["any", 5], "metadata": ' + value + b"}" for value in empty))
    assert [sample.metadata for sample in found] == [{"tools": ["any", 5]}] * len(empty)

    row = {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"tools": "old", "k": 1}}
    assert read(row)[0].metadata == {"tools": [TOOL], "k": 1}
    assert read({"input": "a", "tools": None})[0].metadata == {}
    assert read(row, tool_key=None)[0].metadata == {"tools": "old", "k": 1}


def test_placeholders_become_parts_in_the_order_of_the_chat_and_their_media_inputs(read):
    rich = {"type": "image", "image": "b.png", "max_pixels": 9}
    user = {"role": "user", "content": "<image>left <video><image>right <audio>"}
    media = {"pictures": ["a.png", rich], "clips": [["frame1", "frame2"]], "sounds": ["s.wav"]}

    (sample,) = read({"input": [{"role": "system", "content": "look"}, user], **media}, **MEDIA)

    assert sample.prompt == [
        {"role": "system", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "left "},
                {"type": "video", "video": ["frame1", "frame2"]},
                rich,
                {"type": "text", "text": "right "},
                {"type": "audio", "audio": "s.wav"},
            ],
        },
    ]
    assert sample.multimodal_inputs == {
        "images": ["a.png", rich], "videos": [["frame1", "frame2"]], "audios": ["s.wav"]
    }  # fmt: skip


@pytest.mark.parametrize("takes_images", [True, False])
def test_media_that_stand_in_the_messages_are_inputs_of_a_model_that_takes_images(
    read, small_tokenizer, tmp_path, takes_images
):
    shutil.copytree(small_tokenizer, tmp_path / "model")
    if takes_images:
        (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "a"}, {"type": ["odd"]}, "<image>"]
    row = {"input": [{"role": "user", "content": parts}, {"role": "user", "content": []}]}
    given = {"hf_checkpoint": str(tmp_path / "model"), "asyncdata_processor": MEDIA["asyncdata_processor"]}
    seen = {"images": [parts[0]]}

    (plain,) = read(row, **given)
    (put_in,) = read(row, **given, multimodal_keys={"image": "pictures"})

    assert (plain.prompt, plain.multimodal_inputs) == (row["input"], seen if takes_images else None)
    assert (put_in.prompt, put_in.multimodal_inputs) == (row["input"], seen)
    (rendered,) = read(row, **given | with_template(tmp_path / "model", "{{ messages | length }}"))
    assert (rendered.prompt, rendered.multimodal_inputs) == ("2", seen if takes_images else None)


# Bad rows

BAD: list[tuple[dict[str, Any], dict[str, Any] | bytes, str, str]] = [
    ({}, {"prompt": "a"}, "AD110", "no key 'input': the row has 'prompt': set prompt_key='prompt'?"),
    ({"label_key": "label"}, {"input": "a", "lable": 1}, "AD110", "set label_key='lable'?"),
    ({}, b'{"input": "a', "AD101", "cut off"),
    ({}, b"[]", "AD113", "got an array"),
    ({}, {"input": "a", "tools": {}}, "AD111", "'tools' must be a list of JSON schemas, got an object"),
    ({}, {"input": "a", "tools": "[{"}, "AD101", "'tools' is a string, and its text is not JSON"),
    ({}, {"input": "a", "tools": [], "metadata": "m"}, "AD111", "'metadata' must be an object, as the row has tools"),
    ({}, {"input": "a", "tools": [], "metadata": [1]}, "AD111", "got an array"),
    (
        MEDIA, {"input": "<image><image>", "pictures": ["a"]},
        "AD114", "'input' has 2 <image>, and 'pictures' has 1; there must be one item for each placeholder",
    ),
    (MEDIA, {"input": "<image>", "pictures": []}, "AD114", "has 1 <image>, and 'pictures' has 0"),
    (MEDIA, {"input": "a", "clips": ["a", "b"]}, "AD114", "has 0 <video>, and 'clips' has 2"),
    (MEDIA, {"input": "a", "pictures": "a.png"}, "AD111", "'pictures' must be a list of images"),
    (MEDIA, {"input": None}, "AD111", "'input' must be a string or a list of messages, got null"),
    (MEDIA, {"input": ["a"]}, "AD111", "'input'[0] must be an object with 'content'"),
    (
        MEDIA, {"input": [{"role": "user"}]},
        "AD111", "'input'[0]['content'] must be a string or a list of parts, got null",
    ),
    (MEDIA, {"input": [{"content": {"a": 1}}]}, "AD111", "got an object"),
]  # fmt: skip
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "AD111", "'input' must be a string or a list of messages, got null"),
    ({"input": []}, "AD111", "'input' must be a string or a list of messages that is not empty, got an array"),
    ({"input": [{"content": "a"}]}, "AD112", "'input'[0] has no 'role'"),
    ({"input": "a", "tools": ["x"]}, "AD111", "'tools'[0] must be a JSON schema, got a string"),
    ({"input": [{"role": "user", "content": 5}]}, "AD412", "chat template line 2"),
]
BAD_IN_MILES: list[tuple[dict[str, Any], str]] = [
    ({"input": "x", "tools": [3]}, "'tools'[0]"),
    ({"input": "x", "tools": [{"function": 3}]}, "'tools'[0]['function']"),
    ({"input": "x", "tools": [{"description": "d"}]}, "'tools'[0]['function']"),
    ({"input": "x", "tools": [{"name": None}]}, "'tools'[0]['function']['name']"),
    ({"input": "x", "tools": [{"name": "f", "description": 3}]}, "'tools'[0]['function']['description']"),
    ({"input": "x", "tools": [{"name": "f", "strict": None}]}, "'tools'[0]['function']['strict']"),
    ({"input": "x", "tools": [{"type": 3, "function": {"name": "f"}}]}, "'tools'[0]['type']"),
    ({"input": "x", "tools": [{"name": "f", "defer_loading": True}]}, "'tools'[0]['defer_loading']"),
    ({"input": [{"role": "assistant", "tool_calls": [3]}]}, "'input'[0]['tool_calls'][0]"),
    ({"input": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "['tool_calls'][0]['function']"),
    (
        {"input": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "['function']['arguments']",
    ),
]


def error_of(read: Any, row: Any, **given: Any) -> str:
    """What is said of a bad row, which is skipped if that is the policy."""
    good = {"input": "a", "label": 0}
    assert len(read(good, row, good, **given, asyncdata_bad_rows="skip")) == 2
    with pytest.raises(BadRowError) as caught:
        read(good, row, good, **given)
    return str(caught.value)


@pytest.mark.parametrize(("settings", "row", "code", "reason"), BAD, ids=[str(row)[:50] for _, row, _, _ in BAD])
def test_a_bad_row_is_named_and_the_others_are_kept(read, settings, row, code, reason):
    found = error_of(read, row, **settings)

    assert found.startswith(code)
    assert reason in found


def test_a_bad_chat_is_named_and_the_others_are_kept(read, small_tokenizer):
    for row, code, reason in BAD_CHATS:
        found = error_of(read, row, **with_template(small_tokenizer))
        assert (found[:5], reason in found) == (code, True), found


def test_what_miles_refuses_is_a_bad_row_that_names_the_place(read, small_tokenizer):
    with runs_in_miles(), sglang(tool_model(defers=True)):
        for row, name in BAD_IN_MILES:
            found = error_of(read, row, **with_template(small_tokenizer, MILES))
            assert (found[:5], name in found) == ("AD111", True), found


# Tools in miles


def test_in_miles_tools_are_completed_and_calls_are_parsed_and_in_slime_they_are_as_they_are(read, small_tokenizer):
    call = {"function": {"name": "f", "arguments": '{"a": 7}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"name": "f", "other": 1}]
    rows = [{"input": chat, "tools": tools}, {"input": chat[:1], "tools": []}]
    whole = {"type": "function", "function": {"description": None, "name": "f", "parameters": None, "strict": False}}
    given = with_template(small_tokenizer, MILES)

    assert [sample.prompt for sample in read(rows[0] | {"input": chat[:1]}, **given)] == [f"{json.dumps(tools)}|x"]
    with runs_in_miles():
        assert [sample.prompt for sample in read(*rows, **given)] == [f"{json.dumps([whole])}|x|7", "null|x"]


def test_in_miles_a_template_that_refuses_tools_is_given_their_functions(read, small_tokenizer):
    row = {"input": "x", "tools": [{"name": "f"}]}
    refuses = "{{ raise_exception('no') }}"
    template = (
        f"{{% for t in tools %}}{{% if t.function is defined %}}{refuses}{{% endif %}}{{{{ t.name }}}}{{% endfor %}}"
    )
    with runs_in_miles():
        assert read(row, **with_template(small_tokenizer, template))[0].prompt == "f"
        with pytest.raises(BadRowError, match="AD412 .*no"):
            read(row, **with_template(small_tokenizer, refuses))


@pytest.mark.parametrize("defers", [False, True])
def test_in_miles_tools_have_the_form_of_the_sglang_that_is_installed(read, small_tokenizer, defers):
    model = tool_model(defers=defers)
    tools = [
        {"function": {"parameters": {"a": 1}, "name": "f"}},
        {"type": "function", "function": {"name": "g"}, "x": 1},
    ]
    with runs_in_miles(), sglang(model):
        (sample,) = read({"input": "a", "tools": tools}, **with_template(small_tokenizer, "{{ tools | tojson }}"))

    assert sample.prompt == json.dumps([model.model_validate(tool).model_dump() for tool in tools])


# Of the function itself


def test_fingerprints_tell_what_differs(small_tokenizer, tmp_path):
    shutil.copytree(small_tokenizer, tmp_path / "moved")
    moved, name = str(tmp_path / "moved"), str(small_tokenizer)

    def prints(tokenizer: str = name, **settings: Any) -> dict[str, str]:
        return SlimeTokenizeFn(tokenizer, **settings).fingerprints()

    assert prints(moved, max_length=5) == prints(max_length=5)
    assert prints(max_length=5)["tokenizer"] == PromptTokenizeFn(name).fingerprints()["tokenizer"]
    chat = prints(apply_chat_template=True)
    assert chat["template"] == PromptTokenizeFn(name, apply_chat_template=True).fingerprints()["template"]
    assert chat["tokenizer"] == prints()["tokenizer"] == prints()["template"] == "none"
    other = prints(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": "{{ messages }}"})
    assert other["template"] != chat["template"]
    different = [
        prints(), prints(max_length=5), prints(pretokenize=True), chat, other, prints(prompt_key="q"),
        prints(multimodal_keys={}), prints(multimodal_keys={"image": "a"}), prints(tool_key=None), prints(tool_form={}),
        {"tokenize_fn": PromptTokenizeFn(name).fingerprints()["tokenize_fn"]},
    ]  # fmt: skip
    assert len({each["tokenize_fn"] for each in different}) == len(different)
    assert prints(tokenizer_backend="hf") == prints()


def test_the_fingerprint_of_settings_is_pinned():
    """Another one would refuse every snapshot there is; a change of meaning asks for a new ``version``."""
    fn = SlimeTokenizeFn(NOWHERE, label_key="label", multimodal_keys={"image": "images"})

    assert SlimeTokenizeFn(NOWHERE).fingerprints()["tokenize_fn"] == "142a78928adb6a00a659b3189f2d4093"
    assert fn.fingerprints()["tokenize_fn"] == "f7e769466007f93b038b97e2e27788d2"


def test_resolving_gives_a_local_folder(small_tokenizer, monkeypatch):
    monkeypatch.chdir(small_tokenizer.parent)

    resolved = SlimeTokenizeFn(small_tokenizer.name, max_length=3).resolve()

    assert resolved == SlimeTokenizeFn(str(small_tokenizer), max_length=3)


def test_a_worker_and_a_driver_load_no_heavy_library(small_tokenizer):
    program = (
        "import sys; from asyncdata.integrations.slime.rows import SlimeTokenizeFn\n"
        f"SlimeTokenizeFn({str(small_tokenizer)!r}, max_length=5, apply_chat_template=True).open()\n"
        "print(*{'numpy', 'torch', 'transformers', 'huggingface_hub', 'anyio', 'ray', 'slime'} & {*sys.modules})\n"
        "from asyncdata.integrations.slime import AsyncDataSource\n"
        "print(*{'torch', 'transformers', 'ray', 'slime', 'miles'} & {*sys.modules})"
    )
    root = str(Path(__file__).parents[4])

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)

    assert done.stdout.split() == [], done.stdout
