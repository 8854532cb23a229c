"""The knobs of a loader and of a mixture: defaults, files, wrong ones; and the workers that tuning adds within them."""

import inspect
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

import asyncdata
from asyncdata import BadRows, Cache, DataLoader, Limits, LoaderConfig, Mix, Part, Ranks, RowShuffle, Shuffle
from asyncdata.errors import ConfigError
from asyncdata.loader import autotune as tuners
from asyncdata.loader import config as declared
from tests.support.loading import row_id
from tests.support.parts import STRUCTS, TuningLimits, WorkerState, change, limits_of, mix_of_file, part_seed


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


@pytest.mark.parametrize("loader", [DataLoader, asyncdata.AsyncDataLoader])
def test_the_constructor_of_a_loader_declares_the_fields_with_their_defaults(loader):
    assert {name: each.default for name, each in arguments(loader).items()} == msgspec.structs.asdict(LoaderConfig())
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
        {"bad_rows": {"policy": "quarantine", "path": Path("q")}}, {"bad_rows": BadRows(policy="quarantine", path="q")}
    ),
    "the policy alone, of bad rows": ({"bad_rows": "skip"}, {"bad_rows": BadRows(policy="skip")}),
    "a batch of whole groups": ({"batch_size": 8, "n_samples_per_prompt": 4},) * 2,
    "limits as a dict": ({"limits": {"max_workers": 3}}, {"limits": Limits(max_workers=3)}),
    "ranks of numpy's integers": ({"ranks": NUMPYS}, {"ranks": Ranks(rank=1, world_size=2)}),
    "ranks as a dict": ({"ranks": {"rank": 1, "world_size": 2}}, {"ranks": Ranks(rank=1, world_size=2)}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "fields"), TAKEN.values(), ids=TAKEN)
def test_knobs_are_taken_as(given, fields):
    found = LoaderConfig.of(given)
    assert found == LoaderConfig(**fields)
    assert (type(found.seed), type(found.ranks.rank)) == (int, int)


PLACES = {
    **dict.fromkeys(("world_size", "num_replicas"), "ranks=Ranks(world_size=...)"), "rank": "ranks=Ranks(rank=...)",
    "gradient_accumulation_steps": "ranks=Ranks(gradient_accumulation=...)",
    "row_timeout_s": "limits=Limits(row_timeout_s=...)",
    "folder": "cache=Cache(folder=...)", "policy": "bad_rows=BadRows(policy=...)",
}  # fmt: skip
REFUSED = {
    "wrk": "there is no setting 'wrk'; there are " + ", ".join(sorted(LoaderConfig.__struct_fields__)),
    "prefetch_factor": "there is no setting 'prefetch_factor'; did you mean 'buffer_size'? ",
    **{name: f"there is no setting {name!r}; it is `{place}`" for name, place in PLACES.items()},
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items(), ids=list(REFUSED))
def test_a_knob_that_there_is_not_is_refused_with_its_place_or_name(name, message):
    assert refusal(**{name: 1}).startswith(message)


@pytest.mark.parametrize("knob", STRUCTS)
def test_what_is_no_struct_is_refused_with_what_is_one(knob):
    is_off_by_default = knob in ("executor", "outcomes")  # None is the default itself
    for value in (3, True, [("rank", 1)], Shuffle(), *([] if is_off_by_default else [None])):
        told = f"{STRUCTS[knob].__name__}(...), or a dict of its settings; got {value!r}"
        assert refusal(**{knob: value}).startswith(f"`{knob}` is ") and refusal(**{knob: value}).endswith(told)


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


def test_settings_that_do_not_go_together_are_named_and_those_of_a_struct_that_there_are_not():
    told = "batch_size=6 is no multiple of n_samples_per_prompt=4; a batch holds whole groups"
    assert refusal(batch_size=6, n_samples_per_prompt=4) == told
    told = "Ranks: rank=2 is too large for world_size=2: ranks are counted from 0"
    assert refusal(ranks={"rank": 2, "world_size": 2}) == told
    assert "remote_max_bytes needs a folder" in refusal(cache={"folder": "", "remote_max_bytes": 1})
    told = "there is no setting 'polcy' of `bad_rows`; did you mean 'policy'? There are excerpts, max, path, policy"
    assert refusal(bad_rows={"polcy": "skip"}) == told
    assert "did you mean 'world_size'?" in refusal(ranks={"num_replicas": 2})
    assert "did you mean 'folder'?" in refusal(cache={"cache_dir": "x"})


