"""What the model's checkpoint says of rows: a tokenizer that is code, and a processor that takes images."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError
from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.loader import background_proof
from asyncdata.loader.background_proof import SWITCH

if TYPE_CHECKING:
    from pathlib import Path

ODD_TOKENIZER = '''
from transformers import PreTrainedTokenizer


class OddTokenizer(PreTrainedTokenizer):
    """A character is a token: its number in Unicode."""

    vocab_size = 0x110000

    def get_vocab(self):
        return {}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def save_vocabulary(self, *_):
        return ()
'''
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ ending }}"


@pytest.fixture
def coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer that is code, and has no tokenizer.json."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "tokenization_odd.py").write_text(ODD_TOKENIZER)
    config = {"auto_map": {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "OddTokenizer"}))
    return str(folder)


def source_of(tmp_path: Path, rows: list[dict[str, Any]], **args: Any) -> AsyncDataSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = {"folder": str(tmp_path / "cache")}
    given = {"asyncdata_num_workers": 1, "asyncdata_timeout_s": 100, "asyncdata_cache": cache}
    return AsyncDataSource(SimpleNamespace(prompt_data=str(path), **given, **args))


def test_a_tokenizer_that_is_code_is_refused_with_the_key_that_trusts_it(tmp_path: Path, coded: str) -> None:
    rows = [{"input": "é!"}]
    with pytest.raises(ConfigError, match=r"AD413 .*has no tokenizer\.json.*asyncdata_trust_remote_code"):
        source_of(tmp_path, rows, hf_checkpoint=coded, apply_chat_template=True)


@pytest.mark.thorough
def test_a_trusted_tokenizer_that_is_code_renders_and_counts_as_its_own_code_does(
    tmp_path: Path, coded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    rows = [{"input": text} for text in ("é!", "far too long", "ok")]
    source = source_of(
        tmp_path,
        rows,
        hf_checkpoint=coded,
        apply_chat_template=True,
        apply_chat_template_kwargs={"ending": "."},
        rollout_max_prompt_len=len("<user>ok."),
        asyncdata_trust_remote_code=True,
        asyncdata_pretokenize=True,
    )
    samples = [group[0] for group in source.get_samples(2)]
    source.close()

    assert [sample.prompt for sample in samples] == ["<user>é!.", "<user>ok."]
    assert [list(sample.tokens) for sample in samples] == [list(map(ord, sample.prompt)) for sample in samples]


def test_an_installed_fast_tokenizer_has_no_part_in_a_run_whose_tokenizer_is_code(
    tmp_path: Path, coded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(background_proof, "version_of", lambda _backend: "1")
    given = {"hf_checkpoint": coded, "rollout_max_prompt_len": 5, "asyncdata_trust_remote_code": True}
    source_of(tmp_path, [{"input": "ok"}], dump_details=str(tmp_path / "details"), **given).close()

    assert (tmp_path / "details" / "tokenizer" / "tokenization_odd.py").read_text() == ODD_TOKENIZER
    with pytest.raises(ConfigError, match="asyncdata_tokenizer_backend: gigatoken has no effect with asyncdata_trust"):
        source_of(tmp_path, [{"input": "ok"}], asyncdata_tokenizer_backend="gigatoken", **given)


def processed(_args: Any, media: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return media


@pytest.mark.thorough
@pytest.mark.parametrize("takes_images", [True, False])
def test_images_that_stand_in_messages_are_handed_to_a_model_that_takes_images(
    tmp_path: Path, small_tokenizer: Path, takes_images: bool
) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    for file in small_tokenizer.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    if takes_images:
        (checkpoint / "preprocessor_config.json").write_text("{}")
    image = {"type": "image", "image": "a.png"}
    chat = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    source = source_of(
        tmp_path,
        [{"input": chat}],
        hf_checkpoint=str(checkpoint),
        asyncdata_processor=f"{__name__}.processed",
    )
    (group,) = source.get_samples(1)
    source.close()

    assert group[0].multimodal_inputs == ({"images": [image]} if takes_images else None)
