"""A mixture: what may be said about it, in Python or in a file, and what cannot work."""

import json

import pytest

from asyncdata import Mix, Part
from asyncdata.errors import ConfigError
from tests.support.parts import mix_of_file, part_seed
from tests.support.tokenize_fns import row_id


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Mix({}), "at least one part"), (lambda: Mix({"a.b": "x.jsonl"}), "without dots"),
        (lambda: Mix({"": "x.jsonl"}), "without dots"), (lambda: Mix({"a\nb": "x.jsonl"}), "line breaks"),
        (lambda: Mix({"a": "x.jsonl"}, by="bytes"), "'rows' or 'tokens'"),
        (lambda: Mix({"a": "x.jsonl"}, quota=0), "quota"),
        (lambda: Mix({"a": "x.jsonl"}, on_mix_change="ignore"), "on_mix_change"),
        (lambda: Mix({"a": "x.jsonl"}, temperature=0), "temperature"),
        (lambda: Mix({"a": Part("x.jsonl", weight=1)}, temperature=2), "every part has one"),
        (lambda: Mix({"a": Part("x.jsonl", weight=0)}), "weight above 0"),
        (lambda: Mix({"a": "x.jsonl"}, stages={-1: None}), "from 0 on"),
        (lambda: Mix({"a": "x.jsonl"}, stages={0: {"b": 1}}), "names 'b', and there are a"),
        (lambda: Mix({"a": "x.jsonl"}, stages={5: {"a": 0}}), "no part with a weight above 0"),
        (lambda: Part("x.jsonl", weight=-1), "weight is a number from 0 on"),
        (lambda: Part("x.jsonl", weight=float("nan")), "weight is a number from 0 on"),
        (lambda: Part("x.jsonl", when_done="end"), "when_done"), (lambda: Part("x.jsonl", max_epochs=0), "max_epochs"),
        (lambda: Part(Mix({"a": "x.jsonl"}), tokenize_fn=row_id), "tokenize_fn of a part that is a Mix"),
        (lambda: Mix({"a": "x.jsonl"}).functions(None), "part 'a' has no tokenize_fn"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_and_named(make, why):
    with pytest.raises(ConfigError, match=f"^AD470 .*{why}"):
        make()


def test_leaves_have_dotted_names_in_the_order_of_the_schedule_and_weigh_by_the_bytes_of_all_their_parts():
    mix = Mix({"z": "z.jsonl", "m": Mix({"y": "y.jsonl", "b": "b.jsonl"}), "a": "a.jsonl"}, temperature=1)
    node = mix.node({"a": 100, "m.b": 150, "m.y": 50, "z": 100})

    assert [leaf.name for leaf in mix.leaves()] == ["a", "m.b", "m.y", "z"]
    assert [(leaf.number, leaf.name) for leaf in node.leaves()] == [*enumerate(["a", "m.b", "m.y", "z"])]
    assert node.stages == ((0, (1, 2, 1)),)


def test_the_description_names_every_setting_that_decides_the_schedule():
    mix = Mix({"a": Part("a.jsonl", weight=3), "m": Part(Mix({"x": "x.jsonl"}, quota=5))}, stages={10: {"a": 1}})

    assert mix.node({}).description() == {
        "by": "rows",
        "quota": 1000,
        "a.weight": 3,
        "m.weight": 1,
        "a.weight from 10 on": 1,
        "m.weight from 10 on": 0,
        "a.when_done": ["repeat", None],
        "m.when_done": ["repeat", None],
        "m.by": "rows",
        "m.quota": 5,
        "m.x.weight": 1,
        "m.x.when_done": ["repeat", None],
    }


def test_the_seed_of_a_part_is_pinned_and_its_own():
    """It decides the part's order, so it never changes."""
    assert part_seed(42, "math") == 44107359106453524
    assert len({part_seed(seed, name) for seed in (1, 2) for name in ("a", "b")}) == 4


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


def test_every_setting_is_read_and_paths_are_relative_to_the_file_that_has_them(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "mix.toml").write_text(TOML)
    web = {"parts": {"news": "news.jsonl", "old": {"mix": {"parts": {"x": "x.jsonl"}}, "weight": 2}}}
    (tmp_path / "inner" / "web.json").write_text(json.dumps(web))

    mix = mix_of_file(tmp_path / "mix.toml")

    assert (mix.by, mix.on_mix_change, mix.stages) == ("tokens", "apply", {0: None, 1000: {"math": 1}})
    math = mix.parts["math"]
    assert (math.weight, math.when_done, math.max_epochs) == (5, "leave", 2)
    assert mix.parts["chat"].tokenize_fn == "tests.support.tokenize_fns:row_id"
    assert {leaf.name: leaf.part.source for leaf in mix.leaves()} == {
        "math": f"{tmp_path}/math/*.jsonl",
        "web.news": f"{tmp_path}/inner/news.jsonl",
        "web.old.x": f"{tmp_path}/inner/x.jsonl",
        "chat": ["/data/a.jsonl", f"{tmp_path}/b.jsonl"],
    }


def test_yaml_is_read_where_it_is_installed_and_another_kind_of_file_is_refused(tmp_path):
    pytest.importorskip("yaml")
    for name in ("mix.yaml", "mix.txt"):
        (tmp_path / name).write_text("quota: 10\nstages: {0: parts, 50: {a: 1}}\nparts: {a: a.jsonl, b: b.jsonl}\n")

    mix = mix_of_file(tmp_path / "mix.yaml")
    assert (mix.quota, mix.stages, list(mix.parts)) == (10, {0: None, 50: {"a": 1}}, ["a", "b"])
    with pytest.raises(ConfigError, match=r"^AD470 a mixture is a file that ends in .toml, .yaml or .json"):
        mix_of_file(tmp_path / "mix.txt")


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
