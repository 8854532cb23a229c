"""The demo's data and its tokenizer."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from asyncdata import ConfigError, PromptTokenizeFn, SourceError, demo
from asyncdata.demo import docstring_prompts, tokenizer_folder, write_docstring_prompts
from asyncdata.tokenization.column_writer import ColumnWriter

NUM_ROWS = 500


# The data


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "prompts.jsonl"
    assert write_docstring_prompts(path, num_rows=1500) == 1500
    return path


def test_the_prompts_are_questions_whose_answer_is_the_label(prompts):
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]

    assert all(set(row) == {"input", "label", "metadata"} for row in rows)
    assert {row["metadata"]["kind"] for row in rows} == {"module", "class", "function"}
    found = next(row for row in rows if row["label"] == "argparse.ArgumentParser")
    assert found["metadata"]["module"] == "argparse"
    assert found["metadata"]["line"] > 1000
    assert found["input"].startswith("Which class of Python's standard library is described here? Answer with its")
    assert "Object for parsing command line strings into Python objects." in found["input"]


@pytest.mark.thorough
def test_the_same_python_writes_the_same_prompts(prompts, tmp_path):
    again = tmp_path / "again.jsonl"
    write_docstring_prompts(again, num_rows=1500)

    assert again.read_bytes() == prompts.read_bytes()


@pytest.mark.thorough
def test_there_are_thousands_of_prompts():
    assert sum(1 for _ in islice(docstring_prompts(), 5000)) == 5000


def test_a_library_of_odd_files_has_the_docstrings_that_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""')
    (tmp_path / "lone.py").write_text('"""a lone \\ud800 surrogate"""')
    (tmp_path / "old.py").write_text('"""An escape of old: \\d"""')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text('class A:\n    async def b(self):\n        """In A."""')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text('"""Not of the library."""')
    monkeypatch.setattr(demo, "_library", lambda: tmp_path)

    rows = list(docstring_prompts())

    assert [(row["label"], row["metadata"]) for row in rows] == [
        ("old", {"kind": "module", "module": "old", "line": 1}),
        ("package.A.b", {"kind": "function", "module": "package", "line": 2}),
    ]


def test_a_python_without_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_library", lambda: tmp_path / "lib")

    with pytest.raises(SourceError, match="AD201 no docstring was found in .*lib"):
        write_docstring_prompts(tmp_path / "prompts.jsonl")


def test_at_least_one_prompt_must_be_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="num_rows must be at least 1, got 0"):
        write_docstring_prompts(tmp_path / "prompts.jsonl", num_rows=0)


# The tokenizer


def test_the_tokenizer_is_small():
    sizes = {path.name: path.stat().st_size for path in Path(tokenizer_folder()).iterdir()}

    assert set(sizes) == {"tokenizer.json", "tokenizer_config.json"}
    assert sum(sizes.values()) < 500_000


@pytest.mark.thorough
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_tokenizer_is_the_same_for_transformers(prompts, is_chat):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(tokenizer_folder())
    lines = prompts.read_bytes().splitlines()[:300]
    texts = [json.loads(line)["input"] for line in lines]
    out = ColumnWriter()

    PromptTokenizeFn(tokenizer_folder(), apply_chat_template=is_chat).open()(lines, out)

    if is_chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [oracle.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    expected = [token for text in texts for token in oracle(text, add_special_tokens=False)["input_ids"]]
    tokens = memoryview(out.finish(len(lines), 0.0).tokens).cast("i").tolist()
    assert tokens == expected
    assert {oracle.eos_token, oracle.pad_token} == {"<|end|>", "<|pad|>"}


def test_the_template_of_the_tokenizer_is_the_one_in_the_source():
    config = json.loads((Path(tokenizer_folder()) / "tokenizer_config.json").read_text())

    assert config["chat_template"] == demo.CHAT_TEMPLATE
