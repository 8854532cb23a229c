"""Packs, order and batches are those of XTuner's own code, as recorded in ``tests/golden`` (see ``records``)."""

import functools
import json
import statistics
import sys
from itertools import islice

import numpy as np
import pytest

from asyncdata import Cache, DataLoader, Document, LengthGrouping, Ranks, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, SnapshotMismatchError
from asyncdata.xtuner import PresetPacking, XTunerCollator, XTunerPacking, XTunerTokenizeFn
from tests.support.examples import each_pair, each_value
from tests.support.packing_quality import LAWS, SEEDS, Costs, balance, fill, ours_ordered, xtuners_ordered
from tests.support.packing_quality import costs_of as quality_costs_of
from tests.support.peers import xtuner
from tests.support.peers.records import cases_of, digest, folder_of, module_of, plain
from tests.support.peers.xtuner import batch_of, costs_of, media_of, preset_of, runs_of, share_of, shown, stable_sorts
from tests.support.sources import jsonl, write
from tests.support.xtuner_fns import Pictured, chat_of, draw, write_pictured

PACKS = cases_of("xtuner_packs")


def packed(case, **settings):
    plan = XTunerPacking(**case.given["settings"], **settings).plan([np.array(some) for some in case.given["lengths"]])
    packs = [" ".join("{}:{}-{}".format(*piece) for piece in plan.pack(number)) for number in range(plan.num_packs)]
    return {"packs": packs, "costs": plan.costs.tolist()}


@pytest.mark.parametrize("case", [case for case in PACKS if "soft" not in str(case.given["settings"])], ids=str)
def test_hard_packs_are_xtuners(tmp_path, case):
    assert packed(case) == case.delivered(tmp_path)


@pytest.mark.parametrize("case", [case for case in PACKS if case.given["settings"]["kind"] != "hard"], ids=str)
def test_soft_packs_are_xtuners_ties_and_all(tmp_path, case):
    """XTuner's were made with a stable sort; so are ours, and those that take numpy's order, whatever it is."""
    expected = case.delivered(tmp_path)
    assert packed(case) == expected
    patch = stable_sorts()
    try:
        assert packed(case, ties="numpy") == expected
    finally:
        patch.undo()


@pytest.mark.parametrize("case", cases_of("xtuner_order"), ids=str)
def test_the_order_of_packs_is_xtuners(tmp_path, case):
    num_packs, world_size, accumulation, round_up = case.given.values()
    batch, found = world_size * accumulation, []
    for rank in range(world_size):
        for epoch in range(2):
            place = {"world_size": world_size, "accumulation": accumulation, "seed": 7, "epoch": epoch}
            order = LengthGrouping(method="xtuner").order(costs_of(num_packs), **place)
            whole = share_of(order, rank, world_size, batch, round_up=round_up).tolist()
            consumed = len(whole) * world_size // 2 // batch * batch
            rest = share_of(order, rank, world_size, batch, round_up=round_up, consumed=consumed).tolist()
            found.append([whole[:4], digest(whole), digest(rest)])
    assert found == case.delivered(tmp_path)


@pytest.mark.parametrize("case", cases_of("xtuner_batches"), ids=str)
def test_batches_are_xtuners(tmp_path, case):
    pytest.importorskip("torch")
    packs = [[Document(np.array(ids, np.int32), np.array(labels)) for ids, labels in p] for p in case.given["packs"]]
    items = XTunerCollator(**case.given["settings"], shift="pack", truncate_packs=True, output="tensors")(packs)
    assert batch_of(items) == case.delivered(tmp_path)


def pictures_of(family, packs, folder, function):
    """The samples of a loader over the rows, in packs."""
    rows, settings = [row for pack in packs for row in pack], {}
    if family == "qwen3_vl":
        for row in rows:
            draw(folder, row)
        rows, settings = list(map(chat_of, rows)), {"media_root": str(folder)}
    fn = XTunerTokenizeFn(function, **settings)
    with DataLoader(write(folder / "rows.jsonl", jsonl(rows)), tokenize_fn=fn, num_workers=0, shuffle=False) as loader:
        samples = iter(loader.get_next_batch(len(rows)))
    return [[Document(sample.tokens, sample.labels, None, sample) for sample in islice(samples, len(p))] for p in packs]


@pytest.mark.parametrize("case", cases_of("xtuner_pictures"), ids=str)
def test_batches_with_pictures_are_xtuners(tmp_path, case):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    family, settings, packs = case.given.values()
    expected = case.delivered(tmp_path)
    collate = XTunerCollator(**settings, shift="pack", truncate_packs=True, output="tensors")
    ours = "QwenPictures" if family == "qwen3_vl" else "InternTiles"
    functions = [f"tests.support.xtuner_fns:{ours}"]
    if family == "qwen3_vl" and folder_of("xtuner"):
        functions.append(xtuner.pictures_function())
    for function in functions:
        assert media_of(collate(pictures_of(family, packs, tmp_path, function))) == expected


