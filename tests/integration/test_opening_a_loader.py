"""``DataLoader``: which functions and sources it takes, and what its statistics say of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, JsonlSource, PromptTokenizeFn
from tests.support import worker_fns
from tests.support.faults import until
from tests.support.loaders import bad_row_at, gated, make
from tests.support.loading import ids, order_of, write_rows
from tests.support.tokenize_fns import waits_for_a_file

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 200


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def test_any_function_runs_inline_and_workers_say_what_they_need(path):
    with make(path, lambda row: [row["id"]]) as loader:
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]

    with pytest.raises(ConfigError, match="^AD420 .*num_workers=0 to run it in this process"):
        make(path, lambda row: [row["id"]], num_workers=1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_function_by_its_import_path(path, num_workers):
    with make(path, "tests.support.tokenize_fns:row_id", num_workers=num_workers) as loader:
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


@pytest.mark.parametrize("name", ["nowhere", "nowhere:fn", "tests.support.tokenize_fns:nothing", "a b:c"])
def test_a_function_that_cannot_be_imported_is_refused_at_once(path, name):
    with pytest.raises(ConfigError, match="^AD420 "):
        make(path, name)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_function_that_calls_exit_has_a_bad_row(path, num_workers):
    special = write_rows(path, NUM_ROWS, {13: {"do": "exit"}})
    with make(special, worker_fns.as_told, num_workers=num_workers) as loader:
        _, error = bad_row_at(loader)

    assert (error.code, error.line) == ("AD421", 14)


def test_a_source_is_a_path_a_list_a_folder_a_glob_or_a_description(path):
    folder = str(path.parent)
    sources: list[Any] = [str(path), path, [str(path)], [path], (path,), folder, f"{folder}/*.jsonl"]
    for source in (*sources, JsonlSource(str(path))):
        with make(source) as loader:
            assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


@pytest.mark.parametrize("source", [7, None, b"rows.jsonl", {"rows.jsonl"}])
def test_anything_else_is_no_source(source):
    with pytest.raises(ConfigError, match="^a source is a path"):
        make(source)


@pytest.mark.thorough
def test_a_prompt_is_tokenized_by_workers_as_inline(tmp_path, small_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {i} + {i}?", "label": i}) + "\n" for i in range(100)))
    fn = PromptTokenizeFn(str(small_tokenizer), prompt_key="prompt", label_key="label")

    found = []
    for num_workers in (0, 2):
        with make(path, fn, num_workers=num_workers) as loader:
            batch = loader.get_next_batch(100)
        found.append([(sample.prompt, sample.label, sample.tokens.tolist()) for sample in batch])

    assert found[0] == found[1]
    assert sorted(label for _, label, _ in found[0]) == list(range(100))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_may_be_asked_for_whenever_and_count_what_was_delivered(tmp_path, num_workers):
    path, gate = gated(tmp_path, 0)
    with make(path, waits_for_a_file, shuffle=False, n_samples_per_prompt=2, num_workers=num_workers) as loader:
        assert loader.statistics().ready_samples == 0
        loader.start()
        until(lambda: loader.statistics().to_dict()["asyncdata_workers_busy"] == 1)
        gate.touch()
        loader.get_next_batch(20)
    now = loader.statistics()

    assert (now.samples_total, now.groups_total, now.tokens_total) == (20, 10, 10)
    assert (now.epoch, now.window, now.waits_total) == (0, 0, 1)
    assert now.data_wait_seconds_total > 0


def test_blank_lines_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"id": 0}\r\n   \n\n{"id": 1}')
    with make(path, shuffle=False, epochs=1) as loader:
        assert ids(loader.get_next_batch(2)) == [0, 1]
        assert loader.statistics().blank_lines_total == 3
