"""The shipped buffer filters: which groups they serve, which stay, and the error for a value they cannot rank."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from asyncdata import (
    BalancedByMetadata,
    ByMetadata,
    ByReward,
    ByStaleness,
    Chain,
    ConfigError,
    DataLoader,
    FilterError,
    Group,
    InvalidGroupError,
    Sample,
    Status,
    filters,
    has_reward_spread,
    reset_response,
)
from asyncdata.delivery.ledger import Returned
from asyncdata.delivery.rollout_buffer import choose

if TYPE_CHECKING:
    from collections.abc import Callable


def group_of(number: int, *, size: int = 2, **fields: Any) -> Group:
    """A group whose number its tokens tell; a field that is a list has one value per sample."""
    group = [Sample(index=number * size + place, group_index=number) for place in range(size)]
    for place, sample in enumerate(group):
        sample.tokens = np.array([number], np.int32)
        for name, value in fields.items():
            setattr(sample, name, value[place] if isinstance(value, list) else copy.deepcopy(value))
    return group


def written_by(*versions: Any, key: str = "policy_version") -> list[Group]:
    return [
        group_of(number, extra={} if version is None else {key: version}) for number, version in enumerate(versions)
    ]


def rewarded(*rewards: Any) -> list[Group]:
    return [group_of(number, reward=reward) for number, reward in enumerate(rewards)]


def rows_with(*metadata: Any, key: str = "source") -> list[Group]:
    return [group_of(number, metadata={} if value is None else {key: value}) for number, value in enumerate(metadata)]


def numbers(groups: list[Group]) -> list[int]:
    return [int(group[0].tokens[0]) for group in groups]


def served(buffer_filter: Any, buffer: list[Group], num_groups: int | None = None) -> list[int]:
    """As a loader asks a filter, with all its checks."""
    items = [Returned(group, []) for group in buffer]
    return numbers(
        [item.group for item in choose(items, len(buffer) if num_groups is None else num_groups, buffer_filter)]
    )


EVERY_FILTER = [
    ByStaleness(),
    ByReward(),
    ByMetadata("source"),
    BalancedByMetadata("source"),
    Chain((ByMetadata("source"), ByStaleness())),
]


# Whatever the filter


@pytest.mark.parametrize("buffer_filter", EVERY_FILTER, ids=lambda one: type(one).__name__)
def test_groups_of_equal_rank_are_served_first_in_first_out(buffer_filter: Any) -> None:
    assert served(buffer_filter, rewarded(None, None, None)) == [0, 1, 2]
    assert served(buffer_filter, rewarded(None, None, None), 2) == [0, 1]
    assert buffer_filter([], 3) == []


@pytest.mark.parametrize("buffer_filter", EVERY_FILTER, ids=lambda one: type(one).__name__)
def test_a_filter_changes_neither_the_buffer_nor_a_group(buffer_filter: Any) -> None:
    buffer = [
        group_of(0, reward=[1.0, 0.0], extra={"policy_version": 3}, metadata={"source": "b"}),
        group_of(1, reward=1.0, extra={"policy_version": [5, 4]}, metadata={"source": "a"}, response="so far"),
        group_of(2),
    ]
    list_before, before = list(buffer), [[sample.to_dict() for sample in group] for group in buffer]

    buffer_filter(buffer, 2)

    assert all(group is was for group, was in zip(buffer, list_before, strict=True))
    assert [[sample.to_dict() for sample in group] for group in buffer] == before


@pytest.mark.parametrize("buffer_filter", EVERY_FILTER, ids=lambda one: type(one).__name__)
def test_a_filter_is_a_description_that_cannot_be_changed(buffer_filter: Any) -> None:
    field = buffer_filter.__struct_fields__[0]

    with pytest.raises(AttributeError):
        setattr(buffer_filter, field, None)
    assert msgspec.structs.replace(buffer_filter) == buffer_filter
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        msgspec.convert({"colour": 1}, type(buffer_filter))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByStaleness(order="newest"), "ByStaleness: order='newest'"),
        (lambda: ByStaleness(max_staleness=2), "max_staleness and current_version need one another"),
        (lambda: ByStaleness(current_version=lambda: 2), "max_staleness and current_version need one another"),
        (lambda: ByStaleness(max_staleness=-1, current_version=lambda: 2), "max_staleness must be at least 0, got -1"),
        (lambda: ByStaleness(max_staleness=2, current_version=7), "ByStaleness: current_version=7"),
        (lambda: ByReward(statistic="median"), "ByReward: statistic='median'"),
        (lambda: ByReward(outside="nowhere"), "ByReward: outside='nowhere'"),
        (lambda: ByReward(above=1.0, below=1.0), "above must be lower than below, got above=1.0 and below=1.0"),
        (lambda: ByReward(above=math.nan), "above must be lower than below, got above=nan"),
        (lambda: ByMetadata(5), "ByMetadata: key=5"),
        (lambda: BalancedByMetadata("source", weights={"math": 0}), "the weight of 'math' must be above 0, got 0"),
        (lambda: BalancedByMetadata("source", weights={"math": math.inf}), "the weight of 'math' must be above 0"),
        (lambda: BalancedByMetadata("source", weights={"math": "3"}), "BalancedByMetadata: weights="),
        (lambda: Chain(()), "Chain: filters must have at least one filter"),
        (lambda: Chain((ByReward(), "filters:mine")), "Chain: filters="),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert message in str(caught.value)


def test_a_filter_does_not_follow_what_its_caller_does_with_the_weights() -> None:
    weights = {"math": 3.0}
    buffer_filter = BalancedByMetadata("source", weights=weights)
    weights["math"] = -1

    assert buffer_filter.weights == {"math": 3.0}


@pytest.mark.parametrize("buffer_filter", [ByStaleness, ByReward, ByMetadata, BalancedByMetadata, Chain])
def test_the_class_in_place_of_a_filter_is_named(buffer_filter: Any) -> None:
    with pytest.raises(FilterError, match=f"AD431 the buffer filter '{buffer_filter.__name__}' raised ConfigError"):
        served(buffer_filter, rewarded(1.0))


def test_the_reference_has_every_name_with_its_settings_and_their_defaults() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    here = text.partition("\n## Filters\n")[2].partition("\n## ")[0]

    for name in filters.__all__:
        signature = inspect.signature(getattr(filters, name))
        plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        shown = name + str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
        assert shown.replace("'", '"') in here
        for field in getattr(getattr(filters, name), "__struct_fields__", ()):
            assert f"`{field}`" in here


# By staleness


def test_what_the_newest_policy_wrote_comes_first() -> None:
    assert served(ByStaleness(), written_by(3, 5, 4, 5)) == [1, 3, 2, 0]
    assert served(ByStaleness(order="stalest_first"), written_by(3, 5, 4, 3)) == [0, 3, 2, 1]
    assert served(ByStaleness(order=None), written_by(3, 5, 4)) == [0, 1, 2]


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    half = [group_of(0, extra=[{"policy_version": 9}, {"policy_version": 2}]), *written_by(None, 5)[1:]]

    assert served(ByStaleness(), [*half, *written_by(*[None] * 2, [8, 3, 9])[2:]]) == [1, 2, 0]
    assert served(ByStaleness(), [group_of(0, extra=[{"policy_version": 4}, {}]), *written_by(None, 5)[1:]]) == [1, 0]


def test_a_group_without_a_version_has_no_stale_token() -> None:
    buffer = written_by(3, None, 5, [])

    assert served(ByStaleness(), buffer) == [1, 3, 2, 0]
    assert served(ByStaleness(order="stalest_first"), buffer) == [0, 2, 1, 3]
    assert not ByStaleness(max_staleness=0, current_version=lambda: 99).is_stale(buffer[1])


@pytest.mark.parametrize(("too_stale", "wanted"), [("last", [3, 2, 0, 1]), ("first", [0, 1, 3, 2]), ("stay", [3, 2])])
def test_what_is_too_stale_goes_where_it_is_told_to(too_stale: Any, wanted: list[int]) -> None:
    buffer_filter = ByStaleness(max_staleness=2, current_version=lambda: 7, too_stale=too_stale)
    buffer = written_by(4, 3, 5, 7)

    assert served(buffer_filter, buffer) == wanted
    assert [buffer_filter.is_stale(group) for group in buffer] == [True, True, False, False]


def test_staleness_is_that_of_the_moment_of_the_call() -> None:
    version = 5
    buffer_filter = ByStaleness(max_staleness=1, current_version=lambda: version, too_stale="stay", order=None)
    buffer = written_by(4, 5)

    assert served(buffer_filter, buffer) == [0, 1]
    version = 6
    assert served(buffer_filter, buffer) == [1]


def test_a_policy_that_went_back_to_a_checkpoint_finds_nothing_too_stale() -> None:
    assert served(ByStaleness(max_staleness=0, current_version=lambda: 2), written_by(4, 5)) == [1, 0]


@pytest.mark.parametrize("version", ["7", 7.0, {"step": 7}, [7, "8"]])
def test_a_version_that_is_no_whole_number_is_named_with_its_sample(version: Any) -> None:
    with pytest.raises(
        InvalidGroupError, match=r"AD433 group 1, sample 2: extra\['rollout'\] is .*need a whole number"
    ):
        ByStaleness(version_key="rollout")(written_by(3, version, key="rollout"), 2)

    with pytest.raises(FilterError, match=r"AD431 the buffer filter ByStaleness\(.*AD433 group 1, sample 2"):
        served(ByStaleness(version_key="rollout"), written_by(3, version, key="rollout"))


def test_versions_may_be_numpys() -> None:
    assert served(ByStaleness(), written_by(np.int64(3), np.int32(5))) == [1, 0]


# By reward


def test_groups_whose_rewards_differ_come_first() -> None:
    buffer = rewarded([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.4, 0.6])

    assert served(ByReward(), buffer) == [1, 3, 0, 2]
    assert served(ByReward(order="lowest_first"), buffer) == [0, 2, 3, 1]


def test_equal_rewards_have_no_spread_even_where_their_mean_is_rounded() -> None:
    third = [group_of(0, size=3, reward=0.1)]

    assert np.std([0.1] * 3) > 0, "or this test shows nothing"
    assert served(ByReward(above=0, outside="stay"), third) == []
    assert not has_reward_spread(third[0])


@pytest.mark.parametrize("size", [3, 5, 6, 7, 8, 12, 16])
def test_mirrored_rewards_rank_alike(size: int) -> None:
    solved, failed = [1.0] + [0.0] * (size - 1), [0.0] + [1.0] * (size - 1)
    buffer = [group_of(number, size=size, reward=rewards) for number, rewards in enumerate([solved, failed, solved])]

    assert served(ByReward(), buffer) == served(ByReward(order="lowest_first"), buffer) == [0, 1, 2]


def test_the_mean_may_be_asked_for_within_bounds_that_are_not_part_of_it() -> None:
    buffer = rewarded([1, 1], [0, 1], [0, 0], [0.9, 0.9], [0.5, 0.5])
    sometimes_solved = ByReward(statistic="mean", above=0, below=1, order=None, outside="stay")

    assert served(sometimes_solved, buffer) == [1, 3, 4]
    assert served(ByReward(statistic="mean", above=0.5, below=0.9), buffer) == [0, 1, 2, 3, 4]
    assert served(ByReward(statistic="mean", order="lowest_first"), buffer) == [2, 1, 4, 3, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("gap", [None, math.nan, math.inf, {}, {"style": 1.0}, {"accuracy": None}])
@pytest.mark.parametrize(("missing", "wanted"), [("last", [2, 0, 1]), ("first", [1, 2, 0]), ("stay", [2, 0])])
def test_a_group_with_a_gap_in_its_rewards_goes_where_it_is_told_to(gap: Any, missing: Any, wanted: list[int]) -> None:
    buffer = rewarded([0.0, 0.1], [1.0, gap], [0.0, 1.0])

    assert served(ByReward(missing=missing, reward_key="accuracy"), buffer) == wanted


def test_what_is_outside_the_bounds_and_what_is_missing_have_places_of_their_own() -> None:
    buffer = rewarded(None, [1.0, 1.0], [0.0, 1.0])

    assert served(ByReward(above=0, outside="first", missing="last"), buffer) == [1, 2, 0]
    assert served(ByReward(above=0, outside="last", missing="first"), buffer) == [0, 2, 1]
    assert served(ByReward(above=0, outside="stay", missing="last"), buffer) == [2, 0]
    assert served(ByReward(above=0, outside="last", missing="stay"), buffer) == [2, 1]


def test_a_reward_of_several_values_is_looked_at_by_its_key() -> None:
    buffer = rewarded(
        [{"accuracy": 1, "style": 0.5}] * 2, [{"accuracy": 0}, {"accuracy": np.float32(1)}], [True, False]
    )

    assert served(ByReward(reward_key="accuracy"), buffer) == [1, 2, 0]
    with pytest.raises(InvalidGroupError, match=r"AD433 group 0, .*need reward_key, one of \['accuracy', 'style'\]"):
        ByReward()(buffer, 1)


@pytest.mark.parametrize("reward", ["1.0", [1.0], b"1"])
def test_a_reward_that_is_no_number_is_named_with_its_sample(reward: Any) -> None:
    with pytest.raises(InvalidGroupError, match="AD433 group 0, sample 1: reward is .*need a number"):
        ByReward()(rewarded([0.5, reward]), 1)


# By metadata


def test_groups_come_in_the_order_of_a_value_of_their_rows() -> None:
    by_priority = rows_with(2, 9.5, 1, 2, key="priority")

    assert served(ByMetadata("priority"), by_priority) == [2, 0, 3, 1]
    assert served(ByMetadata("priority", order="descending"), by_priority) == [1, 0, 3, 2]
    assert served(ByMetadata("source"), rows_with("b", "a", "b")) == [1, 0, 2]


@pytest.mark.parametrize(("missing", "wanted"), [("last", [3, 0, 1, 2]), ("first", [1, 2, 3, 0]), ("stay", [3, 0])])
@pytest.mark.parametrize("gap", [None, math.nan])
def test_a_group_without_the_value_goes_where_it_is_told_to(missing: Any, wanted: list[int], gap: Any) -> None:
    assert served(ByMetadata("source", missing=missing), rows_with(2, gap, None, 1)) == wanted


def test_texts_and_numbers_cannot_be_put_in_one_order() -> None:
    with pytest.raises(
        InvalidGroupError, match=r"AD433 group 2, .* metadata\['source'\] is 'a' \(str\); need a number, as 1"
    ):
        ByMetadata("source")(rows_with(None, 1, "a"), 1)
    with pytest.raises(InvalidGroupError, match=r"AD433 group 1, .* is '1' \(int\); need a text, as 'a' before it"):
        ByMetadata("source")(rows_with("a", 1), 1)


@pytest.mark.parametrize("buffer_filter", [ByMetadata("source"), BalancedByMetadata("source")])
def test_a_value_that_is_neither_number_nor_text_is_named(buffer_filter: Any) -> None:
    with pytest.raises(
        InvalidGroupError, match=r"AD433 group 1, .* metadata\['source'\] is .* \(list\); need a number or"
    ):
        buffer_filter(rows_with("a", ["b"]), 1)


def test_a_request_is_shared_out_in_proportion_to_the_weights() -> None:
    buffer = rows_with(*["math"] * 8, *["code"] * 8)
    three_to_one = BalancedByMetadata("source", weights={"math": 3, "code": 1})

    assert served(three_to_one, buffer, 4) == [0, 1, 8, 2]
    assert served(three_to_one, buffer, 8) == [0, 1, 8, 2, 3, 4, 9, 5]
    assert served(BalancedByMetadata("source"), buffer, 4) == [0, 8, 1, 9]


def test_a_value_that_runs_out_leaves_its_share_to_the_others() -> None:
    buffer = rows_with("code", "math", "math", "math", "math")

    assert served(BalancedByMetadata("source", weights={"math": 1, "code": 3}), buffer, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(("missing", "wanted"), [("last", [2, 0, 1]), ("first", [0, 1, 2]), ("stay", [2])])
def test_a_value_without_a_weight_goes_where_it_is_told_to(missing: Any, wanted: list[int]) -> None:
    buffer_filter = BalancedByMetadata("source", weights={"math": 1}, missing=missing)

    assert served(buffer_filter, rows_with("code", None, "math")) == wanted


# Several in a row


def test_the_last_filter_of_a_chain_has_the_last_word_on_the_order() -> None:
    buffer = rows_with(2, 1, 2, 1)
    for group, version in zip(buffer, [7, 7, 8, 8], strict=True):
        for sample in group:
            sample.extra = {"policy_version": version}

    assert served(Chain((ByMetadata("source"), ByStaleness())), buffer) == [3, 2, 1, 0]
    assert served(Chain((ByStaleness(), ByMetadata("source"))), buffer) == [3, 1, 2, 0]


def test_what_a_filter_of_a_chain_leaves_out_the_next_one_does_not_see() -> None:
    buffer = rewarded([1, 1], [0, 1], None, [0, 1])
    differing = ByReward(above=0, outside="stay", missing="stay", order=None)
    seen = []

    def newest(buffer: list[Group], num_groups: int) -> list[Group]:
        seen.append((numbers(buffer), num_groups))
        return buffer[::-1][:num_groups]

    assert served(Chain((differing, newest)), buffer, 1) == [3]
    assert seen == [([1, 3], 1)]


def test_only_the_last_filter_of_a_chain_is_asked_for_few() -> None:
    """Or the first one would decide alone."""
    asked = []

    def first(buffer: list[Group], num_groups: int) -> tuple[Group, ...]:
        asked.append(num_groups)
        return tuple(buffer)

    assert served(Chain((first, ByMetadata("source"))), rows_with("b", "a", "c"), 1) == [1]
    assert asked == [3]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_filter_of_a_chain_may_remove_what_it_returns(steps: int) -> None:
    def removes(buffer: list[Group], num_groups: int) -> list[Group]:
        wanted = buffer[:num_groups]
        del buffer[:num_groups]
        return wanted

    buffer = rewarded(None, None, None)

    assert numbers(Chain((removes,) * steps)(buffer, 2)) == [0, 1]
    assert numbers(buffer) == [0, 1, 2]


def test_a_filter_of_a_chain_that_returns_nothing_is_named() -> None:
    def forgets(buffer: list[Group], num_groups: int) -> None:
        return None

    with pytest.raises(FilterError, match="AD431 .*forgets.* returned NoneType; need a list of groups"):
        served(Chain((forgets, ByStaleness())), rewarded(1.0))


# In a loader


@pytest.fixture
def loader(
    jsonl_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DataLoader]:
    """A function that opens a loader over eight rows; modules of filters can be written to the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = jsonl_file([{"number": number} for number in range(8)])

    def tokenize(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [row["number"]]}

    return lambda **knobs: DataLoader(path, tokenize_fn=tokenize, shuffle=False, num_workers=0, **knobs)


