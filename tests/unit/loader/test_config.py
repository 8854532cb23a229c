"""The knobs: their defaults, and how a wrong one is named."""

from __future__ import annotations

import threading
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from asyncdata.core.errors import ConfigError
from asyncdata.loader.config import Knobs, LoaderConfig
from asyncdata.order.shuffle import RowShuffle, Shuffle


def refusal(**knobs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.of(knobs)

    return str(caught.value)


def test_without_knobs_every_one_has_its_default():
    assert LoaderConfig.of({}) == LoaderConfig()


def test_the_keyword_arguments_of_a_loader_are_the_fields():
    assert tuple(get_type_hints(Knobs)) == LoaderConfig.__struct_fields__


def test_what_is_read_ahead_is_counted_for_all_ranks():
    assert LoaderConfig(buffer_size=10, dp_size=4).capacity == 40


@pytest.mark.parametrize("seed", [0, -1, 2**200, np.int64(7), np.uint8(7)])
def test_any_integer_is_a_seed_and_becomes_a_plain_one(seed):
    found = LoaderConfig.of({"seed": seed}).seed

    assert found == seed
    assert type(found) is int


def test_whole_seconds_may_be_an_int():
    assert LoaderConfig.of({"timeout_s": 5}).timeout_s == 5.0


def test_a_shuffle_may_be_written_as_a_dict():
    assert LoaderConfig.of({"shuffle": {"block_bytes": 1024}}).shuffle == Shuffle(block_bytes=1024)


def test_an_unknown_knob_is_named_with_all_there_are():
    assert refusal(wrk=3) == "there is no knob 'wrk'; there are " + ", ".join(sorted(LoaderConfig.__struct_fields__))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, 0) for name in ("batch_size", "epochs", "n_samples_per_prompt", "buffer_size", "dp_size")],
        ("max_ready_bytes", 0),
        ("num_workers", -1),
        ("max_bad_rows", -1),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("row_timeout_s", -1.0),
        ("row_timeout_s", None),
        ("seed", 1.0),
        ("seed", True),
        ("seed", "42"),
        ("seed", None),
        ("batch_size", "32"),
        ("drop_last", 1),
        ("shuffle", "all"),
        ("shuffle", {"method": "sorted"}),
        ("shuffle", RowShuffle(first="a")),
        ("shuffle", {"blocks": 3}),
        ("shuffle", {"block_bytes": 0}),
        ("on_bad_row", "ignore"),
        ("commit", "never"),
        ("backend", "curio"),
    ],
)
def test_a_wrong_value_is_refused_and_its_knob_named(name, value):
    assert f"`{name}`" in refusal(**{name: value})


def test_a_batch_holds_whole_groups():
    assert LoaderConfig.of({"batch_size": 8, "n_samples_per_prompt": 4}).batch_size == 8
    assert refusal(batch_size=6, n_samples_per_prompt=4) == (
        "batch_size=6 is no multiple of n_samples_per_prompt=4; a batch holds whole groups"
    )


def test_a_config_is_a_value_that_cannot_be_changed():
    with pytest.raises(AttributeError):
        LoaderConfig().seed = 1
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"x": 1}, LoaderConfig)


@pytest.mark.parametrize("value", [float("inf"), 1e300, 10**400, np.float64("inf")])
def test_no_timeout_is_too_long(value):
    seconds = LoaderConfig.of({"timeout_s": value}).timeout_s

    assert seconds is not None
    assert 10**9 < seconds < threading.TIMEOUT_MAX


@pytest.mark.parametrize("value", ["1", b"1", True, float("nan"), [1], object()])
def test_a_timeout_that_is_no_number_is_named(value):
    with pytest.raises(ConfigError, match="^`timeout_s` is a number of seconds, or None for no limit; got "):
        LoaderConfig.of({"timeout_s": value})
