"""Data that grow: what an epoch covers, and that a resume has the same rows; and orders that leave no row."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncdata import HardPacking, JsonlSource, Mix, Part, RayExecutor, RowShuffle, Shuffle, SoftPacking
from asyncdata.errors import ConfigError, NoSamplesError, SnapshotMismatchError, SourceChangedError, SourceError
from tests.support.examples import each_value
from tests.support.faults import until
from tests.support.loaders import make
from tests.support.loading import SHUFFLE, all_dropped, ids, order_of, row_id
from tests.support.stores import HttpHost


def append(path, first, number, tail=""):
    """Rows from id ``first`` on, and then part of one."""
    rows = ({"id": i, "pad": "x" * (i * 37 % 90)} for i in range(first, first + number))
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def as_it_is(path, name):
    """A copy of the whole lines of now."""
    copy = path.parent.parent / name
    data = path.read_bytes()
    copy.write_bytes(data[: data.rfind(b"\n") + 1])
    return copy


def growing(path, **knobs):
    return JsonlSource(str(path), grows=True, **knobs)


def state_of(loader):
    return json.loads(json.dumps(loader.state_dict()))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    append(folder / "m.jsonl", 0, 100)
    return folder


@pytest.mark.parametrize(
    ("given", "shuffle", "num_workers"),
    [
        ("a folder", SHUFFLE, 0),
        ("a glob", Shuffle(enabled=False), 2),
        ("a list", Shuffle(block_bytes=700, window_blocks=3), 0),
        ("a folder", Shuffle(block_bytes=700, window_blocks=3), 2),
    ],
)
def test_an_epoch_covers_the_whole_lines_that_it_begins_with_and_each_is_in_d(folder, num_workers, shuffle, given):
    first, later = folder / "m.jsonl", folder / "a.jsonl"
    with open(first, "a", encoding="utf-8") as file:
        file.write('{"id": 100, "pad"')
    late = [] if given == "a list" else [later]
    paths = {"a folder": str(folder), "a glob": str(folder / "*.jsonl"), "a list": [str(first)]}[given]
    knobs = {"num_workers": num_workers, "buffer_size": 7, "shuffle": shuffle}

    with make(JsonlSource(paths, grows=True), **knobs) as loader:
        of_0 = as_it_is(first, "of 0")
        assert ids(loader.get_next_batch(60)) == order_of(of_0, shuffle=shuffle)[:60]
        with open(first, "a", encoding="utf-8") as file:
            file.write(': ""}\n')
        append(first, 101, 60)
        append(later, 1000, 50, '{"id": 1050')
        state = state_of(loader)
        assert ids(loader.get_next_batch(40)) == order_of(of_0, shuffle=shuffle)[60:]
        of_1 = [as_it_is(each, f"of 1 {each.stem}") for each in [first, *late]]
        expected = order_of(of_1, 2, shuffle=shuffle)
        num_rows = len(expected) // 2
        second = ids(loader.get_next_batch(num_rows - 90))
        append(later, 1050, 5)
        in_1 = state_of(loader)
        second += ids(loader.get_next_batch(90))
        assert second == expected[num_rows:]

    append(folder / "0.jsonl", 5000, 9)
    with make(JsonlSource(paths, grows=True), **knobs) as loader:  # where the files of now would come in another order
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(40)) == order_of(of_0, shuffle=shuffle)[60:]
        for _ in range(2):
            loader.load_state_dict(in_1)
            assert ids(loader.get_next_batch(90)) == second[-90:]
            assert state_of(loader)["counters"]["digest"]["num_samples"] == 100 + num_rows


@pytest.mark.parametrize("has_folder", [False, True])
def test_an_earlier_epoch_covers_what_it_had_or_is_refused_once_a_state_has_forgotten_it(folder, tmp_path, has_folder):
    path, knobs = folder / "m.jsonl", {"buffer_size": 7, "shuffle": False}
    source = JsonlSource(str(path), grows=str(tmp_path / "run/files") if has_folder else True)
    with make(source, **knobs) as loader:
        loader.get_next_batch(100)
        append(path, 100, 50)
        loader.get_next_batch(30)
        loader.set_epoch(0)
        assert ids(loader.get_next_batch(130)) == [*range(100), *range(30)]  # no row of the second epoch
        state = state_of(loader)
        loader.get_next_batch(1)
        with make(source, **knobs) as other:
            other.load_state_dict(state)
            other.get_next_batch(1)
            for one in (loader, other):
                if has_folder:
                    one.set_epoch(0)
                    assert ids(one.get_next_batch(101)) == [*range(100), 0]
                else:
                    with pytest.raises(ConfigError, match=r"AD311 set_epoch\(0\).*here 1, .*grows="):
                        one.set_epoch(0)
                    assert ids(one.get_next_batch(1)) == [31]


@pytest.mark.parametrize("name", ["m.jsonl", "n.jsonl"])
def test_an_epoch_that_was_forgotten_is_that_of_the_folder_and_later_ones_have_all_their_rows(folder, tmp_path, name):
    knobs = {"buffer_size": 7, "batch_size": 1, "shuffle": Shuffle(enabled=False, block_bytes=999)}
    source = JsonlSource(str(folder), grows=str(tmp_path / "run/files"))

    def epoch_of(loader):
        return [row for batch in loader for row in ids(batch)]

    with make(source, **knobs) as loader, make(source, **knobs) as other:
        assert epoch_of(loader) == [*range(100)]
        until(lambda: state_of(loader)["growth"][-1]["epoch"] == 1)  # what the next one covers is known
        append(folder / name, 100, 70)
        assert epoch_of(loader) == [*range(100)]
        assert ids(loader.get_next_batch(1)) == [0]
        other.load_state_dict(state_of(loader))
        other.get_next_batch(1)
        for one in (loader, other):
            one.set_epoch(0)
            assert [epoch_of(one) for _ in range(3)] == [[*range(100)], [*range(100)], [*range(170)]]


def test_a_file_that_comes_with_a_name_that_is_no_utf8_is_named(folder):
    with make(growing(folder), buffer_size=10) as loader:
        loader.get_next_batch(80)
        odd = append(os.path.join(folder, os.fsdecode(b"\xe9.jsonl")), 100, 1)
        with pytest.raises(SourceError, match=r"AD304 cannot read .*\\udce9.jsonl: its path is not UTF-8, .*rename it"):
            loader.get_next_batch(100)
    os.rename(odd, folder / "e.jsonl")
    with make(growing(folder)) as loader:
        assert len(loader.get_next_batch(101)) == 101


@pytest.mark.parametrize(("how", "num_workers"), each_value(["shrinks", "is edited", "is gone", "is an array"], [0, 1]))
def test_what_an_epoch_has_had_may_not_change(folder, how, num_workers):
    path = folder / "m.jsonl"
    append(folder / "n.jsonl", 500, 5)
    with make(growing(folder), num_workers=num_workers, buffer_size=5) as loader:
        loader.get_next_batch(105)
        state = state_of(loader)
    with make(growing(folder), num_workers=num_workers, buffer_size=5) as loader:
        loader.load_state_dict(state)
        loader.get_next_batch(50)
        data = path.read_bytes()
        if how == "shrinks":
            os.truncate(path, 2000)
        elif how == "is edited":
            path.write_bytes(data.replace(b'"id": 7,', b'"id": 8,') + b'{"id": 100}\n')
        elif how == "is gone":
            path.unlink()
        else:
            (folder / "z.jsonl").write_text("[1]")
        with pytest.raises(SourceError if how == "is an array" else SourceChangedError, match="AD(120|30[234])"):
            loader.get_next_batch(500)
    if how in ("shrinks", "is edited"):
        with make(growing(folder), num_workers=num_workers) as loader:
            with pytest.raises(SnapshotMismatchError, match="m.jsonl"):
                loader.load_state_dict(state)


def test_objects_of_a_store_come_with_a_later_epoch_and_may_not_be_replaced(tmp_path):
    def rows(first, number):
        return "".join(json.dumps({"id": i}) + "\n" for i in range(first, first + number)).encode().rstrip(b"\n")

    with HttpHost() as host:
        for name, data in {"b": rows(0, 30), "c": rows(100, 10)}.items():
            host.put(f"/bucket/data/{name}.jsonl", data)
        source = JsonlSource("gs://bucket/data/", grows=True, storage_options=host.google)
        with make(source, num_workers=1, buffer_size=3) as loader:
            assert len(loader.get_next_batch(20)) == 20
            host.put("/bucket/data/a.jsonl", rows(200, 5))
            state = state_of(loader)
            rest = ids(loader.get_next_batch(20))
            assert sorted(ids(loader.get_next_batch(45))) == [*range(30), *range(100, 110), *range(200, 205)]
        with make(source, num_workers=1, buffer_size=3) as loader:
            loader.load_state_dict(state)
            assert ids(loader.get_next_batch(20)) == rest
            host.put("/bucket/data/c.jsonl", rows(300, 10))
            with pytest.raises(SourceChangedError, match="AD3"):
                loader.get_next_batch(200)


def of_rank(folder, shared, rank, state=None, epochs=3, each=lambda _: None):
    """The rows of a rank's batches, and the states after them."""
    knobs = {"ranks": {"rank": rank, "world_size": 2}, "batch_size": 4, "epochs": epochs, "buffer_size": 4}
    source = JsonlSource(str(folder), grows=str(shared))
    with make(source, **knobs) as loader:
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for _ in range(epochs):
            for batch in loader:
                found.append((ids(batch), state_of(loader)))
                each(len(found))
    return found


