"""What comes next, which rows a step had, and a run that goes back and continues without some of them."""

import json
import shlex
from itertools import islice

import msgspec
import pytest
from structlog.testing import capture_logs

from asyncdata import HardPacking, JsonlSource, LengthGrouping, Mix, PackedCollator, RowFn, RowShuffle, SoftPacking
from asyncdata.errors import ConfigError, NoSamplesError, PrefetchTimeoutError
from tests.support.loaders import gated, make, resumed
from tests.support.loading import NUM_ROWS, fails_on_13, id_and_text, ids, row_id, waits_for_a_file, write_rows
from tests.support.pages import run_command
from tests.support.ranks import stream
from tests.support.sources import KINDS, make_rows


def test_what_comes_next_ends_before_a_bad_row_which_is_raised_where_it_is_delivered(tmp_path):
    path, told = write_rows(tmp_path / "rows.jsonl", 30), tmp_path / "bad"
    with make(path, fails_on_13, shuffle=False) as loader:
        assert ids(loader.peek(20)) == list(range(13))
        assert ids(loader.get_next_batch(13)) == list(range(13))
        assert loader.peek(1) == []
    with make(path, fails_on_13, shuffle=False, bad_rows={"policy": "quarantine", "path": str(told)}) as loader:
        assert ids(loader.peek(20)) == [*range(13), *range(14, 21)]
        assert not told.exists() or not told.read_bytes(), "it is not passed over yet"
        assert ids(loader.get_next_batch(20)) == [*range(13), *range(14, 21)]
        assert len(told.read_bytes().splitlines()) == 1


def test_to_look_at_what_comes_next_waits_no_longer_than_it_may_and_then_asks_for_nothing_more(tmp_path):
    path, gate = gated(tmp_path, 20)
    with make(path, waits_for_a_file, shuffle=False, num_workers=1, buffer_size=8) as loader:
        assert ids(loader.peek(4)) == [0, 1, 2, 3]
        with pytest.raises(PrefetchTimeoutError):
            loader.peek(150, timeout_s=0.01)
        gate.touch()
        assert ids(loader.get_next_batch(30)) == list(range(30))
        with pytest.raises(ConfigError, match="AD440"):
            loader.peek(-1)


# From a loss spike to its rows, and to a run without them


def loss_of(sample):
    """What a trainer would see: the bad row stands out."""
    return 90.0 if "poison" in str(sample.extra) else 1.0


def trained(path, rank, steps, state=None, excluded=()):
    """The rows and the loss of each step of a rank, and the states after them."""
    knobs = {"ranks": {"rank": rank, "world_size": 2}, "batch_size": 4, "seed": 7, "shuffle": True}
    found, states = [], []
    with make(path, RowFn(), **knobs) as loader:
        if state is not None:
            loader.load_state_dict(state)
            loader.exclude(excluded)
        for batch in islice(stream(loader), steps):
            found.append(([sample.extra["id"] for sample in batch], max(map(loss_of, batch))))
            states.append(json.loads(json.dumps(loader.state_dict())))
    return found, states


def test_a_bad_row_is_found_from_its_loss_spike_by_two_commands_and_cut_and_the_rest_keeps_its_order(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS, {137: {"text": "poison"}})
    runs = [trained(path, rank, 50) for rank in range(2)]
    spikes = [(rank, step) for rank in range(2) for step in range(50) if runs[rank][0][step][1] > 10]
    rank, step = spikes[0]
    assert len(spikes) == 2, "it comes once an epoch"

    of_run = f"{shlex.quote(str(path))} --seed 7"
    of_step = f"--step {step} --rank {rank} --world-size 2 --batch-size 4"
    _, said, _ = run_command(f"asyncdata sample {of_run} {of_step} --json")
    of_the_step = [json.loads(line) for line in said.splitlines()]
    assert len(of_the_step) == 4
    places = " ".join(f"--position {row['position']}" for row in of_the_step)
    _, shown, _ = run_command(f"asyncdata inspect {of_run} --tokenize-fn asyncdata:RowFn --json {places}")
    texts = [json.loads(line) for line in shown.splitlines()][:4]
    bad = [row for row, text in zip(of_the_step, texts, strict=True) if "poison" in str(text["extra"].get("text"))]
    assert len(bad) == 1

    back = step - 3
    first, second = whole_epochs(runs, NUM_ROWS)
    cut = [trained(path, number, 50 - back, runs[0][1][back - 1], bad) for number in range(2)]
    assert all(loss < 10 for run in cut for _, loss in run[0])
    expected = [row for row in first[8 * back :] if row != 137], [row for row in second if row != 137]
    assert whole_epochs(cut, len(expected[0])) == expected


