"""The knobs: their defaults, and how a wrong one is named."""

import inspect
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest

from asyncdata import AsyncDataLoader, BadRows, Cache, DataLoader, Limits, LoaderConfig, Ranks, RowShuffle, Shuffle
from asyncdata.errors import ConfigError
from asyncdata.loader import config as declared
from tests.support.parts import STRUCTS


def refusal(**knobs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.of(knobs)

    return str(caught.value)


OBJECTS = ("self", "source", "tokenize_fn", "collate_fn", "buffer_filter", "too_old", "packing", "length_grouping")


def arguments(loader: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(loader.__init__).parameters
    return {name: found[name] for name in found if name not in (*OBJECTS, "unknown")}


def kinds(annotation: object) -> set[object]:
    """The types that a union allows, without bounds, and with each word of a ``Literal``."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))

    is_union = get_origin(annotation) in (Union, UnionType)
    return set().union(*map(kinds, get_args(annotation))) if is_union else {annotation}


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
def test_the_constructor_of_a_loader_declares_the_fields_with_their_defaults(loader):
    assert {name: argument.default for name, argument in arguments(loader).items()} == msgspec.structs.asdict(
        LoaderConfig()
    )
    assert tuple(arguments(loader)) == LoaderConfig.__struct_fields__
    with pytest.raises(ConfigError, match=r"^there is no setting 'policy'; it is `bad_rows=BadRows\(policy=\.\.\.\)`$"):
        loader("no-such-file", tokenize_fn=str, policy="skip")


@pytest.mark.parametrize("field", msgspec.structs.fields(LoaderConfig), ids=lambda field: field.name)
def test_the_constructor_of_a_loader_takes_what_a_field_takes(field):
    names = {**vars(declared), "Mapping": Mapping, "Any": Any}
    taken = kinds(eval(arguments(DataLoader)[field.name].annotation, names))  # noqa: S307 - our own source

    if field.name in STRUCTS:
        of_knobs = {"bad_rows": {"raise", "skip", "quarantine"}, "telemetry": {str, os.PathLike[str]}}
        short_forms = of_knobs.get(field.name, set())
        nothing = kinds(field.type) - {STRUCTS[field.name]}  # None, where that is the default
        assert taken == {STRUCTS[field.name], Mapping[str, Any]} | short_forms | nothing
    elif field.name == "shuffle":
        assert taken == {bool, "full", Shuffle, RowShuffle, Mapping[str, Any]}
    else:
        assert taken == kinds(field.type)


NUMPYS = Ranks(rank=np.int64(1), world_size=np.int32(2))
TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none at all": ({}, {}),
    **{f"the seed {seed}": ({"seed": seed}, {"seed": int(seed)}) for seed in (0, -1, 2**200, np.int64(7), np.uint8(7))},
    "whole seconds as an int": ({"timeout_s": 5}, {"timeout_s": 5.0}),
    "a shuffle as a dict": ({"shuffle": {"block_bytes": 1024}}, {"shuffle": Shuffle(block_bytes=1024)}),
    "a path object": ({"cache": {"folder": Path("c")}}, {"cache": Cache(folder="c")}),
    "another path object": (
        {"bad_rows": {"policy": "quarantine", "path": Path("q")}},
        {"bad_rows": BadRows(policy="quarantine", path="q")},
    ),
    "the policy alone, of bad rows": ({"bad_rows": "skip"}, {"bad_rows": BadRows(policy="skip")}),
    "a batch of whole groups": ({"batch_size": 8, "n_samples_per_prompt": 4},) * 2,
    "ranks of numpy's integers": ({"ranks": NUMPYS}, {"ranks": Ranks(rank=1, world_size=2)}),
}


@pytest.mark.parametrize(("given", "fields"), TAKEN.values(), ids=TAKEN)
def test_knobs_are_taken_as(given, fields):
    found = LoaderConfig.of(given)

    assert found == LoaderConfig(**fields)
    assert (type(found.seed), type(found.ranks.rank)) == (int, int)


PLACES = {
    "world_size": "ranks=Ranks(world_size=...)",
    "rank": "ranks=Ranks(rank=...)",
    "num_replicas": "ranks=Ranks(world_size=...)",
    "gradient_accumulation_steps": "ranks=Ranks(gradient_accumulation=...)",
    "row_timeout_s": "limits=Limits(row_timeout_s=...)",
    "folder": "cache=Cache(folder=...)",
    "policy": "bad_rows=BadRows(policy=...)",
}
REFUSED = {
    "wrk": "there is no setting 'wrk'; there are " + ", ".join(sorted(LoaderConfig.__struct_fields__)),
    "prefetch_factor": "there is no setting 'prefetch_factor'; did you mean 'buffer_size'? ",
    **{name: f"there is no setting {name!r}; it is `{place}`" for name, place in PLACES.items()},
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=list(REFUSED))
def test_a_knob_that_there_is_not_is_refused_with_its_place_or_name(name, message):
    assert refusal(**{name: 1}).startswith(message)


@pytest.mark.parametrize(
    "struct",
    [Ranks(rank=1, world_size=2), Limits(max_workers=3), Cache(folder="f"), BadRows(policy="quarantine", path="q")],
    ids=lambda struct: type(struct).__name__,
)
def test_a_struct_may_be_written_as_a_dict(struct):
    knob = next(knob for knob, kind in STRUCTS.items() if isinstance(struct, kind))
    given = {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}

    assert getattr(LoaderConfig.of({knob: given}), knob) == getattr(LoaderConfig.of({knob: struct}), knob) == struct


@pytest.mark.parametrize("knob", STRUCTS)
def test_what_is_no_struct_is_refused_with_what_is_one(knob):
    is_off_by_default = knob in ("executor", "outcomes")  # None is the default itself
    for value in (3, True, [("rank", 1)], Shuffle(), *([] if is_off_by_default else [None])):
        told = f"{STRUCTS[knob].__name__}(...), or a dict of its settings; got {value!r}"
        assert refusal(**{knob: value}).startswith(f"`{knob}` is ") and refusal(**{knob: value}).endswith(told)


def test_an_unknown_setting_of_a_struct_is_named_with_all_there_are():
    assert refusal(bad_rows={"polcy": "skip"}) == (
        "there is no setting 'polcy' of `bad_rows`; did you mean 'policy'? There are excerpts, max, path, policy"
    )
    assert "did you mean 'world_size'?" in refusal(ranks={"num_replicas": 2})
    assert "did you mean 'folder'?" in refusal(cache={"cache_dir": "x"})


WRONG: dict[type, dict[str, list[Any]]] = {
    Ranks: {"rank": [-1], "world_size": [0], "gradient_accumulation": [0], "round_up": ["yes"]},
    Limits: {"max_workers": [0], "max_ready_bytes": [0], "row_timeout_s": [-1.0, None]},
    Cache: {"folder": [3, "a\0b"], "max_row_index_bytes": [0], "remote_max_bytes": [0]},
    BadRows: {"policy": ["ignore"], "max": [-1, "3"], "path": [None, "a\0b"], "excerpts": [1]},
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_value_in_a_struct_is_refused_and_named_with_its_struct(kind):
    knob = next(knob for knob in STRUCTS if STRUCTS[knob] is kind)
    for setting, value in ((setting, value) for setting, values in WRONG[kind].items() for value in values):
        with pytest.raises(ConfigError) as caught:
            kind(**{setting: value})

        assert str(caught.value).startswith(f"{kind.__name__}: {setting}={value!r}")
        assert refusal(**{knob: {setting: value}}) == str(caught.value)


def test_settings_that_do_not_go_together_are_named():
    assert refusal(batch_size=6, n_samples_per_prompt=4) == (
        "batch_size=6 is no multiple of n_samples_per_prompt=4; a batch holds whole groups"
    )
    assert refusal(ranks={"rank": 2, "world_size": 2}) == (
        "Ranks: rank=2 is too large for world_size=2: ranks are counted from 0"
    )


WRONG_KNOBS: dict[str, list[Any]] = {
    **dict.fromkeys(("epochs", "n_samples_per_prompt", "buffer_size", "dp_size"), [0]),
    "batch_size": [0, "32"],
    "num_workers": [-1],
    "timeout_s": [0, float("nan")],
    "seed": [1.0, True, "42", None],
    "drop_last": [1],
    "shuffle": ["all", {"method": "sorted"}, {"method": "keyed", "first": "a"}, {"blocks": 3}, {"block_bytes": 0}],
    "commit": ["never"],
    "event_loop": ["curio"],
}


@pytest.mark.parametrize("name", WRONG_KNOBS)
def test_a_wrong_value_is_refused_and_its_knob_named(name):
    for value in WRONG_KNOBS[name]:
        assert refusal(**{name: value}).startswith(f"{name}=") or f"`{name}`" in refusal(**{name: value})


@pytest.mark.parametrize("value", [float("inf"), 1e300, 10**400, np.float64("inf")])
def test_no_timeout_is_too_long(value):
    seconds = LoaderConfig.of({"timeout_s": value}).timeout_s

    assert seconds is not None
    assert 10**9 < seconds < threading.TIMEOUT_MAX


@pytest.mark.parametrize("value", ["1", b"1", True, float("nan"), [1], object()])
def test_a_timeout_that_is_no_number_is_named(value):
    assert refusal(timeout_s=value).startswith("`timeout_s` is a number of seconds, or None for no limit; got ")


def test_a_cache_of_blocks_needs_a_folder():
    assert "remote_max_bytes needs a folder" in refusal(cache={"folder": "", "remote_max_bytes": 1})
