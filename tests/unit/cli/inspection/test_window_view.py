"""What inspection shows is what a loader delivers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    Cache,
    ConfigError,
    DataLoader,
    EndOfData,
    JsonlSource,
    LengthGrouping,
    NoSamplesError,
    Position,
    PromptTokenizeFn,
    RowShuffle,
    Shuffle,
    SoftPacking,
    SourceChangedError,
    SourceError,
    XTunerPacking,
)
from asyncdata.cli.inspection.find_rows import line_numbers
from asyncdata.cli.inspection.window_view import InspectedRow, OpenedOrder
from asyncdata.workers import inline, request_handler
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
ROW_SHUFFLES = {
    "all rows": "full",
    "slime's order": RowShuffle(method="slime"),
    "a slice": RowShuffle(method="none", first=30, stop=-20),
    "a part": RowShuffle(part="eval", train_ratio=0.7),
}
NUM_ROWS = 300


@pytest.fixture
def rows(jsonl_file: Callable[..., Path]) -> list[str]:
    """Two files, the second with blank lines, a carriage return and no end of its last line."""
    first = [{"id": number, "text": "x" * (number % 37)} for number in range(NUM_ROWS // 2)]
    second = [json.dumps({"id": number, "text": "é" * (number % 31)}).encode() for number in range(150, NUM_ROWS)]
    second = [line + b"\r" * (len(line) % 2) + b"\n" * (len(line) % 3 == 0) for line in second]
    return [str(jsonl_file(first, "a.jsonl")), str(jsonl_file(second, "b.jsonl", final_newline=False))]


def all_rows(paths: list[str], shuffle: Any, epoch: int) -> Iterator[tuple[Position, object]]:
    with OpenedOrder(paths, seed=7, shuffle=shuffle, cache=Cache(folder="")) as opened:
        for view in opened.windows(epoch):
            for row, location in enumerate(view.locations()):
                yield Position(epoch, view.first.window, row), location


@pytest.mark.parametrize("shuffle", [*SHUFFLES.values(), *ROW_SHUFFLES.values()], ids=[*SHUFFLES, *ROW_SHUFFLES])
def test_the_rows_of_the_windows_are_what_the_loader_delivers(rows, shuffle):
    shown = [*all_rows(rows, shuffle, 0), *all_rows(rows, shuffle, 1)]

    knobs = {"num_workers": 0, "epochs": 2, "cache": {"folder": ""}}
    with DataLoader(rows, tokenize_fn=row_id, seed=7, shuffle=shuffle, **knobs) as loader:
        samples = loader.get_next_batch(len(shown), timeout_s=240)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1, timeout_s=240)

    assert len(shown) > NUM_ROWS // 5
    assert shown == [(sample.position, sample.source) for sample in samples]


def test_rows_that_yield_no_sample_are_left_out_where_the_loader_leaves_them_out(rows):
    knobs = {"seed": 7, "shuffle": RowShuffle(only_kept=True), "cache": {"folder": ""}}
    with OpenedOrder(rows, every_third_dropped, **knobs) as opened:
        shown = [row.location for row in opened.first(NUM_ROWS)]

    with DataLoader(rows, tokenize_fn=every_third_dropped, num_workers=0, **knobs) as loader:
        samples = loader.get_next_batch(NUM_ROWS * 2 // 3, timeout_s=240)
    assert shown == [sample.source for sample in samples]


def test_an_order_that_depends_on_samples_needs_the_tokenize_function(rows):
    for knobs in ({"shuffle": RowShuffle(only_kept=True)}, {"shuffle": "full", **PLANNED}):
        with pytest.raises(ConfigError, match="leaves out rows that yield no sample: say how rows are tokenized"):
            OpenedOrder(rows, **knobs)


PLANNED: dict[str, Any] = {"packing": SoftPacking(max_length=8), "plan_packs": True, "batch_size": 2}


@pytest.mark.parametrize(
    "knobs",
    [
        {"shuffle": "full", **PLANNED},
        {"shuffle": "full", **PLANNED, "length_grouping": LengthGrouping(window=4)},
        {"packing": XTunerPacking(max_length=8, seed=5), "batch_size": 1},
    ],
    ids=["packs", "grouped packs", "XTuner's packs"],
)
def test_planned_packs_are_in_the_order_of_the_loader(rows, knobs):
    knobs = {"seed": 7, "cache": {"folder": ""}, **knobs}
    with DataLoader(rows, tokenize_fn=row_id, num_workers=0, collate_fn=lambda packs: packs, **knobs) as loader:
        epochs = [[piece.sample for packs in loader for pack in packs for piece in pack] for _ in range(2)]

    with OpenedOrder(rows, row_id, **knobs) as opened:
        shown = [[(row.position, row.location, row.sample.tokens[0]) for row in opened.first(900, n)] for n in range(2)]
    for samples, found in zip(epochs, shown, strict=True):
        assert len(found) == NUM_ROWS
        assert found == [(sample.position, sample.source, sample.tokens[0]) for sample in samples]


@pytest.mark.parametrize("shuffle", [*SHUFFLES.values(), *ROW_SHUFFLES.values()], ids=[*SHUFFLES, *ROW_SHUFFLES])
def test_an_inspected_row_is_what_a_worker_makes_of_it(rows, shuffle):
    knobs = {"seed": 7, "shuffle": shuffle, "cache": {"folder": ""}}
    with DataLoader(rows, tokenize_fn=row_id, num_workers=0, **knobs) as loader:
        sample = loader.get_next_batch(NUM_ROWS + 40, timeout_s=240)[-1]

    with OpenedOrder(rows, row_id, **knobs) as opened:
        found = opened.at(sample.position)

    assert found.sample is not None
    assert found.location == sample.source
    assert found.sample.position == sample.position
    assert found.sample.tokens.tolist() == sample.tokens.tolist() == [json.loads(found.raw)["id"]]
    with open(sample.source.path, "rb") as file:
        file.seek(sample.source.byte_offset)
        assert file.read(sample.source.num_bytes) == found.raw


def test_without_a_tokenize_function_the_row_alone_is_shown(rows):
    with OpenedOrder(rows) as opened:
        found = opened.at(Position(0, 0, 3))

    assert set(json.loads(found.raw)) == {"id", "text"}
    assert (found.sample, found.dropped, found.error) == (None, "", None)


def first_rows(num_rows: int, *arguments: Any, **knobs: Any) -> list[InspectedRow]:
    with OpenedOrder(*arguments, **{"shuffle": False, **knobs}) as opened:
        return list(opened.first(num_rows))


def test_a_dropped_row_says_why(jsonl_file):
    (found,) = first_rows(1, str(jsonl_file([{"id": 3}])), every_third_dropped)

    assert (found.sample, found.dropped, found.error) == (None, "tokenize_fn", None)


def test_a_bad_row_says_what_is_wrong_with_it(jsonl_file):
    raised, broken = [row.error for row in first_rows(2, str(jsonl_file([{"id": 13}, b"{"])), fails_on_13)]

    assert raised is not None and raised.code == "AD421" and "thirteen" in raised.reason
    assert broken is not None and broken.code == "AD101"


def test_a_row_that_is_too_long_is_not_read(jsonl_file):
    source = JsonlSource(str(jsonl_file([{"id": 1}, {"id": 1, "text": "x" * 500}])), max_row_bytes=100)

    short, long = first_rows(2, source, row_id)

    assert (len(short.raw) > 0, long.raw) == (True, b"")
    assert long.error is not None and long.error.code == "AD108"


def test_an_inspected_row_has_the_tokens_of_a_description(rows, small_tokenizer):
    found = first_rows(6, rows, PromptTokenizeFn(small_tokenizer, prompt_key="text"))

    assert found[0].dropped == "empty_prompt"
    assert found[5].sample is not None and found[5].sample.prompt == "xxxxx"


@pytest.mark.parametrize(("epoch", "window"), [(0, 1), (0, -1), (-1, 0)])
def test_a_window_that_is_not_there_is_named(rows, epoch, window):
    with OpenedOrder(rows) as opened, pytest.raises(ConfigError, match=f"{window} in epoch {epoch}.*windows 0 to 0"):
        opened.window(epoch, window)


@pytest.mark.parametrize("row", [NUM_ROWS, -1])
def test_a_row_that_is_not_there_is_named(rows, row):
    with OpenedOrder(rows) as opened, pytest.raises(ConfigError, match=rf"no row {row} .* 300 rows"):
        opened.at(Position(0, 0, row))


def test_a_file_that_shrank_is_named(jsonl_file):
    path = jsonl_file([{"id": number} for number in range(100)])
    with OpenedOrder(str(path)) as opened:
        path.write_bytes(path.read_bytes()[:100])

        with pytest.raises(SourceChangedError, match=r"AD302 .*rows.jsonl shrank"):
            opened.window(0, 0)


def test_a_file_that_disappeared_is_named(jsonl_file):
    path = jsonl_file([{"id": 1}])
    with OpenedOrder(str(path)) as opened:
        path.unlink()

        with pytest.raises(SourceError, match="AD304"):
            opened.window(0, 0)


@pytest.mark.parametrize("shuffle", [*SHUFFLES.values(), "full"], ids=[*SHUFFLES, "full"])
def test_the_position_of_a_row_number_is_found_across_epochs(rows, shuffle):
    positions = [position for epoch in range(3) for position, _ in all_rows(rows, shuffle, epoch)]

    with OpenedOrder(rows, seed=7, shuffle=shuffle, cache=Cache(folder="")) as opened:
        for number in (0, 1, NUM_ROWS - 1, NUM_ROWS, 2 * NUM_ROWS + 123):
            assert opened.position_of(number) == positions[number]


def test_without_any_row_no_row_has_a_position(jsonl_file):
    with OpenedOrder(str(jsonl_file([b" ", b""]))) as opened, pytest.raises(NoSamplesError, match="AD202"):
        opened.position_of(0)


def test_a_row_index_that_a_run_has_made_is_used(rows, tmp_path, monkeypatch):
    knobs = {"shuffle": "full", "cache": {"folder": str(tmp_path / "cache")}}
    with DataLoader(rows, tokenize_fn=row_id, num_workers=0, **knobs) as loader:
        first = loader.get_next_batch(1, timeout_s=240)[0]
    monkeypatch.setattr(request_handler, "index_blocks", lambda *_: pytest.fail("the rows were counted again"))

    with OpenedOrder(rows, **knobs) as opened:
        assert opened.at(Position()).location == first.source


def test_a_failing_start_is_an_error_and_not_a_wait(rows, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no reader")

    monkeypatch.setattr(inline, "handler_of", fail)

    with OpenedOrder(rows) as opened, pytest.raises(RuntimeError, match="no reader"):
        opened.window(0, 0)


def test_line_numbers_are_those_of_the_locations(rows):
    locations = [location for _, location in all_rows(rows, SHUFFLES["many windows"], 0)][:60]

    assert line_numbers(locations) == [location.line_number() for location in locations]


def test_no_locations_have_no_line_numbers():
    assert line_numbers([]) == []
