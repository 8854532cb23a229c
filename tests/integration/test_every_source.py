"""What holds for every source alike: one order, each row once an epoch, exact resume, bad rows and changes named."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import (
    BadRowError,
    DataLoader,
    SnapshotMismatchError,
    SourceChangedError,
    SourceError,
)
from tests.support.loading import SHUFFLE, ids
from tests.support.sources import KINDS, Kind, make_rows
from tests.support.tokenize_fns import fails_on_13, id_and_text, row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.thorough

NUM_ROWS = 203
SHUFFLES: dict[str, Any] = {"in windows": SHUFFLE, "as they lie": False, "all rows": "full"}
WORKERS_AND_BUFFERS = [(0, 1), (1, 1000), (2, 16)]
IN_CI = {"in windows": (2, 16), "as they lie": (1, 1000), "all rows": (2, 16)}  # inline, the buffer is the least


class Written(NamedTuple):
    """A source with its rows: its kind, where it is, and what a loader is given."""

    kind: Kind
    folder: Path
    source: Any

    def rewrite(self, rows: list[dict[str, Any]]) -> Any:
        """Other rows in its place."""
        return self.kind.write(self.folder, rows)


@pytest.fixture(params=KINDS)
def written(request, tmp_path) -> Written:
    kind = KINDS[request.param]
    for package in kind.needs:
        pytest.importorskip(package)
    if kind.is_stream and request.node.callspec.params.get("shuffle") == "all rows":
        pytest.skip("its rows cannot be read one by one")
    return Written(kind, tmp_path, kind.write(tmp_path, make_rows(NUM_ROWS)))


def make(source: Any, tokenize_fn: Callable[..., Any] = row_id, **knobs: Any) -> DataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for, and leaves no index."""
    defaults = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240, "cache": {"folder": ""}}
    return DataLoader(source, tokenize_fn=tokenize_fn, **defaults | knobs)


def first(source: Any, number: int, **knobs: Any) -> list[int]:
    with make(source, **knobs) as loader:
        return ids(loader.get_next_batch(number))


# One order


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_epoch_has_every_row_once(written, shuffle):
    seen = first(written.source, 3 * NUM_ROWS, shuffle=SHUFFLES[shuffle])

    epochs = [seen[number * NUM_ROWS : (number + 1) * NUM_ROWS] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == (1 if shuffle == "as they lie" else 3)


def test_without_shuffling_the_rows_come_as_they_lie(written):
    assert first(written.source, NUM_ROWS, shuffle=False) == list(range(NUM_ROWS))


def test_a_row_is_the_row_that_was_written(written):
    """Whole: those that found no room in their window, too."""
    rows = make_rows(NUM_ROWS)
    with make(written.source, id_and_text) as loader:
        samples = loader.get_next_batch(NUM_ROWS)

    assert [sample.tokens.tolist() for sample in samples] == [
        [number, *map(ord, rows[number]["pad"])] for number in ids(samples)
    ]


@pytest.mark.parametrize("with_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_order_is_the_same_for_any_workers_and_buffer(written, shuffle, with_all):
    expected = first(written.source, 2 * NUM_ROWS, shuffle=SHUFFLES[shuffle], buffer_size=1000)

    for num_workers, buffer_size in WORKERS_AND_BUFFERS if with_all else [(0, 1), IN_CI[shuffle]]:
        settings = {"num_workers": num_workers, "buffer_size": buffer_size, "shuffle": SHUFFLES[shuffle]}
        assert first(written.source, 2 * NUM_ROWS, **settings) == expected, settings


def test_another_seed_is_another_order(written):
    assert first(written.source, NUM_ROWS, seed=1) != first(written.source, NUM_ROWS, seed=2)


# Exact resume


@pytest.mark.parametrize("num_points", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resumed_at_any_point_it_is_the_uninterrupted_run(written, shuffle, num_points):
    settings = {"shuffle": SHUFFLES[shuffle]}
    expected = first(written.source, 3 * NUM_ROWS, **settings)

    for number in random.Random(5).sample(range(2 * NUM_ROWS), num_points):
        with make(written.source, **settings) as loader:
            loader.get_next_batch(number + 1)
            state = loader.state_dict()
        with make(written.source, **settings) as loader:
            loader.load_state_dict(state)
            assert ids(loader.get_next_batch(40)) == expected[number + 1 : number + 41]


def test_resumed_by_workers_it_is_the_same_run(written):
    expected = first(written.source, 2 * NUM_ROWS)
    with make(written.source, num_workers=1) as loader:
        loader.get_next_batch(150)
        state = loader.state_dict()
    with make(written.source, num_workers=2) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(100)) == expected[150:250]


def test_the_same_rows_written_again_are_the_same_data(written):
    with make(written.source) as loader:
        loader.get_next_batch(50)
        state = loader.state_dict()

    with make(written.rewrite(make_rows(NUM_ROWS))) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(50)) == first(written.source, 100)[50:]


# Bad rows


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_is_named_by_its_place_at_its_turn(written, num_workers):
    place = written.kind.place(written.source, 13, NUM_ROWS)

    with make(written.source, fails_on_13, shuffle=False, num_workers=num_workers) as loader:
        assert ids(loader.get_next_batch(13)) == list(range(13))
        with pytest.raises(BadRowError, match="^AD421 ") as caught:
            loader.get_next_batch(1)

    error = caught.value
    assert error.path.startswith(place.path)
    assert (error.line, error.row_number) == (place.line, place.row_number)
    assert '"id"' in error.excerpt.replace("\\", "")


def test_a_bad_row_may_be_skipped_and_is_counted(written, tmp_path):
    settings = {"bad_rows": {"policy": "skip", "path": str(tmp_path / "quarantine.jsonl")}}
    expected = [number for number in first(written.source, NUM_ROWS) if number != 13]

    with make(written.source, fails_on_13, **settings) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
        assert loader.statistics().bad_rows_total == 1


# Changes


@pytest.mark.parametrize(
    "rows",
    [make_rows(NUM_ROWS, "y"), make_rows(NUM_ROWS - 1), make_rows(NUM_ROWS)[::-1]],
    ids=["other", "fewer", "turned"],
)
def test_a_state_of_other_data_is_refused(written, rows):
    if not written.kind.is_content_known:
        pytest.skip("nothing tells its rows from others before they are read")
    with make(written.source) as loader:
        loader.get_next_batch(50)
        state = loader.state_dict()

    with make(written.rewrite(rows)) as loader:
        with pytest.raises(SnapshotMismatchError, match="data: ") as caught:
            loader.load_state_dict(state)
        assert "data" in caught.value.differences


def test_data_that_is_replaced_while_it_is_read_stops_the_stream(written):
    if not written.kind.is_in_files:
        pytest.skip("it cannot be changed from outside")
    with make(written.source, buffer_size=1) as loader:
        loader.state_dict()  # with a fingerprint of the content
        loader.get_next_batch(1)
        written.rewrite(make_rows(NUM_ROWS, "y"))
        with pytest.raises(SourceChangedError, match=f"^{written.kind.changed} "):
            while True:
                loader.get_next_batch(1)


def test_a_source_without_rows_is_an_error(written, tmp_path_factory):
    empty = written.kind.write(tmp_path_factory.mktemp("empty"), [])

    # AD125: datasets cannot load what it has saved. AD401: that a stream has no rows is known when it has been read
    with pytest.raises(SourceError, match="^AD(201|202|401|125) "), make(empty) as loader:
        loader.get_next_batch(1)