WRONG_KNOBS: dict[str, list[Any]] = {
    **dict.fromkeys(("epochs", "n_samples_per_prompt", "buffer_size", "dp_size"), [0]), "batch_size": [0, "32"],
    "num_workers": [-1], "timeout_s": [0, float("nan")], "seed": [1.0, True, "42", None], "drop_last": [1],
    "shuffle": ["all", {"method": "sorted"}, {"method": "keyed", "first": "a"}, {"blocks": 3}, {"block_bytes": 0}],
    "commit": ["never"], "event_loop": ["curio"],
}  # fmt: skip


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


def test_the_description_names_what_decides_the_schedule_and_leaves_have_dotted_names():
    mix = Mix({"a": Part("a.jsonl", weight=3), "m": Part(Mix({"x": "x.jsonl"}, quota=5))}, stages={10: {"a": 1}})

    assert mix.node({}).description() == {
        "by": "rows", "quota": 1000, "a.weight": 3, "m.weight": 1, "a.weight from 10 on": 1, "m.weight from 10 on": 0,
        "a.when_done": ["repeat", None], "m.when_done": ["repeat", None], "m.by": "rows", "m.quota": 5, "m.x.weight": 1,
        "m.x.when_done": ["repeat", None],
    }  # fmt: skip
    assert part_seed(42, "math") == 44107359106453524
    assert len({part_seed(seed, name) for seed in (1, 2) for name in ("a", "b")}) == 4

    mix = Mix({"z": "z.jsonl", "m": Mix({"y": "y.jsonl", "b": "b.jsonl"}), "a": "a.jsonl"}, temperature=1)
    node = mix.node({"a": 100, "m.b": 150, "m.y": 50, "z": 100})

    assert [leaf.name for leaf in mix.leaves()] == ["a", "m.b", "m.y", "z"]
    assert [(leaf.number, leaf.name) for leaf in node.leaves()] == [*enumerate(["a", "m.b", "m.y", "z"])]
    assert node.stages == ((0, (1, 2, 1)),)


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
tokenize_fn = "tests.support.loading:row_id"
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
    assert mix.parts["chat"].tokenize_fn == "tests.support.loading:row_id"
    assert {leaf.name: leaf.part.source for leaf in mix.leaves()} == {
        "math": f"{tmp_path}/math/*.jsonl", "web.news": f"{tmp_path}/inner/news.jsonl",
        "web.old.x": f"{tmp_path}/inner/x.jsonl", "chat": ["/data/a.jsonl", f"{tmp_path}/b.jsonl"],
    }  # fmt: skip


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
        ("parts = 1", "has `parts`"), ("[parts.a]\nweight = 1", "has a `source`, or a `mix`"),
        ('[parts.a]\nsource = "x"\nmix = "y"', "has a `source`, or a `mix`"), ("[parts", "cannot be read"),
        ('wieght = 1\n[parts]\na = "x"', "no setting 'wieght' of a mixture"),
        ('[parts.a]\nsource = "x"\nwieght = 2', "no setting 'wieght' of part 'a'"),
        ('[parts.a]\nmix = "bad.toml"', "nested more than 8 deep"),
        ('stages = 3\n[parts]\na = "x"', "`stages` is a table"),
        ('[parts.a]\nsource = "x"\nweight = -1', "weight is a number"),
        ('[parts.a]\nmix = "none.toml"', "none.toml cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named_with_the_file(tmp_path, text, why):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"AD470 .*{why}") as refused:
        mix_of_file(tmp_path / "bad.toml")
    assert "bad.toml" in str(refused.value)


MIB = 1 << 20


class Tuned:
    """A tuner, workers of 100 bytes each, and a trainer: all that is seen of it is how long it has waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        self.now_s = self.waited_s = 0.0
        self.num_workers, self.num_groups, self.stage = 1, 1, "tokenize"
        self.resizes = self.num_answered = 0
        change(monkeypatch, memory_of_a_worker=lambda pid: 100)
        allowed = TuningLimits(**{"min_workers": 1, "max_workers": 8, "max_worker_bytes": 1 << 40, **limits})
        every: Any = self  # its pool, its read-ahead, and its engine with all parts
        self.is_done: bool | None = None
        self.tuner = tuners.Tuner(allowed, every, every, every, clock=lambda: self.now_s)
        self.waits = self.coordinator = self.ledger = self.counters = self

    totals = property(lambda self: lambda: (0, self.waited_s))
    waits_for = property(lambda self: lambda: self.stage)

    def set_num_workers(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def statistics(self) -> Any:
        return SimpleNamespace(workers=[WorkerState(state="idle", pid=7)] * self.num_workers)

    def resize(self) -> None:
        self.resizes += 1

    def run(self, seconds: float, starved: float = 0.0, replies: int = 100) -> int:
        """So much time passes, of which the trainer waits a share; the workers that there are then."""
        for _ in range(replies):
            self.now_s += seconds / replies
            self.waited_s += starved * seconds / replies
            self.on_submit()
            self.num_answered += 1
            self.is_done = self.is_done or self.tuner.look()
        return self.num_workers


def test_tuning_stops_at_the_limit_and_adds_nothing_where_the_trainer_does_not_wait(monkeypatch):
    tuned = Tuned(monkeypatch, max_workers=3)
    with capture_logs() as logs:
        assert tuned.run(60, starved=0.5, replies=1000) == 3
    assert logs == [
        {"event": "autotune.changed", "before": 1, "after": 2, "log_level": "info"},
        {"event": "autotune.changed", "before": 2, "after": 3, "log_level": "info"},
        {"event": "autotune.limited", "limit": "max_workers", "num_workers": 3, "log_level": "info"},
    ]
    assert (tuned.resizes, tuned.is_done) == (2, True)
    assert tuned.run(3600) == 3, "none is removed"

    assert Tuned(monkeypatch).run(100, starved=0.005) == 1
    for stage in ("start", "read", "index"):
        tuned = Tuned(monkeypatch)
        tuned.stage = stage
        assert tuned.run(100, starved=1.0) == 1


@pytest.mark.parametrize(("max_worker_bytes", "number"), [(450, 4), (400, 4), (399, 3), (1, 1)])
def test_the_memory_of_the_workers_is_a_limit(monkeypatch, max_worker_bytes, number):
    tuned = Tuned(monkeypatch, max_worker_bytes=max_worker_bytes)
    with capture_logs() as logs:
        assert tuned.run(60, starved=0.5, replies=2000) == number
    assert logs[-1]["limit"] == "max_memory_bytes"


LIMITS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "by default all CPUs, and half of the free memory": (
        {}, {"min_workers": 1, "max_workers": 12, "max_worker_bytes": (500 - 64) * MIB}
    ),
    "numbers that are given are kept": (
        {"num_workers": 3, "limits": {"max_workers": 9}}, {"min_workers": 3, "max_workers": 3}
    ),
    "and so are limits": (
        {"limits": {"max_workers": 5, "max_memory_bytes": 100 * MIB, "max_ready_bytes": 40 * MIB}},
        {"max_workers": 5, "max_worker_bytes": 60 * MIB},
    ),
    "zero workers are one thread": ({"num_workers": 0}, {"min_workers": 1, "max_workers": 1}),
    "it begins within the limits": ({"limits": {"max_workers": 1}}, {"min_workers": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "wanted"), LIMITS.values(), ids=LIMITS)
def test_what_it_may_do_follows_from_the_settings_and_the_machine(monkeypatch, settings, wanted):
    change(monkeypatch, cpus_of_a_loader=lambda: 12)
    change(monkeypatch, free_memory_of_a_loader=lambda: 1000 * MIB)
    assert {name: getattr(limits_of(LoaderConfig.of(settings)), name) for name in wanted} == wanted
