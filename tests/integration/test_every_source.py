"""What holds for every source alike: one order, each row once an epoch, exact resume, bad rows and changes named."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import DataLoader, JsonlSource, ParquetSource, RowShuffle
from asyncdata.errors import BadRowError, SnapshotMismatchError, SourceChangedError, SourceError
from tests.support import loaders
from tests.support.loading import SHUFFLE, ids
from tests.support.sources import KINDS, Kind, make_rows
from tests.support.tokenize_fns import fails_on_13, id_and_text, row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ROWS = 203
SHUFFLES: dict[str, Any] = {"in windows": SHUFFLE, "as they lie": False, "all rows": "full"}
QUICK = ("JSONL files", "Parquet, tiny row groups", "a gzip file", "a JSON array", "an iterable", "an object by http")
LISTED = {"JSONL files": JsonlSource, "Parquet files": ParquetSource, "zstd files": JsonlSource}
"""Of which a file may be listed again."""


class Written(NamedTuple):
    """A source with its rows: its kind, where it is, and what a loader is given."""

    kind: Kind
    folder: Path
    source: Any

    def rewrite(self, rows: list[dict[str, Any]]) -> Any:
        return self.kind.write(self.folder, rows)


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in KINDS])
def written(request, tmp_path) -> Written:
    return written_as(request.param, tmp_path)


def written_as(name: str, folder: Path) -> Written:
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)
    return Written(kind, folder, kind.write(folder, make_rows(NUM_ROWS)))


@pytest.fixture
def shuffle(request) -> Any:
    return SHUFFLES[request.param]


each_way = pytest.mark.parametrize(
    ("written", "shuffle"),
    [
        pytest.param(name, shuffle, marks=() if name in QUICK else pytest.mark.thorough)
        for number, name in enumerate(KINDS)
        for shuffle in (SHUFFLES if name in QUICK else (list(SHUFFLES)[number % 2 * 2], "as they lie"))
        if shuffle != "all rows" or not KINDS[name].is_stream
    ],
    indirect=True,
)
"""Each of the quick kinds in each order; of the others in two or, of a stream, in one."""


def make(source: Any, tokenize_fn: Callable[..., Any] = row_id, **knobs: Any) -> DataLoader:
    return loaders.make(source, tokenize_fn, **{"cache": {"folder": ""}} | knobs)


def first(source: Any, number: int, **knobs: Any) -> list[int]:
    with make(source, **knobs) as loader:
        return ids(loader.get_next_batch(number))


def state_after(source: Any, number: int, **knobs: Any) -> dict[str, Any]:
    with make(source, **knobs) as loader:
        loader.get_next_batch(number)
        return loader.state_dict()


@each_way
def test_every_epoch_has_every_row_once_and_another_seed_is_another_order(written, shuffle):
    seen = first(written.source, 3 * NUM_ROWS, shuffle=shuffle)

    epochs = [seen[number * NUM_ROWS : (number + 1) * NUM_ROWS] for number in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 3
    if shuffle is False:
        assert epochs == [list(range(NUM_ROWS))] * 3
    else:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert first(written.source, NUM_ROWS, shuffle=shuffle, seed=1) != epochs[0]


def test_a_row_is_the_row_that_was_written(written):
    """Whole: those that found no room in their window, too."""
    rows = make_rows(NUM_ROWS)
    with make(written.source, id_and_text) as loader:
        samples = loader.get_next_batch(NUM_ROWS)

    assert [sample.tokens.tolist() for sample in samples] == [
        [number, *map(ord, rows[number]["pad"])] for number in ids(samples)
    ]


@pytest.mark.thorough
@each_way
def test_the_order_is_the_same_for_any_workers_and_buffer(written, shuffle):
    expected = first(written.source, 2 * NUM_ROWS, shuffle=shuffle, buffer_size=1000)

    for num_workers, buffer_size in [(0, 1), (1, 1000) if shuffle is False else (2, 16)]:
        settings = {"num_workers": num_workers, "buffer_size": buffer_size, "shuffle": shuffle}
        assert first(written.source, 2 * NUM_ROWS, **settings) == expected, settings


@pytest.mark.parametrize("name", LISTED)
def test_a_file_that_is_listed_twice_comes_twice_an_epoch_and_resumes(tmp_path, name):
    written = written_as(name, tmp_path)
    source = LISTED[name]([*written.source, written.source[0]], allow_repeats=True)
    expected = first(source, 2 * (NUM_ROWS + NUM_ROWS // 3))

    wanted = Counter([*range(NUM_ROWS), *range(NUM_ROWS // 3)])
    assert Counter(expected[: wanted.total()]) == Counter(expected[wanted.total() :]) == wanted
    state = state_after(source, 150)
    with make(source) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(50)) == expected[150:200]
    with make(written.source) as loader, pytest.raises(SnapshotMismatchError, match="data: 4 -> 3 files"):
        loader.load_state_dict(state)


@each_way
def test_resumed_at_any_point_it_is_the_uninterrupted_run(written, shuffle):
    expected = first(written.source, 3 * NUM_ROWS, shuffle=shuffle)

    for number in random.Random(5).sample(range(2 * NUM_ROWS), 2):
        state = state_after(written.source, number + 1, shuffle=shuffle)
        with make(written.source, shuffle=shuffle) as loader:
            loader.load_state_dict(state)
            assert ids(loader.get_next_batch(40)) == expected[number + 1 : number + 41]


def test_the_same_rows_written_again_are_the_same_data(written):
    expected, state = first(written.source, 100), state_after(written.source, 50)

    with make(written.rewrite(make_rows(NUM_ROWS))) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(50)) == expected[50:]


@pytest.mark.parametrize("is_index_known", [True, False])
@pytest.mark.parametrize("shuffle", ["full", RowShuffle(method="slime"), RowShuffle(method="none"), True], ids=str)
def test_a_row_that_has_brought_down_its_workers_is_left_out_in_every_later_epoch(tmp_path, shuffle, is_index_known):
    """It is in the snapshot's journal, and no kind of window sends it again."""
    path, knobs = KINDS["a JSONL file"].write(tmp_path, make_rows(40)), {"shuffle": shuffle}
    with make(path, **knobs) as loader:
        state = loader.state_dict()
        every = ids(loader.get_next_batch(120))
    with open(path, "rb") as file:
        offset = sum(map(len, file.readlines()[:11]))
    state = {**json.loads(json.dumps(state)), "journal": [[0, offset]]}
    expected = [row for row in every if row != 11]

    with make(path, **knobs) as loader:
        if is_index_known:
            loader.get_next_batch(1)
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(117)) == expected
        loader.load_state_dict(state)
        loader.get_next_batch(1)
        loader.set_epoch(2)  # whose window is ready at once, as the index is complete by then
        assert ids(loader.get_next_batch(39)) == expected[78:]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_bad_row_is_named_by_its_place_at_its_turn_or_skipped_and_counted(written, num_workers, tmp_path):
    place = written.kind.place(written.source, 13, NUM_ROWS)
    knobs = {"shuffle": False, "num_workers": num_workers}

    with make(written.source, fails_on_13, **knobs) as loader:
        assert ids(loader.get_next_batch(13)) == list(range(13))
        with pytest.raises(BadRowError, match="^AD421 ") as caught:
            loader.get_next_batch(1)
    error = caught.value
    assert error.path.startswith(place.path)
    assert (error.line, error.row_number) == (place.line, place.row_number)
    assert '"id"' in error.excerpt.replace("\\", "")
    with make(written.source, fails_on_13, bad_rows="skip", **knobs) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == [row for row in range(NUM_ROWS) if row != 13]
        assert loader.statistics().bad_rows_total == 1


@pytest.mark.parametrize(
    "rows",
    [make_rows(NUM_ROWS, "y"), make_rows(NUM_ROWS - 1), make_rows(NUM_ROWS)[::-1]],
    ids=["other", "fewer", "turned"],
)
def test_a_state_of_other_data_is_refused(written, rows):
    if not written.kind.is_content_known:
        pytest.skip("nothing tells its rows from others before they are read")
    state = state_after(written.source, 50)

    with make(written.rewrite(rows)) as loader, pytest.raises(SnapshotMismatchError, match="data: ") as caught:
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
