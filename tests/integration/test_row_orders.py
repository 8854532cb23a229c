"""Orders of single rows: slime's, slices and parts; their index, which is kept; and arrays, which have them too."""

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import BadRows, DataLoader, HardPacking, JsonArraySource, JsonlSource, Ranks, RowShuffle
from asyncdata.errors import BadRowError, ConfigError, SnapshotMismatchError
from tests.support.examples import each_value
from tests.support.loaders import make
from tests.support.loading import id_and_text, ids, row_id, waits_for_a_file, write_rows
from tests.support.parts import change
from tests.support.sources import jsonl, write

NUM_ROWS = 500


def drops_odd(row: dict[str, Any]) -> list[int] | None:
    return [row["id"]] if row["id"] % 2 == 0 else None


drops_odd.version = 1  # a function without one has no fingerprint, so that what it keeps is found out every time


@pytest.fixture
def path(jsonl_file) -> Path:
    return jsonl_file([{"id": number, "pad": "x" * (number * 37 % 300)} for number in range(NUM_ROWS)])


def loader(path: Any, shuffle: Any = "full", function: Any = row_id, **knobs: Any) -> DataLoader:
    cache = {name: knobs.pop(name) for name in ("folder", "max_row_index_bytes") if name in knobs}
    cache = {**cache, "folder": str(cache["folder"])} if cache else {}
    knobs = {"num_workers": 0, "buffer_size": 64, "cache": cache} | knobs
    return DataLoader(path if isinstance(path, list) else str(path), tokenize_fn=function, shuffle=shuffle, **knobs)


def shuffled(rows: list[int], seed: int) -> list[int]:
    random.Random(seed).shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", [0, 42, -3])
def test_slimes_method_gives_slimes_permutation(path, seed):
    random.seed(7)
    state = random.getstate()
    with loader(path, RowShuffle(method="slime"), seed=seed) as data:
        epochs = [ids(data.get_next_batch(NUM_ROWS)) for _ in range(3)]
    assert epochs == [shuffled(list(range(NUM_ROWS)), seed + epoch) for epoch in range(3)]
    assert random.getstate() == state, "the global generator is the user's"


def test_rows_that_yield_no_sample_are_left_out_before_they_are_ordered(path):
    with loader(path, RowShuffle(method="slime", only_kept=True), drops_odd, seed=1) as data:
        assert data.num_rows() == NUM_ROWS // 2
        found = ids(data.get_next_batch(NUM_ROWS // 2))
        statistics = data.statistics()
    kept = list(range(0, NUM_ROWS, 2))
    assert found == [kept[i] for i in shuffled(list(range(len(kept))), 1)]
    assert statistics.excluded_rows == {"tokenize_fn": NUM_ROWS // 2}
    assert statistics.dropped_total == {}


FATES = {"kept": '{{"id": {}}}', "dropped": '{{"id": {}, "dropped": 1}}', "no object": '"text {}"', "blank": "  "}


def drops_marked(row: dict[str, Any]) -> list[int] | None:
    return None if "dropped" in row else [row["id"]]


@pytest.mark.parametrize("seed", range(6))
def test_the_rows_that_have_a_number_are_those_of_a_list_sliced_filtered_and_split(tmp_path, monkeypatch, seed):
    """Of many blocks of two files: rows that are no objects have none; a part is what torch's split gives."""
    chance = random.Random(seed)
    change(monkeypatch, bytes_of_an_index_block=chance.choice([16, 100, 1 << 20]))
    fates = [chance.choice(["kept", "kept", *FATES]) for _ in range(60)]
    lines = [FATES[fate].format(number) for number, fate in enumerate(fates)]
    for name, some in (("a", lines[:37]), ("b", lines[37:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some) + "\n")
    first, stop = (None if seed % 3 == 0 or chance.random() < 0.2 else chance.randrange(-12, 25) for _ in range(2))
    chosen: dict[str, Any] = {"first": first, "stop": stop, "only_kept": (first, stop) == (None, None) or seed % 2 == 0}
    objects = [number for number, fate in enumerate(fates) if fate in ("kept", "dropped")]
    wanted = [row for row in objects[first:stop] if not chosen["only_kept"] or fates[row] == "kept"]
    ratio, split_seed = chance.random(), chance.randrange(1000)
    excluded = {"tokenize_fn": fates.count("dropped"), "bad row AD113": fates.count("no object")}

    def rows(num_rows: int, **settings: Any) -> list[int]:
        """The samples of an epoch, of so many rows that have a number."""
        shuffle = RowShuffle(method="none", **chosen, **settings)
        knobs = {"bad_rows": BadRows(policy="skip", max=None), "epochs": 1, "batch_size": 100}
        with loader(tmp_path, shuffle, drops_marked, **knobs) as data:
            assert data.num_rows() == num_rows
            if (first, stop) == (None, None):
                assert data.statistics().excluded_rows == excluded
            return [row for batch in data for row in ids(batch)] if num_rows else []

    kept = [row for row in wanted if fates[row] == "kept"]
    if kept:
        assert rows(len(wanted)) == kept
    torch = pytest.importorskip("torch")
    order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(split_seed)).tolist()
    num_train = int(len(wanted) * ratio)
    for name, numbers in (("train", order[:num_train]), ("eval", order[num_train:])):
        part = [wanted[number] for number in sorted(numbers)]
        if [row for row in part if fates[row] == "kept"]:
            found = rows(len(part), part=name, train_ratio=ratio, split_seed=split_seed)
            assert found == [row for row in part if fates[row] == "kept"]


def test_a_bad_row_stops_an_order_that_would_leave_it_out_unless_it_may_be_skipped(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:7], "{broken", *lines[7:]]) + "\n")
    with loader(path, RowShuffle(only_kept=True)) as data, pytest.raises(BadRowError) as caught:
        data.num_rows()
    assert (caught.value.code, caught.value.line) == ("AD101", 8)
    with loader(path, RowShuffle(only_kept=True)) as data, pytest.raises(BadRowError):
        data.get_next_batch(1)


