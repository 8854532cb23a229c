"""Media are loaded after the plan: in the same order, within a limit, once a group, and bad ones by name."""

import contextlib
import gc
import gzip
import itertools
import json
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

from asyncdata import DataLoader, HardPacking, LengthGrouping, Mix, PackedCollator, PaddedCollator, Part, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, SourceChangedError, TooManyBadRowsError
from tests.support.column_fns import NumberedMedia, media_of, two_phases, without_load, write_rows
from tests.support.faults import until
from tests.support.sources import jsonl, write


def row_of(sample):
    return int(sample.tokens[0])


def check(sample):
    number = row_of(sample)
    assert sample.columns["size"] == (3 if number % 5 else 0)
    if number % 5:
        assert np.array_equal(sample.columns["pixels"], media_of(number, 3))
        assert not sample.columns["pixels"].flags.writeable
    else:
        assert "pixels" not in sample.columns
    return number


def loader_of(source, workers=1, fn=None, **knobs):
    return DataLoader(source, tokenize_fn=fn or NumberedMedia(), num_workers=workers, epochs=1, **knobs)


@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (2, False), (2, "full")])
def test_samples_have_their_media_in_the_order_of_text(tmp_path, workers, shuffle):
    path = write_rows(tmp_path / "rows.jsonl")
    with loader_of(path, workers, shuffle=shuffle, batch_size=7, limits={"max_media_bytes": 100}) as loader:
        found = [check(sample) for batch in loader for sample in batch]
        now = loader.statistics()
    assert sorted(found) == list(range(60))
    text = write_rows(tmp_path / "text.jsonl", items=0)
    with loader_of(text, shuffle=shuffle, batch_size=60) as loader:
        assert [row_of(sample) for sample in next(iter(loader))] == found
    assert (now.media_loaded_total, now.media_bytes_total, now.media_waiting_samples) == (48, 48 * 48, 0)


def test_a_group_shares_its_media_which_are_loaded_once(tmp_path):
    path, log = write_rows(tmp_path / "rows.jsonl"), tmp_path / "log"
    fn = NumberedMedia(log=str(log))
    with DataLoader(path, tokenize_fn=fn, num_workers=1, epochs=1, n_samples_per_prompt=4, shuffle=False) as loader:
        groups = loader.get_samples(10)
    for group in groups:
        assert len({check(sample) for sample in group}) == 1
        if "pixels" in group[0].columns:
            assert all(np.shares_memory(group[0].columns["pixels"], one.columns["pixels"]) for one in group)
    read = log.read_text().split()
    assert len(read) == len(set(read))