def test_a_sequence_context_is_an_object_of_xtuners(monkeypatch):
    module = module_of("xtuner", "v1.data_proto.sequence_context")
    monkeypatch.setitem(sys.modules, "xtuner.v1.data_proto", module)
    pack = [Document(np.arange(3)), Document(np.arange(5))]
    (item,) = XTunerCollator(max_length=10, output="sequence_context")([pack])
    assert type(item["seq_ctx"]) is module.SequenceContext
    assert item["seq_ctx"].cu_seq_lens_q.tolist() == [0, 3, 8, 10]
    assert item["seq_ctx"].mask.tolist() == [[True] * 8 + [False] * 2]
    assert item["shifted_labels"].tolist() == [[1, 2, -100, 1, 2, 3, 4, -100, -100, -100]]
    assert not [name for name in sys.modules if name.partition(".")[0] == "mmengine"], "nothing of it is left behind"


def write_rows(jsonl_file, lengths):
    first = 0
    for number, of_one in enumerate(lengths):
        jsonl_file([{"number": first + row, "tokens": tokens} for row, tokens in enumerate(of_one)], f"{number}.jsonl")
        first += len(of_one)


def numbered_loader(folder, **knobs):
    """A loader of the files of a folder, of which each token tells its place."""
    settings = {"tokenize_fn": XTunerTokenizeFn("tests.support.xtuner_fns:Numbered"), "num_workers": 0}
    settings |= {"batch_size": 1, "cache": {"folder": str(folder / "index")}}
    return DataLoader(sorted(map(str, folder.glob("*.jsonl"))), **settings | knobs)


def loader_of(folder, rank, given):
    settings, collate = given["settings"], {"shift": "pack", "truncate_packs": True, "output": "tensors"}
    knobs = {"packing": XTunerPacking(**settings), "seed": settings["seed"], "epochs": 2}
    knobs |= {"batch_size": given["batch_size"], "drop_last": not given["round_up"]}
    ranks = Ranks(rank=rank, world_size=given["world_size"], gradient_accumulation=given["accumulation"])
    grouping = LengthGrouping(method="xtuner") if given["grouped"] else None
    collate_fn = XTunerCollator(max_length=settings["max_length"], **collate)
    return numbered_loader(folder, ranks=ranks, length_grouping=grouping, collate_fn=collate_fn, **knobs)