def whole_epochs(runs, num_first):
    """The rows of both ranks in the order of D, of an epoch that has ``num_first`` rows left, and of the next one."""
    rows = [row for steps in zip(*(run[0] for run in runs), strict=True) for row in in_order(steps)]
    second = -(-num_first // 8) * 8  # a short last batch is filled up with rows that came before
    return rows[:num_first], rows[second : second + NUM_ROWS - (137 not in rows)]


def in_order(steps):
    """The rows of a step of both ranks, as they stand in D."""
    first, second = (rows for rows, _ in steps)
    return [row for pair in zip(first, second, strict=True) for row in pair]


def test_ranks_that_tokenize_their_own_rows_tokenize_all_after_some_are_excluded(tmp_path):
    """The rows behind those that are excluded go to other ranks than before."""
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    knobs = {"shuffle": RowShuffle(only_kept=True), "batch_size": 2, "seed": 7}
    with make(path, **knobs) as loader:
        rows = loader.get_next_batch(40)
    excluded, kept = {13, 21, 22}, [row for number, row in enumerate(rows) if number not in {13, 21, 22}]

    def steps(rank):
        with make(path, ranks={"rank": rank, "world_size": 2}, **knobs) as loader:
            for number, batch in enumerate(loader):
                if number == 2:
                    assert loader.exclude(rows[row].source for row in excluded) == 3
                yield [(sample.source, sample.tokens.tolist()) for sample in batch]

    both = list(zip(*(islice(steps(rank), 9) for rank in range(2)), strict=True))
    found = [row for first, second in both for pair in zip(first, second, strict=True) for row in pair]
    assert found == [(sample.source, sample.tokens.tolist()) for sample in kept[:36]]


QUICK = ("JSONL files", "a gzip file", "Parquet files")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in (*QUICK, "a JSON array") else pytest.mark.thorough) for name in KINDS],
)
@pytest.mark.parametrize("shuffle", [True, "full", RowShuffle(method="none")], ids=str)
def test_the_rows_are_left_out_from_here_on_by_every_kind_of_source_and_the_state_keeps_them(tmp_path, name, shuffle):
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)
    if kind.is_stream and shuffle is not True:
        pytest.skip("its rows cannot be read one by one")
    source, knobs = kind.write(tmp_path, make_rows(60)), {"shuffle": shuffle, "cache": {"folder": ""}, "epochs": 3}
    with make(source, row_id, **knobs) as loader:
        whole = ids(loader.get_next_batch(180))
    with make(source, row_id, **knobs) as loader:
        before = loader.get_next_batch(25)
        coming = loader.peek(30)
        assert loader.exclude([before[3], [coming[0]], coming[29].source]) == 3
        assert loader.exclude([before[3]]) == 3
        out = {whole[3], whole[25], whole[54]}
        expected = [row for row in whole[25:] if row not in out]
        assert ids(loader.get_next_batch(40)) == expected[:40]
        state = json.loads(json.dumps(loader.state_dict()))
        assert loader.statistics().dropped_total["excluded"] >= 2
    assert resumed(source, state, len(expected) - 40, row_id, **knobs) == expected[40:]


