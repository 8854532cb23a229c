"""Groups in the buffer: what giving one back costs, the files of large ones, and what no checkpoint can hold."""

import base64
import copy
import datetime
import functools
import os
import shutil
import stat
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.core.checksummed_file import pack
from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.integrations.slime import BadGroupError
from asyncdata.integrations.slime import checkpoint as slime_groups
from tests.support.parts import change
from tests.support.slime_source import checkpoint_at, labels, source_of

MIB = 1 << 20


def files_of(given):
    return sorted(Path(given["save"], "rollout", "asyncdata_groups").glob("*"))


def with_experts(groups, num_bytes=2 * MIB):
    """As a rollout that replays routing leaves them."""
    for group in groups:
        for sample in group:
            sample.tokens = list(range(sample.index, sample.index + 9))
            sample.rollout_routed_experts = np.full(num_bytes // 4, sample.index, np.int32)
    return groups


def assert_same(one, other):
    assert type(one) is type(other)
    if hasattr(one, "shape"):
        assert (one.dtype, one.shape, bool((one == other).all())) == (other.dtype, other.shape, True)
    elif isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, dict) or hasattr(one, "spec_info"):
        one, other = (each if isinstance(each, dict) else vars(each) for each in (one, other))
        assert one.keys() == other.keys()
        assert_same(list(one.values()), [other[key] for key in one])
    else:
        assert one == other


def test_giving_a_group_back_copies_none_of_its_large_arrays(prompts, given):
    with source_of(prompts, **given) as source:
        groups = with_experts(source.get_samples(1), 32 * MIB)
        tracemalloc.start()
        source.add_samples(groups)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 * MIB  # the loader, which reads ahead meanwhile, takes up to one