@pytest.mark.parametrize("case", cases_of("xtuner_epochs"), ids=str)
def test_a_rank_gets_what_xtuners_sampler_gives_it(tmp_path, jsonl_file, case):
    pytest.importorskip("torch")
    write_rows(jsonl_file, case.given["lengths"])
    for rank, expected in enumerate(case.delivered(tmp_path)):
        with loader_of(tmp_path, rank, case.given) as loader, loader_of(tmp_path, rank, case.given) as resumed:
            batches = (shown(batch_of(batch)) for _ in range(2) for batch in loader)
            before = list(islice(batches, len(expected) // 3))
            state = plain(loader.state_dict())
            assert plain(before + list(batches)) == expected

            resumed.load_state_dict(state)
            assert plain(before + [shown(batch_of(batch)) for _ in range(2) for batch in resumed]) == expected


def preset_loader(folder, given, **knobs):
    return numbered_loader(folder, **{"packing": PresetPacking(**preset_of(folder, **given))} | knobs)


def packs_of(loader, number):
    epochs = (batch for _ in range(2) for batch in loader)
    return [runs_of([t for document in batch[0] for t in document.tokens.tolist()]) for batch in islice(epochs, number)]


@pytest.mark.parametrize("case", cases_of("xtuner_preset"), ids=str)
def test_packs_that_a_folder_names_are_xtuners_in_their_order_and_resume(tmp_path, jsonl_file, case):
    lengths, preset, world_size, batch = case.given.values()
    write_rows(jsonl_file, lengths)
    for rank, expected in enumerate(case.delivered(tmp_path)):
        ranks = Ranks(rank=rank, world_size=world_size, gradient_accumulation=batch // world_size)
        knobs = {"ranks": ranks, "epochs": 2}
        with preset_loader(tmp_path, preset, **knobs) as loader:
            before = packs_of(loader, len(expected) // 2 - 1)
            state = plain(loader.state_dict())
            assert before + packs_of(loader, 99) == expected
        with preset_loader(tmp_path, preset, **knobs) as loader:
            loader.load_state_dict(state)
            assert before + packs_of(loader, 99) == expected


PRESET = {"pieces": [[[0, 0, 0, 3], [0, 1, 2, 5]], [[0, 2, 0, 6]]], "order": [1, 0], "max_length": 6}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_length": 7}, 'pack 0 has 6 tokens, and max_length is 7: set short="padding"'),
        ({"max_length": 5}, 'pack 0 has 6 tokens, and max_length is 5: set long="truncate"'),
        ({"pieces": [[[0, 3, 0, 6]]], "order": [0]}, "piece 0 of samples.npy cannot be made: its file has 3 rows"),
        ({"pieces": [[[0, 0, 0, 6]]], "order": [0]}, "cannot be made: the row has 5 tokens"),
        ({"pieces": [[[1, 0, 0, 6]]], "order": [0]}, r"1.jsonl, which is no file of the data"),
        ({"order": [2]}, "names packs from 2 to 2, of 2"),
        ({"pieces": [[[0, 0, 3, 3]]], "order": [0]}, "a row, and tokens from start to stop"),
    ],
)
def test_packs_that_cannot_be_made_are_refused_with_their_place(tmp_path, jsonl_file, changes, reason):
    write_rows(jsonl_file, [[5, 6, 7]])
    with pytest.raises(ConfigError, match=f"AD453 PresetPacking.*{reason}"):
        with preset_loader(tmp_path, PRESET | changes) as loader:
            next(iter(loader))


def test_a_preset_needs_every_row_and_a_state_is_of_its_packs_wherever_they_lie(tmp_path, jsonl_file):
    write_rows(jsonl_file, [[5, 6, 7]])
    with preset_loader(tmp_path, PRESET) as loader:
        assert packs_of(loader, 1) == ["2:0-6"]
        state = loader.state_dict()
    (tmp_path / "moved").mkdir()
    other = preset_of(tmp_path / "moved", **PRESET)
    (tmp_path / "moved" / "paths.json").write_text((tmp_path / "paths.json").read_text())
    with preset_loader(tmp_path, PRESET, packing=PresetPacking(**other)) as loader:
        loader.load_state_dict(state)
        assert packs_of(loader, 1) == ["0:0-3 1:2-5"]
    other = PRESET | {"order": [0, 1]}
    with preset_loader(tmp_path, other) as loader, pytest.raises(SnapshotMismatchError, match="AD603"):
        loader.load_state_dict(state)
    write_rows(jsonl_file, [[5, 6, 7, 0]])
    with preset_loader(tmp_path, PRESET) as loader, pytest.raises(ConfigError, match="AD453 .* 1 of 4 rows are no sam"):
        next(iter(loader))


WRONG = {6: [0, 0], 7: None, 11: [9, 9]}
"""Rows that XTuner drops: two whose sizes are not known, and one whose picture is cut."""
GOOD = [number for number in range(40) if number not in WRONG]
KINDS = {
    "samples": {"batch_size": 5},
    "online": {"packing": SoftPacking(max_length=32), "collate_fn": list, "batch_size": 2},
    "planned": {"packing": XTunerPacking(max_length=32, seed=42), "collate_fn": list, "batch_size": 2},
}


def fn_of(folder, **settings):
    arguments = {"log": str(folder / "log"), "max_length": 60, **settings}
    return XTunerTokenizeFn("tests.support.xtuner_fns:Pictured", arguments, media_root=str(folder))


def pictured_loader(path, folder, kind="samples", workers=1, state=None, **knobs):
    settings = {"num_workers": workers, "epochs": 1, "cache": Cache(folder=""), **KINDS[kind], **knobs}
    loader = DataLoader(path, tokenize_fn=fn_of(folder), **settings)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def samples_of(batch):
    return [getattr(one, "sample", one) for item in batch for one in (item if isinstance(item, list) else [item])]


def check(sample):
    """The sample is what one call of the function gives; return its row."""
    number = sample.extra["id"]
    size = (1 + number % 3) * (2 + number % 4) if number % 5 else 0
    text = [1000 * number + ord(letter) for letter in "abcdefg"[: 1 + number % 7]]
    assert sample.tokens.tolist() == [9] * size + text
    assert sample.labels.tolist() == [-100] * size + text
    assert sample.columns["mrope"].tolist() == [[place] * 3 for place in range(size + len(text))]
    assert np.array_equal(sample.columns["pixel_values"], np.full((size, 12), number))
    assert sample.columns["num_img_tokens"].tolist() == ([size] if size else [])
    return number


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_opened_once_an_epoch_and_none_to_plan(tmp_path, kind, workers):
    path = write_pictured(tmp_path, sizes=WRONG)
    with pictured_loader(path, tmp_path, kind, workers) as loader:
        assert sorted(check(sample) for batch in loader for sample in samples_of(batch)) == GOOD
        if kind != "planned":
            assert loader.statistics().dropped_total == {"num_tokens_0": 3}
    opened = (tmp_path / "log").read_text().splitlines()
    assert sorted(opened) == sorted(f"runtime {number}.json" for number in GOOD if number % 5)


@pytest.mark.parametrize("kind", ["online", "planned"])
def test_a_picture_that_cannot_be_opened_or_has_another_size_leaves_its_pack_as_it_is(tmp_path, kind):
    path = write_pictured(tmp_path)
    with pictured_loader(path, tmp_path, kind) as loader:
        whole = [samples_of(batch) for batch in loader]
    (tmp_path / "13.json").unlink()
    (tmp_path / "21.json").write_text("[[1, 1], 0]")
    with pictured_loader(path, tmp_path, kind, bad_rows="skip") as loader:
        found = [samples_of(batch) for batch in loader]
        lost = {"bad row AD421": 1, "bad row AD424": 1}
        assert loader.statistics().dropped_total == lost
    for batch, expected in zip(found, whole, strict=True):
        for sample, good in zip(batch, expected, strict=True):
            if check(good) in (13, 21):
                assert len(sample.tokens) == len(good.tokens)
                assert set(sample.labels.tolist()) == {-100}
                assert not sample.columns
            else:
                assert check(sample) == check(good)
    with pictured_loader(path, tmp_path, kind) as loader, pytest.raises(BadRowError, match="AD421|AD424"):
        list(loader)


@pytest.mark.parametrize("weight", [0.0, 5000.0])
def test_what_the_function_says_that_a_row_costs_is_what_packs_are_dealt_by(tmp_path, weight):
    """The packs and their order are those that XTuner makes of the counts and costs of its first state."""
    path, function = write_pictured(tmp_path, 300, WRONG), Pictured(max_length=60, visual_pack_weight=weight)
    function.set_state("cache")
    with open(path) as file:
        counts = [function(json.loads(line)) for line in file]
    rows = [number for number, count in enumerate(counts) if count["num_tokens"]]
    packing, grouping = XTunerPacking(max_length=32, seed=42, lookahead=9), LengthGrouping(method="xtuner")
    lengths, costs = (np.array([counts[row][key] for row in rows]) for key in ("num_tokens", "proxy_attn_flops"))
    plan = packing.plan([lengths], [costs])
    order = grouping.order(plan.costs, world_size=1, accumulation=2, seed=7, epoch=0)
    knobs = {"packing": packing, "length_grouping": grouping, "seed": 7, "collate_fn": list, "cache": Cache(folder="")}
    fn = fn_of(tmp_path, visual_pack_weight=weight)
    with DataLoader(path, tokenize_fn=fn, num_workers=1, epochs=1, batch_size=2, **knobs) as loader:
        found = [[check(document.sample) for document in pack] for batch in loader for pack in batch]
    expected = [[rows[row] for row, _, _ in plan.pack(number)] for number in order]
    assert found[: len(expected)] == expected
    assert len(set(plan.costs)) > 1 or not weight


MAX_LENGTHS = (4096, 8192, 32768)
NUM_PACKS = 7400


@pytest.mark.thorough
@pytest.mark.parametrize(("law", "max_length"), each_value(LAWS.keys(), MAX_LENGTHS))
def test_packs_are_as_full_as_those_of_a_plan_of_all_samples(law, max_length):
    found = [fill(law, max_length, seed) for seed in SEEDS]
    ours = statistics.mean(one.ours for one in found)
    assert ours >= statistics.mean(one.xtuners for one in found)
    assert all(one.displacement < one.window for one in found)
    if law in {"lognormal", "zipf"}:
        assert ours >= 99.5


@functools.cache
def costs(law: str, *, xtuners: bool) -> Costs:
    return quality_costs_of(law, NUM_PACKS, 32768, 7, xtuners=xtuners)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("law", "accumulation", "method"), each_pair(["lognormal", "zipf"], [1, 8], ["karmarkar_karp", "snake"])
)
def test_ranks_are_better_balanced_than_in_xtuners_order(law, accumulation, method):
    order = ours_ordered(costs(law, xtuners=False), 64, accumulation, method=method)
    ours = balance(costs(law, xtuners=False), order, 64, accumulation)
    theirs = costs(law, xtuners=True)
    xtuners = balance(theirs, xtuners_ordered(theirs, 64, accumulation), 64, accumulation)
    assert ours.efficiency >= xtuners.efficiency
    assert ours.efficiency >= 0.985
    assert ours.first_over_last <= 1.01
    assert xtuners.first_over_last > 1.01