def test_rows_of_a_mixture_are_left_out_of_their_own_part(tmp_path):
    paths = [write_rows(tmp_path / f"{name}.jsonl", 40) for name in "ab"]
    mix = lambda: Mix({"a": paths[0], "b": paths[1], "the file of b": paths[1]})  # noqa: E731
    with make(mix()) as loader:
        bad = next(sample for sample in loader.peek(200) if sample.source_name == "b" and ids([sample]) == [13])
        command = f"asyncdata sample {paths[1]} --position 0:0:0 --json --no-shuffle"
        place = json.loads(run_command(command)[1])
        places = {ids([sample])[0]: sample.source for sample in loader.peek(200) if sample.source_name == "a"}
        assert loader.exclude([bad, {**place, "source": "b"}, places[7]]) == 3
        state = loader.state_dict()
    with make(mix()) as loader:
        loader.load_state_dict(state)
        found = loader.get_next_batch(300)
    seen = {name: {ids([sample])[0] for sample in found if sample.source_name == name} for name in mix().parts}
    assert list(seen.values()) == [set(range(40)) - {7}, set(range(40)) - {0, 13}, set(range(40))]


@pytest.mark.parametrize(("by", "is_nested"), [("rows", False), ("tokens", True)])
def test_a_part_whose_rows_are_all_excluded_sits_out_and_the_others_keep_their_order(tmp_path, by, is_nested):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", 20) for name in "abc"}

    def loader():
        parts = dict(paths)
        if is_nested:
            parts = {"in": Mix({"a": parts.pop("a")}, quota=3), **parts}
        return make(Mix(parts, by=by, quota=9))

    of_a = "in.a" if is_nested else "a"
    own = lambda found, name: [ids([sample])[0] for sample in found if sample.source_name == name]  # noqa: E731
    with loader() as plain:
        before, whole = plain.get_next_batch(90), plain.get_next_batch(200)
    with loader() as cut, capture_logs() as told:
        assert len(own(cut.get_next_batch(90), of_a)) == 30
        assert cut.exclude([sample for sample in before if sample.source_name == of_a]) == 20
        found = cut.get_next_batch(50)
        state = json.loads(json.dumps(cut.state_dict()))
        found += cut.get_next_batch(50)
        assert cut.statistics().by_source[of_a].dropped["excluded"] in range(10, 200)
        assert cut.statistics().by_source[of_a].samples == 30
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert ids(resumed.get_next_batch(50)) == ids(found[50:])

    assert not own(found, of_a)
    for name in "bc":
        rows, without = own(whole, name), own(found, name)
        assert 47 <= len(without) <= 53
        assert without == rows[: len(without)]
    (event,) = [event for event in told if event["event"] == "mixture.part_sits_out"]
    assert (event["source"], event["num_rows"]) == (of_a, 20)


def test_a_mixture_of_which_all_rows_are_excluded_says_so(tmp_path):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", 20) for name in "ab"}
    with make(Mix(paths, quota=5)) as loader:
        loader.exclude(loader.get_next_batch(60))
        for _ in range(2):
            with pytest.raises(NoSamplesError, match="AD401 .* 0 kept: .* by excluded"):
                loader.get_next_batch(1)


PACKED = {
    "soft": {"packing": SoftPacking(max_length=256)},
    "cut": {"packing": HardPacking(max_length=256)},
    "across epochs": {"packing": SoftPacking(max_length=256, across_epochs=True)},
    "planned": {"packing": SoftPacking(max_length=256), "shuffle": "full", "plan_packs": True},
    "grouped": {"length_grouping": LengthGrouping()},
}


def listed(item):
    """The samples of a pack, each with its tokens there; of a sample, itself."""
    documents = item if isinstance(item, list) else [item]
    return [(getattr(each, "sample", each), len(each.tokens)) for each in documents]


def packs_of(batches, out=frozenset()):
    """Where the documents of each pack come from, and their tokens; without the rows ``out``."""
    packs = [listed(item) for batch in batches for item in batch]
    places = [[(sample.source.byte_offset, number) for sample, number in pack] for pack in packs]
    return [[place for place in pack if place[0] not in out] for pack in places]


