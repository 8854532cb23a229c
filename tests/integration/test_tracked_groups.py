"""Groups that are tracked, acknowledged or given back: loops over them, what is refused, and what a restart serves."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import date

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from asyncdata import AsyncDataLoader, Sample, SoftPacking, Status
from asyncdata.errors import ConfigError, EndOfData, FilterError, InvalidGroupError, LoaderClosedError, SnapshotError
from tests.support.faults import until
from tests.support.loaders import gated, is_wanted, make
from tests.support.loading import ids, order_of, row_id, waits_for_a_file, write_rows

NUM_ROWS, SIZE = 24, 2


def numbers(groups):
    return [group[0].group_index for group in groups]


def test_what_was_served_before_is_not_tracked_and_a_sample_or_a_copy_stands_for_its_group(rows):
    with make(rows, n_samples_per_prompt=SIZE) as loader:
        early = loader.get_samples(1)
        loader.track()
        loader.track()
        groups = loader.get_samples(3)
        loader.consume([groups[0][1], groups[0][0]])
        loader.consume([list(groups[1])])
        with pytest.raises(ConfigError, match="AD437 consume takes .* once: group 0 was not served, or"):
            loader.consume([*groups[2:], *early])
        with pytest.raises(ConfigError, match="AD437 .*: group without a number was not served"):
            loader.consume([[Sample(), Sample()]])
        assert loader.drop([*groups[2:], *early], "stale") == 1


def test_what_is_not_tracked_is_refused(rows):
    with make(rows) as loader:
        groups = loader.get_samples(2)
        with pytest.raises(ConfigError, match=r"AD437 groups are not tracked: call track\(\) before the first"):
            loader.consume(groups)
        with pytest.raises(ConfigError, match="AD437 groups are not tracked"):
            loader.drop(groups, "stale")
        with pytest.raises(ConfigError, match=r"AD437 drop\(\) takes a reason, such as 'stale', got ''"):
            loader.drop(groups, "")
    with make(rows, commit="on_ack") as loader:
        groups = loader.get_samples(2)
        loader.consume(groups)
        assert loader.statistics().tracked_groups == 0
    packed = make(rows, packing=SoftPacking(max_length=64), batch_size=1)
    with packed as loader, pytest.raises(ConfigError, match=r"not from track\(\)"):
        loader.track()


def test_a_short_last_batch_stays_dropped_after_a_restart_before_it_and_is_counted_once(rows):
    knobs = {"commit": "on_ack", "epochs": 1, "drop_last": True}
    with make(rows, **knobs) as loader:
        first, second = loader.get_samples(10), loader.get_samples(10)
        with pytest.raises(EndOfData):
            loader.get_samples(10)
        loader.ack(first)
        state = loader.state_dict()
    with make(rows, **knobs) as loader:
        loader.load_state_dict(state)
        assert numbers(loader.get_samples(10)) == numbers(second)
        with pytest.raises(EndOfData):
            loader.get_samples(1)
        assert loader.statistics().dropped_total == {"drop_last": 4}


def test_what_is_acknowledged_comes_no_more_also_if_it_was_the_first_of_its_call(rows):
    with make(rows, commit="on_ack", shuffle=False) as loader:
        loader.ack(loader.get_samples(3)[:1])
        state = loader.state_dict()
    with make(rows, commit="on_ack", shuffle=False) as loader:
        loader.load_state_dict(state)
        assert numbers(loader.get_samples(3)) == [1, 2, 3]


def test_groups_of_many_calls_are_acknowledged_in_one(rows):
    with make(rows, commit="on_ack") as loader:
        loader.ack([group for _ in range(3) for group in loader.get_samples(2)])
        assert loader.statistics().leased_requests == 0


def test_an_epoch_of_which_all_is_acknowledged_or_excluded_is_followed_by_the_next(tmp_path):
    path, knobs = write_rows(tmp_path / "rows.jsonl", 3), {"commit": "on_ack", "shuffle": False}
    with make(path, **knobs) as loader:
        groups = loader.get_samples(3)
        loader.ack(groups[1:])
        loader.exclude(groups[:1])
        state = loader.state_dict()
    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        assert [ids(group) for group in loader.get_samples(2)] == [[1], [2]]


def test_a_short_last_batch_that_is_dropped_leaves_in_the_buffer_what_was_given_back(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 3)
    with make(path, epochs=1, drop_last=True, shuffle=False) as loader:
        groups = loader.get_samples(2)
        loader.add_samples(groups[:1])
        with pytest.raises(EndOfData) as end:
            loader.get_samples(3)
        assert end.value.groups == []
        assert loader.get_samples(1) == groups[:1]


def test_numbers_go_on_after_groups_that_were_out_where_another_epoch_is_begun_after_a_restart(rows):
    with make(rows, commit="on_ack") as loader:
        loader.add_samples(loader.get_samples(1))
        loader.get_samples(3)
        state = loader.state_dict()
    with make(rows, commit="on_ack") as loader:
        loader.load_state_dict(state)
        loader.get_samples(1)
        loader.set_epoch(1)
        assert loader.statistics().tracked_groups == 1, "that of the buffer"
        assert numbers(loader.get_samples(1)) == [3]


def finished(groups):
    for sample in (sample for group in groups for sample in group):
        sample.response, sample.response_length, sample.status = "Yes", 1, Status.COMPLETED
        sample.tokens = np.append(sample.tokens, np.int32(9))
    return groups


def test_a_loop_goes_on_as_groups_end_in_other_tasks_and_is_over_when_none_is_left(rows):
    """Even groups are finished at once, odd ones at the second time; the trainer is told the end by a short batch."""

    async def work(loader, group):
        await anyio.lowlevel.checkpoint()
        if group[0].group_index % 2 == 0 or group[0].response:
            loader.add_samples(finished([group]))
        else:
            group[0].response = "so far"
            loader.add_samples([group])

    async def run():
        most, batches = [], []
        async with AsyncDataLoader(rows, tokenize_fn=row_id, epochs=1, num_workers=0) as loader:

            async def begin():
                async for group in loader.groups(max_out=5, max_finished=4):
                    most.append(loader.statistics().tracked_groups)
                    tasks.start_soon(work, loader, group)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(begin)
                while not batches or len(batches[-1]) == 3:
                    batches.append(await loader.take_finished(3, at_least=3))
                    loader.consume(batches[-1])
            return most, batches

    most, batches = anyio.run(run)
    assert len(most) == NUM_ROWS + NUM_ROWS // 2
    assert max(most) <= 5
    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(NUM_ROWS))


def test_to_wait_for_groups_that_are_out_is_no_wait_for_data_and_ends_with_the_loader(rows):
    async def run():
        told = []

        async def take(groups):
            try:
                told.append(await anext(groups))
            except LoaderClosedError as error:
                told.append(error)

        async with (
            AsyncDataLoader(rows, tokenize_fn=row_id, num_workers=0) as loader,
            anyio.create_task_group() as tasks,
        ):
            await loader.peek(4)
            before, groups = loader.statistics().waits_total, loader.groups(max_out=1)
            await take(groups)
            tasks.start_soon(take, groups)
            await anyio.wait_all_tasks_blocked()
            assert (len(told), loader.statistics().waits_total) == (1, before)
            loader.consume([told[0]])
            await anyio.wait_all_tasks_blocked()
            assert (len(told), loader.statistics().tracked_groups) == (2, 1)
            tasks.start_soon(take, groups)
            await anyio.wait_all_tasks_blocked()
            await loader.aclose()
        return told[2]

    assert isinstance(anyio.run(run), LoaderClosedError)


def test_what_is_out_may_come_back_when_only_rows_that_are_no_samples_are_left(tmp_path):
    (path := tmp_path / "rows.jsonl").write_text('{"id": 0}\n' + '{"id":\n' * 50)
    with (
        make(path, epochs=1, shuffle=False, bad_rows="skip", buffer_size=1) as loader,
        ThreadPoolExecutor(1) as threads,
    ):
        loop = loader.groups(max_out=9)
        group = next(loop)
        again = threads.submit(next, loop)
        until(lambda: loader.statistics().bad_rows_total == 50)
        loader.add_samples([group])
        assert numbers([again.result()]) == [0]
        loader.consume([group])
        assert next(loop, None) is None


def test_a_plain_loop_waits_for_other_threads(rows):
    with make(rows, epochs=1) as loader, ThreadPoolExecutor(2) as threads:
        served = []
        for group in loader.groups(max_out=2):
            served.append(group)
            threads.submit(loader.consume, [group])
        assert numbers(served) == list(range(NUM_ROWS))


def test_limits_that_cannot_work_are_refused(rows):
    with make(rows) as loader:
        for call in (
            lambda: loader.groups(max_out=0),
            lambda: loader.groups(max_out=1, max_finished=0),
            lambda: loader.take_finished(2, at_least=3),
            lambda: loader.get_samples(2, at_least=0),
            lambda: setattr(loader, "policy_version", 0.5),
            lambda: make(rows, max_policy_lag=1, too_old="later"),
            lambda: make(rows, max_policy_lag=1, packing=SoftPacking(max_length=64), batch_size=1),
        ):
            with pytest.raises(ConfigError, match="AD438"):
                call()


def test_finished_groups_that_are_taken_while_a_call_waits_are_not_served_by_that_call_as_well(tmp_path):
    path, gate = gated(tmp_path, 20)
    knobs = {"shuffle": False, "buffer_size": 8}
    with make(path, waits_for_a_file, **knobs) as loader, ThreadPoolExecutor(1) as threads:
        loader.add_samples(finished(loader.get_samples(2)))
        waits = threads.submit(loader.get_samples, 30)
        until(lambda: is_wanted(loader))
        taken = numbers(loader.take_finished(1))
        gate.touch()
        assert (taken, numbers(waits.result())) == ([0], list(range(1, 31)))


def test_a_group_that_is_too_old_is_the_prompt_that_it_was(rows):
    with make(rows, max_policy_lag=0) as loader:
        (group,) = loader.get_samples(1)
        prompt = group[0].tokens.tolist()
        loader.policy_version = 3
        loader.add_samples(finished([group]))
        assert loader.take_finished(1) == []
        ((sample,),) = loader.get_samples(1)
        assert (sample.tokens.tolist(), sample.response, sample.status) == (prompt, "", Status.PENDING)
        assert (sample.extra["policy_version"], loader.policy_version) == (3, 3)
        state = loader.state_dict()
    with make(rows) as loader:
        loader.load_state_dict(state)
        assert loader.policy_version == 3
        assert loader.statistics().too_old_groups_total == {"reset": 1}


def test_a_group_that_was_out_and_is_too_old_is_reset_by_a_restart(rows):
    with make(rows, max_policy_lag=0, commit="on_ack") as loader:
        loader.add_samples(finished(loader.get_samples(1)))
        loader.take_finished(1)
        loader.policy_version = 3
        state = loader.state_dict()
    with make(rows, max_policy_lag=0, commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert loader.statistics().too_old_groups_total == {"reset": 1}


def test_a_function_decides_what_is_done_with_a_group_that_is_too_old(rows):
    words = {0: "keep", 1: "drop", 2: "reset", 3: "burn"}
    with make(rows, max_policy_lag=0, too_old=lambda group: words[group[0].group_index]) as loader:
        loader.add_samples(finished(loader.get_samples(3)))
        loader.policy_version = 1
        assert numbers(loader.take_finished(9)) == [0]
        now = loader.statistics()
        assert now.too_old_groups_total == {"drop": 1, "reset": 1}
        assert now.dropped_groups_total == {"too_old": 1}
        loader.get_samples(1)
        groups = finished(loader.get_samples(2))
        loader.add_samples(groups[:1])
        with pytest.raises(FilterError, match="AD431 too_old returned 'burn'"):
            loader.policy_version = 2
        assert loader.policy_version == 1
        loader.add_samples(groups[1:])
        with pytest.raises(FilterError, match="AD431 too_old raised KeyError"):
            words.clear()
            loader.policy_version = 2


PAIRS = {"n_samples_per_prompt": 2}


def newest_first(buffer, num_groups):
    return buffer[::-1][:num_groups]


def test_a_filter_may_be_named_by_its_import_path(path):
    with make(path, buffer_filter=f"{__name__}:newest_first") as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:3])
        assert numbers(loader.get_samples(2)) == [2, 1]


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
    packed = base64.b64encode(msgspec.msgpack.encode([{"tokens": {"__ndarray__": 5}}])).decode()
    for text, match in (("%", "AD602 .* buffer cannot be read"), (packed, "")):
        with make(path) as loader, pytest.raises(SnapshotError, match=match or "AD602 .* buffer cannot be read: Type"):
            loader.load_state_dict(state | {"buffer": [text]})
            assert not match, "it is refused at once"
            loader.get_samples(1)