def give_back_with_versions(loader: DataLoader, *versions: int) -> None:
    groups = loader.get_samples(len(versions))
    for (sample,), version in zip(groups, versions, strict=True):
        sample.extra["policy_version"] = version
    loader.add_samples(groups)


def test_a_filter_is_named_by_the_import_path_of_a_module_that_has_it(
    loader: Callable[..., DataLoader], tmp_path: Path
) -> None:
    (tmp_path / "my_filters_by_path.py").write_text(
        "from asyncdata.filters import ByStaleness\nstalest_first = ByStaleness(order='stalest_first')\n"
    )
    try:
        with loader(buffer_filter="my_filters_by_path:stalest_first") as opened:
            give_back_with_versions(opened, 5, 3, 4)
            assert numbers(opened.get_samples(3)) == [1, 2, 0]
    finally:
        sys.modules.pop("my_filters_by_path", None)


def test_what_stays_in_the_buffer_is_in_the_snapshot_and_can_be_served_by_another_filter(
    loader: Callable[..., DataLoader],
) -> None:
    fresh_only = ByStaleness(max_staleness=1, current_version=lambda: 9, too_stale="stay")
    with loader(buffer_filter=fresh_only) as opened:
        give_back_with_versions(opened, 5, 9, 8)
        assert numbers(opened.get_samples(3)) == [1, 2, 3], "the stream fills up"
        assert opened.statistics().buffered_groups == 1
        state = opened.state_dict()

    with loader() as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed.get_samples(2)) == [0, 4]


