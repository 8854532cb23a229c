"""Batches and loops are slices of the order, epoch by epoch, to the end: of ``DataLoader`` and ``AsyncDataLoader``.

What a ``DataLoader`` does in any order of calls is in ``test_whole_loader.py``.
"""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncdata import JsonlSource, Position, Sample, SourceLocation, Status
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import ConfigError, LoaderClosedError, NoSamplesError, WorkerError
from tests.support import worker_fns
from tests.support.faces import FACES
from tests.support.faults import until
from tests.support.loaders import bad_row_at, gated
from tests.support.loaders import make as open_loader
from tests.support.loading import NUM_ROWS, ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import waits_for_a_file


@pytest.fixture(params=FACES.values(), ids=FACES)
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    opened: Callable[..., Any] = request.param
    return opened


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in ids(batch)]


def test_a_sample_says_what_it_is_and_where_it_comes_from(make, path):
    with make(path, n_samples_per_prompt=2) as loader:
        loader.get_next_batch(4)
        first, second = loader.get_next_batch(2)

    row = int(first.tokens[0])
    line, offset = line_of(path, row)
    assert (first.index, second.index) == (4, 5)
    assert (first.group_index, second.group_index) == (2, 2)
    assert first.position == second.position == Position(0, 0, 2)
    assert first.source == SourceLocation(str(path), offset, len(path.read_bytes().splitlines()[row]))
    assert first.source.line_number() == line
    assert (first.label, first.prompt, first.metadata, first.extra) == (row, None, {}, {})
    assert first.tokens.dtype == np.int32
    assert not first.tokens.flags.writeable
    assert np.shares_memory(first.tokens, second.tokens)
    assert first.status is Status.PENDING


def test_samples_of_a_group_share_no_value_that_a_trainer_may_change(make, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 1}) + "\n")
    fn = lambda row: {"input_ids": [1], "metadata": {"list": []}, "label": [5]}  # noqa: E731
    with make(path, fn, n_samples_per_prompt=2) as loader:
        first, second = loader.get_next_batch(2)

    first.metadata["list"].append(1)
    first.label.append(2)
    assert (second.metadata, second.label) == ({"list": []}, [5])


def test_a_batch_must_be_whole_groups_and_a_number_of_groups_a_number(make, path):
    with make(path, n_samples_per_prompt=2) as loader:
        for number in (0, -1, 3, "2", 2.0, None):
            with pytest.raises(ConfigError, match="^AD440 num_samples must be a positive multiple"):
                loader.get_next_batch(number)
            if number not in (0, 3):
                with pytest.raises(ConfigError, match="^AD440 num_groups"):
                    loader.get_samples(number)
        assert loader.get_samples(0) == []
        assert ids(loader.get_next_batch(np.int64(2))) == [order_of(path)[0]] * 2
        assert len(loader.get_samples(np.int32(2))) == 2
        with pytest.raises(ConfigError, match="iterating needs batch_size"):
            iter(loader)


def test_nothing_is_asked_before_the_first_batch_is_wanted(make, path):
    with make(path, batch_size=64) as loader:
        loop = iter(loader)
        loader.get_next_batch(150)
        assert flat(loop) == order_of(path)[150:]
        assert next(loop, None) is None, "the end is the end"


def test_an_epoch_of_less_than_a_batch_under_drop_last_is_an_error_each_time(make, path):
    with make(path, batch_size=NUM_ROWS + 1, drop_last=True) as loader:
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            with pytest.raises(NoSamplesError, match=f"AD406 epoch {epoch} has fewer samples than one batch"):
                next(iter(loader))