def test_ranks_that_see_other_sizes_agree_by_the_folder_on_what_an_epoch_covers(folder, tmp_path):
    turns, found = threading.Barrier(2), {}

    def rank(number):
        def each(step):
            turns.wait(60)
            append(folder / "m.jsonl", 1000 + 10 * step + number, 1 + 5 * number)  # between their looks, too

        found[number] = of_rank(folder, tmp_path / "run/files", number, each=each)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))

    assert len(found[0]) == len(found[1]) > 39, "they have as many batches, and later epochs have more rows"
    for (_, one), (_, other) in zip(found[0], found[1], strict=True):
        listed, others = ({each["epoch"]: each["files"] for each in state["growth"]} for state in (one, other))
        both = listed.keys() & others.keys()  # one rank may have looked what the next epoch covers, and the other not
        assert both and [listed[epoch] for epoch in both] == [others[epoch] for epoch in both]
        assert one["counters"]["digest"] == other["counters"]["digest"]

    again = [of_rank(folder, tmp_path / "run/files", number, found[0][20][1]) for number in range(2)]
    assert [[rows for rows, _ in run] for run in again] == [[rows for rows, _ in found[n][21:]] for n in range(2)]


def test_ranks_with_other_files_or_other_content_are_told_and_do_not_diverge(folder, tmp_path):
    of_rank(folder, tmp_path / "shared", 0, epochs=1)
    other = tmp_path / "other"
    other.mkdir()
    append(other / "m.jsonl", 0, 100)
    with pytest.raises(SourceChangedError, match=r"AD311 .*epoch-0.files was written by a rank.* has other files"):
        of_rank(other, tmp_path / "shared", 1, epochs=1)

    path = folder / "m.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"id": 7', b'"id": 8'))
    with pytest.raises(SourceChangedError, match="AD303 .*m.jsonl has other content here"):
        of_rank(folder, tmp_path / "shared", 1, epochs=1)
    os.truncate(path, 1000)
    with pytest.raises(SourceChangedError, match="AD302"):
        of_rank(folder, tmp_path / "shared", 1, epochs=1)

    (tmp_path / "shared/epoch-0.files").write_bytes(b"\xc1")
    with pytest.raises(SourceError, match="AD311 the ranks cannot agree"):
        of_rank(folder, tmp_path / "shared", 1, epochs=1)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"shuffle": "full"}, "an order of single rows"),
        ({"shuffle": RowShuffle(method="none")}, "an order of single rows"),
        ({"executor": RayExecutor(), "num_workers": None}, "workers on other machines"),
        ({"ranks": {"rank": 1, "world_size": 2}}, "world_size above 1 and no folder"),
    ],
    ids=str,
)
def test_what_does_not_go_with_growth_is_refused(folder, knobs, said):
    with pytest.raises(ConfigError, match=f"AD311 a source that grows does not work with {said}"):
        make(growing(folder), **knobs)