@pytest.mark.parametrize("how", PACKED)
def test_packs_have_a_gap_and_are_otherwise_the_same_also_where_nothing_is_left_of_one(rows, how):
    knobs = {"batch_size": 2, "epochs": 2, "cache": {"folder": ""}, **PACKED[how]}
    with make(rows, id_and_text, **knobs) as loader:
        whole = [batch for _ in range(2) for batch in loader]
    with make(rows, id_and_text, **knobs) as loader:
        loop = iter(loader)
        assert packs_of(next(loop) for _ in range(3)) == packs_of(whole[:3])
        state = loader.state_dict()
    bad = [listed(whole[4][1])[-1][0], *(sample for sample, _ in listed(whole[5][0]))]
    out = {sample.source.byte_offset for sample in bad}

    with make(rows, id_and_text, **knobs) as loader:
        loader.load_state_dict(state)
        loader.exclude(bad)
        loop = iter(loader)
        cut = [next(loop) for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
    with make(rows, id_and_text, **knobs) as loader:
        loader.load_state_dict(state)
        cut += [batch for _ in range(2) for batch in loader]
    assert packs_of(cut, out) == packs_of(whole[3:], out)
    assert [len(batch) for batch in cut] == [len(batch) for batch in whole[3:]], "no rank misses a batch"
    gap = cut[2][0] if how == "grouped" else cut[2][0][0]
    assert (gap.tokens.tolist(), gap.labels.tolist()) == ([0, 0], [-100, -100])
    if how != "grouped":
        assert len(cut[2][0]) == 1 < len(whole[5][0]), "one gap, however many samples are gone"
        assert (PackedCollator()(cut[2])["labels"][0] == -100).all()


def test_what_is_no_row_of_the_loader_is_refused_and_nothing_is_excluded(rows, tmp_path):
    with make(write_rows(tmp_path / "others.jsonl", 3)) as others:
        stranger = others.get_next_batch(1)[0]
    with make(rows) as loader:
        first = loader.get_next_batch(1)
        for row in (stranger, {"path": str(rows)}, {"path": str(rows), "byte_offset": -1}, "rows.jsonl:3", 5, []):
            with pytest.raises(ConfigError, match="AD485 exclude"):
                loader.exclude([*first, row])
        assert "excluded" not in loader.state_dict()


@pytest.mark.parametrize("name", QUICK)
def test_a_place_where_no_row_begins_is_refused(tmp_path, name):
    source = KINDS[name].write(tmp_path, make_rows(60))
    with make(source, row_id) as loader:
        where = loader.peek(1)[0].source
        is_text = where.row_number is None
        where = msgspec.structs.replace(where, **({"byte_offset": 0} if is_text else {"row_number": 0}))
        first = msgspec.structs.asdict(where)
        assert loader.exclude([where, first]) == 1
        wrong = {"byte_offset": [5, 10**9, True, 10**30]} if is_text else {"row_number": [True, 10**9, 10**30]}
        for key, values in wrong.items():
            for value in values if is_text or not KINDS[name].is_stream else values[:1]:
                with pytest.raises(ConfigError, match="AD485 exclude.* no row .* begins there"):
                    loader.exclude([first | {key: value}])
        with pytest.raises(ConfigError, match="AD485"):
            loader.exclude([first | {"path": ["a list"]}])
        json.dumps(loader.state_dict())


def test_a_row_after_a_byte_order_mark_and_one_that_was_added_are_rows(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 5)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with make(JsonlSource(str(path), grows=True), shuffle=False) as loader:
        size = path.stat().st_size
        with path.open("ab") as file:
            file.write(b'{"id": 77}\n')
        assert loader.exclude([{"path": str(path), "byte_offset": place} for place in (3, size)]) == 2
        assert ids(loader.get_next_batch(9)) == [*range(1, 5), *range(1, 5), 1]


def test_of_a_mixture_only_the_part_with_other_data_forgets_which_rows_are_excluded(tmp_path):
    mix = Mix({name: write_rows(tmp_path / f"{name}.jsonl", 30) for name in "ab"})
    with make(mix) as loader:
        rows = loader.get_next_batch(20)
        loader.exclude(rows)
        state = loader.state_dict()
    write_rows(tmp_path / "a.jsonl", 31)
    names = [sample.source_name for sample in rows]
    with make(mix) as loader, capture_logs() as logs:
        loader.load_state_dict(state, allow_changed={"data"})
        assert len(loader.state_dict()["excluded"]) == names.count("b") > 0
    assert [log["num_rows"] for log in logs if log["event"] == "snapshot.exclusions_forgotten"] == [names.count("a")]


# Groups of excluded rows, where `test_whole_loader.py` does not get


@pytest.fixture(params=["one source", "a mixture"])
def source(request, tmp_path):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", 30) for name in "ab"}
    return Mix(paths) if request.param == "a mixture" else paths["a"]


def test_what_waits_in_a_state_that_was_saved_before_does_not_come_either(source):
    """A state of before excluded groups were dropped may have them in its buffer."""
    with make(source) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[2:])
        state = json.loads(json.dumps(loader.state_dict()))
        loader.exclude([groups[2]])
        excluded = loader.state_dict()["excluded"]
    with make(source) as loader:
        loader.load_state_dict(state | {"excluded": excluded})
        again = loader.get_samples(3)
        assert again[0][0].group_index == 3
        assert groups[2][0].source not in [group[0].source for group in again]


