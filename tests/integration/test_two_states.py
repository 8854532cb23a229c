"""Functions of XTuner's protocol in two states: the first counts rows and opens no file, the second loads samples."""

import json

import numpy as np
import pytest

from asyncdata import Cache, DataLoader, LengthGrouping, SoftPacking
from asyncdata.errors import BadRowError
from asyncdata.xtuner import XTunerPacking, XTunerTokenizeFn
from tests.support.xtuner_fns import Pictured, write_pictured

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


def loader_of(path, folder, kind="samples", workers=1, state=None, **knobs):
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


def opened(folder):
    return sorted((folder / "log").read_text().splitlines())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_opened_once_an_epoch_and_none_to_plan(tmp_path, kind, workers):
    path = write_pictured(tmp_path, sizes=WRONG)
    with loader_of(path, tmp_path, kind, workers) as loader:
        assert sorted(check(sample) for batch in loader for sample in samples_of(batch)) == GOOD
        if kind != "planned":
            assert loader.statistics().dropped_total == {"num_tokens_0": 3}
    assert opened(tmp_path) == sorted(f"runtime {number}.json" for number in GOOD if number % 5)


@pytest.mark.parametrize("kind", ["online", "planned"])
def test_a_picture_that_cannot_be_opened_or_has_another_size_leaves_its_pack_as_it_is(tmp_path, kind):
    path = write_pictured(tmp_path)
    with loader_of(path, tmp_path, kind) as loader:
        whole = [samples_of(batch) for batch in loader]
    (tmp_path / "13.json").unlink()
    (tmp_path / "21.json").write_text("[[1, 1], 0]")
    with loader_of(path, tmp_path, kind, bad_rows="skip") as loader:
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
    with loader_of(path, tmp_path, kind) as loader, pytest.raises(BadRowError, match="AD421|AD424"):
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