def test_what_cannot_grow_is_refused(folder, tmp_path):
    for name, wrong in {"python_lines": True, "allow_repeats": True}.items():
        with pytest.raises(ConfigError, match="AD311 grows does not work with"):
            make(growing(folder, **{name: wrong}))
    with pytest.raises(ConfigError, match="AD471 part 'a' grows"):
        make(Mix({"a": Part(growing(folder)), "b": Part(growing(folder))}))
    (tmp_path / "array.json").write_text('[{"id": 1}]')
    with pytest.raises(SourceError, match="AD311 .*array.json is compressed, or a JSON array"):
        make(growing(tmp_path / "array.json"))
    (tmp_path / "begun.jsonl").write_text('{"id": 1')
    with pytest.raises(SourceError, match="AD201 no whole line yet in 1 files: .*begun.jsonl"):
        make(growing(tmp_path / "begun.jsonl"))


def test_a_state_with_growth_and_a_loader_without_refuse_each_other(folder):
    with make(growing(folder)) as loader:
        loader.get_next_batch(10)
        grown = state_of(loader)
    with make(str(folder)) as loader:
        loader.get_next_batch(10)
        plain = state_of(loader)
        with pytest.raises(SnapshotMismatchError, match="order.grows"):
            loader.load_state_dict(grown)
    with make(growing(folder), row_id) as loader, pytest.raises(SnapshotMismatchError, match="order.grows"):
        loader.load_state_dict(plain)


