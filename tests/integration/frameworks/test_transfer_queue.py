"""A feeder of TransferQueue: nothing is lost and nothing comes twice, whichever of loader and queue was saved later."""

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata.errors import ConfigError
from asyncdata.integrations.transfer_queue import QueueFeeder
from tests.support.examples import in_ci
from tests.support.frameworks.killed_runs import needs
from tests.support.frameworks.transfer_queue import ALL, PARTITION, ROWS, VERL_TAG, Run, empty, opened, queue_of
from tests.support.loading import write_rows

pytestmark = pytest.mark.timeout(900)  # two nodes of Ray, and actors that import torch


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    needs("transfer_queue", "ray")
    with queue_of(tmp_path_factory.mktemp("queue")) as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


STEPS = ("fill", "fill", "train", "train", "roll_out", "save_loader", "save_queue", "crash")


@pytest.mark.thorough
@in_ci(max_examples=15)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), max_size=40),
    room=st.sampled_from([1, 4, 8, 50]),
    drop_last=st.booleans(),
)
@example([("fill", 0), ("save_queue", 0), ("crash", 0), ("fill", 0)], 1, False)
@example([("fill", 0), ("train", 3), ("save_queue", 0), ("crash", 0)], 4, False)
@example([("fill", 0), ("train", 0), ("save_loader", 0), ("crash", 0)], 4, False)
def test_each_prompt_is_trained_once_whatever_was_saved_when(path, real, steps, room, drop_last):
    run = Run(path, real, room, drop_last=drop_last)
    for name, which in steps:
        getattr(run, name)(which)
    assert run.finish() == ALL


@pytest.mark.thorough
def test_prompts_that_the_queue_did_not_take_are_put_by_the_next_call(path, real, monkeypatch):
    run = Run(path, real)

    def fail(**_):
        raise ConnectionError("the queue is away")

    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr("transfer_queue.kv_batch_put", fail)
        run.fill()
    assert run.finish() == ALL


@pytest.mark.thorough
def test_prompts_have_the_fields_and_tags_that_were_asked_for(path, real):
    queue, _ = real
    empty(queue)
    with opened(path, shuffle=False) as loader:
        feeder = QueueFeeder(loader, 2, tag=VERL_TAG)
        assert feeder.fill() == ["0:0:0", "0:0:1"]
        assert feeder.fill() == []
        assert queue.kv_list(PARTITION)[PARTITION]["0:0:1"] == VERL_TAG
        found = queue.kv_batch_get(keys=["0:0:1"], partition_id=PARTITION, select_fields=["prompt_ids", "extra"])
        [prompt_ids], [extra] = found["prompt_ids"], found["extra"]
        assert (list(prompt_ids), extra["id"]) == ([], 1)


@pytest.mark.parametrize("given", [{"commit": "on_delivery"}, {"room": 0}])
def test_a_loader_without_leases_and_a_queue_without_room_are_refused(path, given):
    with opened(path, commit=given.get("commit", "on_ack")) as loader, pytest.raises(ConfigError, match="AD466 Queue"):
        QueueFeeder(loader, given.get("room", 1))


def test_without_the_package_it_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with opened(path) as loader, pytest.raises(ConfigError, match="TransferQueue"):
        QueueFeeder(loader, 1)
