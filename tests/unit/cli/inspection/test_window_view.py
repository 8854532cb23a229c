"""What inspection shows is what a loader delivers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from asyncdata import DataLoader, JsonlSource, PromptTokenizeFn, Shuffle
from asyncdata.cli.inspection.window_view import (
    WindowView,
    estimate_num_rows,
    line_numbers,
    open_order,
    position_of,
    rows_of_window,
)
from asyncdata.errors import ConfigError, NoSamplesError, SourceChangedError, SourceError
from asyncdata.types import Position
from tests.support.tokenize_fns import every_third_dropped, fails_on_13, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHUFFLES = {
    "many windows": Shuffle(block_bytes=512, window_blocks=4),
    "one window": Shuffle(),
    "as they lie": Shuffle(enabled=False, block_bytes=700, window_blocks=3),
    "rows longer than blocks": Shuffle(block_bytes=16, window_blocks=50),
}
NUM_ROWS = 300


@pytest.fixture
def rows(jsonl_file: Callable[..., Path]) -> list[str]:
    """Two files, the second with blank lines, a carriage return and no end of its last line."""
    first = [{"id": number, "text": "x" * (number % 37)} for number in range(NUM_ROWS // 2)]
    second = [json.dumps({"id": number, "text": "é" * (number % 31)}).encode() for number in range(150, NUM_ROWS)]
    second = [line + b"\r" * (len(line) % 2) + b"\n" * (len(line) % 3 == 0) for line in second]
    return [str(jsonl_file(first, "a.jsonl")), str(jsonl_file(second, "b.jsonl", final_newline=False))]


def all_rows(paths: list[str], shuffle: Shuffle, epoch: int) -> Iterator[tuple[Position, object]]:
    files, order = open_order(paths, seed=7, shuffle=shuffle)
    for window in range(order.num_windows):
        for row, location in enumerate(rows_of_window(files, order, epoch, window)):
            yield Position(epoch, window, row), location


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_the_rows_of_the_windows_are_what_the_loader_delivers(rows, shuffle):
    shown = [*all_rows(rows, shuffle, 0), *all_rows(rows, shuffle, 1)]

    with DataLoader(rows, tokenize_fn=row_id, seed=7, shuffle=shuffle, num_workers=0, epochs=2) as loader:
        samples = loader.get_next_batch(2 * NUM_ROWS, timeout_s=30)

    assert len(shown) == 2 * NUM_ROWS
    assert shown == [(sample.position, sample.source) for sample in samples]


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_a_look_at_a_row_is_what_a_worker_makes_of_it(rows, shuffle):
    with DataLoader(rows, tokenize_fn=row_id, seed=7, shuffle=shuffle, num_workers=0) as loader:
        sample = loader.get_next_batch(NUM_ROWS + 40, timeout_s=30)[-1]
    files, order = open_order(rows, seed=7, shuffle=shuffle)

    with WindowView(files, order, sample.position.epoch, sample.position.window, row_id) as view:
        look = view.look(sample.position.row)

    assert look.sample is not None
    assert look.location == sample.source
    assert look.sample.position == sample.position
    assert look.sample.tokens.tolist() == sample.tokens.tolist() == [json.loads(look.raw)["id"]]
    with open(sample.source.path, "rb") as file:
        file.seek(sample.source.byte_offset)
        assert file.read(sample.source.num_bytes) == look.raw


def test_a_look_without_a_tokenize_function_shows_the_row_alone(rows):
    files, order = open_order(rows)

    with WindowView(files, order, 0, 0) as view:
        look = view.look(3)

    assert set(json.loads(look.raw)) == {"id", "text"}
    assert (look.sample, look.dropped, look.error) == (None, "", None)


def test_a_look_says_why_a_row_is_dropped(jsonl_file):
    files, order = open_order(str(jsonl_file([{"id": 3}])), shuffle=False)

    with WindowView(files, order, 0, 0, every_third_dropped) as view:
        look = view.look(0)

    assert (look.sample, look.dropped, look.error) == (None, "tokenize_fn", None)


def test_a_look_says_what_is_wrong_with_a_bad_row(jsonl_file):
    files, order = open_order(str(jsonl_file([{"id": 13}, b"{"])), shuffle=False)

    with WindowView(files, order, 0, 0, fails_on_13) as view:
        raised, broken = view.look(0).error, view.look(1).error

    assert raised is not None and raised.code == "AD421" and "thirteen" in raised.reason
    assert broken is not None and broken.code == "AD101"


def test_a_look_at_a_row_that_is_too_long_does_not_read_it(jsonl_file):
    source = JsonlSource(str(jsonl_file([{"id": 1, "text": "x" * 500}])), max_row_bytes=100)
    files, order = open_order(source, shuffle=False)

    with WindowView(files, order, 0, 0, row_id) as view:
        look = view.look(0)

    assert look.raw == b""
    assert look.error is not None and look.error.code == "AD108"


def test_a_look_uses_the_tokenizer_of_a_description(rows, small_tokenizer):
    files, order = open_order(rows, shuffle=False)

    with WindowView(files, order, 0, 0, PromptTokenizeFn(small_tokenizer, prompt_key="text")) as view:
        assert view.look(0).dropped == "empty_prompt"
        assert view.look(5).sample.prompt == "xxxxx"


@pytest.mark.parametrize(("epoch", "window"), [(0, 1), (0, -1), (-1, 0)])
def test_a_window_that_is_not_there_is_named(rows, epoch, window):
    files, order = open_order(rows)

    with pytest.raises(ConfigError, match=f"no window {window} in epoch {epoch}.*windows 0 to 0"):
        rows_of_window(files, order, epoch, window)


@pytest.mark.parametrize("row", [NUM_ROWS, -1])
def test_a_row_that_is_not_there_is_named(rows, row):
    files, order = open_order(rows)

    with WindowView(files, order, 0, 0) as view, pytest.raises(ConfigError, match=rf"no row {row} .* 300 rows"):
        view.look(row)


def test_a_file_that_shrank_is_named(jsonl_file):
    path = jsonl_file([{"id": number} for number in range(100)])
    files, order = open_order(str(path))
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(SourceChangedError, match=r"AD302 .*rows.jsonl shrank"):
        rows_of_window(files, order, 0, 0)


def test_a_file_that_disappeared_is_named(jsonl_file):
    path = jsonl_file([{"id": 1}])
    files, order = open_order(str(path))
    path.unlink()

    with pytest.raises(SourceError, match="AD304"):
        rows_of_window(files, order, 0, 0)


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_the_position_of_a_row_number_is_found_across_epochs(rows, shuffle):
    files, order = open_order(rows, seed=7, shuffle=shuffle)
    positions = [position for epoch in range(3) for position, _ in all_rows(rows, shuffle, epoch)]

    for number in (0, 1, NUM_ROWS - 1, NUM_ROWS, 2 * NUM_ROWS + 123):
        assert position_of(files, order, number) == positions[number]


def test_the_position_of_a_row_is_asked_for_where_there_is_none(jsonl_file):
    files, order = open_order(str(jsonl_file([b" ", b""])))

    with pytest.raises(NoSamplesError, match="AD202"):
        position_of(files, order, 0)


def test_the_number_of_rows_of_a_small_file_is_exact(rows):
    files, order = open_order(rows)

    assert estimate_num_rows(files, order) == NUM_ROWS


def test_the_number_of_rows_of_a_large_file_is_estimated(jsonl_file):
    num_rows = 20_000
    path = jsonl_file([{"id": number, "text": "x" * (number * 7919 % 61)} for number in range(num_rows)])
    files, order = open_order(str(path), shuffle=Shuffle(block_bytes=1024))

    assert files.num_blocks > 1000
    assert estimate_num_rows(files, order) == pytest.approx(num_rows, rel=0.05)


def test_line_numbers_are_those_of_the_locations(rows):
    locations = [location for _, location in all_rows(rows, SHUFFLES["many windows"], 0)][:60]

    assert line_numbers(locations) == [location.line_number() for location in locations]


def test_there_are_no_line_numbers_of_nothing():
    assert line_numbers([]) == []