def test_what_is_loaded_ahead_stays_within_the_limit_which_a_held_batch_counts_for(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", num_rows=600)
    with loader_of(path, batch_size=4, limits={"max_media_bytes": 480}) as loader:
        held = []
        for number, batch in enumerate(loader):
            held.append(batch)
            assert loader.statistics().media_held_bytes <= 480 + 48 * 4 + number * 192
            if number == 10:
                break
        at_hold = loader.statistics().media_held_bytes
        assert at_hold >= 48 * sum("pixels" in sample.columns for batch in held for sample in batch)
        del held, batch
        gc.collect()
        assert loader.statistics().media_held_bytes <= 480


@pytest.mark.parametrize("collate", [None, PaddedCollator(), lambda samples: {"a": [PaddedCollator()(samples)]}])
def test_batches_that_are_held_count_and_are_said_once(tmp_path, collate):
    path, size = write_rows(tmp_path / "rows.jsonl", num_rows=200), 4 * 48
    knobs = {"batch_size": 5, "shuffle": False, "collate_fn": collate, "limits": {"max_media_bytes": 960}}
    with structlog.testing.capture_logs() as logs, loader_of(path, 0, **knobs) as loader:
        batches, held = iter(loader), []
        held += itertools.islice(batches, 3)
        gc.collect()
        assert not [log for log in logs if log["event"] == "media.over_limit"]
        for number, batch in enumerate(batches, 4):
            held.append(batch)
            assert loader.statistics().media_held_bytes >= number * size
        (said,) = [log for log in logs if log["event"] == "media.over_limit"]
        assert (said["held_bytes"] > 960, said["limit_bytes"]) == (True, 960)
        del batch, held
        gc.collect()
        assert loader.statistics().media_held_bytes == 0


@pytest.mark.parametrize(
    ("fault", "workers", "code"),
    [("bad", 1, "AD456"), ("raises", 0, "AD421"), ("dies", 1, "AD423"), ("other", 0, "AD424")],
)
def test_media_that_cannot_be_loaded_make_a_bad_row(tmp_path, fault, workers, code):
    path = write_rows(tmp_path / "rows.jsonl", {7: fault})
    with loader_of(path, workers, shuffle=False) as loader:
        with pytest.raises(BadRowError, match=f"{code}.*rows.jsonl:8") as raised:
            assert [check(sample) for sample in loader.get_next_batch(7)] == list(range(7))
            loader.get_next_batch(1)
    assert raised.value.line == 8
    with loader_of(path, workers, shuffle=False, bad_rows="skip", batch_size=59) as loader:
        assert [check(sample) for batch in loader for sample in batch] == [n for n in range(60) if n != 7]
        assert loader.statistics().dropped_total == {f"bad row {code}": 1}


@pytest.mark.parametrize("is_resumed", [False, True])
def test_groups_given_back_keep_no_media_and_get_them_again(tmp_path, is_resumed):
    path = write_rows(tmp_path / "rows.jsonl")
    with loader_of(path, n_samples_per_prompt=2, shuffle=False) as loader:
        groups = loader.get_samples(8)
        loader.add_samples(groups[3:])
        assert all("pixels" not in sample.columns for group in groups[3:] for sample in group)
        assert b"pixels" not in msgspec.msgpack.encode(loader.state_dict())
        if is_resumed:
            with loader_of(path, n_samples_per_prompt=2, shuffle=False) as other:
                other.load_state_dict(loader.state_dict())
                found = other.get_samples(8)
        else:
            found = loader.get_samples(8)
    assert [check(group[1]) for group in found] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert np.shares_memory(found[0][0].columns["pixels"], found[0][1].columns["pixels"])


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_group_given_back_whose_media_are_gone_is_a_bad_row(tmp_path, policy):
    path, gone = write_rows(tmp_path / "rows.jsonl"), tmp_path / "gone"
    fn = NumberedMedia(gone=str(gone))
    with DataLoader(path, tokenize_fn=fn, num_workers=1, epochs=1, shuffle=False, bad_rows=policy) as loader:
        loader.add_samples([[sample] for sample in loader.get_next_batch(4)])
        gone.write_text("2\n")
        if policy == "raise":
            with pytest.raises(BadRowError, match="AD456.*rows.jsonl:3"):
                loader.get_next_batch(4)
            gone.write_text("")
            assert [check(sample) for sample in loader.get_next_batch(4)] == [0, 1, 2, 3]
        else:
            assert [check(sample) for sample in loader.get_next_batch(4)] == [0, 1, 3, 4]
            assert loader.statistics().dropped_total == {"bad row AD456": 1}


def test_a_pickled_sample_has_its_media(tmp_path):
    with loader_of(write_rows(tmp_path / "rows.jsonl"), shuffle=False) as loader:
        sample = pickle.loads(pickle.dumps(loader.get_next_batch(2)[1]))  # noqa: S301 - our own bytes
    assert check(sample) == 1


PACKED = {"packing": SoftPacking(max_length=16), "collate_fn": PackedCollator(max_length=16), "batch_size": 2}


def packs_of(path, workers=1, state=None, **knobs):
    packed = PACKED | {"plan_packs": True, "shuffle": "full", "cache": {"folder": ""}}
    with loader_of(path, workers, **packed | knobs) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch, loader.state_dict()


@pytest.mark.parametrize("is_planned", [True, False])
def test_packs_have_the_media_of_their_documents(tmp_path, is_planned):
    path = write_rows(tmp_path / "rows.jsonl")
    seen = []
    for batch, _ in packs_of(path, plan_packs=is_planned):
        counts, pixels = batch["pixels_counts"].tolist(), batch["pixels"]
        assert sum(counts) == len(pixels)
        first = pixels[:, 0][np.isin(np.arange(len(pixels)), np.cumsum([0, *counts])[:-1][np.array(counts) > 0])]
        seen += first.astype(int).tolist()
    assert sorted(seen) == [number for number in range(60) if number % 5]


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_document_whose_media_fail_keeps_its_place_untrained_and_all_else_is_the_same(tmp_path, is_planned):
    packs = [batch for batch, _ in packs_of(write_rows(tmp_path / "good.jsonl"), plan_packs=is_planned)]
    faulty, knobs = write_rows(tmp_path / "faulty.jsonl", {13: "bad"}), {"plan_packs": is_planned, "bad_rows": "skip"}
    found = list(packs_of(faulty, **knobs))
    assert len(found) == len(packs)
    for good, (batch, _) in zip(packs, found, strict=True):
        lost = good["input_ids"] == 13
        assert np.array_equal(batch["input_ids"], good["input_ids"])
        assert np.array_equal(batch["labels"], np.where(lost, -100, good["labels"]))
        is_lost = np.isin(good["pixels"], media_of(13, 3)).all(axis=1) & lost.any()
        assert np.array_equal(batch["pixels"], np.where(is_lost[:, None], 0, good["pixels"]))
        assert batch["pixels_counts"].tolist() == good["pixels_counts"].tolist()
    again = [batch["labels"].tolist() for batch, _ in packs_of(faulty, 0, found[0][1], **knobs)]
    assert again == [batch["labels"].tolist() for batch, _ in found[1:]]


ONLINE = {
    "packs": {},
    "small windows": {"packing": SoftPacking(max_length=16, window_samples=4)},
    "epochs apart": {"packing": SoftPacking(max_length=16, window_samples=4, across_epochs=False)},
    "grouped": {"length_grouping": LengthGrouping(), "drop_last": True},
    "single samples": {"length_grouping": LengthGrouping(), "packing": None, "collate_fn": PaddedCollator()},
}


def run_of(path, workers, state=None, **knobs):
    """The batches of two epochs, each with the state and what was dropped after it."""
    knobs = PACKED | {"batch_size": 3, "epochs": 2} | knobs
    with DataLoader(path, tokenize_fn=NumberedMedia(), num_workers=workers, bad_rows="skip", **knobs) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2):
            for batch in loader:
                now = loader.statistics()
                assert now.bad_rows_total == sum(now.dropped_total.values())
                yield {name: str(value) for name, value in batch.items()}, loader.state_dict(), now.dropped_total


