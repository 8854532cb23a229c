"""Short and late reads change nothing. A failed read is named in the error, and a resumed run continues after it."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData, HuggingFaceSource, Shuffle, SourceError
from tests.faults.support.faulty_reads import Faults, faulty, faulty_file_system, row_id
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S, write_rows
from tests.support.sources import KINDS, make_rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=3, full=25)
NUM_ROWS = 300
EPOCHS = 2
SHUFFLE = Shuffle(block_bytes=1024, window_blocks=8)
WAYS = {kind: (kind, {}) for kind in ("a JSONL file", "JSONL files", "a gzip file", "zstd files", "a JSON array")}
WAYS["a JSONL file, by its index"] = ("a JSONL file", {"shuffle": "full", "cache": {"folder": ""}})
"""Those whose reads go through Python; Parquet and Arrow files are read by their own libraries."""


@pytest.fixture(params=WAYS)
def way(request, tmp_path) -> tuple[Any, dict[str, Any]]:
    kind, knobs = WAYS[request.param]
    for module in KINDS[kind].needs:
        pytest.importorskip(module)
    return KINDS[kind].write(tmp_path, make_rows(NUM_ROWS)), knobs


def make(source: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "epochs": EPOCHS, "num_workers": 0, "timeout_s": NEVER_S}
    return DataLoader(source, **settings | knobs)


def rest_of(loader: DataLoader, found: list[tuple[Any, ...]]) -> None:
    """Append what comes until the end, or until an error; it comes out of here."""
    while True:
        try:
            samples = loader.get_next_batch(10)
        except EndOfData as end:
            found += [(sample.index, *sample.tokens.tolist()) for sample in end.samples]
            return

        found += [(sample.index, *sample.tokens.tolist()) for sample in samples]


def all_of(source: Any, **knobs: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with make(source, **knobs) as loader:
        rest_of(loader, found)
    return found


@pytest.mark.parametrize("how", ["short", "slow"])
def test_short_and_slow_reads_change_nothing(way, how):
    source, knobs = way
    expected = all_of(source, **knobs)
    assert len(expected) == NUM_ROWS * EPOCHS
    with faulty(Faults(short=how == "short", slow=how == "slow")) as faults:
        found = all_of(source, **knobs)

    assert found == expected
    assert faults.num_faults > 0
    record("IO", f"{how} reads", faults=faults.num_faults, lost=0, repeated=0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_short_reads_of_workers_change_nothing(tmp_path, num_workers):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)

    assert all_of(path, num_workers=num_workers) == all_of(path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_read_that_fails_is_named_and_a_resume_goes_on_with_the_next_sample(way, code):
    source, knobs = way
    expected = all_of(source, **knobs)
    with faulty(Faults()) as quiet:
        all_of(source, **knobs)
    places = sorted({1 + place * quiet.num_reads // ROUNDS for place in range(ROUNDS)})
    paths = [source] if isinstance(source, str) else source
    num_failed = 0
    for place in places:
        found: list[tuple[Any, ...]] = []
        with faulty(Faults(fail_at=place, error=OSError(code, os.strerror(code)))) as faults:
            try:
                loader = make(source, **knobs)
            except SourceError as error:  # it was to be looked at first
                assert os.strerror(code) in str(error)
                num_failed += 1
                continue

            with loader:
                try:
                    rest_of(loader, found)
                except SourceError as error:
                    assert os.strerror(code) in str(error)
                    assert any(path in str(error) for path in paths)
                    assert "at byte" in str(error)
                    num_failed += 1
                state = json.dumps(loader.state_dict())
        assert faults.num_faults == 1
        assert found == expected[: len(found)], place
        with make(source, **knobs) as loader:
            loader.load_state_dict(json.loads(state))
            rest_of(loader, found)
        assert found == expected, place

    record("IO", "failed reads, and resumes", faults=len(places), lost=0, repeated=0, unnamed=0)
    say(f"{len(places)} reads failed with {errno.errorcode[code]}; {num_failed} were told; all resumed")


def remote(paths: list[Path], faults: Faults | None = None) -> HuggingFaceSource:
    """The files as a streaming dataset; faults begin when it is there."""
    import datasets

    prefix = "" if faults is None else faulty_file_system(faults)
    quiet = faults or Faults()
    quiet.is_on = False
    files = [f"{prefix}{path}" for path in paths]
    source = HuggingFaceSource(datasets.load_dataset("json", data_files=files, split="train", streaming=True))
    quiet.is_on = True
    return source


def test_a_remote_file_system_that_fails_short_or_slow(tmp_path):
    pytest.importorskip("datasets")
    paths = [
        write_rows(tmp_path / f"{part}.jsonl", 150, {i: {"id": 1000 * part + i} for i in range(150)}) for part in (0, 1)
    ]
    expected = all_of(remote(paths))
    assert len(expected) == 300 * EPOCHS
    quiet = Faults()
    assert all_of(remote(paths, quiet)) == expected
    for faults in (Faults(short=True), Faults(slow=True)):
        assert all_of(remote(paths, faults)) == expected
        record("IO", "remote, short or slow", faults=faults.num_faults, lost=0, repeated=0)
        assert faults.num_faults > 0
    errors = [OSError(code, os.strerror(code)) for code in (errno.EIO, errno.ECONNRESET)]
    for place in sorted({1 + place * quiet.num_reads // ROUNDS for place in range(ROUNDS)}):
        for error in errors:
            found: list[tuple[Any, ...]] = []
            with make(remote(paths, Faults(fail_at=place, error=error))) as loader:
                with pytest.raises(SourceError) as caught:
                    rest_of(loader, found)
                state = json.dumps(loader.state_dict())
            assert str(error.strerror) in str(caught.value)
            assert found == expected[: len(found)]
            with make(remote(paths)) as loader:
                loader.load_state_dict(json.loads(state))
                rest_of(loader, found)
            assert found == expected
            record("IO", "remote, failed", faults=1, lost=0, repeated=0)