@pytest.mark.parametrize(
    "knobs",
    [{}, *(pytest.param(k, marks=pytest.mark.thorough) for k in ({"commit": "on_ack"}, {"buffer_size": 3}))],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_whose_collate_fn_raises_is_not_consumed(make, path, size, knobs):
    """Wherever it came from: the middle of what is ready, its edge, or a wait."""
    chance, num_calls = random.Random(1), 0

    def collate(samples: list[Sample]) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        if chance.random() < 0.5:
            raise RuntimeError("out of memory")
        return ids(samples)

    with make(path, batch_size=10, collate_fn=collate, n_samples_per_prompt=size, **knobs) as loader:
        seen, loop = [], iter(loader)
        while len(seen) < 2 * size * NUM_ROWS:
            try:
                seen += next(loop)
            except RuntimeError:
                num_calls -= 1
            except StopIteration:
                loop = iter(loader)

    assert seen == [number for number in order_of(path, 2) for _ in range(size)]
    assert num_calls == len(seen) // 10, "every batch is collated once"


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_tokenizer_that_cannot_be_opened_is_an_error_at_every_call(make, path, num_workers):
    with make(path, worker_fns.Opening("raises"), num_workers=num_workers) as loader:
        for epoch in (0, 0, 3):
            loader.set_epoch(epoch)
            with pytest.raises(WorkerError, match="^AD426 the tokenize function cannot be opened: FileNotFoundError"):
                loader.get_next_batch(1)


def test_after_closing_every_use_says_so_and_the_state_is_that_of_the_last_delivery(make, path):
    with make(path, batch_size=2) as loader:
        batch = loader.get_next_batch(33)
        loader.close()
        loader.close()
        state = loader.state_dict()
        calls = [("get_next_batch", 1), ("get_samples", 1), ("add_samples", [batch]), ("ack",), ("start",)]
        for name, *arguments in (*calls, ("load_state_dict", state), ("set_epoch", 1), ("__iter__",)):
            with pytest.raises(LoaderClosedError, match=r"^AD502 the loader was closed by a?close\(\)"):
                next(getattr(loader, name)(*arguments))
        assert loader.statistics().samples_total == 33

    with make(path, batch_size=2) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(3)) == order_of(path)[33:36]
    assert [sample.label for sample in batch] == order_of(path)[:33], "samples outlive their loader"


def test_any_function_runs_inline_and_workers_say_what_they_need(path):
    with open_loader(path, lambda row: [row["id"]]) as loader:
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]

    with pytest.raises(ConfigError, match="^AD420 .*num_workers=0 to run it in this process"):
        open_loader(path, lambda row: [row["id"]], num_workers=1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_function_that_calls_exit_has_a_bad_row(path, num_workers):
    special = write_rows(path, NUM_ROWS, {13: {"do": "exit"}})
    with open_loader(special, worker_fns.as_told, num_workers=num_workers) as loader:
        _, error = bad_row_at(loader)

    assert (error.code, error.line) == ("AD421", 14)


def test_a_source_is_a_path_a_list_a_folder_a_glob_or_a_description(path):
    folder = str(path.parent)
    sources: list[Any] = [str(path), path, [str(path)], [path], (path,), folder, f"{folder}/*.jsonl"]
    for source in (*sources, JsonlSource(str(path))):
        with open_loader(source) as loader:
            assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


ROWS: list[tuple[Any, str]] = [([{"id": 0}], "list"), (({"id": number} for number in range(3)), "generator")]


class Tokenizer:
    """As a tokenizer of transformers, which can be called too."""

    name_or_path = "Qwen/Qwen3-0.6B"

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return tokens

    def __call__(self, text: Any) -> Any:
        return {"input_ids": [1]}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *((given, "^a source is a path") for given in (7, None, b"rows.jsonl", {"rows.jsonl"})),
        *((given, rf"^a {kind} of rows .*IterableSource\(make\)") for given, kind in ROWS),
    ],
)
def test_anything_else_is_no_source(source, told):
    with pytest.raises(ConfigError, match=told):
        open_loader(source)


@pytest.mark.parametrize("given", [str(tokenizer_folder()), "Qwen/Qwen3-0.6B", Tokenizer()])
def test_a_tokenizer_alone_is_no_tokenize_function(path, given):
    with pytest.raises(ConfigError, match=r"^AD420 '\S+' is a tokenizer.* pass ChatTokenizeFn\('\S+'\) for chats"):
        open_loader(path, given)


def test_threads_that_restore_and_exclude_do_not_wait_for_each_other(path):
    with open_loader(path) as loader, ThreadPoolExecutor(2) as threads:
        state, rows = loader.state_dict(), loader.get_next_batch(1)
        calls = [partial(loader.load_state_dict, state), partial(loader.exclude, rows)]

        assert len(list(threads.map(lambda call: [call() for _ in range(200)], calls))) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_may_be_asked_for_whenever_and_count_what_was_delivered(tmp_path, num_workers):
    path, gate = gated(tmp_path, 0)
    with open_loader(path, waits_for_a_file, shuffle=False, n_samples_per_prompt=2, num_workers=num_workers) as loader:
        assert loader.statistics().ready_samples == 0
        loader.start()
        until(lambda: loader.statistics().to_dict()["asyncdata_workers_busy"] == 1)
        with ThreadPoolExecutor() as threads:
            batch = threads.submit(loader.get_next_batch, 20)
            until(lambda: loader.statistics().data_wait_seconds_total > 0)
            gate.touch()
            batch.result()
    now = loader.statistics()

    assert (now.samples_total, now.groups_total, now.tokens_total) == (20, 10, 10)
    assert (now.epoch, now.window, now.waits_total) == (0, 0, 1)