@pytest.mark.parametrize("name", ONLINE)
def test_packs_made_as_samples_come_are_those_of_text_and_go_on_at_every_batch(tmp_path, name):
    path, knobs = write_rows(tmp_path / "rows.jsonl", {13: "bad", 21: "raises"}), ONLINE[name]
    whole = list(run_of(path, 1, **knobs))
    text = run_of(write_rows(tmp_path / "text.jsonl", items=0), 1, **knobs)
    assert [batch["input_ids"] for batch, _, _ in whole] == [batch["input_ids"] for batch, _, _ in text]
    assert whole[-1][2] == {"bad row AD456": 2, "bad row AD421": 2}
    for number, (_, state, _) in enumerate(whole[:-1]):
        again = list(run_of(path, 0, json.loads(json.dumps(state)), **knobs))
        assert [batch for batch, _, _ in again] == [batch for batch, _, _ in whole[number + 1 :]]
        assert again[-1][2] == whole[-1][2]


def test_media_of_packs_made_as_samples_come_are_loaded_ahead_within_the_limit(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", num_rows=600)
    small = PACKED | {"packing": SoftPacking(max_length=16, window_samples=8)}
    for limit in (1, 480):
        num_delivered = 0
        with loader_of(path, **small, limits={"max_media_bytes": limit}) as loader:
            for batch in loader:
                num_delivered += int(np.count_nonzero(batch["pixels_counts"]))
                now = loader.statistics()
                assert now.media_held_bytes <= (480 if limit > 1 else 0) + batch["pixels"].nbytes
                assert limit > 1 or now.media_loaded_total == num_delivered
                if limit > 1 and num_delivered < 100:  # without a call
                    until(lambda: loader.statistics().media_loaded_total > num_delivered)  # noqa: B023
        assert num_delivered == 480


def test_a_batch_that_the_collator_refuses_comes_again_with_its_media(tmp_path):
    refused = []

    def collate(packs):
        if not refused and any(document.tokens[0] == 13 for pack in packs for document in pack):
            refused.append(packs)
            raise OSError("no room")
        return PACKED["collate_fn"](packs)

    path, knobs = write_rows(tmp_path / "rows.jsonl", {13: "bad"}), {"plan_packs": False, "bad_rows": "skip"}
    whole = [batch["labels"].tolist() for batch, _ in packs_of(path, **knobs)]
    packed = PACKED | {"collate_fn": collate, "shuffle": "full", "cache": {"folder": ""}}
    found = []
    with loader_of(path, bad_rows="skip", **packed) as loader:
        for _ in range(2):
            with contextlib.suppress(OSError):
                found += (batch["labels"].tolist() for batch in loader)
        assert refused
        assert found == whole
        assert loader.statistics().dropped_total == {"bad row AD456": 1}


def test_a_file_that_is_gone_before_the_media_of_a_pack_are_loaded_is_an_error(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", num_rows=600)
    batches = packs_of(path, plan_packs=False, shuffle=True, limits={"max_media_bytes": 1})
    next(batches)
    Path(path).write_text("{}\n")
    with pytest.raises(SourceChangedError, match="AD302"):
        list(batches)


@pytest.mark.parametrize("bad_rows", ["raise", {"policy": "skip", "max": 1}])
def test_a_medium_of_a_pack_made_as_samples_come_may_end_the_run(tmp_path, bad_rows):
    path = write_rows(tmp_path / "rows.jsonl", {13: "bad", 21: "bad"})
    with loader_of(path, **PACKED, bad_rows=bad_rows) as loader:
        for _ in range(2):
            with pytest.raises((BadRowError, TooManyBadRowsError), match="AD456.*picture 1"):
                list(loader)
        assert loader.statistics().bad_rows_total == (0 if bad_rows == "raise" else 1)


@pytest.mark.parametrize("is_planned", [True, False])
def test_of_grouped_samples_the_bad_one_stays_untrained(tmp_path, is_planned):
    path = write_rows(tmp_path / "rows.jsonl", {13: "bad"})
    grouped = {"length_grouping": LengthGrouping(), "plan_packs": is_planned, "batch_size": 4, "bad_rows": "skip"}
    with loader_of(path, shuffle="full", cache={"folder": ""}, **grouped) as loader:
        found = [sample for batch in loader for sample in batch]
        assert loader.statistics().dropped_total == {"bad row AD456": 1}
    (bad,) = (sample for sample in found if row_of(sample) == 13)
    assert set(bad.labels.tolist()) == {-100}
    assert not bad.columns["pixels"].any()
    assert sorted(check(sample) for sample in found if sample is not bad) == [n for n in range(60) if n != 13]


def test_packs_of_a_mixture_have_the_media_of_their_parts(tmp_path):
    plain, zipped = write_rows(tmp_path / "a.jsonl", {8: "bad"}), tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(Path(plain).read_bytes()))
    a, b = Part(plain, weight=1, when_done="stop"), Part(str(zipped), weight=1, bad_rows={"policy": "skip", "max": 2})
    found = list(run_of(Mix({"a": a, "b": b}), 1))
    assert found[-1][2] == {"bad row AD456": 4}
    again = list(run_of(Mix({"a": a, "b": b}), 1, found[5][1]))
    assert [batch for batch, _, _ in again] == [batch for batch, _, _ in found[6:]]


@pytest.mark.parametrize("is_planned", [True, False])
def test_samples_with_media_are_not_cut(tmp_path, is_planned):
    with pytest.raises(ConfigError, match="cut"):
        next(packs_of(write_rows(tmp_path / "rows.jsonl"), packing=HardPacking(max_length=16), plan_packs=is_planned))


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_are_read_once_have_their_media_also_after_they_are_given_back(tmp_path, workers):
    plain = Path(write_rows(tmp_path / "rows.jsonl", {4: "bad"}))
    zipped = write(tmp_path / "rows.jsonl.gz", gzip.compress(plain.read_bytes()))
    knobs = {"shuffle": False, "bad_rows": "skip", "n_samples_per_prompt": 2}
    with loader_of(zipped, workers, **knobs) as loader:
        groups = loader.get_samples(10)
        assert [check(group[0]) for group in groups] == [0, 1, 2, 3, *range(5, 11)]
        loader.add_samples(groups[5:8])
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(zipped, workers, **knobs) as loader:
        loader.load_state_dict(state)
        assert [check(group[1]) for group in loader.get_samples(6)] == [6, 7, 8, 11, 12, 13]
    packs = [batch for batch, _, _ in run_of(plain, workers, shuffle=False)]
    assert [batch for batch, _, _ in run_of(zipped, workers, shuffle=False)] == packs


@pytest.mark.parametrize("is_planned", [True, False])
def test_each_rank_loads_the_media_of_its_own_packs(tmp_path, is_planned):
    path = write_rows(tmp_path / "rows.jsonl")
    found = []
    for rank in range(2):
        log = tmp_path / f"log.{rank}"
        of_rank = {"ranks": {"rank": rank, "world_size": 2}, "plan_packs": is_planned}
        batches = packs_of(path, fn=NumberedMedia(log=str(log)), **of_rank)
        found.append({int(pixel) for batch, _ in batches for pixel in batch["pixels"][:, 0]})
        loaded = list(map(int, log.read_text().split()))
        assert len(loaded) == len(set(loaded))
        assert found[-1] <= set(loaded)
        assert len(loaded) < 40  # of 48: of the last batch, which is filled up, a rank has all
    assert found[0] | found[1] == {number for number in range(60) if number % 5}


WRONG = {
    "load raises": ({"fault": "raises"}, "AD421.*load raised ValueError.'no picture'"),
    "other names": ({"loaded": {"sounds": [1]}}, r"AD425.*\['sounds'\], and the plan's media has \['pixels'\]"),
    "other numbers": ({"loaded": {"pixels": [[1, 2, 3, 4]]}}, "AD425.*16 bytes, and 2 values were planned"),
    "another shape": ({"loaded": {"pixels": [[1, 2]]}}, r"AD425.*shape \(1, 2\)"),
    "no dict": ({"loaded": 3}, "AD425"),
    "unknown media": ({"media": {"sounds": 1}}, "AD425.*how many values load gives of pixels"),
    "no number": ({"media": {"pixels": "2"}}, "AD425.*'2' as the number of values of pixels"),
    "no counts": ({"media": 2}, "AD425.*media is 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_of_two_phases_does_wrong_is_a_bad_row(tmp_path, name):
    row, message = WRONG[name]
    path = write(tmp_path / "rows.jsonl", jsonl([{"id": 1, **row}]))
    with loader_of(path, 0, two_phases) as loader, pytest.raises(BadRowError, match=message):
        loader.get_next_batch(1)


@pytest.mark.parametrize("is_planned", [True, False])
def test_columns_of_the_load_without_a_load_are_those_of_another_call(tmp_path, is_planned):
    path, knobs = write_rows(tmp_path / "rows.jsonl"), {"plan_packs": is_planned}
    with_load = [str(batch) for batch, _ in packs_of(path, fn=NumberedMedia(), **knobs)]
    assert [str(batch) for batch, _ in packs_of(path, fn=without_load, **knobs)] == with_load
    few = {"limits": {"max_media_bytes": 100}, "batch_size": 4}
    with loader_of(write_rows(tmp_path / "good.jsonl"), fn=without_load, **few) as loader:
        for batch in loader:
            assert loader.statistics().media_held_bytes <= 100 + 48 * len(list(map(check, batch)))
