"""Rows as slime and miles read them: what the records of ``test_slime_source`` lack.

Prompts, tokens, and what is said of bad rows are in ``tests/transcripts``: ``slime-rows.md`` and ``slime-chats.md``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from asyncdata import PromptTokenizeFn
from asyncdata.errors import ConfigError
from asyncdata.integrations.slime import AsyncDataSource
from tests.support.parts import SlimeTokenizeFn
from tests.support.peers.checkouts import sglang, tool_model
from tests.support.slime_source import args_for, runs_in_miles, source_of

NOWHERE = "/there/is/no/such/tokenizer"
TOOL = {"type": "function", "function": {"name": "look"}}
MEDIA: dict[str, Any] = {
    "multimodal_keys": {"image": "pictures", "video": "clips", "audio": "sounds"},
    "asyncdata_processor": "tests.support.slime_source.as_they_are",
}
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text or ('[' ~ p.type ~ ']') }}{% endfor %}{% endfor %}"


@pytest.fixture
def read(tmp_path):
    """A function that gives the samples of rows, or raises what is wrong with the first bad one."""

    def samples(*rows, **given):
        path = tmp_path / "rows.jsonl"
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"\n".join(lines))
        with source_of(path, **{"label_key": None, "asyncdata_bad_rows": "raise", **given}) as source:
            return list(source.dataset.samples)

    return samples


def with_template(folder, text=None, **given):
    kwargs = {} if text is None else {"chat_template": text}
    return {"hf_checkpoint": str(folder), "apply_chat_template": True, "apply_chat_template_kwargs": kwargs, **given}


@pytest.mark.parametrize(
    "settings", [{"rollout_max_prompt_len": 5}, {"asyncdata_pretokenize": True}, {"apply_chat_template": True}], ids=str
)
def test_where_it_is_needed_a_missing_tokenizer_is_refused_before_any_work(prompts, settings):
    with pytest.raises(ConfigError, match="AD413"):
        AsyncDataSource(args_for(prompts, hf_checkpoint=NOWHERE, **settings))


def test_tokens_are_whole_numbers_of_text_without_media(read, small_tokenizer):
    encode = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json")).encode
    given = with_template(small_tokenizer, PARTS, asyncdata_pretokenize=True, **MEDIA)
    seen, text = read({"input": "<image>?", "pictures": ["a"]}, {"input": "what?"}, **given)
    assert (seen.prompt, seen.tokens) == ("[image]?", [])  # the rollout must count the images' own tokens
    assert (text.tokens, text.multimodal_inputs) == (encode(text.prompt).ids, None)
    assert all(type(token) is int for token in text.tokens)


def test_tools_go_into_metadata_that_is_empty_or_an_object(read):
    empty = (b"{ }", b"0.0", b"-0", b"[ ]", b'""', b"null", b"0e5", b"false")
    found = read(*(b'{"input": "a", "tools": ["any", 5], "metadata": ' + value + b"}" for value in empty))
    assert [sample.metadata for sample in found] == [{"tools": ["any", 5]}] * len(empty)
    row = {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"tools": "old", "k": 1}}
    assert read(row)[0].metadata == {"tools": [TOOL], "k": 1}
    assert read({"input": "a", "tools": None})[0].metadata == {}
    assert read(row, tool_key=None)[0].metadata == {"tools": "old", "k": 1}


def test_the_media_of_placeholders_are_inputs_in_the_order_of_the_chat(read):
    rich, frames = {"type": "image", "image": "b.png", "max_pixels": 9}, ["frame1", "frame2"]
    media = {"pictures": ["a.png", rich], "clips": [frames], "sounds": ["s.wav"]}
    (sample,) = read({"input": "<image>left <video><image>right <audio>", **media}, **MEDIA)
    assert sample.multimodal_inputs == {"images": ["a.png", rich], "videos": [frames], "audios": ["s.wav"]}


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


@pytest.mark.parametrize("defers", [False, True])
def test_in_miles_tools_have_the_form_of_the_sglang_that_is_installed(read, small_tokenizer, defers):
    model = tool_model(defers=defers)
    tools = [{"function": {"parameters": {"a": 1}, "name": "f"}}]
    tools.append({"type": "function", "function": {"name": "g"}, "x": 1})
    with runs_in_miles(), sglang(model):
        (sample,) = read({"input": "a", "tools": tools}, **with_template(small_tokenizer, "{{ tools | tojson }}"))
    assert sample.prompt == json.dumps([model.model_validate(tool).model_dump() for tool in tools])


def test_fingerprints_tell_what_differs(small_tokenizer, tmp_path):
    shutil.copytree(small_tokenizer, tmp_path / "moved")
    moved, name = str(tmp_path / "moved"), str(small_tokenizer)

    def prints(tokenizer=name, **settings):
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