@pytest.mark.parametrize(
    ("shuffle", "others"),
    [
        (RowShuffle(method="slime"), [True, "full", RowShuffle(method="slime", stop=5)]),
        (RowShuffle(part="train"), [RowShuffle(part="eval"), RowShuffle(part="train", split_seed=1), RowShuffle()]),
    ],
    ids=["slime", "a part"],
)
def test_a_snapshot_of_another_order_of_rows_is_refused(path, shuffle, others):
    with loader(path, shuffle) as data:
        data.get_next_batch(3)
        state = data.state_dict()
    for other in others:
        with loader(path, other) as data, pytest.raises(SnapshotMismatchError, match=r"order\."):
            data.load_state_dict(state)


@pytest.mark.parametrize(("world_size", "drop_last"), [(1, False), (3, True)])
@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": RowShuffle(only_kept=True), "n_samples_per_prompt": 2},
        {"shuffle": "full", "plan_packs": True, "packing": HardPacking(max_length=8)},
    ],
    ids=["kept rows", "planned packs"],
)
def test_the_number_of_batches_is_that_of_a_loop(path, settings, drop_last, world_size):
    ranks = Ranks(world_size=world_size)
    with loader(path, function=drops_odd, batch_size=4, drop_last=drop_last, ranks=ranks, **settings) as steps:
        for _ in range(2):
            assert steps.num_batches() == len(list(steps))


def test_the_number_of_batches_is_refused_where_rows_may_be_dropped(path):
    for settings in ({}, {"shuffle": True}, {"shuffle": RowShuffle(only_kept=True), "batch_size": None}):
        with loader(path, **{"batch_size": 4} | settings) as steps, pytest.raises(ConfigError, match="AD443"):
            steps.num_batches()


def test_seeking_goes_to_any_row_of_any_epoch(path):
    with loader(path, RowShuffle(method="slime"), seed=5, n_samples_per_prompt=2) as data:
        data.seek(3, 100, group_index=1000)
        groups = data.get_samples(3)
        assert [group[0].group_index for group in groups] == [1000, 1001, 1002]
        assert [sample.index for sample in groups[0]] == [2000, 2001]
        assert [int(group[0].tokens[0]) for group in groups] == shuffled(list(range(NUM_ROWS)), 8)[100:103]
        data.seek(3, NUM_ROWS)
        assert data.position() == type(data.position())(4, 0, 0)
        for epoch, row in ((0, NUM_ROWS + 1), (-1, 0), (0, -1)):
            with pytest.raises(ConfigError, match=r"there is no row"):
                data.seek(epoch, row)


