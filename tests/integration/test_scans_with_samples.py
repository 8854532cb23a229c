"""Workers that share no memory answer a scan with samples; what is delivered is what all other workers give."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest

from asyncdata import Mix, Outcomes, Part, PassRate, Shuffle
from asyncdata.errors import BadRowError, EndOfData
from tests.support import loaders
from tests.support.inner import change, real
from tests.support.loading import ids, order_of, write_rows
from tests.support.parts import Crashed, InlineExecutor, Promise, Scan
from tests.support.tokenize_fns import every_third_dropped, fails_on_13, id_and_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

NUM_ROWS = 200
WIDE = Shuffle(block_bytes=1024, window_blocks=16)
"""Several scans for each window."""


def with_samples() -> AbstractContextManager[Any]:
    """Inside it, an executor is asked for samples with its scans."""
    return patch.object(InlineExecutor, "answers_with_samples", new=True)


@pytest.fixture
def crashing(monkeypatch) -> Iterator[list[Scan]]:
    """The second scan of each window that asks for samples brings its workers down. Yields such scans."""
    submit, crashed = real("submit"), list[Scan]()

    def crash(self: InlineExecutor, request: Any, max_losses: int = 10) -> Promise[Any]:
        if isinstance(request, Scan) and request.with_samples and request.base:
            crashed.append(request)
            assert max_losses == 2
            died, asked = Promise[Any](), msgspec.structs.replace(request, with_samples=False)
            submit(self, asked).then(lambda _: died.keep(Crashed("AD423", "its worker died")))
            return died

        return submit(self, request, max_losses)

    change(monkeypatch, submit=crash)
    return crashed


make = partial(loaders.make, shuffle=WIDE)


def delivered(source: Any, tokenize_fn: Any = id_and_text, **knobs: Any) -> dict[str, Any]:
    """All samples, and all that is counted."""
    found = []
    with make(source, tokenize_fn, **{"epochs": 2} | knobs) as loader, pytest.raises(EndOfData):
        while True:
            (sample,) = loader.get_next_batch(1)
            found.append((sample.tokens.tolist(), sample.label, sample.prompt, sample.position))
    now, state = loader.statistics(), loader.state_dict()
    return {"samples": found, "dropped": now.dropped_total, "notes": now.noted_total, "counters": state["counters"]}


@pytest.fixture
def rows(tmp_path) -> Path:
    """With rows that are longer than a block, blank lines, and rows that are no JSON."""
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS, {40: {"text": "x" * 30_000}, 90: {"text": "y" * 5000}})
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:60], b"", b"{", b'"text"', *lines[60:]]) + b"\n")
    return path


@pytest.mark.parametrize(
    ("function", "digest", "is_down"),
    [
        (id_and_text, "tokens", False),
        (every_third_dropped, "tokens", True),
        (fails_on_13, "positions", False),
        (fails_on_13, "positions", True),
    ],
)
def test_samples_drops_and_errors_are_the_same(rows, request, function, digest, is_down):
    crashed = request.getfixturevalue("crashing") if is_down else None
    knobs = {"bad_rows": "skip", "digest": digest}
    expected = delivered(rows, function, **knobs)
    with with_samples():
        assert delivered(rows, function, **knobs) == expected
    assert not is_down or crashed


def test_a_bad_row_is_raised_at_its_turn_with_the_same_words(tmp_path):
    path, seen = write_rows(tmp_path / "rows.jsonl", NUM_ROWS), []

    def look() -> None:
        found = []
        with make(path, fails_on_13) as loader, pytest.raises(BadRowError) as caught:
            while True:
                found += ids(loader.get_next_batch(1))
        seen.append((found, str(caught.value), caught.value.traceback))

    look()
    with with_samples():
        look()
    assert seen[0] == seen[1]


def test_the_order_is_d_also_of_a_run_that_resumes(tmp_path, crashing):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    with make(path) as loader:
        found = ids(loader.get_next_batch(77))
        state = loader.state_dict()
    with with_samples(), make(path) as loader:
        loader.load_state_dict(state)
        found += ids(loader.get_next_batch(2 * NUM_ROWS))

    assert found == order_of(path, 3, shuffle=WIDE)[: len(found)]
    assert crashing


@pytest.mark.parametrize("is_down", [False, True])
def test_rows_that_an_epoch_excludes_are_left_out_and_counted_once(tmp_path, request, is_down):
    if is_down:
        request.getfixturevalue("crashing")
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    outcomes = Outcomes(policy=PassRate(drop_above=0.5))

    def look() -> tuple[list[int], dict[str, int]]:
        with make(path, outcomes=outcomes, batch_size=50) as loader:
            found = []
            for _ in range(2):
                for batch in loader:
                    loader.report(batch, [float(number % 2) for number in ids(batch)])
                    found += ids(batch)
            return found, loader.statistics().dropped_total

    expected = look()
    assert expected[1] == {"excluded": NUM_ROWS // 2}
    with with_samples():
        assert look() == expected


def test_the_parts_of_a_mixture_give_the_same_and_rows_count_as_tokenized(tmp_path):
    mix = Mix({name: Part(write_rows(tmp_path / f"{name}.jsonl", 90), when_done="leave") for name in ("a", "b")})

    expected = delivered(mix)
    with with_samples():
        assert delivered(mix) == expected
        with make(tmp_path / "a.jsonl", epochs=1, batch_size=90) as loader:
            assert [len(batch) for batch in loader] == [90]
            assert loader.statistics().tokenized_rows_total == 90
