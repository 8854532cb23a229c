"""``DataLoader``: groups that the trainer gives back, or has not acknowledged, come first, also after a restart."""

from __future__ import annotations

import base64
import json
from datetime import date

import msgspec
import numpy as np
import pytest

from asyncdata import Status
from asyncdata.errors import ConfigError, InvalidGroupError, SnapshotError
from tests.support.loaders import make
from tests.support.loading import ids, order_of

NUM_ROWS = 100
PAIRS = {"n_samples_per_prompt": 2}


def numbers(groups):
    return [group[0].group_index for group in groups]


# Giving back


def newest_first(buffer, num_groups):
    return buffer[::-1][:num_groups]


def test_a_filter_may_be_named_by_its_import_path(path):
    with make(path, buffer_filter=f"{__name__}:newest_first") as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:3])
        assert numbers(loader.get_samples(2)) == [2, 1]


# After a restart


def test_groups_given_back_are_in_the_state_whole_until_they_are_served(path):
    with make(path, **PAIRS) as loader:
        groups = loader.get_samples(5)
        first, second = groups[1]
        first.response, first.response_length, first.reward = "so far", 2, {"math": 0.5}
        first.loss_mask, first.rollout_log_probs, first.status = [1, 0], [-0.25, -1.5], Status.TRUNCATED
        first.tokens = np.array([7, 8, 9], np.int32)
        first.metadata["tool"] = ["search", 1]
        second.extra["reward_model"] = {"version": 3}
        loader.add_samples([groups[0], groups[3], groups[1]])
        loader.get_samples(1)
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, **PAIRS) as loader:
        loader.load_state_dict(state)
        restored = loader.get_samples(3)

    assert [[sample.group_index for sample in group] for group in restored] == [[3, 3], [1, 1], [5, 5]]
    for before, after in zip([*groups[3], *groups[1]], [*restored[0], *restored[1]], strict=True):
        assert msgspec.to_builtins(before.to_dict()) == msgspec.to_builtins(after.to_dict())
    assert restored[1][0].tokens.tolist() == [7, 8, 9]
    assert restored[1][0].status is Status.TRUNCATED
    with make(path) as loader:
        with pytest.raises(ConfigError, match="groups of 2 samples, and n_samples_per_prompt is 1"):
            loader.load_state_dict(state)
        assert ids(loader.get_next_batch(1)) == order_of(path)[:1]


@pytest.mark.parametrize(
    "values",
    [
        [1] * 100,
        [0.5, float("inf"), -0.0] * 40,
        [*[1] * 99, True],
        [*[0.5] * 99, 1],
        [*[1] * 99, 300, -1],
        [*[1.0] * 70_000],
        [2**80, *[1] * 99],
        ["\ud800"],
        [*[1] * 99, None, "text", [1.5], {"a": (1, b"b")}],
    ],
    ids=lambda values: f"{len(values)} from {values[0]!r:.8} to {values[-1]!r:.8}",
)
def test_long_lists_of_any_values_are_given_back_with_their_types(path, values):
    with make(path) as loader:
        (group,) = loader.get_samples(1)
        group[0].rollout_log_probs = group[0].extra["values"] = values
        loader.add_samples([group])
        saved = json.loads(json.dumps(loader.state_dict()))
        loader.save(path.with_suffix(".state"))
        with pytest.raises(InvalidGroupError, match=r"AD432 group 0: \$.extra.when\[99\] is a datetime.date"):
            other = loader.get_samples(2)[1]
            other[0].extra["when"] = [*[1.0] * 99, date(2026, 1, 1)]
            loader.add_samples([other])
    with make(path) as loader:
        for go_back in (lambda: loader.load_state_dict(saved), lambda: loader.restore(path.with_suffix(".state"))):
            go_back()
            again = json.loads(json.dumps(loader.state_dict()))["buffer"]
            assert again == saved["buffer"]
            ((sample,),) = loader.get_samples(1)
            for found in (sample.rollout_log_probs, sample.extra["values"]):
                assert found == values
                assert list(map(type, found)) == list(map(type, values))


def test_a_group_in_a_state_that_cannot_be_read_is_said_where_it_is_needed(path):
    with make(path) as loader:
        loader.add_samples(loader.get_samples(1))
        state = loader.state_dict()
    for text, match in (("%", "AD602 .* buffer cannot be read"), (packed_text([{"tokens": {"__ndarray__": 5}}]), "")):
        with make(path) as loader, pytest.raises(SnapshotError, match=match or "AD602 .* buffer cannot be read: Type"):
            loader.load_state_dict(state | {"buffer": [text]})
            assert not match, "it is refused at once"
            loader.get_samples(1)


def packed_text(value):
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()