def test_what_needs_the_index_says_so_where_there_is_none(path):
    with loader(path, True) as data:
        with pytest.raises(ConfigError, match="row index"):
            data.num_rows()
        with pytest.raises(ConfigError, match="row index"):
            data.seek(0, 5)


def test_the_index_is_made_once_for_the_same_data(path, tmp_path):
    with loader(path, RowShuffle(only_kept=True), drops_odd, folder=tmp_path / "kept") as data:
        expected = ids(data.get_next_batch(50))
    (file,) = (tmp_path / "kept" / "index").glob("*.index")
    before = file.stat().st_mtime_ns

    with loader(path, RowShuffle(only_kept=True), drops_odd, folder=tmp_path / "kept") as data:
        assert ids(data.get_next_batch(50)) == expected
    with loader(path, RowShuffle(only_kept=True), drops_odd, folder="") as data:
        assert ids(data.get_next_batch(50)) == expected
    with capture_logs() as logs, loader(path, RowShuffle(only_kept=True), folder=tmp_path / "kept") as data:
        data.num_rows()

    (event,) = [log for log in logs if log["event"] == "index.not_stored"]
    assert "the tokenize function has no attribute version" in event["reason"]
    assert file.stat().st_mtime_ns == before
    assert list((tmp_path / "kept" / "index").glob("*.index")) == [file], "without a version there is no fingerprint"


def test_indexes_are_kept_within_a_size_and_the_runs_own_and_those_in_use_stay(path, parquet, tmp_path):
    cache_dir = str(tmp_path / "kept")
    folder = tmp_path / "kept" / "index"

    def kept() -> set[str]:
        return {entry.stem for entry in folder.iterdir()}

    with loader(parquet, "full", folder=cache_dir) as copying:
        expected = ids(copying.get_next_batch(5))
        (first,) = kept()
        with loader(path, folder=cache_dir, max_row_index_bytes=1) as data:
            data.num_rows()
        assert len(kept()) == 2
        expected += ids(copying.get_next_batch(NUM_ROWS - 5))
    assert sorted(expected) == list(range(NUM_ROWS))

    with loader(path, folder=cache_dir, max_row_index_bytes=1) as data:
        data.num_rows()
    assert len(kept()) == 1
    assert first not in kept()
    with capture_logs() as events, loader(parquet, "full", folder=cache_dir, max_row_index_bytes=1) as data:
        data.num_rows()
    assert kept() == {first}
    assert [event["num_indexes"] for event in events if event["event"] == "index.evicted"] == [1]


def test_the_first_rows_of_an_unshuffled_order_come_before_the_pass_has_found_all(tmp_path, monkeypatch):
    """The 150th row holds up the pass, which tokenizes the rows: it is two blocks further on."""
    change(monkeypatch, bytes_of_an_index_block=4096)
    gate = tmp_path / "gate"
    path = write_rows(tmp_path / "rows.jsonl", 200, {150: {"gate": str(gate)}})

    with loader(path, RowShuffle(method="none", only_kept=True), waits_for_a_file, timeout_s=240) as data:
        found = ids(data.get_next_batch(10))
        state = data.state_dict()
        gate.touch()
        found += ids(data.get_next_batch(400))

    assert found == [row % 200 for row in range(410)]
    with loader(path, RowShuffle(method="none", only_kept=True), waits_for_a_file, folder="") as data:
        data.load_state_dict(state)
        assert ids(data.get_next_batch(300)) == found[10:310]


def test_longer_rows_than_are_allowed_are_bad_at_their_turn_or_left_out(jsonl_file):
    path = jsonl_file([{"id": 1}, {"id": 2, "pad": "x" * 5000}, {"id": 3}])
    source = JsonlSource(str(path), max_row_bytes=1000)
    for only_kept in (False, True):
        shuffle = RowShuffle(method="none", only_kept=only_kept)
        with DataLoader(source, tokenize_fn=row_id, shuffle=shuffle, num_workers=0, bad_rows="skip") as data:
            assert ids(data.get_next_batch(4)) == [1, 3, 1, 3]
            assert data.num_rows() == (2 if only_kept else 3)


# Sources that cannot be read row by row: their rows are copied.


