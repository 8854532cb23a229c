"""The rows that ``order``, ``sample`` and ``inspect`` show are those that a loader delivers, in its order."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    ConfigError,
    DataLoader,
    JsonlSource,
    LengthGrouping,
    RowFn,
    RowShuffle,
    Shuffle,
    SoftPacking,
    SourceChangedError,
    SourceError,
    XTunerPacking,
)
from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.cli.main import main
from asyncdata.loader.mix_file import mix_of_file
from asyncdata.workers import inline, request_handler
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import Sample

NUM_ROWS = 120
ROWS = [{"id": number, "pad": "é" * (number % 37)} for number in range(NUM_ROWS)]
ROW_ID = ("--tokenize-fn", "tests.support.tokenize_fns:row_id")
TWO_THIRDS = ("--tokenize-fn", "tests.support.tokenize_fns:every_third_dropped")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(folder: Path) -> str:
    """With a mark at its beginning, blank lines, carriage returns, and no end of its last line."""
    lines = [json.dumps(row).encode() + b"\r" * (row["id"] % 2) + b"\n" * (1 + (row["id"] % 9 == 0)) for row in ROWS]
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines).rstrip())
    return str(folder / "rows.jsonl")


def gzipped(folder: Path) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return str(folder / "rows.jsonl.gz")


def array(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    return str(folder / "rows.json")


def parquet(folder: Path) -> str:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=50)
    return str(folder / "rows.parquet")


WINDOWS: tuple[tuple[str, ...], Any] = (
    ("--block-bytes", "512", "--window-blocks", "4"),
    Shuffle(block_bytes=512, window_blocks=4),
)
FULL: tuple[tuple[str, ...], Any] = (("--shuffle", "full"), "full")
ORDERS: dict[str, tuple[Callable[[Path], str], tuple[str, ...], Any]] = {
    "lines in windows": (jsonl, *WINDOWS),
    "lines in one window": (jsonl, (), True),
    "lines as they lie": (jsonl, ("--no-shuffle", "--block-bytes", "700"), Shuffle(enabled=False, block_bytes=700)),
    "lines longer than blocks": (jsonl, ("--block-bytes", "16"), Shuffle(block_bytes=16)),
    "all lines": (jsonl, *FULL),
    "lines in slime's order": (
        jsonl,
        ("--loader", 'shuffle={"method": "slime", "stop": 90}'),
        RowShuffle(method="slime", stop=90),
    ),
    "a part of the lines": (
        jsonl,
        ("--loader", 'shuffle={"method": "keyed", "part": "eval", "train_ratio": 0.7}'),
        RowShuffle(part="eval", train_ratio=0.7),
    ),
    "a gzip in windows": (gzipped, *WINDOWS),
    "an array in windows": (array, *WINDOWS),
    "all of an array": (array, *FULL),
    "Parquet in windows": (parquet, *WINDOWS),
    "all of Parquet": (parquet, *FULL),
}


def delivered(source: Any, *, epochs: int = 1, **knobs: Any) -> list[Sample]:
    knobs = {"tokenize_fn": row_id, "num_workers": 0, "seed": 7, "timeout_s": 240, **knobs}
    with DataLoader(source, epochs=epochs, batch_size=1, collate_fn=list, **knobs) as loader:
        batches = [sample for _ in range(epochs) for batch in loader for sample in batch]
    return [piece.sample for pack in batches for piece in pack] if "packing" in knobs else batches


def place_of(sample: Sample) -> dict[str, Any]:
    """As ``order`` prints it."""
    source = sample.source
    assert source is not None
    number = {"byte_offset": source.byte_offset, "line": source.line_number()}
    place = number if source.row_number is None else {"row_number": source.row_number}
    return {"position": str(sample.position), "path": source.path, "num_bytes": source.num_bytes, **place}


@pytest.mark.parametrize(("write", "options", "shuffle"), ORDERS.values(), ids=ORDERS)
def test_rows_are_shown_as_a_loader_delivers_them(here, run_json, write, options, shuffle):
    path = write(here)
    samples = delivered(path, epochs=2, shuffle=shuffle)
    words = (path, "--seed", 7, *options)
    lines = ["--lines"] if write is jsonl else []

    found = [run_json("order", *words, "--num", 0, "--epoch", epoch, *lines) for epoch in (0, 1)]
    assert sum(found, []) == [place_of(sample) for sample in samples]

    # Any of them, in any order, by position, and by the place in the file.
    some = [*samples[:: len(samples) // 4], samples[0]]
    *rows, total = run_json("inspect", *words, *ROW_ID, *(f"--position={each.position}" for each in some))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in some]
    assert total["total"]["num_samples"] == len(some)
    of_epoch_0 = [each for each in some if each.position.epoch == 0]
    *rows, _ = run_json("inspect", *words, *ROW_ID, *(f"--row={line_of(each)}" for each in of_epoch_0))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in of_epoch_0]

    # One of the first epoch and one of a later one, by its number.
    for number in (len(samples) // 2 - 1, len(samples) - 1):
        (row,) = run_json("sample", *words, "--ordinal", number)
        assert {name: row[name] for name in place_of(samples[number])} == place_of(samples[number])
        assert json.loads(row["row"])["id"] == samples[number].tokens[0]


def shown_row(row: dict[str, Any]) -> tuple[str, int]:
    """Its position, and its token."""
    ((piece,),) = [text["pieces"] for text in row["texts"]]
    return row["position"], int(piece["text"])


def line_of(sample: Sample) -> str:
    place = place_of(sample)
    return f"{place['path']}:{place.get('line', place.get('row_number'))}"


PLANNED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "only rows that yield a sample": (
        ['shuffle={"method": "keyed", "only_kept": true}'],
        {"shuffle": RowShuffle(only_kept=True)},
    ),
    "planned packs": (
        [
            'packing={"SoftPacking": {"max_length": 8}}',
            "plan_packs=true",
            "batch_size=1",
            'shuffle={"method": "keyed"}',
        ],
        {"packing": SoftPacking(max_length=8), "plan_packs": True, "shuffle": "full"},
    ),
    "planned packs of like length": (
        [
            'packing={"SoftPacking": {"max_length": 8}}',
            "plan_packs=true",
            "batch_size=1",
            'shuffle={"method": "keyed"}',
            'length_grouping={"window": 4}',
        ],
        {
            "packing": SoftPacking(max_length=8),
            "plan_packs": True,
            "shuffle": "full",
            "length_grouping": LengthGrouping(window=4),
        },
    ),
    "XTuner's packs": (
        ['packing={"XTunerPacking": {"max_length": 8, "seed": 5}}', "batch_size=1", "shuffle=true"],
        {"packing": XTunerPacking(max_length=8, seed=5)},
    ),
}


@pytest.mark.parametrize(("settings", "knobs"), PLANNED.values(), ids=PLANNED)
def test_an_order_that_depends_on_samples_is_that_of_the_loader(here, run_json, settings, knobs):
    path, loader = jsonl(here), [word for each in settings for word in ("--loader", each)]
    samples = delivered(path, **{"tokenize_fn": TWO_THIRDS[1], **knobs})

    found = run_json("order", path, "--seed", 7, *TWO_THIRDS, "--num", 0, *loader)

    assert len(found) == NUM_ROWS * 2 // 3
    assert [row["position"] for row in found] == [str(sample.position) for sample in samples]
    assert [row["byte_offset"] for row in found] == [sample.source.byte_offset for sample in samples]


# Rows by their places


def refused(run_json: Callable[..., list[Any]], *words: object) -> str:
    (found,) = run_json(*words, status=1)
    message: str = found["error"]["message"]
    return message


def test_of_several_files_the_one_that_is_named_has_the_row(here, run_json):
    for name in ("a", "b"):
        (here / f"{name}.jsonl").write_text("".join(f'{{"id": {n}, "of": "{name}"}}\n' for n in range(40)))
    words = ("inspect", "a.jsonl", "b.jsonl", *WINDOWS[0], *ROW_ID)

    row, _ = run_json(*words, "--row", "b.jsonl:18")

    assert (row["path"], row["line"], shown_row(row)[1]) == (str(here / "b.jsonl"), 18, 17)
    assert refused(run_json, *words, "--row", 7).startswith(f"the data has 2 files; say which: {here}/a.jsonl:7")
    assert "c.jsonl: it is not a file of the data" in refused(run_json, *words, "--row", "c.jsonl:1")


@pytest.mark.parametrize("place", ["2", "4", "0", "rows.jsonl:9"])
def test_a_place_without_a_row_is_named(jsonl_file, run_json, place):
    path = jsonl_file([{"id": 1}, b"   ", {"id": 2}])

    said = refused(run_json, "inspect", path, *ROW_ID, "--row", place)
    assert said.startswith(f"there is no row at {path}:{place[-1]}: it is blank, beyond the end, or left out")


@pytest.mark.parametrize("write", [gzipped, array, parquet])
def test_a_number_beyond_the_end_is_named(here, run_json, write):
    path = write(here)

    assert f"there is no row at {path}:{NUM_ROWS}: " in refused(run_json, "inspect", path, *ROW_ID, "--row", NUM_ROWS)
    assert "no window 99 in epoch 0" in refused(run_json, "sample", path, "--position", "0:99:0")


def test_a_row_that_the_order_leaves_out_is_not_found(here, run_json):
    words = ("inspect", jsonl(here), *ROW_ID, "--loader", 'shuffle={"method": "none", "stop": 5}')

    assert shown_row(run_json(*words, "--row", 6)[0])[1] == 4
    assert "left out" in refused(run_json, *words, "--row", 7)


@pytest.mark.parametrize("place", ["", "rows.jsonl:", "rows.jsonl:x", "-1"])
def test_a_malformed_place_is_refused(here, run_json, place):
    said = refused(run_json, "inspect", jsonl(here), *ROW_ID, f"--row={place}")

    assert said.startswith("a row's location is written LINE or FILE:LINE, as in data.jsonl:12")


# What can be wrong with the data


def test_without_any_row_no_row_has_a_position(jsonl_file, run_json):
    assert refused(run_json, "sample", jsonl_file([b" ", b""]), "--ordinal", 0).startswith("AD202 ")


def test_an_array_that_is_cut_off_is_named(here, run_json):
    (here / "rows.json").write_text(json.dumps(ROWS)[:-30])

    assert refused(run_json, "sample", "rows.json", "--ordinal", NUM_ROWS - 1).startswith("AD120 ")


def test_a_row_that_is_too_long_is_not_read(jsonl_file):
    source = JsonlSource(str(jsonl_file([{"id": 1}, {"id": 1, "text": "x" * 500}])), max_row_bytes=100)

    with OpenedOrder(source, row_id, shuffle=False) as opened:
        short, long = opened.first(2)
    assert (len(short.raw) > 0, long.raw) == (True, b"")
    assert str(long.fault).startswith("AD108 ")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), SourceChangedError, r"AD302 .*rows.jsonl shrank"),
        (lambda path: path.unlink(), SourceError, "AD304"),
    ],
    ids=["it shrank", "it disappeared"],
)
def test_a_file_that_changes_after_it_was_opened_is_named(jsonl_file, change, error, message):
    path = jsonl_file({"id": number} for number in range(100))
    with OpenedOrder(str(path)) as opened:
        change(path)

        with pytest.raises(error, match=message):
            opened.window(0, 0)


@pytest.mark.parametrize(("epoch", "window"), [(0, 1), (0, -1), (-1, 0)])
def test_a_window_that_is_not_there_is_named(here, epoch, window):
    with OpenedOrder(jsonl(here)) as opened, pytest.raises(ConfigError, match=f"{window} in epoch {epoch}.* 0 to 0"):
        opened.window(epoch, window)


def test_a_failing_start_is_an_error_and_not_a_wait(here, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no reader")

    monkeypatch.setattr(inline, "handler_of", fail)

    with OpenedOrder(jsonl(here)) as opened, pytest.raises(RuntimeError, match="no reader"):
        opened.window(0, 0)


def test_a_row_index_that_a_run_has_made_is_used(here, run_json, monkeypatch):
    path, cache = jsonl(here), {"folder": str(here / "kept")}
    samples = delivered(path, shuffle="full", cache=cache)
    monkeypatch.setattr(request_handler, "index_blocks", lambda *_: pytest.fail("the rows were counted again"))

    (found,) = run_json("order", path, *FULL[0], "--seed", 7, "--num", 1, "--loader", f"cache={json.dumps(cache)}")

    assert found["position"] == str(samples[0].position)


# Mixtures


@pytest.fixture
def mix(here: Path) -> str:
    """Part ``a`` has rows that are too long for ``--max-length 20``, part ``b`` a bad row."""
    for name, number in (("a", 50), ("b", 40)):
        rows = [json.dumps({"input": f"{name} {n} " * (1 + 9 * (n % 4 == 0)), "label": n}) for n in range(number)]
        (here / f"{name}.jsonl").write_text("\n".join([*rows, "{" if name == "b" else ""]))
    (here / "mix.toml").write_text('quota = 4\n[parts]\na = {source = "a.jsonl", weight = 3}\nb = "b.jsonl"\n')
    return "mix.toml"


def test_of_a_mixture_every_command_shows_what_a_loader_delivers(mix, run_json, demo_tokenizer):
    words = ("--mix", mix, "--tokenizer", demo_tokenizer, "--max-length", 20, "--window-blocks", 7)
    work = ("--num-workers", 0, "--bad-rows", "skip")
    run_json("run", *words, *work, "--num-batches", 2, "--batch-size", 45, "--record", "record", "--snapshot", "state")
    with open("record", encoding="utf-8") as file:
        record = [json.loads(line) for line in file]
    wanted = [(row["position"], row["path"], row["byte_offset"]) for row in record]

    assert [
        (row["position"], row["path"], row["byte_offset"]) for row in run_json("order", *words, "--num", 90)
    ] == wanted
    *rows, _ = run_json("inspect", *words, "--num", 90)
    samples = [row for row in rows if not row["dropped"] and not row["error"]]
    assert [(row["position"], row["num_tokens"]) for row in samples] == [
        (row["position"], row["num_tokens"]) for row in record
    ]
    assert len({row["position"] for row in rows}) == len(rows)
    assert all(row["path"].endswith(f"{row['source']}.jsonl") for row in rows)
    assert any(row["dropped"] == "max_length" for row in rows) and any(row["error"] for row in rows)
    (by_ordinal,) = run_json("sample", *words, *work, "--ordinal", 89)
    (by_position,) = run_json("sample", *words, *work, "--position", wanted[89][0])
    assert by_position == {**by_ordinal, "ordinal": None}
    assert (by_ordinal["position"], by_ordinal["path"], by_ordinal["byte_offset"]) == wanted[89]
    assert json.loads(by_ordinal["row"])["label"] == by_ordinal["line"] - 1
    resumed = run_json("sample", *words, *work, "--ordinal", 90, "--snapshot", "state")
    assert resumed == run_json("sample", *words, *work, "--ordinal", 90)


def test_without_a_tokenizer_every_row_of_a_mixture_counts_as_a_sample(mix, run_json):
    with DataLoader(mix_of_file(mix), tokenize_fn=RowFn(), num_workers=0, bad_rows="skip") as loader:
        samples = loader.get_next_batch(35)[5:]

    found = run_json("order", "--mix", mix, "--num", 30, "--from", 5)

    assert [(row["source"], row["byte_offset"]) for row in found] == [
        (sample.source_name, sample.source.byte_offset) for sample in samples
    ]


def test_what_a_look_at_a_mixture_settles_itself_is_no_use_to_give(mix, run_json):
    words = ("order", "--mix", mix, "--num", 3)

    assert run_json(*words, "--loader", "bad_rows=raise", "--loader", "num_workers=1") == run_json(*words)


def test_a_resumed_run_of_a_mixture_is_the_uninterrupted_one(mix, here, run_json, demo_tokenizer):
    words = ("run", "--mix", mix, "--tokenizer", demo_tokenizer, "--num-workers", 0, "--bad-rows", "skip")
    for num_batches, options in (
        (3, ["--snapshot=s", "--record=two"]),
        (8, ["--snapshot=s", "--record=two", "--resume"]),
    ):
        run_json(*words, "--batch-size", 10, "--num-batches", num_batches, *options)
    run_json(*words, "--batch-size", 10, "--num-batches", 8, "--record=one")

    assert (here / "two").read_bytes() == (here / "one").read_bytes()


def test_looking_at_a_mixture_writes_no_file(mix, here, capsys, demo_tokenizer):
    (here / mix).write_text(
        (here / mix).read_text().replace('"b.jsonl"', '{source = "b.jsonl", bad_rows = "quarantine"}')
    )
    before = sorted(path.name for path in here.iterdir())
    words = ["--mix", mix, "--tokenizer", demo_tokenizer]

    assert main(["order", *words, "--num", "200"]) == 0
    assert main(["inspect", *words, "--num", "200"]) == 0
    assert main(["sample", *words, "--num-workers", "0", "--ordinal", "200"]) == 0

    assert sorted(path.name for path in here.iterdir()) == before