def test_a_row_that_is_excluded_is_that_of_its_file_after_one_that_sorts_before_it_has_come(folder):
    append(folder / "n.jsonl", 100, 101)
    with make(growing(folder), shuffle=False) as loader:
        groups = loader.get_samples(101)
        loader.exclude([groups[100]])
        loader.add_samples([groups[0], groups[1]])
        state = state_of(loader)
    append(folder / "a.jsonl", 200, 201)
    with make(growing(folder), shuffle=False) as loader:
        loader.load_state_dict(state)
        assert loader.statistics().dropped_groups_total == {}
        assert [ids(group) for group in loader.get_samples(2)] == [[0], [1]]


FILES = {
    "rows": "".join(json.dumps({"id": n}) + "\n" for n in range(50)),
    "blank": "\n\n\n",
    "bad": "1\n2\n",
    "empty": "",
}
SKIP = {"bad_rows": "skip"}
NONE_KEPT = {"tokenize_fn": all_dropped}
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "no bytes": ("empty", "full", {}),
    "blocks of blank lines": ("blank", Shuffle(), {}),
    "blank lines": ("blank", "full", {}),
    "blank lines in slime's order": ("blank", RowShuffle(method="slime"), {}),
    "a slice from the end on": ("rows", RowShuffle(first=50), {}),
    "a slice from the end on, as they lie": ("rows", RowShuffle(method="none", first=50), {}),
    "a slice up to the start": ("rows", RowShuffle(stop=0), {}),
    "a slice up to the start, as they lie": ("rows", RowShuffle(method="none", stop=0), {}),
    "a slice of no row": ("rows", RowShuffle(first=-5, stop=3), {}),
    "a split without eval": ("rows", RowShuffle(part="eval", train_ratio=1.0), {}),
    "a split without train": ("rows", RowShuffle(part="train", train_ratio=0.0), {}),
    "only kept rows, and none is": ("rows", RowShuffle(only_kept=True), NONE_KEPT),
    "only kept rows, as they lie": ("rows", RowShuffle(method="none", only_kept=True), NONE_KEPT),
    "only bad rows": ("bad", "full", SKIP),
    "only bad rows without a number": ("bad", RowShuffle(first=0), SKIP),
    "all dropped": ("rows", "full", NONE_KEPT),
    "all dropped in blocks": ("rows", Shuffle(), NONE_KEPT),
}
OTHERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "outcomes": {"outcomes": {"policy": {"drop_above": 0.9}}},
    "soft packs": {"packing": SoftPacking(max_length=16)},
    "hard packs": {"packing": HardPacking(max_length=16)},
    "acknowledged": {"commit": "on_ack"},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def take(source: Any, **knobs: Any) -> None:
    """Ask for samples one at a time, so that much is read ahead."""
    with make(source, **{"buffer_size": 200, "batch_size": 1} | knobs) as loader:
        for _ in loader:
            pass


@pytest.mark.parametrize(("way", "other"), each_value(list(WAYS), list(OTHERS)))
def test_a_loader_whose_order_has_no_row_says_so_and_a_part_is_named(data: Path, way: str, other: str) -> None:
    name, shuffle, settings = WAYS[way]
    path = data / f"{name}.jsonl"
    with pytest.raises(SourceError, match="AD401|AD201"):
        take(path, shuffle=shuffle, **settings, **OTHERS[other])
    for weight in (1, 99):
        parts = {"none": Part(path, shuffle=shuffle, **settings), "all": Part(data / "rows.jsonl", weight=weight)}
        with pytest.raises(SourceError, match="AD201|AD407 part 'none'"):
            take(Mix(parts), **OTHERS[other])


@pytest.mark.parametrize("way", ["blank lines", "a slice from the end on"])
def test_a_part_of_a_nested_mixture_is_named_with_its_mixture(data: Path, way: str) -> None:
    name, shuffle, settings = WAYS[way]
    inner = Mix({"none": Part(data / f"{name}.jsonl", shuffle=shuffle, **settings), "all": Part(data / "rows.jsonl")})
    with pytest.raises(NoSamplesError, match=r"AD407 part 'inner\.none'"):
        take(Mix({"inner": Part(inner), "all": Part(data / "rows.jsonl")}))


@pytest.mark.parametrize("way", ["blank lines", "a slice from the end on", "only kept rows, and none is"])
def test_a_rank_of_an_order_without_a_row_says_so(data: Path, way: str) -> None:
    name, shuffle, settings = WAYS[way]
    with pytest.raises(NoSamplesError, match="AD401"):
        take(data / f"{name}.jsonl", shuffle=shuffle, ranks={"rank": 1, "world_size": 2}, **settings)
