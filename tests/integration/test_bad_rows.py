"""``DataLoader``: a bad row stops the stream at its turn and is named, or is skipped and counted."""

from __future__ import annotations

import pytest

from asyncdata import Limits
from asyncdata.errors import EndOfData, TooManyBadRowsError
from tests.support import worker_fns
from tests.support.loaders import make
from tests.support.loading import ids, order_of, write_rows
from tests.support.tokenize_fns import fails_on_13

NUM_ROWS = 200


def test_bad_rows_beyond_the_budget_are_told_once_however_often_calls_fail(path, tmp_path):
    told = tmp_path / "told"
    policy = {"policy": "quarantine", "path": str(told), "max": 0}
    with make(path, fails_on_13, shuffle=False, bad_rows=policy) as loader:
        for _ in range(2):
            with pytest.raises(TooManyBadRowsError):
                loader.get_next_batch(14)
    assert len(told.read_bytes().splitlines()) == 1


@pytest.mark.thorough
def test_a_row_that_kills_workers_does_so_a_few_times_and_no_more(tmp_path):
    """Here it is one of the fixed rows, too, that are to show whether the tokens are the same after a resume."""
    path = write_rows(tmp_path / "rows.jsonl", 1000, {0: {"do": "die"}})

    with make(path, worker_fns.as_told, num_workers=2, bad_rows="skip", buffer_size=50, epochs=1) as loader:
        assert sorted(ids(loader.get_next_batch(999))) == list(range(1, 1000))
        assert loader.statistics().worker_restarts_total <= 2 + 3 * 2


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["dies", "hangs"])
def test_a_row_that_kills_a_batch_is_told_from_the_row_that_was_read_last(path, what):
    """A tokenizer reads row by row, and says so, and then encodes all at once."""
    expected = order_of(path)
    description = worker_fns.ReadsThenEncodes(what)

    with make(path, description, num_workers=1, bad_rows="skip", epochs=1, limits=Limits(row_timeout_s=0.5)) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == [number for number in expected if number != 13]
        assert loader.statistics().bad_rows_total == 1


@pytest.mark.parametrize(
    "poison",
    [(0, 17, 39), *(pytest.param(poison, marks=pytest.mark.thorough) for poison in ((16, 17), (0, 1, 2, 38, 39)))],
    ids=str,
)
def test_a_row_that_kills_workers_is_skipped_and_its_neighbours_are_not(jsonl_file, poison):
    path = jsonl_file({"id": number, "do": "die" if number in poison else "id"} for number in range(40))
    good = [number for number in range(40) if number not in poison]
    knobs = {"shuffle": False, "num_workers": 1, "bad_rows": "skip", "epochs": 1}
    with make(path, worker_fns.as_told, **knobs, buffer_size=100) as loader:
        start = loader.state_dict()
        assert ids(loader.get_next_batch(len(good))) == good
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        state, now = loader.state_dict(), loader.statistics()

    starts = [len(b"".join(path.read_bytes().splitlines(keepends=True)[:number])) for number in poison]
    assert state["journal"] == [[0, offset] for offset in starts]
    assert (now.bad_rows_total, now.dropped_total) == (len(poison), {"bad row AD423": len(poison)})
    with make(path, worker_fns.as_told, **knobs) as loader:
        loader.load_state_dict({**start, "journal": [*state["journal"], [0, 5], [9, 0]]})  # and what begins no row
        assert ids(loader.get_next_batch(len(good))) == good
        assert loader.statistics().dropped_total.get("journal", 0) >= len(poison) - (39 in poison)
        assert loader.statistics().bad_rows_total == 0
