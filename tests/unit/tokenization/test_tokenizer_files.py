"""The files of a tokenizer are read as ``transformers`` reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import huggingface_hub
import pytest
from tokenizers import Tokenizer

from asyncdata.errors import ConfigError
from asyncdata.tokenization.tokenizer_files import resolve
from tests.support.parts import PATTERNS, TokenizerFiles
from tests.unit.tokenization.trained import variant

TEXTS = [
    "def main(): return 1", "<|im_start|>user\nhello<|im_end|>",
    "<tool> x<TOOL> <new>é <image> <|endoftext|><unk>[PAD]", " <tool>  <extra_0><extra_1> \n", "",
]  # fmt: skip


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


@pytest.fixture
def edited(small_tokenizer, tmp_path) -> Callable[..., Path]:
    """A function that copies the small tokenizer with another configuration, and perhaps other files beside it."""

    def edit(files: dict[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path / f"tokenizer{len(list(tmp_path.iterdir()))}"
        variant(small_tokenizer, folder, config=config)
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return edit


CONFIGS: dict[str, dict[str, Any]] = {
    "as saved": {},
    "more tokens": {
        "added_tokens_decoder": {
            "2001": token("<new>", special=False), "2000": token("<tool>", special=False, lstrip=True),
            "0": token("<|endoftext|>", special=True),
        }
    },
    "other flags": {"added_tokens_decoder": {"1": token("<|im_start|>", special=True, rstrip=True)}},
    "named tokens that are new": {"unk_token": "<unk>", "pad_token": "[PAD]", "bos_token": None},
    "named tokens with flags": {"unk_token": {"__type": "AddedToken", **token("<unk>", lstrip=True)}},
    "a named token among the declared": {
        "unk_token": "<unk>", "added_tokens_decoder": {"2000": token("<unk>", special=False, rstrip=True)}},
    "extra tokens": {"extra_special_tokens": ["<extra_0>", "<extra_1>", "<|im_end|>"]},
    "extra tokens of the old name": {"additional_special_tokens": ["<extra_1>", "<extra_0>"]},
    "extra tokens with names": {"extra_special_tokens": {"image_token": "<image>", "boi_token": "<extra_0>"}},
    "a token with a name of its own": {"image_token": "<image>", "add_bos_token": True},
    "special tokens are split": {"split_special_tokens": True},
    "legacy files": {
        "files": {
            "special_tokens_map.json": {"eos_token": token("<new>"), "unk_token": "<unk>"},
            "added_tokens.json": {"<tool>": 2001, "<TOOL>": 2000, "<|im_end|>": 2},
        }
    },
    "legacy files that do not count": {
        "files": {"special_tokens_map.json": {"eos_token": "<new>"}}, "added_tokens_decoder": {}},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_are_those_of_transformers(edited, config):
    transformers = pytest.importorskip("transformers", minversion="5.23", reason="the oracle is not installed")
    folder = edited(**config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    files = TokenizerFiles(str(folder))
    ours = files.load()

    for add in (False, True):
        encodings = ours.encode_batch_fast(TEXTS, add_special_tokens=add)
        assert [each.ids for each in encodings] == theirs(TEXTS, add_special_tokens=add)["input_ids"]
    assert (ours.get_vocab(), files.special_tokens) == (theirs.get_vocab(), theirs.special_tokens_map)


def test_nothing_is_truncated_or_padded_and_the_padding_token_is_a_named_token(edited):
    folder = edited(pad_token=None)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(pad_token="<|im_start|>", length=8)
    tokenizer.save(path)

    files = TokenizerFiles(str(folder))
    loaded = files.load()

    assert (loaded.truncation, loaded.padding) == (None, None)
    assert [len(each.ids) > 3 for each in loaded.encode_batch_fast(TEXTS[:2])] == [True, True]
    assert files.special_tokens.get("pad_token") is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert TokenizerFiles(str(folder)).special_tokens["pad_token"] == "<|im_start|>"


def test_a_folder_without_a_configuration_will_do(edited):
    folder = edited()
    (folder / "tokenizer_config.json").unlink()

    files = TokenizerFiles(str(folder))

    assert (files.special_tokens, files.chat_templates, files.load().token_to_id("<|im_end|>")) == ({}, {}, 2)


TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one": ({"chat_template": "A"}, {"default": "A"}),
    "none": ({"chat_template": None}, {}),
    "by name": ({"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]},
                {"default": "A", "tool_use": "B"}),
    "file": ({"chat_template": "A", "files": {"chat_template.jinja": "F"}}, {"default": "F"}),
    "files": (
        {"chat_template": "A", "files": {"chat_template.jinja": "F", "additional_chat_templates/rag.jinja": "R",
                                         "additional_chat_templates/notes.txt": "N"}},
        {"default": "F", "rag": "R"}),
    "additional files alone": ({"chat_template": "A", "files": {"additional_chat_templates/rag.jinja": "R\r\né"}},
        {"rag": "R\né"}),
    "a processor's file": ({"chat_template": "A", "files": {"chat_template.json": {"chat_template": "P"}}},
        {"default": "A"}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_are_found_where_transformers_finds_them(edited, config, expected):
    folder = edited(**config)

    assert TokenizerFiles(str(folder)).chat_templates == expected

    transformers = pytest.importorskip("transformers", minversion="5.23", reason="the oracle is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(folder).chat_template or {}
    assert ({"default": theirs} if isinstance(theirs, str) else theirs) == expected


def test_the_digest_is_of_the_content(edited, small_tokenizer):
    def digest(folder: Path) -> str:
        return TokenizerFiles(str(folder)).digest()

    original = digest(small_tokenizer)

    assert digest(edited()) == original
    assert digest(edited(chat_template="X", model_max_length=1, pad_token="<|im_end|>")) == original
    changed = [
        digest(edited(unk_token="<unk>")),
        digest(edited(split_special_tokens=True)),
        digest(edited(added_tokens_decoder={"2000": token("<new>", special=False)})),
        digest(edited(added_tokens_decoder={"2000": token("<new>", special=True)})),
        digest(edited(files={"tokenizer.json": (small_tokenizer / "tokenizer.json").read_text() + "\n"})),
    ]
    assert len({original, *changed}) == 6


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_used_as_it_is_and_of_a_hub_name_the_files_are_fetched_once(small_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(small_tokenizer.parent)
    monkeypatch.setenv("HOME", str(small_tokenizer.parent))
    snapshot = shutil.copytree(small_tokenizer, tmp_path / "snapshots" / COMMIT)
    download = Mock(return_value=str(snapshot))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    for name in (str(small_tokenizer), small_tokenizer.name, f"~/{small_tokenizer.name}"):
        assert resolve(name, revision="ignored") == (str(small_tokenizer), None)
    assert resolve("org/model", "main") == (str(snapshot), COMMIT)

    assert download.mock_calls == [call("org/model", revision="main", allow_patterns=list(PATTERNS))]
    assert not any("safetensors" in pattern or pattern == "*" for pattern in PATTERNS)


def test_a_name_without_a_tokenizer_is_refused_with_the_way_out(tmp_path, small_tokenizer, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("401 Client Error")))

    with pytest.raises(ConfigError) as caught:
        resolve("org/model", "v1")
    assert str(caught.value) == (
        "AD413 tokenizer 'org/model' is not a folder here, and cannot be downloaded from the Hugging Face hub at "
        "revision 'v1': 401 Client Error; check the name, or download it before and pass the folder"
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    for name in ("/no/such/folder", "./folder", "a/b/c", "", "two words"):
        with pytest.raises(ConfigError, match="AD413"):
            resolve(name)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*; write one with AutoTokenizer.*save_pretrained"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file; pass the folder that it lies in"):
        resolve(str(small_tokenizer / "tokenizer.json"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", POINTER, "run 'git lfs pull'"),
        ("tokenizer.json", '{"added_tokens": [', "tokenizer.json cannot be read: Input data was truncated"),
        ("tokenizer.json", "[]", "tokenizer.json cannot be read: Expected `object`"),
        ("tokenizer.json", {"model": {"type": "Nothing"}}, r"tokenizer\.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", {"eos_token": {"text": 1}}, "tokenizer_config.json: Object missing .* `content`"),
        ("tokenizer_config.json", {"chat_template": 5}, r"tokenizer_config.json: .* at `\$.chat_template`"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
        ("chat_template.jinja", None, "chat_template.jinja cannot be read: Is a directory"),
    ],
    ids=["pointer", "cut", "array", "no tokenizer", "config", "token", "template", "coding", "folder"],
)
def test_a_damaged_file_is_named(edited, name, content, reason):
    folder = edited({name: content} if isinstance(content, str | dict) else {})
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    elif content is None:
        (folder / name).mkdir()

    with pytest.raises(ConfigError, match=f"AD413 .*{reason}"):
        TokenizerFiles(str(folder)).load()
