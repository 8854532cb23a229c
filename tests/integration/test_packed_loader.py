"""Loops over packs: what an epoch is, what its end does, and what a trainer may do to it in between."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    AsyncDataLoader,
    ConfigError,
    DataLoader,
    EndOfData,
    HardPacking,
    LengthGrouping,
    NoSamplesError,
    PackedCollator,
    PaddedCollator,
    Ranks,
    Shuffle,
    SnapshotMismatchError,
    SoftPacking,
)
from tests.support.loading import SHUFFLE

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 150
NUM_TOKENS = sum(1 + i * 7 % 23 for i in range(NUM_ROWS))


def repeated(row: dict[str, Any]) -> dict[str, Any]:
    """As many tokens as the row asks for, all of them its number."""
    return {"input_ids": [row["id"]] * row["n"]}


repeated.version = "1"  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", [1 + i * 7 % 23 for i in range(NUM_ROWS)])


def written(path: Path, lengths: list[int]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "n": n}) + "\n" for i, n in enumerate(lengths)))
    return path


def settings(**given: Any) -> dict[str, Any]:
    packing = SoftPacking(max_length=64, window_samples=16, window_tokens=128, across_epochs=True)
    usual = {"tokenize_fn": repeated, "packing": packing, "batch_size": 2, "shuffle": SHUFFLE, "num_workers": 0}
    return {**usual, "timeout_s": 240, **given}


def make(path: Path, **given: Any) -> DataLoader:
    return DataLoader(path, **settings(**given))


def shape(batch: Any) -> list[list[tuple[int, int]]]:
    """Each document of each pack: its row, and its tokens."""
    return [[(int(document.tokens[0]), len(document.tokens)) for document in pack] for pack in batch]


def epochs_of(loader: DataLoader, number: int) -> list[Any]:
    return [[shape(batch) for batch in loader] for _ in range(number)]


def rows_of(batches: list[Any]) -> Counter[int]:
    return Counter(row for batch in batches for pack in batch for row, _ in pack)


def test_every_sample_is_in_one_pack_of_every_epoch_when_epochs_are_packed_by_themselves(path: Path) -> None:
    packing = SoftPacking(max_length=64, window_samples=16, window_tokens=128, across_epochs=False)
    with make(path, packing=packing) as loader:
        epochs = epochs_of(loader, 3)

    assert [rows_of(batches) for batches in epochs] == [Counter(range(NUM_ROWS))] * 3
    assert epochs[0] != epochs[1]


def test_what_waits_at_an_epochs_end_goes_on_in_the_next_and_the_last_one_leaves_nothing(path: Path) -> None:
    with make(path, epochs=3) as loader:
        epochs = epochs_of(loader, 3)
        statistics = loader.statistics()

        assert next(iter(loader), None) is None
        assert sum(epochs, []) and rows_of(sum(epochs, [])) == Counter(list(range(NUM_ROWS)) * 3)
        assert rows_of(epochs[0]) != Counter(range(NUM_ROWS)), "the first one ends before its last packs are full"
        assert statistics.packed_tokens_total == 3 * NUM_TOKENS
        assert statistics.packs_total == sum(len(batch) for batch in sum(epochs, []))
        assert statistics.held_samples == 0 or loader.epoch == 3


def test_an_await_gives_the_same_batches(path: Path) -> None:
    async def all_of_it() -> list[Any]:
        async with AsyncDataLoader(path, **settings(epochs=2, length_grouping=LengthGrouping(window=4))) as loader:
            return [[shape(batch) async for batch in loader] for _ in range(2)]

    with make(path, epochs=2, length_grouping=LengthGrouping(window=4)) as loader:
        assert asyncio.run(all_of_it()) == epochs_of(loader, 2)


def test_two_tasks_that_iterate_get_every_pack_once(path: Path) -> None:
    async def all_of_it() -> list[Any]:
        async with AsyncDataLoader(path, **settings(epochs=1)) as loader:
            iterator = aiter(loader)
            found: list[Any] = []

            async def consume() -> None:
                found.extend([shape(batch) async for batch in iterator])

            await asyncio.gather(consume(), consume(), consume())
            return found

    assert rows_of(asyncio.run(all_of_it())) == Counter(range(NUM_ROWS))


def test_threads_that_iterate_get_every_pack_once(path: Path) -> None:
    with make(path, epochs=1) as loader:
        iterator, found = iter(loader), []
        threads = [threading.Thread(target=lambda: found.extend(map(shape, iterator))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert rows_of(found) == Counter(range(NUM_ROWS))


def test_a_loop_that_is_left_goes_on_where_it_was(path: Path) -> None:
    with make(path, epochs=1) as whole, make(path, epochs=1) as loader:
        first = [shape(batch) for batch in islice(iter(loader), 3)]

        assert [first + epochs_of(loader, 1)[0]] == epochs_of(whole, 1)


def test_an_epoch_that_fills_no_batch_is_packed_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with make(path) as loader:
        epochs = epochs_of(loader, 3)
        epoch = loader.epoch

    assert epoch == 3
    assert [rows_of(batches) for batches in epochs] == [Counter(range(3))] * 3


def test_a_loop_that_says_its_epoch_has_every_sample_of_few(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with make(path, ranks=Ranks(world_size=1)) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert [rows_of(batches) for batches in epochs_of(loader, 1)] == [Counter(range(3))]


def test_a_loop_runs_on_until_a_hard_pack_is_full(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with make(path, packing=HardPacking(max_length=64, across_epochs=True), batch_size=1) as loader:
        epochs = epochs_of(loader, 2)
        epoch = loader.epoch

    assert [len(batches) for batches in epochs] == [1, 1]
    assert all(sum(length for _, length in pack) == 64 for batches in epochs for batch in batches for pack in batch)
    assert epoch == 8


def test_a_loop_whose_epoch_was_named_is_over_that_epoch_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with make(path, packing=HardPacking(max_length=64, across_epochs=True), batch_size=1) as loader:
        found = []
        for epoch in range(8):
            loader.set_epoch(epoch)
            found.append(len(epochs_of(loader, 1)[0]))

    assert found == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("given", [{}, {"packing": None, "batch_size": 40, "drop_last": True}])
def test_a_run_resumed_behind_an_epochs_last_batch_repeats_nothing_if_it_names_its_epochs(
    path: Path, given: dict[str, Any]
) -> None:
    def read(loader: DataLoader, epoch: int) -> list[Any]:
        loader.set_epoch(epoch)
        packs = (batch if "packing" not in given else [[s] for s in batch] for batch in loader)
        return [[[int(item.tokens[0]) for item in pack] for pack in batch] for batch in packs]

    with make(path, epochs=3, **given) as loader:
        states, wanted = [], []
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                wanted.append((epoch, len(batch)))
                states.append(loader.state_dict())
    last = max(number for number, (epoch, _) in enumerate(wanted) if epoch == 0)
    with make(path, epochs=3, **given) as whole, make(path, epochs=3, **given) as loader:
        epochs = [read(whole, epoch) for epoch in range(3)]
        loader.load_state_dict(states[last])
        first = loader.epoch
        rest = [read(loader, epoch) for epoch in range(first, 3)]

    assert [batches for batches in rest if batches] == epochs[1:]


def test_one_epoch_of_few_samples_is_one_short_batch(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with make(path, epochs=1) as loader:
        assert [sorted(pack) for batch in epochs_of(loader, 1)[0] for pack in batch] == [[(0, 5), (1, 6), (2, 7)]]


def test_data_of_which_nothing_can_be_packed_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", [100, 200, 300])
    with (
        make(path, packing=SoftPacking(max_length=64, overlong="drop")) as loader,
        pytest.raises(NoSamplesError, match="AD401 epoch 0: no sample could be packed: 3 by overlong"),
    ):
        next(iter(loader))


def test_a_sample_too_long_for_a_pack_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "long.jsonl", [10, 20, 65, 30])
    with make(path, shuffle=False) as loader, pytest.raises(ConfigError, match=r"AD450 .*long\.jsonl:3 \(byte offset "):
        next(iter(loader))


@pytest.mark.parametrize("across_epochs", [True, False])
def test_packs_that_fill_no_batch_are_dropped_and_counted(path: Path, across_epochs: bool) -> None:
    packing = SoftPacking(max_length=64, window_samples=16, window_tokens=128, across_epochs=across_epochs)
    with make(path, packing=packing, batch_size=4, epochs=2, drop_last=True) as loader:
        batches = sum(epochs_of(loader, 2), [])
        statistics = loader.statistics()

    assert {len(batch) for batch in batches} == {4}
    num_samples = sum(rows_of(batches).values())
    assert statistics.unpacked_samples_total["drop_last"] == 2 * NUM_ROWS - num_samples > 0
    assert statistics.unpacked_tokens_total["drop_last"] + statistics.packed_tokens_total == 2 * NUM_TOKENS


def test_fewer_packs_than_a_batch_of_all_ranks_is_an_error_where_the_rest_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [5, 6, 7])
    with (
        make(path, epochs=1, drop_last=True) as loader,
        pytest.raises(NoSamplesError, match="AD406 epoch 0 has 1 pack"),
    ):
        next(iter(loader))


def test_a_last_batch_is_filled_for_all_ranks_with_its_own_packs(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [60, 61, 62])
    loaders = [make(path, epochs=1, ranks=Ranks(world_size=2, rank=rank), shuffle=False) for rank in range(2)]
    batches = [epochs_of(loader, 1)[0] for loader in loaders]
    for loader in loaders:
        loader.close()

    assert batches[0] == [[[(0, 60)], [(2, 62)]]]
    assert batches[1] == [[[(1, 61)], [(0, 60)]]]


def test_a_last_batch_that_is_not_filled_leaves_a_rank_without_one(tmp_path: Path) -> None:
    path = written(tmp_path / "few.jsonl", [60, 61, 62, 63, 64])
    given = {"epochs": 1, "batch_size": 2, "shuffle": False}
    loaders = [make(path, ranks=Ranks(rank=rank, world_size=2, round_up=False), **given) for rank in range(2)]
    batches = [epochs_of(loader, 1)[0] for loader in loaders]
    for loader in loaders:
        loader.close()

    assert [len(found) for found in batches] == [2, 1]
    assert rows_of(sum(batches, [])) == Counter(range(5))


def test_samples_of_like_length_are_computed_together_without_packing(path: Path) -> None:
    given = {"packing": None, "length_grouping": LengthGrouping(window=8), "collate_fn": PaddedCollator()}
    with make(path, batch_size=1, ranks=Ranks(world_size=4), epochs=1, **given) as loader:
        widths = [batch["input_ids"].shape for batch in loader]
    with make(path, batch_size=8, epochs=1, packing=None, length_grouping=LengthGrouping(window=8)) as loader:
        found = Counter(int(sample.tokens[0]) for batch in loader for sample in batch)

    assert len(widths) == -(-NUM_ROWS // 4)
    assert found == Counter(range(NUM_ROWS))


def test_a_collate_fn_is_given_packs_of_documents_with_their_samples(path: Path) -> None:
    with make(path, collate_fn=PackedCollator(max_length=64), batch_size=2) as loader:
        batch = next(iter(loader))
    with make(path) as loader:
        packs = next(iter(loader))

    assert batch["input_ids"].shape == (2, 64)
    assert batch["cu_seqlens"][-1] == 128
    document = packs[0][0]
    assert document.sample.position is not None
    assert list(document.tokens) == list(document.sample.tokens)


def test_a_batch_that_cannot_be_collated_is_the_next_one_again(path: Path) -> None:
    failures = [True, False, True, True, False]

    def fails_at_times(packs: list[Any]) -> Any:
        if failures and failures.pop(0):
            raise RuntimeError("not now")

        return shape(packs)

    with make(path, collate_fn=fails_at_times, epochs=1) as loader, make(path, epochs=1) as whole:
        iterator, found = iter(loader), []
        while True:
            try:
                found.append(next(iterator))
            except RuntimeError:
                state = loader.state_dict()
                assert state["packing"]["num_packs"] == 2 * len(found)
            except StopIteration:
                break

        assert [found] == epochs_of(whole, 1)


def test_a_state_holds_no_tokens_and_survives_json(path: Path) -> None:
    with make(path, length_grouping=LengthGrouping(window=4), epochs=2) as loader:
        batches = epochs_of(loader, 1)[0]
        state = json.loads(json.dumps(loader.state_dict()))
        rest = epochs_of(loader, 1)[0]
    with make(path, length_grouping=LengthGrouping(window=4), epochs=2) as loader:
        loader.load_state_dict(state)

        assert loader.epoch == 1
        assert epochs_of(loader, 1)[0] == rest
    assert batches
    assert len(json.dumps(state["packing"])) < 4000


def test_a_file_is_a_state_as_well(path: Path, tmp_path: Path) -> None:
    with make(path, epochs=1) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.save(tmp_path / "run.snapshot")
        rest = [shape(batch) for batch in iterator]
    with make(path, epochs=1) as loader:
        loader.restore(tmp_path / "run.snapshot")

        assert epochs_of(loader, 1)[0] == rest


def test_another_packing_is_refused_by_name(path: Path) -> None:
    with make(path) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(path, packing=HardPacking(max_length=64, across_epochs=True)) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"order\.packing"):
            loader.load_state_dict(state)

        loader.load_state_dict(state, allow_changed={"order"})
        assert loader.epoch == 1, "the next epoch begins"
        assert sum(length for _, length in shape(next(iter(loader)))[0]) == 64


def test_another_seed_begins_the_next_epoch_with_nothing_waiting(path: Path) -> None:
    with make(path) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(path, seed=7) as loader:
        loader.load_state_dict(state, allow_changed={"seed"})
        loader_batch = shape(next(iter(loader)))
    with make(path, seed=7) as other:
        other.set_epoch(1)
        assert shape(next(iter(other))) == loader_batch


def test_set_epoch_begins_an_epoch_and_leaves_the_present_one_alone(path: Path) -> None:
    packing = SoftPacking(max_length=64, window_samples=16, window_tokens=128, across_epochs=False)
    with make(path, packing=packing) as loader:
        first, second = epochs_of(loader, 2)
        loader.set_epoch(0)
        assert epochs_of(loader, 1) == [first]
        iterator = iter(loader)
        begun = shape(next(iterator))
        loader.set_epoch(1)
        assert [[begun, *map(shape, iterator)]] == [second]


def test_the_end_of_data_has_no_packs_left(path: Path) -> None:
    with make(path, epochs=1) as loader:
        epochs_of(loader, 1)
        state = loader.state_dict()
        assert epochs_of(loader, 2) == [[], []]
    with make(path, epochs=1) as loader:
        loader.load_state_dict(state)
        assert epochs_of(loader, 1) == [[]]
    with make(path, epochs=2) as loader:
        loader.load_state_dict(state)
        assert rows_of(epochs_of(loader, 1)[0]) == Counter(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n_samples_per_prompt": 2}, "n_samples_per_prompt"),
        ({"commit": "on_ack"}, "on_ack"),
        ({"buffer_filter": lambda buffer, number: buffer[:number]}, "buffer_filter"),
        ({"batch_size": None}, "batch_size"),
    ],
)
def test_settings_of_rollouts_are_refused_beside_packing(path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(path, **given)


@pytest.mark.parametrize("given", [{}, {"packing": None, "ranks": Ranks(world_size=2)}])
def test_calls_of_rollouts_say_that_batches_come_from_a_loop(path: Path, given: dict[str, Any]) -> None:
    with make(path, **given) as loader:
        for call in (loader.get_next_batch, loader.get_samples, loader.add_samples):
            with pytest.raises(ConfigError, match="come from a `for` loop"):
                call(2)  # type: ignore[operator]


@pytest.mark.parametrize("given", [{"ranks": {"rank": 2, "world_size": 2}}, {"ranks": {"rank": 1}}])
def test_a_rank_that_does_not_exist_is_refused(path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="counted from 0"):
        make(path, **given)


def test_ranks_without_packing_cut_batches_of_the_one_order(path: Path) -> None:
    def rows(loader: DataLoader, number: int | None = None) -> list[list[int]]:
        return [[int(sample.tokens[0]) for sample in batch] for batch in islice(iter(loader), number)]

    with make(path, packing=None, batch_size=6) as loader:
        whole = rows(loader)
    loaders = [make(path, packing=None, batch_size=3, ranks=Ranks(world_size=2, rank=rank)) for rank in range(2)]
    shares = [rows(loader, 10) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    again = make(path, packing=None, batch_size=6)
    with again:
        again.load_state_dict(states[1])
        rest = rows(again)

    assert [sorted([*one, *other]) for one, other in zip(*shares, strict=True)] == [sorted(b) for b in whole[:10]]
    assert shares[0] == [batch[::2] for batch in whole[:10]]
    assert rest == whole[10:]


def test_the_last_batch_of_ranks_without_packing_is_filled_or_dropped(path: Path) -> None:
    def sizes(round_up: bool | None = None, **given: Any) -> list[Any]:
        ranks = [Ranks(world_size=2, rank=rank, round_up=round_up) for rank in range(2)]
        loaders = [make(path, packing=None, batch_size=4, ranks=one, **given) for one in ranks]
        found = [[len(batch) for batch in loader] for loader in loaders]
        dropped = [loader.statistics().dropped_total for loader in loaders]
        for loader in loaders:
            loader.close()
        return [*found, dropped[0]]

    full = [4] * 18
    assert sizes() == [[*full, 4], [*full, 4], {}]
    assert sizes(round_up=False) == [[*full, 3], [*full, 3], {}]
    assert sizes(drop_last=True) == [full, full, {"drop_last": 6}]


def test_an_end_without_samples_is_no_batch(path: Path) -> None:
    with make(path, packing=None, epochs=1, batch_size=4, shuffle=Shuffle(enabled=False)) as loader:
        assert len(list(loader)) == -(-NUM_ROWS // 4)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