def test_a_filter_that_cannot_rank_a_group_leaves_the_buffer_as_it_was(loader: Callable[..., DataLoader]) -> None:
    with loader(buffer_filter=ByReward()) as opened:
        groups = opened.get_samples(2)
        groups[1][0].reward = {"accuracy": 1.0}
        opened.add_samples(groups)

        with pytest.raises(FilterError, match="AD433 group 1, sample 1: reward is .*need reward_key"):
            opened.get_samples(1)
        assert opened.statistics().buffered_groups == 2


# Dynamic sampling


def test_rewards_differ_or_they_do_not() -> None:
    differing, alike = rewarded([0, 1], [0.5, 0.5])

    assert has_reward_spread(differing)
    assert not has_reward_spread(alike)
    assert not has_reward_spread(group_of(0, size=1, reward=1.0))


def test_a_tolerance_takes_rewards_that_lie_close_for_alike() -> None:
    (group,) = rewarded([0.5, 0.75])

    assert has_reward_spread(group, tolerance=0.2)
    assert not has_reward_spread(group, tolerance=0.25)


def test_the_spread_of_one_value_of_a_reward() -> None:
    (group,) = rewarded([{"accuracy": 1, "style": 0}, {"accuracy": 1, "style": 1}])

    assert not has_reward_spread(group, reward_key="accuracy")
    assert has_reward_spread(group, reward_key="style")


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_group_that_is_not_wholly_rewarded_is_not_judged(reward: Any) -> None:
    with pytest.raises(InvalidGroupError, match="AD433 group 0, sample 1: reward .*need a finite number; reward every"):
        has_reward_spread(rewarded([1.0, reward])[0])