def test_a_large_group_is_written_once_also_in_the_next_run_and_again_if_it_is_missing(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(with_experts(source.get_samples(1)))
        source.save(0)
        (before,) = [path.stat() for path in files_of(given)]
        source.save(1)
        source.add_samples(with_experts(source.get_samples(2)[1:]))
        source.save(2)
        found = [path.stat() for path in files_of(given)]
        assert len(found) == 2
        assert (before.st_ino, before.st_mtime_ns) in [(file.st_ino, file.st_mtime_ns) for file in found]
        assert {stat.S_IMODE(file.st_mode) for file in found} == {0o600}
        assert stat.S_IMODE(files_of(given)[0].parent.stat().st_mode) == 0o700
    assert all(checkpoint_at(given["save"], number).stat().st_size < 100_000 for number in (0, 1, 2))
    with source_of(prompts, **given) as source:
        source.load(2)
        names = files_of(given)
        source.save(3)
        assert files_of(given) == names
        shutil.rmtree(names[0].parent)
        source.save(4)
        (again,) = files_of(given)  # the other one is of older checkpoints
        assert again in names
        source.load(4)


@pytest.mark.thorough
def test_a_group_comes_back_as_it_was_given_back(prompts, given, tmp_path):
    torch = pytest.importorskip("torch")
    values = {
        "rollout_routed_experts": torch.arange(3 * MIB // 2, dtype=torch.int16).reshape(3, -1),
        "multimodal_train_inputs": {"pixel_values": torch.full((700, 700), 0.1, dtype=torch.bfloat16), "none": None},
        "rollout_top_p_token_ids": np.arange(MIB, dtype=np.int64)[::2],
        "metadata": {
            "big": 2**80, "text": "\ud800", "tuple": (1, b"x" * MIB), "__ndarray__": [1, 2],
            "dates": np.arange(200_000).astype("M8[s]"), "empty": np.empty((0, 4), np.float16), "small": np.arange(4),
        },
        "rollout_log_probs": [-0.1, float("-inf")] * 1000,
    }  # fmt: skip
    with source_of(prompts, **given) as source:
        groups = source.get_samples(2)
        for group in groups:
            for sample in group:
                vars(sample).update(copy.deepcopy(values))
        for sample in groups[1]:  # this one is msgpack, the other one JSON
            del sample.metadata["big"], sample.metadata["text"]
        source.add_samples(groups)
        source.save(0)
    assert len(files_of(given)) == 2
    elsewhere = {**given, "save": str(tmp_path / "elsewhere")}
    with source_of(prompts, **elsewhere) as source:
        source.load(0)
        assert_same(source.buffer, groups)
        source.save(1)  # into a folder that has none of the files
    with source_of(prompts, **{**elsewhere, "load": elsewhere["save"]}) as source:
        source.load(1)
        assert_same(source.buffer, groups)
        source.buffer[0][0].rollout_routed_experts[0, 0] = 5  # a trainer writes into them
        source.buffer[0][0].metadata["dates"][0] = np.datetime64("now")


def test_changes_after_it_was_given_back_are_not_in_the_checkpoint(prompts, given):
    with source_of(prompts, **given) as source:
        (group,) = with_experts(source.get_samples(1))
        for sample in group:
            sample.metadata["small"] = np.zeros(100_000, np.int8)
            sample.metadata["bytes"] = bytearray(100_000)
        before = copy.deepcopy(group)
        source.add_samples([group])
        for sample in group:
            sample.tokens.append(7)
            sample.metadata["tags"].append("new")
            sample.metadata["small"][:] = 1
            sample.metadata["bytes"][:] = b"1" * 100_000
            sample.rollout_routed_experts = np.zeros(MIB)
            sample.response = "changed"
        source.save(0)
        source.load(0)

        for sample in before:
            sample.metadata["bytes"] = bytes(sample.metadata["bytes"])
        assert_same(source.buffer, [before])


def test_a_large_array_is_read_when_the_checkpoint_is_written(prompts, given):
    with source_of(prompts, **given) as source:
        (group,) = with_experts(source.get_samples(1))
        source.add_samples([group])
        group[0].rollout_routed_experts[0] = 77
        source.save(0)
        group[0].rollout_routed_experts[0] = 78
        source.save(1)
        source.load(1)
        assert source.buffer[0][0].rollout_routed_experts[:2].tolist() == [77, 0]


@pytest.mark.thorough
def test_a_large_array_that_a_thread_writes_into_meanwhile_does_not_tear_the_file(prompts, given):
    stop = threading.Event()
    with source_of(prompts, **given) as source, ThreadPoolExecutor() as pool:
        (group,) = with_experts(source.get_samples(1))

        def write_into_it():
            while not stop.is_set():
                group[0].rollout_routed_experts[:] += 1

        writing = pool.submit(write_into_it)
        try:
            for rollout_id in range(5):
                source.add_samples([copy.copy(group)])
                source.save(rollout_id)
        finally:
            stop.set()
        writing.result()
        source.load(4)
        assert source.get_buffer_length() == 5


# As the last version had it that wrote all groups into the snapshot.
PIXELS = {"__dict__": {"__tensor__": ["bfloat16", [3, 5], {"__ndarray__": ["|u1", [30], "gD+AP4A/" * 5]}]}}
KEPT = {"__dict__": {"pixel_values": PIXELS, "__tensor__": {"__tuple__": [1, {"__bytes__": "eA=="}]}}}
OLD = {
    "tokens": [1, 2, 3], "status": "aborted",
    "metadata": {"__dict__": {"big": [2**63, -1.5, None], "__odd__": 1}},
    "rollout_routed_experts": {"__ndarray__": ["<i4", [30_000], base64.b64encode(b"\7\0\0\0" * 30_000).decode()]},
    "multimodal_train_inputs": {"__dict__": {"__kept__": KEPT}},
}  # fmt: skip


def rewrite(path, change):
    base, fields = snapshots.load_fields(path)
    change(fields)
    payload = snapshots.msgspec.msgpack.encode(fields)
    path.write_bytes(pack(payload, "msgpack", schema=base.schema, library=base.library) + payload)


def test_a_checkpoint_from_before_groups_had_files_is_restored(given):
    torch = pytest.importorskip("torch")
    with source_of(None, **given) as source:
        groups = source.get_samples(3)
        source.add_samples([groups[0], [groups[1], [groups[2][0]]]])
        source.save(3)
        rewrite(checkpoint_at(given["save"], 3), lambda fields: fields["buffer"][0][0].update(OLD))
        for rollout_id in (3, 4):  # as it was, and as it is written now
            source.load(rollout_id)
            (one, _), ((three, _), (four,)) = source.buffer
            assert [one.index, three.index, four.index, source.sample_group_index] == [0, 2, 4, 3]
            assert (one.tokens, one.status.value) == ([1, 2, 3], "aborted")
            assert one.metadata == {"big": [2**63, -1.5, None], "__odd__": 1}
            assert_same(one.rollout_routed_experts, np.full(30_000, 7, np.int32))
            assert one.multimodal_train_inputs["__tensor__"] == (1, b"x")
            assert_same(one.multimodal_train_inputs["pixel_values"], torch.ones(3, 5, dtype=torch.bfloat16))
            one.rollout_routed_experts[:] = 7  # writable
            source.save(4)


@pytest.mark.thorough
def test_files_that_no_kept_checkpoint_names_are_removed(prompts, given):
    folder = Path(given["save"], "rollout", "asyncdata_groups")
    with source_of(prompts, **given) as source:
        source.add_samples(with_experts(source.get_samples(2)))
        source.save(0)
        source.save(1)
        source.get_samples(1)
        for _ in range(3):  # until no older one is kept
            source.save(0)
        assert len(files_of(given)) == 2, "rollout 1 names both"
        checkpoint_at(given["save"], 1).unlink()
        (folder / "notes.txt").touch()
        source.save(2)
        assert len(files_of(given)) == 2, "one group, and the files that are not ours"
        (folder / "notes.txt").unlink()
        source.get_samples(1)
        for _ in range(3):
            source.save(0)
        checkpoint_at(given["save"], 2).unlink()
        source.save(3)

    assert not folder.exists()


def test_nothing_is_removed_while_a_checkpoint_cannot_be_read(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(with_experts(source.get_samples(1)))
        source.save(0)
        checkpoint_at(given["save"], 0).write_bytes(b"damaged")
        source.get_samples(1)
        with capture_logs() as events:
            source.save(1)
    assert len(files_of(given)) == 1
    (event,) = [event for event in events if event["event"] == "checkpoint.groups_not_removed"]
    assert "_0.asyncdata may name some, and cannot be read: it is not a snapshot" in event["reason"]


def test_what_a_killed_process_left_half_written_is_removed_an_hour_later(prompts, given):
    with source_of(prompts, **given) as source:
        source.add_samples(with_experts(source.get_samples(1)))
        source.save(0)
        (path,) = files_of(given)
        old, new = (path.parent / f".{path.name}.77.{end}.tmp" for end in ("0123abcd", "4567abcd"))
        old.touch()
        new.touch()
        os.utime(old, (0, 0))
        source.save(1)
    assert (old.exists(), new.exists()) == (False, True)


HARMS: dict[str, tuple[Any, str]] = {
    "gone": (lambda path, other: path.unlink(), "it is not there; a checkpoint is moved"),
    "cut off": (lambda path, other: path.write_bytes(path.read_bytes()[:-1]), "it is cut off"),
    "changed": (lambda path, other: path.write_bytes(path.read_bytes()[:-1] + b"?"), "its checksum does not match"),
    "exchanged": (lambda path, other: path.write_bytes(other.read_bytes()), "it is another group's"),
    "a folder": (lambda path, other: (path.unlink(), path.mkdir()), "it is not a regular file|Is a directory"),
    "a pipe": (lambda path, other: (path.unlink(), os.mkfifo(path)), "it is not a regular file"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_missing_or_damaged_is_named_and_nothing_is_restored(prompts, given, harm):
    harm, reason = HARMS[harm]
    with source_of(prompts, **given) as source:
        groups = with_experts(source.get_samples(2))
        source.add_samples(groups)
        source.save(0)
        one, other = files_of(given)
        harm(one, other)
        with pytest.raises(SnapshotError, match=rf"AD602 .*/asyncdata_groups/{one.name}: ({reason})") as caught:
            source.load(0)
        assert "load an older checkpoint" in str(caught.value)
        assert source.buffer == groups


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x01" + bytes(8), (1).to_bytes(8, "little") + b"\x07"])
def test_a_whole_file_that_holds_no_group_is_refused(prompts, given, content, monkeypatch):
    change(monkeypatch, pieces_of_a_group=lambda samples, encode: [content])
    change(monkeypatch, bytes_of_a_group_in_a_file=0)
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(1))
        source.save(0)
        with pytest.raises(SnapshotError, match="AD602 .*its content cannot be decoded"):
            source.load(0)


@pytest.mark.thorough
@pytest.mark.parametrize("place", [[0, 10**9], [-1, 8], [8, -8], [10**9, 8], "ab", None])
def test_bytes_outside_of_the_file_are_refused(prompts, given, place, monkeypatch):
    record = [{"rollout_routed_experts": {"__ndarray__": ["<i4", [2], place]}}]
    change(monkeypatch, bytes_of_a_group_in_a_file=0)
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(1))
        with monkeypatch.context() as patch:
            pieces = slime_groups.pieces
            change(patch, pieces_of_a_group=lambda samples, encode: pieces(record, encode))
            source.save(0)
        with pytest.raises(SnapshotError, match="AD602 a group in the snapshot's buffer cannot be read"):
            source.load(0)


@pytest.mark.parametrize("name", ["../../secret", "a" * 63, "A" * 64, 5, None])
def test_a_name_that_is_no_checksum_is_never_opened(prompts, given, name):
    stored = {"file": name, "num_bytes": 1, "num_samples": 1, "num_tokens": 0}
    with source_of(prompts, **given) as source:
        source.save(0)
        rewrite(checkpoint_at(given["save"], 0), lambda fields: fields.update(buffer=[[{"__samples__": stored}]]))
        with pytest.raises(SnapshotError, match="AD602 .*names no file"):
            source.load(0)


@pytest.mark.thorough
def test_a_group_that_cannot_be_written_leaves_what_was_there(prompts, given, monkeypatch):
    def fails(place, message):
        error = OSError(28, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error))
            with pytest.raises(SnapshotError, match=f"AD601 {message}"):
                source.save(0)

    with source_of(prompts, **given) as source:
        source.add_samples(with_experts(source.get_samples(1)))
        source.save(0)
        before = sorted(Path(given["save"], "rollout").rglob("*"))
        source.add_samples(with_experts(source.get_samples(2)[1:]))
        fails("asyncdata.integrations.slime.checkpoint.replace_file", "a group of the .*No space left on device; free")
        assert sorted(Path(given["save"], "rollout").rglob("*")) == before
        fails("asyncdata.checkpoint.snapshot.replace_file", ".*No space left on device")
        assert set(files_of(given)) <= set(before), "nothing names it"
        source.load(0)
        assert source.get_buffer_length() == 1


def nested(depth):
    return functools.reduce(lambda value, _: [value], range(depth), [])


DEEP = "nested more than 200 deep"
UNPERSISTABLE: dict[str, dict[Any, Any]] = {
    r"\$\.metadata\.of": {"of": {1, 2}},
    r"\$\.metadata\.at": {"at": datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)},
    "has the key 5": {5: "a number as its key"}, r"metadata\.lock": {"lock": object()}, DEEP: {"tree": nested(500)},
}  # fmt: skip
SERVE = {"asyncdata_unpersistable": "serve_without_saving"}


def test_refusing_is_the_default_and_says_what_it_is_and_how_to_have_it_otherwise(prompts):
    with source_of(prompts) as source:
        (group,) = source.get_samples(1)
        for reason, metadata in [*UNPERSISTABLE.items(), (DEEP, {"tree": nested(100_000)})]:
            group[0].metadata = metadata
            message = f"AD432 group 0: .*{reason}.*asyncdata_unpersistable: serve_without_saving"
            with pytest.raises(BadGroupError, match=message):
                source.add_samples([group])
        assert source.buffer == []


def test_what_is_nested_as_deep_as_may_be_comes_back_and_what_is_no_group_is_refused_either_way(prompts, given):
    with source_of(prompts, **given) as source:
        groups = source.get_samples(1)
        inner = groups[0][0].metadata = {"lists": nested(197), "dicts": {}}
        for _ in range(198):
            inner["dicts"] = {}
            inner = inner["dicts"]
        source.add_samples(groups)
        source.save(0)
        source.load(0)
        assert_same(source.buffer, groups)

    with source_of(prompts, **given, **SERVE) as source:
        (group,) = source.get_samples(1)
        for bad in ([group[:1]], [tuple(group)], (group,)):
            with pytest.raises(BadGroupError, match="AD432"):
                source.add_samples(bad)
    with pytest.raises(ConfigError, match="asyncdata_unpersistable"), source_of(prompts, asyncdata_unpersistable="no"):
        pass


def test_a_group_that_cannot_be_kept_is_served_if_that_is_asked_for_and_a_restart_that_loses_it_says_so(prompts, given):
    with capture_logs() as events, source_of(prompts, **given, **SERVE) as source:
        groups = source.get_samples(6)
        for group, metadata in zip(groups, UNPERSISTABLE.values(), strict=False):
            group[0].metadata = metadata
        source.add_samples(groups[:3])
        source.add_samples(groups[3:])
        assert source.statistics()["asyncdata_unpersistable_groups_total"] == 5
        source.save(0)
        assert source.get_samples(3) == groups[:3]
        source.save(1)

    (event,) = [event for event in events if event["event"] == "buffer.not_saved"]
    assert (event["group_index"], event["log_level"]) == (0, "warning")
    assert event["reason"] == "$.metadata.of is a builtins.set, which a snapshot cannot hold"
    for rollout_id, lost in ((0, [0, 1, 2, 3, 4]), (1, [3, 4])):
        for knob in (SERVE, {}):
            with capture_logs() as events, source_of(prompts, **given, **knob) as source:
                source.load(rollout_id)
                assert labels(source.buffer) == ["5"]
                assert source.statistics()["asyncdata_dropped_groups_unpersistable_total"] == len(lost)
                source.save(2)
            (event,) = [event for event in events if event["event"] == "checkpoint.groups_lost"]
            assert (event["num_groups"], event["log_level"]) == (len(lost), "warning")
            assert [number for number, _ in event["groups"]] == lost
            assert DEEP in event["groups"][-1][1]
