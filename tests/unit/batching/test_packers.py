"""Packing: what fills a pack, what happens to samples that cannot be packed, and what is refused."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import ConfigError, HardPacking, SnapshotError, SoftPacking, XTunerPacking
from asyncdata.batching.packers.xtuner import proxy_cost

if TYPE_CHECKING:
    from asyncdata.batching.packers.base import Pack

# A promise to every snapshot there is: packs are not in them, they are made again. See tests/unit/order/test_order.py.
PACKS_DIGEST = "2b1a6752cc839623"


def names(packs: list[Pack]) -> list[str]:
    return ["".join(reference for reference, _, _ in pack) for pack in packs]


def soft(max_length: int = 10, window_samples: int = 4, **settings: Any) -> SoftPacking:
    return SoftPacking(max_length=max_length, window_samples=window_samples, window_tokens=1, **settings)


def test_the_oldest_goes_first_and_the_largest_that_fit_top_up() -> None:
    packer = soft().open()

    assert packer.extend([4, 2, 7, 1], "abcd") == []  # a is taken
    assert packer.extend([3], ["e"]) == []  # b is taken
    # c does not fit, so the largest of the window that do, e and then d, fill the pack up.
    assert packer.extend([5], ["f"]) == [[("a", 0, 4), ("b", 0, 2), ("e", 0, 3), ("d", 0, 1)]]
    assert names(packer.extend([9], ["g"])) == []
    assert names(packer.flush()) == ["c", "f", "g"]


def test_of_samples_of_one_length_the_oldest_tops_up() -> None:
    packer = soft().open()

    assert names(packer.extend([8, 9, 2, 2, 2, 2], "abcdef") + packer.flush()) == ["ac", "b", "def"]


def test_nothing_is_packed_before_the_window_has_samples_and_tokens_enough() -> None:
    packer = SoftPacking(max_length=10, window_samples=3, window_tokens=40).open()

    assert packer.extend([10] * 3, range(3)) == []  # 30 tokens
    assert packer.extend([9], [3]) == []  # 39
    assert packer.extend([1], [4]) == []  # 40: the first is taken in
    assert names([[(str(number), 0, 0) for number, _, _ in pack] for pack in packer.extend([10], [5])]) == ["0"]


def test_the_default_window_has_eight_packs_of_tokens() -> None:
    packer = SoftPacking(max_length=100, window_samples=1).open()

    packs = [packer.extend([100], [number]) for number in range(10)]

    # The first pack is closed when the second sample has eight packs of tokens after it.
    assert [len(some) for some in packs] == [0] * 8 + [1, 1]


def test_soft_packs_are_the_same_for_ever() -> None:
    lengths = (np.arange(3000, dtype=np.int64) * 2_654_435_761 % 4096) + 1
    packer = SoftPacking(max_length=4096).open()

    packs = packer.extend(lengths, range(3000)) + packer.flush()  # type: ignore[arg-type]

    assert blake2b(repr(packs).encode(), digest_size=8).hexdigest() == PACKS_DIGEST


def test_an_overlong_sample_is_an_error_and_nothing_is_taken_in() -> None:
    packer = soft(overlong="error").open()
    before = packer.state()

    with pytest.raises(ConfigError, match=r"^AD450 sample row 7 has 11 tokens, more than the max_length=10"):
        packer.extend([1, 0, 11], ["row 5", "row 6", "row 7"])
    with pytest.raises(ConfigError, match="AD450"):
        packer.extend([11], ["row 7"])
    assert packer.state() == before


def test_an_overlong_sample_is_dropped_and_counted() -> None:
    packer = soft(overlong="drop").open()

    assert names(packer.extend([11, 10, 12], "abc") + packer.flush()) == ["b"]
    assert packer.counts.samples == {"overlong": 2}
    assert packer.counts.tokens == {"overlong": 23}


def test_an_overlong_sample_is_truncated_and_counted() -> None:
    packer = soft(overlong="truncate").open()

    assert packer.extend([13, 2], "ab") + packer.flush() == [[("a", 0, 10)], [("b", 0, 2)]]
    assert packer.counts.samples == {}
    assert packer.counts.tokens == {"truncated": 3}


@pytest.mark.parametrize("packing", [soft(), HardPacking(max_length=10, keep_tail=True)])
def test_a_sample_without_a_token_is_dropped_and_counted(packing: Any) -> None:
    packer = packing.open()

    assert names(packer.extend([0], ["a"]) + packer.extend([0, 3], "bc") + packer.flush()) == ["c"]
    assert packer.counts.samples == {"empty": 2}


def test_samples_take_room_in_whole_segments() -> None:
    packer = soft(max_length=16, segment_multiple_of=8).open()

    packs = packer.extend([8, 9, 1, 7], "abcd") + packer.flush()

    assert packs == [[("a", 0, 8), ("c", 0, 1)], [("b", 0, 9)], [("d", 0, 7)]]


def test_a_packer_holds_no_more_than_its_window() -> None:
    packer = soft(window_samples=100).open()

    for number in range(20_000):
        packer.extend([number % 7 + 1], [number])

    state = packer.state()
    assert len(state["lengths"]) <= 100
    assert len(packer._pieces) < 100 + 1024 + 1  # noqa: SLF001 - what it holds cannot be seen otherwise


def test_hard_packs_cut_samples_and_the_tail_is_dropped_and_counted() -> None:
    packer = HardPacking(max_length=5).open()

    assert packer.extend([3, 7], "ab") == [[("a", 0, 3), ("b", 0, 2)], [("b", 2, 7)]]
    assert packer.extend([4], ["c"]) == []
    assert packer.flush() == []
    assert packer.counts.tokens == {"tail": 4}
    assert packer.extend([5], ["d"]) == [[("d", 0, 5)]]  # after a flush it begins anew


def test_a_packing_says_whether_samples_are_cut_and_which_are_kept() -> None:
    assert HardPacking(max_length=5).cuts
    assert not soft().cuts
    assert [HardPacking(max_length=5).keeps(length) for length in (0, 1, 6)] == [False, True, True]
    assert [soft().keeps(length) for length in (0, 1, 10, 11)] == [False, True, True, False]
    assert soft(overlong="truncate").keeps(11)


def test_the_tail_of_hard_packs_can_be_kept() -> None:
    packer = HardPacking(max_length=5, keep_tail=True).open()

    assert packer.extend([4], "a") == []
    assert packer.flush() == [[("a", 0, 4)]]
    assert packer.flush() == []


@pytest.mark.parametrize("packing", [soft(), HardPacking(max_length=10)])
@pytest.mark.parametrize("lengths", [[-1], [1.5], ["a"], [[1]], [True]])
def test_lengths_are_whole_numbers(packing: Any, lengths: Any) -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        packing.open().extend(lengths, range(len(lengths)))


@pytest.mark.parametrize("packing", [soft(), HardPacking(max_length=10)])
def test_each_length_has_a_reference(packing: Any) -> None:
    with pytest.raises(ConfigError, match="2 lengths and 1 references"):
        packing.open().extend([1, 2], "a")


@pytest.mark.parametrize(
    ("packing", "state"),
    [
        (soft(), {"lengths": [1, 2], "taken": [], "references": ["a"]}),
        (soft(), {"lengths": "abc"}),
        (soft(), {"window": []}),
        (soft(), {"open_pack": [["a", 0, 11]]}),
        (HardPacking(max_length=5), {"open_pack": [["a", 0, 5]]}),
        (HardPacking(max_length=5), {"open_pack": [["a", 0]]}),
        (HardPacking(max_length=5), soft().open().state()),
    ],
)
def test_a_state_that_is_none_of_this_packing_is_refused(packing: Any, state: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match="^AD602 "):
        packing.open(state)


def test_a_state_knows_the_room_that_segments_take() -> None:
    packing = soft(max_length=16, window_samples=2, segment_multiple_of=8)
    packer = packing.open()
    assert packer.extend([1, 1, 8], "abc") == []  # a and b fill the pack
    again = packing.open(packer.state())

    assert names(again.extend([8], ["d"])) == names(packer.extend([8], ["d"])) == ["ab"]


def test_a_state_knows_the_tokens_of_the_window_that_are_packed_already() -> None:
    packing = SoftPacking(max_length=10, window_samples=1, window_tokens=20)
    packer = packing.open()
    assert names(packer.extend([9, 9, 1, 1, 9], "abcde")) == ["ac"]  # b is the oldest; c, which is after it, is gone
    assert packer.state()["taken"] == [0]
    again = packing.open(packer.state())

    # c's token, d's, e's nine and f's nine are a full window.
    assert packer.extend([9], ["f"]) == again.extend([9], ["f"]) == []
    assert packer.state() == again.state()
    assert again.state()["taken"] == []  # so c is let go of


def test_a_packer_does_not_change_the_state_that_it_was_restored_from() -> None:
    state = soft(overlong="drop").open().state()
    packer = soft(overlong="drop").open(state)

    packer.extend([11, 0, 4, 9], range(4))

    assert state == soft(overlong="drop").open().state()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SoftPacking, {"max_length": 0}, "max_length=0"),
        (SoftPacking, {"max_length": 10, "window_samples": "4"}, "window_samples='4'"),
        (SoftPacking, {"max_length": 10, "window_tokens": -1}, "window_tokens=-1"),
        (SoftPacking, {"max_length": 10, "overlong": "cut"}, "overlong='cut'"),
        (SoftPacking, {"max_length": 10, "segment_multiple_of": 4}, "no multiple of segment_multiple_of=4"),
        (HardPacking, {"max_length": 1.5}, "max_length=1.5"),
        (XTunerPacking, {"max_length": 10, "seed": -1}, "seed=-1"),
        (XTunerPacking, {"max_length": 10, "seed": 0, "kind": "soft"}, "kind='soft'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_settings_are_equal_by_value_and_unknown_ones_are_refused() -> None:
    assert SoftPacking(max_length=10) == SoftPacking(max_length=10, window_samples=256)
    with pytest.raises(ConfigError, match="did you mean 'window_"):
        SoftPacking(max_length=10, window=3)  # type: ignore[call-arg]


# The plans of XTuner; that they are XTuner's is tests/integration/test_against_xtuner.py.


@pytest.mark.parametrize(("kind", "digest"), [("expand_soft", "78edf2386f7844ff"), ("hard", "492f53b1c894c440")])
def test_a_plan_is_the_same_for_ever(kind: Any, digest: str) -> None:
    lengths = (np.arange(2000, dtype=np.int64) * 2_654_435_761 % 300) + 1
    plan = XTunerPacking(max_length=1000, seed=42, kind=kind, join_datasets=False, slice_samples=600).plan(
        [lengths[:500], lengths[500:]]
    )

    columns = b"".join(column.astype("<i8").tobytes() for column in plan)
    assert blake2b(columns, digest_size=8).hexdigest() == digest


@pytest.mark.parametrize("kind", ["expand_soft", "hard"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_plan_of_nothing_has_no_pack(kind: Any, joined: bool) -> None:
    packing = XTunerPacking(max_length=10, seed=0, kind=kind, join_datasets=joined)

    for lengths in ([], [np.empty(0, np.int64)]):
        plan = packing.plan(lengths)

        assert plan.num_packs == 0
        assert plan.offsets.tolist() == [0]


def test_a_hard_plan_of_less_than_a_pack_has_no_pack() -> None:
    assert XTunerPacking(max_length=10, seed=0, kind="hard").plan([np.array([4, 5])]).num_packs == 0


def test_a_soft_plan_has_every_sample_once_and_overlong_ones_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    plan = XTunerPacking(max_length=50, seed=1).plan([lengths])
    packs = [plan.pack(number) for number in range(plan.num_packs)]

    assert sorted(piece for pack in packs for piece in pack) == [(row, 0, n) for row, n in enumerate(lengths.tolist())]
    assert all(len(pack) == 1 or sum(stop for _, _, stop in pack) <= 50 for pack in packs)


@pytest.mark.parametrize("lengths", [[np.array([3, 0])], [np.array([1.5])], [np.array([[1]])]])
def test_a_plan_is_of_samples_with_tokens(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="whole numbers, from 1 on"):
        XTunerPacking(max_length=10, seed=0).plan(lengths)


def test_without_lookahead_a_soft_plan_is_next_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    packing = XTunerPacking(max_length=50, seed=1, lookahead=0)
    plan = packing.plan([lengths])
    rows = [row for number in range(plan.num_packs) for row, _, _ in plan.pack(number)]
    totals = [sum(stop for _, _, stop in plan.pack(number)) for number in range(plan.num_packs)]

    firsts = lengths[[plan.pack(number)[0][0] for number in range(1, plan.num_packs)]]
    assert sorted(rows) == list(range(300))
    assert all(total + first > 50 for total, first in zip(totals[:-1], firsts.tolist(), strict=True))


def test_costs_of_a_plan_are_those_given_or_xtuners_for_text() -> None:
    lengths, packing = [np.array([640, 64, 65])], XTunerPacking(max_length=1000, seed=0)

    assert proxy_cost(np.array([64, 65, 191, 192, 320])).tolist() == [0, 1, 1, 4, 4]
    assert packing.plan(lengths).costs.tolist() == [26]
    assert packing.plan(lengths, [np.array([0.5, 1.0, 2.25])]).costs.tolist() == [3]
