"""A mixture in a file: TOML, YAML or JSON, with paths relative to it, and other files in it."""

from __future__ import annotations

import json

import pytest

from asyncdata import ConfigError
from asyncdata.loader.mix_file import mix_of_file

TOML = """
by = "tokens"
on_mix_change = "apply"

[stages]
0 = "parts"
1_000 = {math = 1}

[parts.math]
source = "math/*.jsonl"
weight = 5
when_done = "leave"
max_epochs = 2

[parts.web]
mix = "inner/web.json"

[parts.chat]
source = ["/data/a.jsonl", "b.jsonl"]
tokenize_fn = "tests.support.tokenize_fns:row_id"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "mix.toml").write_text(TOML)
    web = {"parts": {"news": "news.jsonl", "old": {"mix": {"parts": {"x": "x.jsonl"}}, "weight": 2}}}
    (tmp_path / "inner" / "web.json").write_text(json.dumps(web))
    return tmp_path


def test_every_setting_is_read(folder):
    mix = mix_of_file(folder / "mix.toml")

    assert (mix.by, mix.on_mix_change, mix.stages) == ("tokens", "apply", {0: None, 1000: {"math": 1}})
    math = mix.parts["math"]
    assert (math.weight, math.when_done, math.max_epochs) == (5, "leave", 2)
    assert mix.parts["chat"].tokenize_fn == "tests.support.tokenize_fns:row_id"


def test_paths_are_relative_to_the_file_that_has_them(folder):
    sources = {leaf.name: leaf.part.source for leaf in mix_of_file(folder / "mix.toml").leaves()}

    assert sources == {
        "math": f"{folder}/math/*.jsonl",
        "web.news": f"{folder}/inner/news.jsonl",
        "web.old.x": f"{folder}/inner/x.jsonl",
        "chat": ["/data/a.jsonl", f"{folder}/b.jsonl"],
    }


def test_yaml_is_read_where_it_is_installed(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "mix.yaml").write_text("quota: 10\nstages: {0: parts, 50: {a: 1}}\nparts: {a: a.jsonl, b: b.jsonl}\n")

    mix = mix_of_file(tmp_path / "mix.yaml")

    assert (mix.quota, mix.stages, list(mix.parts)) == (10, {0: None, 50: {"a": 1}}, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("parts = 1", "has `parts`"),
        ("[parts.a]\nweight = 1", "has a `source`, or a `mix`"),
        ('[parts.a]\nsource = "x"\nmix = "y"', "has a `source`, or a `mix`"),
        ('wieght = 1\n[parts]\na = "x"', "no setting 'wieght' of a mixture"),
        ('[parts.a]\nsource = "x"\nwieght = 2', "no setting 'wieght' of part 'a'"),
        ('[parts.a]\nmix = "bad.toml"', "nested more than 8 deep"),
        ("[parts", "cannot be read"),
        ('stages = 3\n[parts]\na = "x"', "`stages` is a table"),
        ('[parts.a]\nsource = "x"\nweight = -1', "weight is a number"),
        ('[parts.a]\nmix = "none.toml"', "none.toml cannot be read"),
    ],
)
def test_what_cannot_work_is_named_with_the_file(tmp_path, text, why):
    (tmp_path / "bad.toml").write_text(text)

    with pytest.raises(ConfigError, match=f"AD470 .*{why}") as refused:
        mix_of_file(tmp_path / "bad.toml")

    assert "bad.toml" in str(refused.value)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "mix.txt").write_text("")

    with pytest.raises(ConfigError, match=r"ends in .toml, .yaml or .json"):
        mix_of_file(tmp_path / "mix.txt")
