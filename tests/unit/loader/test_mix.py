"""What may be said about a mixture, and what cannot work."""

from __future__ import annotations

import pytest

from asyncdata import ConfigError, Mix, Part
from asyncdata.loader.mix import part_seed
from tests.support.tokenize_fns import row_id


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Mix({}), "at least one part"),
        (lambda: Mix({"a.b": "x.jsonl"}), "without dots"),
        (lambda: Mix({"": "x.jsonl"}), "without dots"),
        (lambda: Mix({"a\nb": "x.jsonl"}), "line breaks"),
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
        (lambda: Part("x.jsonl", when_done="end"), "when_done"),
        (lambda: Part("x.jsonl", max_epochs=0), "max_epochs"),
        (lambda: Part(Mix({"a": "x.jsonl"}), tokenize_fn=row_id), "tokenize_fn of a part that is a Mix"),
        (lambda: Mix({"a": "x.jsonl"}).functions(None), "part 'a' has no tokenize_fn"),
    ],
)
def test_what_cannot_work_is_refused_and_named(make, why):
    with pytest.raises(ConfigError, match=f"^AD470 .*{why}"):
        make()


def test_leaves_have_dotted_names_in_the_order_of_the_schedule():
    mix = Mix({"z": "z.jsonl", "m": Mix({"y": "y.jsonl", "b": "b.jsonl"}), "a": "a.jsonl"})

    assert [leaf.name for leaf in mix.leaves()] == ["a", "m.b", "m.y", "z"]
    assert [leaf.name for leaf in mix.node({}).leaves()] == ["a", "m.b", "m.y", "z"]
    assert [leaf.number for leaf in mix.node({}).leaves()] == [0, 1, 2, 3]


def test_a_nested_mixture_weighs_by_the_bytes_of_all_its_parts():
    mix = Mix({"a": "a.jsonl", "m": Mix({"x": "x.jsonl", "y": "y.jsonl"})}, temperature=1)

    assert mix.node({"a": 100, "m.x": 150, "m.y": 50}).stages == ((0, (1, 2)),)


def test_the_description_names_every_setting_that_decides_the_schedule():
    mix = Mix({"a": Part("a.jsonl", weight=3), "m": Part(Mix({"x": "x.jsonl"}, quota=5))}, stages={10: {"a": 1}})

    assert mix.description(mix.node({})) == {
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
    assert part_seed(42, "math") == PINNED
    assert len({part_seed(seed, name) for seed in (1, 2) for name in ("a", "b")}) == 4


PINNED = 44107359106453524
