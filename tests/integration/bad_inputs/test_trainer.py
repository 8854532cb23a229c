"""The catalogue of bad inputs, rows 59 to 69: what a trainer may do wrong with a loader."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, IterableSource, Sample
from asyncdata.errors import (
    BadRowError,
    ConfigError,
    FilterError,
    InvalidGroupError,
    LoaderClosedError,
    LoaderForkedError,
    PrefetchTimeoutError,
)
from asyncdata.filters import ByStaleness
from tests.support.bad_inputs import assert_is_ours
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, order_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ROWS = 60


def groups_of(loader: DataLoader) -> list[Any]:
    return loader.get_samples(3)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (lambda buffer, number: [[]], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: [list(buffer[0])], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: buffer[0], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: None, "AD430 .*returned NoneType; need a list of groups"),
        (lambda buffer, number: 7, "AD430 .*returned int; need a list of groups"),
        (lambda buffer, number: {}["reward"], r"AD431 .*raised KeyError\('reward'\); no group was taken"),
    ],
    ids=["foreign", "a copy", "wrong nesting", "nothing", "a number", "an error"],
)
def test_59_61_a_filter_that_returns_what_it_may_not_or_raises_takes_nothing(path, chosen, text):
    with make(path, buffer_filter=chosen) as loader:
        loader.add_samples(groups_of(loader))
        with pytest.raises(FilterError, match=text) as caught:
            loader.get_samples(1)
        assert_is_ours(caught.value, text[:5])
        assert isinstance(caught.value.__cause__, KeyError) is (text[:5] == "AD431")
        assert loader.statistics().buffered_groups == 3


def test_59_60_what_a_filter_returns_twice_or_does_not_remove_is_capped_and_served_once(path):
    """AD430 is for what is no group."""
    with make(path, buffer_filter=lambda buffer, number: [*buffer, *buffer]) as loader:
        groups = groups_of(loader)
        loader.add_samples(groups)
        assert loader.get_samples(2) == groups[:2]
        assert loader.get_samples(1) == groups[2:]
        assert ids(loader.get_next_batch(3)) == order_of(path)[3:6]


def not_serialisable(groups: list[Any]) -> Any:
    groups[1][0].extra["images"] = [threading.Lock()]
    return groups


TWICE = "AD432 group {} is in the buffer already, or has a sample twice; it would be served twice"
NO_LIST = "AD432 add_samples takes a list of groups, got {}"
NO_GROUP = "AD432 group {} must be a list of Sample, got {}"
OF_ANOTHER_SIZE = "AD432 group {} has {} samples, and n_samples_per_prompt is 2"
UNKNOWN = (
    "AD432 group 1: $.extra.images[0] is a _thread.lock, which a snapshot cannot hold. Keep it elsewhere, or turn it "
    "into numbers, text, lists, dicts or numpy arrays"
)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda groups: [groups[0], groups[1][:1]], OF_ANOTHER_SIZE.format(1, 1)),
        (lambda groups: [[], groups[0]], OF_ANOTHER_SIZE.format(0, 0)),
        (lambda groups: [groups[0] + groups[1]], OF_ANOTHER_SIZE.format(0, 4)),
        (lambda groups: [groups[0], groups[1], groups[0]], TWICE.format(2)),
        (lambda groups: [groups[0][:1] * 2], TWICE.format(0)),
        (not_serialisable, UNKNOWN),
        (lambda groups: {"group": groups[0]}, NO_LIST.format("dict")),
        (iter, NO_LIST.format("list_iterator")),
        (lambda groups: [groups[0], Sample()], f"{NO_GROUP.format(1, 'Sample')}; a group of one sample is [sample]"),
        (lambda groups: [tuple(groups[0])], NO_GROUP.format(0, "tuple")),
        (lambda groups: [[Sample(), "text", 5]], NO_GROUP.format(0, "a list of Sample, int, str")),
    ],
)
def test_62_groups_that_cannot_be_kept_are_refused_before_any_is_and_buffered_ones_as_well(path, spoil, text):
    with make(path, n_samples_per_prompt=2) as loader:
        groups, more = groups_of(loader), groups_of(loader)
        with pytest.raises(InvalidGroupError) as caught:
            loader.add_samples(spoil(groups))
        assert_is_ours(caught.value, "AD432")
        assert str(caught.value) == text
        loader.add_samples(more)
        for again in (more[1], [Sample(), more[1][1]]):
            with pytest.raises(InvalidGroupError) as caught:
                loader.add_samples([again])
            assert str(caught.value) == TWICE.format(0)
        assert loader.statistics().buffered_groups == 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (7, "a function of \\(buffer, num_groups\\), got int"),
        (ByStaleness, "got the class ByStaleness; make one of it"),
        ("asyncdata:__all__", "got tuple"),
        ("asyncdata.filters:ByStaleness", "got the class ByStaleness"),
        ("asyncdata.filters:nothing", "AD420 cannot import"),
    ],
)
def test_what_is_no_filter_is_refused_when_the_loader_is_made(path, what, message):
    with pytest.raises(ConfigError, match=message):
        make(path, buffer_filter=what)


@pytest.mark.parametrize("number", [0, -1, "3", 2.0, None, 3])
def test_63_a_number_that_cannot_be_asked_for_is_refused(path, number):
    with make(path, n_samples_per_prompt=2) as loader, pytest.raises(ConfigError) as caught:
        loader.get_next_batch(number)
    assert_is_ours(caught.value, "AD440")
    assert repr(number) in str(caught.value)


def test_63_a_number_beyond_all_reason_is_not_capped_but_waited_for(path):
    with make(path, timeout_s=0.3) as loader:
        with pytest.raises(PrefetchTimeoutError, match="^AD510 "):
            loader.get_next_batch(10**9)
        assert ids(loader.get_next_batch(5, timeout_s=240)) == order_of(path)[:5]


def test_64_threads_that_ask_at_the_same_time_get_disjoint_slices(path):
    with make(path) as loader, ThreadPoolExecutor(4) as threads:
        found = [threads.submit(lambda: ids(loader.get_next_batch(3))) for _ in range(NUM_ROWS // 3)]
        slices = sorted(future.result() for future in found)

    expected = order_of(path)
    assert slices == sorted(expected[first : first + 3] for first in range(0, NUM_ROWS, 3))


def test_65_closing_ends_a_wait_and_the_trainers_error_is_its_own(path):
    gate, began = threading.Event(), threading.Event()

    def waits(row: dict[str, Any]) -> list[int]:
        began.set()
        gate.wait(NEVER_S)
        return [row["id"]]

    loader = make(path, waits)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(loader.get_next_batch, 1)
        began.wait(NEVER_S)
        loader.close()
        error = taken.exception(NEVER_S)
        gate.set()

    assert isinstance(error, LoaderClosedError)
    assert str(error) == "AD502 the loader was closed by close()"
    with pytest.raises(KeyError, match="^'mine'$"), make(path) as loader:
        raise KeyError("mine")


def test_66_closing_twice_is_closing_and_every_use_afterwards_says_by_what(path):
    never_used = make(path)
    never_used.close()
    with make(path) as loader:
        loader.get_next_batch(1)
    loader.close()
    loader.close()
    with pytest.raises(LoaderClosedError) as caught:
        loader.get_next_batch(1)
    assert_is_ours(caught.value, "AD502")
    assert "at the end of its `with`" in str(caught.value)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_67_a_forked_child_is_refused_and_a_loader_cannot_be_copied(path):
    with make(path) as loader:
        loader.get_next_batch(1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            calls = [("get_next_batch", 1), ("get_samples", 1), ("__iter__",), ("add_samples", []), ("start",)]
            try:
                for name, *arguments in (*calls, ("load_state_dict", {}), ("set_epoch", 1)):
                    with pytest.raises(LoaderForkedError, match="^AD503 the loader was made in process"):
                        next(getattr(loader, name)(*arguments))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ids(loader.get_next_batch(1)) == order_of(path)[1:2]
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied or pickled: it owns a thread and processes"):
                copied(loader)


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_68_a_function_or_source_that_asks_its_own_loader_is_refused_and_does_not_wait_for_itself(path, backend):
    if backend != "asyncio":
        pytest.importorskip(backend)

    def rows(epoch: int) -> Iterator[dict[str, Any]]:
        yield {"id": loader.get_next_batch(1)[0].tokens[0]}

    asking = make(path, lambda row: [loader.get_next_batch(1)[0].tokens[0]], timeout_s=None, event_loop=backend)
    with asking as loader, pytest.raises(BadRowError, match=r"^AD421 .*ConfigError\('AD504 the loader is called"):
        loader.get_next_batch(1)
    with make(IterableSource(rows), timeout_s=None, event_loop=backend) as loader:
        with pytest.raises(ConfigError, match="^AD504 the loader is called"):
            loader.get_next_batch(1)
    with make(path) as other, make(path, lambda row: [row["id"], *ids(other.get_next_batch(1))]) as loader:
        assert len(loader.get_next_batch(3)) == 3, "another loader may be asked, as the error says"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda loader, buffer: loader.get_next_batch(1), id="get_next_batch"),
        pytest.param(lambda loader, buffer: loader.get_samples(1), id="get_samples"),
        pytest.param(lambda loader, buffer: loader.add_samples([[copy.copy(buffer[0][0])]]), id="add_samples"),
        pytest.param(lambda loader, buffer: loader.ack(), id="ack"),
        pytest.param(lambda loader, buffer: loader.set_epoch(7), id="set_epoch"),
    ],
)
def test_68_so_is_a_filter_and_nothing_is_changed(path, call):
    calls = [call]

    def asks(buffer: list[Any], number: int) -> list[Any]:
        for each in calls:
            each(loader, buffer)
        return buffer[:number]

    with make(path, buffer_filter=asks, timeout_s=None) as loader:
        groups = groups_of(loader)
        loader.add_samples(groups)
        for number in (1, 5):  # the second one has to wait for the stream as well
            with pytest.raises(
                FilterError, match=r"^AD431 .*ConfigError\(.AD504 the buffer filter .* calls the loader"
            ):
                loader.get_samples(number)
        calls.clear()
        assert loader.get_samples(3) == groups
        assert ids(loader.get_next_batch(3)) == order_of(path)[3:6]


def test_69_ranks_that_are_fed_only_say_how_far_to_read_ahead(path):
    found = []
    for knobs in ({}, {"dp_size": 1}, {"dp_size": 8, "buffer_size": 2}):
        with make(path, **knobs) as loader:
            found.append(ids(loader.get_next_batch(NUM_ROWS)))

    assert found == [order_of(path)] * 3
    with pytest.raises(ConfigError, match="dp_size"):
        make(path, dp_size=0)