# Rolled out anew


def rolled_out(number: int, prompt: list[int], response: list[int]) -> Group:
    group = group_of(
        number,
        response="so far",
        response_length=len(response),
        reward=1.0,
        rollout_log_probs=[[-0.5] * len(response)] * 2,
        loss_mask=[[1] * len(response)] * 2,
        status=Status.ABORTED,
        metadata={"source": "math"},
        extra={"policy_version": 3, "note": "kept"},
    )
    for sample in group:
        sample.tokens = np.array(prompt + response, np.int32)
    return group


def test_a_group_that_is_reset_is_as_it_came_from_the_stream() -> None:
    group, fresh = rolled_out(4, [7, 8], [9, 10, 11]), rolled_out(4, [7, 8], [])
    for sample in fresh:
        sample.response, sample.reward, sample.loss_mask, sample.rollout_log_probs = "", None, None, None
        sample.status, sample.extra = Status.PENDING, {"note": "kept"}

    reset_response(group, response_in_tokens=True)

    assert [sample.to_dict() for sample in group] == [sample.to_dict() for sample in fresh]
    assert group[0].tokens.dtype == np.int32
    assert group[0].tokens.base is None, "or the response's tokens stay in memory"


def test_tokens_that_never_had_the_response_stay() -> None:
    group = rolled_out(0, [7, 8, 9], [])
    for sample in group:
        sample.response_length = 2

    reset_response(group, response_in_tokens=False)

    assert [sample.tokens.tolist() for sample in group] == [[7, 8, 9]] * 2


def test_the_version_is_forgotten_under_its_own_key() -> None:
    group = written_by(5, key="rollout")[0]

    reset_response(group, response_in_tokens=False, version_key="rollout")

    assert [sample.extra for sample in group] == [{}, {}]


@pytest.mark.parametrize("length", [3, -1])
def test_a_group_with_too_few_tokens_for_its_response_is_not_touched(length: int) -> None:
    group = rolled_out(2, [], [9, 10])
    group[1].response_length = length
    before = [sample.to_dict() for sample in group]

    with pytest.raises(
        InvalidGroupError, match=f"AD433 group 2, sample 5: response_length is '{length}' .*its 2 tokens"
    ):
        reset_response(group, response_in_tokens=True)
    assert [sample.to_dict() for sample in group] == before


def test_a_stale_group_that_the_loop_resets_is_fresh() -> None:
    buffer_filter = ByStaleness(max_staleness=1, current_version=lambda: 9)
    group = rolled_out(0, [7], [8])
    assert buffer_filter.is_stale(group)

    reset_response(group, response_in_tokens=True)

    assert not buffer_filter.is_stale(group)