@pytest.fixture
def parquet(tmp_path) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"id": range(NUM_ROWS), "pad": ["x" * (number * 37 % 300) for number in range(NUM_ROWS)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    return tmp_path / "rows.parquet"


def test_a_copy_that_is_not_kept_is_gone_with_its_loader(parquet, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with loader(parquet, "full", folder="") as data:
        data.num_rows()
        assert list(tmp_path.glob("asyncdata-rows-*/*.rows"))
    assert not list(tmp_path.glob("asyncdata-rows-*"))


@pytest.mark.parametrize(
    ("call", "suffix"),
    [("pread", ".index"), ("pwrite", ".index"), ("pwrite", ".places"), ("fsync", ".index"), ("fsync", ".places")],
)
def test_an_index_that_cannot_be_kept_costs_only_the_next_run_time(path, tmp_path, monkeypatch, call, suffix):
    with loader(path, folder=tmp_path / "kept") as data:
        expected = ids(data.get_next_batch(NUM_ROWS))
    really = getattr(os, call)

    def fails(fd: int, *rest: Any) -> Any:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(suffix):
            raise OSError(errno.ENOSPC, "No space left on device")

        return really(fd, *rest)

    monkeypatch.setattr(os, call, fails)
    with capture_logs() as logs, loader(path, folder=tmp_path / "full") as data:
        found = ids(data.get_next_batch(NUM_ROWS))

    assert found == expected
    (event,) = [log for log in logs if log["event"] == "index.not_written"]
    assert event["path"].startswith(str(tmp_path / "full"))
    assert "No space left on device" in event["reason"]


# The rows of an index are in a file, which is mapped

PROGRAM = f"""
import os, signal, sys
from asyncdata import DataLoader
from asyncdata.loader import opened_rows
from tests.support.loading import row_id
path, folder, stop, torn = *sys.argv[1:3], *map(int, sys.argv[3:])
opened_rows._INDEX_BLOCK_BYTES = 4096
write, num_writes = os.pwrite, 0
def torn_write(fd, data, offset):
    global num_writes
    num_writes += 1
    if num_writes == stop:
        write(fd, bytes(data[:torn]), offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data, offset)
os.pwrite = torn_write
with DataLoader(path, tokenize_fn=row_id, shuffle="full", num_workers=0, cache={{"folder": folder}}) as data:
    print([int(sample.tokens[0]) for sample in data.get_next_batch({NUM_ROWS})])
    print([line.split()[4] for line in open("/proc/self/maps").read().splitlines() if line.endswith(".places")])
"""
"""The process dies in its write number ``stop``, of which ``torn`` bytes are written."""


def run(path: Path, folder: Path, stop: int = 0, torn: int = 0) -> list[str]:
    """What a process with a loader prints: its rows, and which files of rows it has mapped; killed in a write: []."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder), str(stop), str(torn)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if stop else 0), done.stderr
    return done.stdout.splitlines()


def rows_file(folder: Path) -> Path:
    (found,) = (folder / "index").glob("*.places")
    return found


def test_processes_map_one_file(path, tmp_path):
    with loader(path) as data:
        expected = str(ids(data.get_next_batch(NUM_ROWS)))
    first = run(path, tmp_path)
    assert first == [expected, str([str(rows_file(tmp_path).stat().st_ino)])]
    assert run(path, tmp_path) == first


def test_a_killed_writer_leaves_nothing_that_is_used(path, tmp_path):
    """The next one writes all anew: else it would not come to the write in which it is killed."""
    expected = run(path, tmp_path / "whole")[0]
    for stop, torn in ((1, 5), (2, 9), (3, 0), (3, 20), (4, 100), (5, 30), (3, 1)):
        assert run(path, tmp_path / "cut", stop, torn) == []
    assert run(path, tmp_path / "cut")[0] == expected
    assert rows_file(tmp_path / "cut").read_bytes() == rows_file(tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_a_damaged_file_of_rows_is_made_again_and_those_who_read_it_keep_theirs(path, tmp_path, place):
    with loader(path, folder=tmp_path, num_workers=0) as data:
        expected = ids(data.get_next_batch(NUM_ROWS))
    whole, kept = rows_file(tmp_path), rows_file(tmp_path).read_bytes()

    with loader(path, folder=tmp_path) as reader:
        begun = ids(reader.get_next_batch(9))
        damaged = bytearray(kept)
        damaged[place] ^= 1
        other = whole.with_name("other")  # a damaged disk changes what is mapped, too; the one who writes must not
        other.write_bytes(damaged)
        other.chmod(0o600)
        other.replace(whole)
        with loader(path, folder=tmp_path) as data:
            assert ids(data.get_next_batch(NUM_ROWS)) == expected
        assert begun + ids(reader.get_next_batch(NUM_ROWS - 9)) == expected

    assert rows_file(tmp_path).read_bytes() == kept


NUM_ELEMENTS = 300
ROWS = [
    {"id": row, "pad": "x" * (row * 37 % 300), "text": ['a "quote", a \\ and [brackets]}', {"deep": [row, {}]}]}
    for row in range(NUM_ELEMENTS)
]
LAYOUTS: dict[str, Callable[[], bytes]] = {
    "compact": lambda: json.dumps(ROWS, separators=(",", ":")).encode(),
    "over many lines": lambda: b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2).encode() + b"\r\n",
    "spaces, and long elements": lambda: (
        b" [\n\n" + b" ,\t".join(json.dumps(row, indent=1 + row["id"] % 9).encode() for row in ROWS) + b"\n ] "
    ),
}
SHUFFLES = {
    "full": "full",
    "the first 8": RowShuffle(stop=8),
    "the first 8 as they lie": RowShuffle(method="none", stop=8),
    "the last 20": RowShuffle(method="slime", first=-20),
    "train": RowShuffle(part="train"),
    "eval": RowShuffle(part="eval"),
    "kept": RowShuffle(only_kept=True),
}


@pytest.fixture
def small_blocks(monkeypatch):
    change(monkeypatch, bytes_of_an_index_block=700)


@pytest.fixture
def array(tmp_path, small_blocks) -> Path:
    return write(tmp_path / "rows.json", LAYOUTS["compact"]())


def array_loader(source: Any, shuffle: Any = "full", **knobs: Any) -> DataLoader:
    return make(source, id_and_text, shuffle=shuffle, buffer_size=16, cache={"folder": ""}, **knobs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("shuffle", "layout"), each_value(SHUFFLES, LAYOUTS.keys()))
def test_an_array_has_the_order_of_its_rows_as_lines(tmp_path, shuffle, layout):
    with array_loader(write(tmp_path / "rows.jsonl", jsonl(ROWS)), shuffle) as data:
        num_rows = data.num_rows()
        expected = [sample.tokens.tolist() for sample in data.get_next_batch(2 * num_rows)]
    text = LAYOUTS[layout]()
    with array_loader(write(tmp_path / "rows.json", text), shuffle) as data:
        assert data.num_rows() == num_rows
        samples = data.get_next_batch(2 * num_rows)
    assert [sample.tokens.tolist() for sample in samples] == expected
    assert [sample.source.row_number for sample in samples] == ids(samples)
    for place in (sample.source for sample in samples):
        assert json.loads(text[place.byte_offset : place.byte_offset + place.num_bytes])["id"] == place.row_number


def test_no_more_is_read_than_the_first_rows_where_only_they_are_asked_for(array):
    os.truncate(array, 30 * 700)
    with array_loader(array, RowShuffle(stop=8)) as data:
        assert sorted(ids(data.get_next_batch(8))) == list(range(8))
        assert data.num_rows() == 8


def test_an_element_that_is_too_long_is_a_bad_row(array):
    source = JsonArraySource(str(array), max_row_bytes=300)
    short = [row["id"] for row in ROWS if len(json.dumps(row, separators=(",", ":"))) <= 300]
    with array_loader(source, RowShuffle(method="none"), bad_rows="skip", epochs=1, batch_size=10) as data:
        assert [number for batch in data for number in ids(batch)] == short
        assert data.statistics().dropped_total == {"bad row AD108": NUM_ELEMENTS - len(short)}


def test_a_compressed_array_is_refused_as_compressed_lines_are(tmp_path):
    path = write(tmp_path / "rows.json.gz", gzip.compress(LAYOUTS["compact"]()))
    with pytest.raises(ConfigError, match=r"rows\.json\.gz can only be read from front to back, and this shuffle"):
        array_loader(path)