def test_a_restart_serves_of_the_groups_of_the_buffer_that_are_out_those_that_are_not_excluded(source):
    with make(source, commit="on_ack") as loader:
        loader.add_samples(loader.get_samples(2))
        out = loader.get_samples(2)
        loader.exclude(out[:1])
        assert loader.statistics().tracked_groups == 2
        state = json.loads(json.dumps(loader.state_dict()))
        loader.add_samples(out)
        assert loader.statistics().tracked_groups == 0
    with make(source, commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert loader.statistics().dropped_groups_total == {}
        assert [group[0].group_index for group in loader.get_samples(2)] == [1, 2]


def test_groups_that_come_again_keep_their_numbers_whenever_rows_were_excluded(source):
    with make(source, commit="on_ack") as loader:
        groups = loader.get_samples(4)
        loader.exclude(groups[:1])
        state = json.loads(json.dumps(loader.state_dict()))
    for number in range(3):
        with make(source, commit="on_ack") as loader:
            loader.load_state_dict(state)
            loader.exclude(groups[number : number + 1])
            state = json.loads(json.dumps(loader.state_dict()))
            assert [group[0].group_index for group in loader.get_samples(2)] == [number + 1, number + 2]


def test_an_epoch_that_begins_again_has_no_number_for_a_row_that_is_excluded(rows):
    with make(rows) as loader:
        loader.exclude(loader.get_samples(4)[1:2])
        loader.set_epoch(1)
        loader.set_epoch(0)
        assert [group[0].group_index for group in loader.get_samples(4)] == [4, 5, 6, 7]


def test_a_group_that_a_trainer_made_of_several_rows_is_dropped_if_one_of_them_is_excluded(source):
    with make(source, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        loader.add_samples([[groups[0][0], groups[1][0]]])
        loader.exclude([groups[1]])
        loader.add_samples([[groups[2][0], groups[1][1]], [groups[0][1], groups[2][1]]])
        assert loader.statistics().dropped_groups_total == {"excluded": 2}
        assert loader.get_samples(1) == [[groups[0][1], groups[2][1]]]


def test_a_row_that_is_excluded_again_was_no_group_in_the_meantime(source):
    with make(source, commit="on_ack") as loader:
        coming = loader.peek(2)[1:]
        loader.exclude(coming)
        groups = [(group[0].group_index, group[0].source) for group in loader.get_samples(3)]
        loader.exclude(coming)
        state = json.loads(json.dumps(loader.state_dict()))
    with make(source, commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert [(group[0].group_index, group[0].source) for group in loader.get_samples(3)] == groups
