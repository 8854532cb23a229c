"""The snapshot: what it holds comes back, only whole files are taken, and a wrong one is refused in words."""

from __future__ import annotations

import base64
import contextlib
import errno
import gzip
import io
import json
import math
import os
import pickle
import secrets
import stat
import time
import zipfile
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.matching import check, differences
from asyncdata.checkpoint.snapshot import (
    Snapshot,
    describe,
    describe_file,
    from_state_dict,
    load,
    save,
    to_state_dict,
)
from asyncdata.core.checksummed_file import pack
from asyncdata.core.errors import ConfigError, SnapshotError, SnapshotMismatchError, SnapshotVersionError
from asyncdata.core.types import Position, Sample, SourceLocation, Status

DATA = {"num_files": 2, "num_bytes": 30, "digest": "d1", "files": [["a.jsonl", 10, "x"], ["b.jsonl", 20, "y"]]}
ORDER = {"seed": 42, "shuffle": True, "block_bytes": 32768, "window_blocks": 1024, "num_blocks": 9}
FINGERPRINTS = {"data": DATA, "tokenizer": "t1", "template": "p1", "tokenize_fn": "f1"}


def sample(index: int) -> dict[str, Any]:
    return Sample(
        index=index,
        group_index=index // 2,
        prompt="2 + 2 = ?",
        tokens=np.arange(5, dtype=np.int32),
        label=4,
        metadata={"level": 1, "image": b"\x00\xff", "size": (3, 4)},
        position=Position(1, 2, 3),
        source=SourceLocation("a.jsonl", 10, 20),
        response="f\u00fcnf",
        response_length=2,
        reward={"exact": 0.5},
        loss_mask=[1, 0],
        rollout_log_probs=[-0.25, float("-inf")],
        status=Status.ABORTED,
    ).to_dict()


FULL = Snapshot(
    library="0.1.0",
    position=(1, 2, 3),
    counters={"num_groups": 7, "num_samples": 14, "drops": {"too_long": 3}},
    order=ORDER,
    fingerprints=FINGERPRINTS,
    buffer=[[sample(0), sample(1)], [sample(2), sample(3)]],
    leases=[[sample(4), sample(5)]],
    acked=[(1, 2, 5), (1, 3, 0)],
    journal=[(0, 123_456_789_012)],
    canaries=["c0", "c1"],
)
LEAST = Snapshot(position=(0, 0, 0))

# Written by the first release. It has to load for ever: add one for each new schema, and change none.
GOLDEN = (
    "QURTTkFQMQqSAAAAhqdibGFrZTJi2UAxMGEwZTEzOGRjMzgwNjY4MmQ1YzA1N2U3NDk3MzkwNWExMDU4OTYxOWMyNTQxNDNlOWU3"
    "MzM5ZDYxMjAyMWRmpnNjaGVtYQGnbGlicmFyeaUwLjEuMKdjcmVhdGVkyz/4AAAAAAAAq3BheWxvYWRfbGVuzQFVqGVuY29kaW5n"
    "p21zZ3BhY2uLpnNjaGVtYQGnbGlicmFyeaUwLjEuMKhwb3NpdGlvbpMDDsyfqGNvdW50ZXJzgqpudW1fZ3JvdXBzAqVkcm9wc4Go"
    "dG9vX2xvbmcBpW9yZGVyg6RzZWVkKqdzaHVmZmxlw613aW5kb3dfYmxvY2tzzQQArGZpbmdlcnByaW50c4KkZGF0YYSpbnVtX2Zp"
    "bGVzAaludW1fYnl0ZXMJpmRpZ2VzdKFkpWZpbGVzkZOhYQmheKl0b2tlbml6ZXKhdKZidWZmZXKRkYSlaW5kZXgApnRva2Vuc4Gr"
    "X19uZGFycmF5X1+TozxpNJECrEFRQUFBQUlBQUFBPaZyZXdhcmTLv+AAAAAAAAClbGFiZWzApmxlYXNlc5GRgqVpbmRleAGocmVz"
    "cG9uc2WlZsO8bmalYWNrZWSRkwMOzKCnam91cm5hbJGSAM0QAKhjYW5hcmllc5GhYw=="
)
GOLDEN_JSON = (
    "QURTTkFQMQqPAAAAhqdibGFrZTJi2UA3NjVmM2E0ZDc0NDY1OTRlNWQwYjk4ZDhkNjM3YThiYzA1ZWY3YWIyMjVhMTFlNmE2YTY0"
    "MTQ5ZWQwNmFjOWZlpnNjaGVtYQGnbGlicmFyeaUwLjEuMKdjcmVhdGVkyz/4AAAAAAAAq3BheWxvYWRfbGVuzQIcqGVuY29kaW5n"
    "pGpzb257InNjaGVtYSI6IDEsICJsaWJyYXJ5IjogIjAuMS4wIiwgInBvc2l0aW9uIjogWzMsIDE0LCAxNTldLCAiY291bnRlcnMi"
    "OiB7Im51bV9ncm91cHMiOiAyLCAiZHJvcHMiOiB7InRvb19sb25nIjogMX19LCAib3JkZXIiOiB7InNlZWQiOiA0MiwgInNodWZm"
    "bGUiOiB0cnVlLCAid2luZG93X2Jsb2NrcyI6IDEwMjR9LCAiZmluZ2VycHJpbnRzIjogeyJkYXRhIjogeyJudW1fZmlsZXMiOiAx"
    "LCAibnVtX2J5dGVzIjogOSwgImRpZ2VzdCI6ICJkIiwgImZpbGVzIjogW1siYSIsIDksICJ4Il1dfSwgInRva2VuaXplciI6ICJ0"
    "In0sICJidWZmZXIiOiBbW3siaW5kZXgiOiAwLCAidG9rZW5zIjogeyJfX25kYXJyYXlfXyI6IFsiPGk0IiwgWzJdLCAiQVFBQUFB"
    "SUFBQUE9Il19LCAicmV3YXJkIjogLTAuNSwgImxhYmVsIjogbnVsbH1dXSwgImxlYXNlcyI6IFtbeyJpbmRleCI6IDEsICJyZXNw"
    "b25zZSI6ICJmXHUwMGZjbmYifV1dLCAiYWNrZWQiOiBbWzMsIDE0LCAxNjBdXSwgImpvdXJuYWwiOiBbWzAsIDQwOTZdXSwgImNh"
    "bmFyaWVzIjogWyJcdWQ4MDAiXX0="
)
GOLDEN_STATE = (
    '{"format": "asyncdata.snapshot", "schema": 1, "library": "0.1.0", "position": [3, 14, 159], "counter'
    's": {"num_groups": 2, "drops": {"too_long": 1}}, "order": {"seed": 42, "shuffle": true, "window_bloc'
    'ks": 1024}, "fingerprints": {"data": {"num_files": 1, "num_bytes": 9, "digest": "d", "files": [["a",'
    ' 9, "x"]]}, "tokenizer": "t"}, "buffer": [[{"index": 0, "tokens": {"__ndarray__": ["<i4", [2], "AQAA'
    'AAIAAAA="]}, "reward": -0.5, "label": null}]], "leases": [[{"index": 1, "response": "f\\u00fcnf"}]],'
    ' "acked": [[3, 14, 160]], "journal": [[0, 4096]], "canaries": ["c"]}'
)
GOLDEN_SNAPSHOT = Snapshot(
    library="0.1.0",
    position=(3, 14, 159),
    counters={"num_groups": 2, "drops": {"too_long": 1}},
    order={"seed": 42, "shuffle": True, "window_blocks": 1024},
    fingerprints={"data": {"num_files": 1, "num_bytes": 9, "digest": "d", "files": [["a", 9, "x"]]}, "tokenizer": "t"},
    buffer=[[{"index": 0, "tokens": {"__ndarray__": ["<i4", [2], "AQAAAAIAAAA="]}, "reward": -0.5, "label": None}]],
    leases=[[{"index": 1, "response": "f\u00fcnf"}]],
    acked=[(3, 14, 160)],
    journal=[(0, 4096)],
    canaries=["c"],
)


def refusal(path: os.PathLike[str]) -> str:
    with pytest.raises(SnapshotError, match=r"^AD602 ") as caught:
        load(path)
    return str(caught.value)


def wrapped(payload: bytes, *, encoding: str = "msgpack", schema: int = 1, library: str = "0.1.0") -> bytes:
    """A file that is whole, whatever its payload."""
    return pack(payload, encoding, schema=schema, library=library) + payload


def names(folder: os.PathLike[str]) -> list[str]:
    return sorted(os.listdir(folder))


class TestStateDict:
    @pytest.mark.parametrize("snapshot", [FULL, LEAST, GOLDEN_SNAPSHOT])
    def test_a_snapshot_comes_back_as_it_was(self, snapshot):
        assert from_state_dict(to_state_dict(snapshot)) == snapshot

    def test_json_carries_it(self):
        assert from_state_dict(json.loads(json.dumps(to_state_dict(FULL)))) == FULL

    def test_it_is_made_of_plain_builtins_alone(self):
        def kinds(value):
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            return {type(value)}.union(*map(kinds, inner))

        odd = msgspec.structs.replace(FULL, order={"weights": (1, (2, 3)), "status": Status.PENDING})

        assert kinds(to_state_dict(odd)) <= {dict, list, str, int, float, bool, type(None)}
        assert to_state_dict(odd)["order"] == {"weights": [1, [2, 3]], "status": "pending"}
        assert to_state_dict(FULL)["format"] == "asyncdata.snapshot"

    def test_its_keys_are_text_as_in_json(self):
        state = to_state_dict(Snapshot(position=(0, 0, 0), counters={"by": {1: 2}}))

        assert state["counters"] == {"by": {"1": 2}} == json.loads(json.dumps(state))["counters"]

    def test_it_shares_nothing_with_the_snapshot(self):
        state = to_state_dict(FULL)
        state["buffer"][0][0]["metadata"]["level"] = 99
        state["buffer"][0][0]["loss_mask"].append(5)
        state["counters"]["drops"].clear()

        assert from_state_dict(to_state_dict(FULL)).buffer[0][0]["metadata"]["level"] == 1
        assert (FULL.buffer[0][0]["loss_mask"], FULL.counters["drops"]) == ([1, 0], {"too_long": 3})

    def test_the_samples_in_it_are_the_samples_that_were_given_back(self):
        restored = Sample.from_dict(from_state_dict(json.loads(json.dumps(to_state_dict(FULL)))).buffer[0][1])

        assert restored.to_dict() == sample(1)
        assert (restored.tokens.dtype, restored.tokens.tolist()) == (np.int32, [0, 1, 2, 3, 4])
        assert restored.metadata == {"level": 1, "image": b"\x00\xff", "size": (3, 4)}

    def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults(self):
        state = {"format": "asyncdata.snapshot", "position": [1, 2, 3], "of_a_later_minor_version": {"a": 1}}

        assert from_state_dict(state) == Snapshot(position=(1, 2, 3))

    @pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType])
    def test_any_mapping_is_taken(self, kind):
        assert from_state_dict(kind(to_state_dict(FULL))) == FULL

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            ({"position": [1, "2", 3]}, "Expected `int`, got `str` - at `$.position[1]`"),
            ({"position": [1, 2]}, "$.position"),
            ({"position": [0, -1, 0]}, "$.position[1]"),
            ({"position": [0, True, 0]}, "$.position[1]"),
            ({"position": None}, "$.position"),
            ({"buffer": [[{}], [5]]}, "$.buffer[1][0]"),
            ({"buffer": "groups"}, "$.buffer"),
            ({"acked": [[1, 2]]}, "$.acked[0]"),
            ({"journal": [[0, 0.5]]}, "$.journal[0][1]"),
            ({"canaries": [1]}, "$.canaries[0]"),
            ({"order": []}, "$.order"),
            ({"library": 1}, "$.library"),
            ({"schema": "1"}, "$.schema"),
            ({"schema": 0}, "$.schema"),
            ({"schema": True}, "$.schema"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_place(self, change, place):
        with pytest.raises(SnapshotError, match=r"^AD602 this state_dict cannot be loaded: ") as caught:
            from_state_dict(to_state_dict(FULL) | change)
        assert place in str(caught.value)

    def test_a_state_without_a_position_is_not_taken_for_the_beginning(self):
        state = to_state_dict(FULL)
        del state["position"]

        with pytest.raises(SnapshotError, match="missing required field `position`"):
            from_state_dict(state)

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ({}, "an empty dict"),
            ({"sample_offset": 3, "epoch_id": 1}, "a dict with the keys 'sample_offset', 'epoch_id'"),
            ({"format": "other"}, "a dict with the keys 'format'"),
            ([1], "a list"),
            (None, "a NoneType"),
        ],
    )
    def test_what_is_no_state_dict_of_ours_is_named(self, state, words):
        with pytest.raises(SnapshotError, match=f"it is {words}, not what asyncdata's state_dict"):
            from_state_dict(state)

    def test_keys_that_are_no_text_are_refused(self):
        with pytest.raises(SnapshotError):
            from_state_dict(to_state_dict(FULL) | {5: 6, "order": {1: 2}})


class TestSchemas:
    def test_a_newer_schema_is_refused_and_the_version_that_wrote_it_named(self):
        state = to_state_dict(FULL) | {"schema": 9, "library": "7.1.0"}

        with pytest.raises(SnapshotVersionError, match=r"schema 9, written by asyncdata 7\.1\.0; .* up to 1: use"):
            from_state_dict(state)

    def test_a_file_of_a_newer_schema_is_refused_before_its_content_is_looked_at(self, tmp_path):
        (tmp_path / "s").write_bytes(wrapped(b"a content of another kind", schema=2, library="7.1.0", encoding="zstd"))

        with pytest.raises(SnapshotVersionError, match=r"AD602 .*/s cannot .* schema 2, written by asyncdata 7\.1\.0"):
            load(tmp_path / "s")

    def test_older_ones_migrate_step_by_step(self, monkeypatch, tmp_path):
        path = tmp_path / "s"
        save(path, FULL)
        old = to_state_dict(FULL)
        steps = {1: lambda state: state | {"epoch": state["position"][0]}, 2: rename_canaries}
        monkeypatch.setattr(snapshots, "SCHEMA", 3)
        monkeypatch.setattr(snapshots, "_MIGRATIONS", steps)
        expected = msgspec.structs.replace(FULL, schema=3, canaries=["c0", "c1", "1"])

        assert from_state_dict(old) == load(path) == expected
        assert old == to_state_dict(FULL)

    def test_one_that_cannot_migrate_is_a_snapshot_error(self, monkeypatch):
        monkeypatch.setattr(snapshots, "SCHEMA", 3)
        monkeypatch.setattr(snapshots, "_MIGRATIONS", {1: lambda state: state["of_no_such_name"]})

        with pytest.raises(SnapshotError, match="of_no_such_name"):
            from_state_dict(to_state_dict(FULL))

    def test_there_is_a_migration_from_every_older_schema(self):
        assert sorted(snapshots._MIGRATIONS) == list(range(1, snapshots.SCHEMA))  # noqa: SLF001


def rename_canaries(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "canaries": [*state["canaries"], str(state["epoch"])]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class TestFile:
    @pytest.mark.parametrize("snapshot", [FULL, LEAST])
    def test_a_snapshot_comes_back_as_it_was(self, tmp_path, snapshot):
        num_bytes = save(tmp_path / "s", snapshot)

        assert load(tmp_path / "s") == load(f"{tmp_path}/s") == snapshot
        assert num_bytes == os.path.getsize(tmp_path / "s")

    def test_what_looks_like_the_place_of_the_checksum_is_left_as_it_is(self, tmp_path):
        zeros = msgspec.structs.replace(FULL, library="0" * 64, canaries=["0" * 64])
        save(tmp_path / "s", zeros)

        assert load(tmp_path / "s") == zeros

    def test_only_its_owner_may_read_it(self, tmp_path):
        save(tmp_path / "s", FULL)

        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600

    def test_the_last_three_are_kept(self, tmp_path):
        for number in range(5):
            save(tmp_path / "s", Snapshot(position=(number, 0, 0)))

        assert [load(tmp_path / name).position[0] for name in names(tmp_path)] == [4, 3, 2]
        assert names(tmp_path) == ["s", "s.1", "s.2"]

    @pytest.mark.parametrize("keep", [1, 2, 5])
    def test_as_many_are_kept_as_asked_for(self, tmp_path, keep):
        for number in range(7):
            save(tmp_path / "s", Snapshot(position=(number, 0, 0)), keep=keep)

        assert [load(tmp_path / name).position[0] for name in names(tmp_path)] == list(range(6, 6 - keep, -1))

    def test_keeping_none_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="keep must be 1 or more"):
            save(tmp_path / "s", FULL, keep=0)

    def test_a_relative_path_will_do(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        save("s", FULL)

        assert load("s") == FULL

    def test_text_and_numbers_that_msgpack_lacks_come_back_too(self, tmp_path):
        odd = msgspec.structs.replace(FULL, buffer=[[{"response": "\ud800", "label": 2**100, "nan": -0.0}]])
        save(tmp_path / "s", odd)

        assert load(tmp_path / "s") == odd

    def test_nan_comes_back_too(self, tmp_path):
        for counters in ({"x": float("nan")}, {"x": float("nan"), "big": 2**70}):
            save(tmp_path / "s", Snapshot(position=(0, 0, 0), counters=counters))
            assert math.isnan(load(tmp_path / "s").counters["x"])
        assert math.isnan(from_state_dict(json.loads(json.dumps(to_state_dict(load(tmp_path / "s"))))).counters["x"])

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "value", [pytest.param(object(), id="object()"), np.int64(1), {"digits": 5000}, {"depth": 100_000}], ids=str
    )
    def test_what_no_file_can_hold_is_refused_and_the_old_one_kept(self, tmp_path, value):
        save(tmp_path / "s", FULL)
        if isinstance(value, dict):
            value = 10 ** value["digits"] if "digits" in value else nested(value["depth"])

        with pytest.raises(SnapshotError, match=r"^AD601 the snapshot holds what no file can: .*; nothing was written"):
            save(tmp_path / "s", Snapshot(position=(9, 9, 9), counters={"big": 2**70, "value": value}))
        assert (load(tmp_path / "s"), names(tmp_path)) == (FULL, ["s"])

    def test_more_than_can_be_loaded_is_not_saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr(snapshots, "MAX_FILE_BYTES", 1000)

        with pytest.raises(SnapshotError, match=r"AD601 the snapshot has \d+ bytes, more than 1000"):
            save(tmp_path / "s", FULL)
        assert names(tmp_path) == []

    def test_everything_is_on_the_disk_before_it_bears_the_name(self, tmp_path, monkeypatch):
        calls: list[tuple[str, str]] = []

        def watch(name):
            real = getattr(os, name)

            def call(*args, **kwargs):
                last = args[-1] if name == "replace" else args[0]
                place = os.readlink(f"/proc/self/fd/{last}") if isinstance(last, int) else last
                calls.append((name, os.path.basename(place)))
                return real(*args, **kwargs)

            monkeypatch.setattr(os, name, call)

        save(tmp_path / "s", LEAST)
        for name in ("write", "fsync", "pread", "link", "replace"):
            watch(name)
        save(tmp_path / "s", FULL)
        monkeypatch.undo()

        steps = [(name, "tmp" if place.endswith(".tmp") else place) for name, place in calls]
        assert list(dict.fromkeys(steps)) == [
            ("write", "tmp"),
            ("fsync", "tmp"),
            ("pread", "tmp"),
            ("link", "s"),
            ("replace", "s.1"),
            ("replace", "s"),
            ("fsync", tmp_path.name),
        ]

    def test_what_it_takes_is_the_same_for_ever(self, tmp_path, monkeypatch):
        monkeypatch.setattr(time, "time", lambda: 1.5)
        save(tmp_path / "s", GOLDEN_SNAPSHOT)
        save(tmp_path / "j", msgspec.structs.replace(GOLDEN_SNAPSHOT, canaries=["\ud800"]))

        assert base64.b64encode((tmp_path / "s").read_bytes()).decode() == GOLDEN
        assert base64.b64encode((tmp_path / "j").read_bytes()).decode() == GOLDEN_JSON
        assert json.dumps(to_state_dict(GOLDEN_SNAPSHOT)) == GOLDEN_STATE

    def test_a_snapshot_of_the_first_schema_loads_for_ever(self, tmp_path):
        (tmp_path / "s").write_bytes(base64.b64decode(GOLDEN))
        (tmp_path / "j").write_bytes(base64.b64decode(GOLDEN_JSON))

        assert load(tmp_path / "s") == from_state_dict(json.loads(GOLDEN_STATE)) == GOLDEN_SNAPSHOT
        assert load(tmp_path / "j") == msgspec.structs.replace(GOLDEN_SNAPSHOT, canaries=["\ud800"])


class TestWhatSaveCannotDo:
    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(SnapshotError, match=f"AD601 .*: there is no folder {tmp_path}/none; make it first; there"):
            save(tmp_path / "none" / "s", FULL)

    @pytest.mark.parametrize("kind", ["link", "folder"])
    def test_only_a_file_is_replaced(self, tmp_path, kind):
        save(tmp_path / "target", LEAST)
        path = tmp_path / "s"
        path.symlink_to("target") if kind == "link" else path.mkdir()

        with pytest.raises(SnapshotError, match=r"AD601 .*: a link, folder or device is in its place"):
            save(path, FULL)
        assert (names(tmp_path), load(tmp_path / "target")) == (["s", "target"], LEAST)

    def test_a_full_disk_is_named_with_the_bytes_needed(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        monkeypatch.setattr(os, "write", fail(errno.ENOSPC))

        with pytest.raises(SnapshotError, match=r"AD601 .*/s was not written: No space left on device") as caught:
            save(tmp_path / "s", FULL)
        assert "(need 2" in str(caught.value)
        assert str(caught.value).endswith("the previous snapshot is kept as s")
        assert isinstance(caught.value.__cause__, OSError)
        assert (load(tmp_path / "s"), names(tmp_path)) == (LEAST, ["s"])

    def test_a_disk_that_lies_is_found_out(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, offset: bytes([pread(fd, n, offset)[0] ^ 1]))

        with pytest.raises(SnapshotError, match="reads back otherwise after byte 0; the previous snapshot is kept"):
            save(tmp_path / "s", FULL)
        monkeypatch.setattr(os, "pread", lambda *_: b"")
        with pytest.raises(SnapshotError, match="reads back otherwise"):
            save(tmp_path / "s", FULL)
        assert (load(tmp_path / "s"), names(tmp_path)) == (LEAST, ["s"])

    def test_writes_and_reads_that_come_in_pieces_are_put_together(self, tmp_path, monkeypatch):
        write, pread = os.write, os.pread
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
        monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 77), offset))
        save(tmp_path / "s", FULL)

        assert load(tmp_path / "s") == FULL

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
    def test_without_hard_links_older_ones_are_kept_too(self, tmp_path, monkeypatch, code):
        monkeypatch.setattr(os, "link", fail(code))
        for number in range(5):
            save(tmp_path / "s", Snapshot(position=(number, 0, 0)))

        assert [load(tmp_path / name).position[0] for name in names(tmp_path)] == [4, 3, 2]

    def test_without_hard_links_the_message_says_where_the_previous_one_is(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        replace = os.replace
        monkeypatch.setattr(os, "link", fail(errno.EPERM))
        monkeypatch.setattr(os, "replace", lambda a, b: fail(errno.EIO)() if a.endswith("tmp") else replace(a, b))

        with pytest.raises(SnapshotError, match=r"the previous snapshot is kept as s\.1$"):
            save(tmp_path / "s", FULL)
        monkeypatch.undo()
        assert refusal(tmp_path / "s").endswith("s.1 is valid: restore it instead")

        save(tmp_path / "s", FULL)
        assert (load(tmp_path / "s"), load(tmp_path / "s.1"), names(tmp_path)) == (FULL, LEAST, ["s", "s.1"])

    def test_a_link_refused_for_another_reason_leaves_all_as_it_was(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        monkeypatch.setattr(os, "link", fail(errno.EIO))

        with pytest.raises(SnapshotError, match=r"Input/output error; the previous snapshot is kept as s$"):
            save(tmp_path / "s", FULL)
        assert (load(tmp_path / "s"), names(tmp_path)) == (LEAST, ["s"])

    def test_a_save_that_failed_at_the_last_moment_costs_no_older_one(self, tmp_path, monkeypatch):
        for number in range(2):
            save(tmp_path / "s", Snapshot(position=(number, 0, 0)))
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: fail(errno.EIO)() if b.endswith("/s") else replace(a, b))
        for _ in range(3):
            with pytest.raises(SnapshotError, match="AD601"):
                save(tmp_path / "s", Snapshot(position=(2, 0, 0)))
        monkeypatch.undo()
        save(tmp_path / "s", Snapshot(position=(2, 0, 0)))

        assert [load(tmp_path / name).position[0] for name in names(tmp_path)] == [2, 1, 0]

    def test_a_file_in_the_way_is_not_written_through(self, tmp_path, monkeypatch):
        monkeypatch.setattr(secrets, "token_hex", lambda _: "0123abcd")
        (tmp_path / "precious").write_bytes(b"precious")
        (tmp_path / f".s.{os.getpid()}.0123abcd.tmp").hardlink_to(tmp_path / "precious")

        with pytest.raises(SnapshotError, match="AD601 .* File exists"):
            save(tmp_path / "s", FULL)
        assert (tmp_path / "precious").read_bytes() == b"precious"

    def test_a_folder_that_cannot_be_synced_is_told_as_such(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        fsync = os.fsync

        def on_folders(code):
            return lambda fd: fail(code)() if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync(fd)

        monkeypatch.setattr(os, "fsync", on_folders(errno.EIO))
        with pytest.raises(SnapshotError, match=r"AD601 .* is written, but a power loss may undo it: .*; save again"):
            save(tmp_path / "s", FULL)
        monkeypatch.setattr(os, "fsync", on_folders(errno.EINVAL))
        save(tmp_path / "s", FULL)

        assert names(tmp_path) == ["s", "s.1", "s.2"]

    def test_what_killed_processes_left_is_removed_once_it_is_an_hour_old(self, tmp_path):
        old, young, half_an_hour = ".s.77.0123abcd.tmp", ".s.78.0123abcd.tmp", time.time() - 1800
        kept = [".other.77.0123abcd.tmp", ".s.77.tmp", ".s.my.77.0123abcd.tmp", young]
        for name in (old, ".s.77.0123abcd.old.tmp", *kept):
            (tmp_path / name).write_bytes(b"half")
            os.utime(tmp_path / name, (0, 0) if name != young else (half_an_hour, half_an_hour))
        save(tmp_path / "s", FULL)

        assert names(tmp_path) == sorted([*kept, "s"])

    def test_what_cannot_be_tidied_up_fails_no_save(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "scandir", fail(errno.EACCES))

        save(tmp_path / "s", FULL)

        assert load(tmp_path / "s") == FULL


def fail(code: int):
    def call(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


class TestDamage:
    @pytest.mark.thorough
    def test_every_single_bit_counts(self, tmp_path):
        whole = base64.b64decode(GOLDEN)
        path = tmp_path / "s"
        path.write_bytes(whole)
        num_accepted = 0
        with path.open("r+b", buffering=0) as file:
            for place in range(len(whole) * 8):
                offset, bit = divmod(place, 8)
                os.pwrite(file.fileno(), bytes([whole[offset] ^ 1 << bit]), offset)
                with contextlib.suppress(SnapshotError):
                    load(path)
                    num_accepted += 1
                os.pwrite(file.fileno(), whole[offset : offset + 1], offset)

        assert num_accepted == 0
        assert load(path) == GOLDEN_SNAPSHOT

    @pytest.mark.thorough
    def test_every_cut_is_told_with_the_bytes_expected_and_got(self, tmp_path):
        whole = base64.b64decode(GOLDEN)
        for num_bytes in range(1, len(whole)):
            (tmp_path / "s").write_bytes(whole[:num_bytes])
            assert f"bytes or more, got {num_bytes};" in refusal(tmp_path / "s")
        assert f"it is cut off: expected {len(whole)} bytes or more" in refusal(tmp_path / "s")

    def test_an_empty_file_is_named(self, tmp_path):
        (tmp_path / "s").touch()

        assert "s cannot be loaded: it is empty (0 bytes); no older snapshot beside it" in refusal(tmp_path / "s")

    def test_bytes_too_many_are_named(self, tmp_path):
        (tmp_path / "s").write_bytes(base64.b64decode(GOLDEN) + b"xyz")

        assert "it has 3 bytes too many: expected" in refusal(tmp_path / "s")

    def test_a_flipped_bit_is_told_as_such(self, tmp_path):
        data = bytearray(base64.b64decode(GOLDEN))
        data[-1] ^= 1
        (tmp_path / "s").write_bytes(data)

        assert "its checksum does not match" in refusal(tmp_path / "s")

    def test_a_missing_file_is_named(self, tmp_path):
        assert f"AD602 {tmp_path}/s cannot be read: No such file or directory; no older" in refusal(tmp_path / "s")

    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            (pickle.dumps({"position": 1}), "a pickle"),
            (gzip.compress(b"x", mtime=0), "gzip data"),
            (b"\x28\xb5\x2f\xfd....", "zstd data"),
            (b"PAR1....", "a Parquet file"),
            (b'{"format": "asyncdata.snapshot"}', "JSON text; load it with json and load_state_dict"),
            (b"[1, 2]", "JSON text"),
            (b"\x93NUMPY\x01", "a NumPy array"),
            (b"\x89HDF\r\n", "an HDF5 file"),
            (b"ARROW1\x00\x00", "an Arrow file"),
            (b"hello world", "some other file"),
            (b"\x00", "some other file"),
        ],
    )
    def test_another_kind_of_file_is_named(self, tmp_path, data, kind):
        (tmp_path / "s").write_bytes(data)

        assert f"it is not a snapshot but {kind} (it starts with " in refusal(tmp_path / "s")

    def test_a_zip_archive_is_named_as_what_torch_saves(self, tmp_path):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("data.pkl", pickle.dumps({}))
        (tmp_path / "s").write_bytes(buffer.getvalue())

        assert "a zip archive, as torch.save writes" in refusal(tmp_path / "s")

    def test_a_folder_and_a_fifo_are_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")

        assert "it is not a regular file" in refusal(tmp_path / "fifo")
        assert "Is a directory" in refusal(tmp_path)

    def test_the_newest_valid_one_beside_it_is_named(self, tmp_path):
        path = tmp_path / "s"
        for number in range(3):
            save(path, Snapshot(position=(number, 0, 0)))
        path.write_bytes(b"")
        assert refusal(path).endswith("; s.1 is valid: restore it instead")

        (tmp_path / "s.1").write_bytes(b"damaged")
        assert refusal(path).endswith("; s.2 is valid: restore it instead")

        (tmp_path / "s.2").unlink()
        assert refusal(path).endswith("; no older snapshot beside it is valid either")

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"\xc0",
            b"\x93\x01\x02\x03",
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\x91" * 1_000_000 + b"\x90",
            b"\x81\xa8position" + b"\x91" * 100_000 + b"\x90",
            b"\x81\x80\x01",
            b"\x81\xa2\xff\xff\x01",
            b"\xc1",
            msgspec.msgpack.encode({"position": [1, 2, 3]}) + b"\x00",
            pickle.dumps({"position": (1, 2, 3)}),
        ],
    )
    def test_a_crafted_payload_is_refused_without_taking_memory(self, tmp_path, payload):
        (tmp_path / "s").write_bytes(wrapped(payload))

        assert "it" in refusal(tmp_path / "s")

    @pytest.mark.parametrize("payload", [b"", b"[" * 1_000_000, b"\xff", b'{"position": [1, 2, NaN]}', b"9" * 5000])
    def test_so_is_a_crafted_payload_of_json(self, tmp_path, payload):
        (tmp_path / "s").write_bytes(wrapped(payload, encoding="json"))

        assert "it" in refusal(tmp_path / "s")

    def test_an_unknown_encoding_is_refused(self, tmp_path):
        (tmp_path / "s").write_bytes(wrapped(b"\xc0", encoding="pickle"))

        assert "KeyError('pickle')" in refusal(tmp_path / "s")

    @pytest.mark.parametrize(
        "raw",
        [b"\xdf\xff\xff\xff\xff", b"\x81\xa1x" + b"\x91" * 60_000 + b"\x90", b"\xc0", b"\x80", b"\xa2\xff\xff"],
    )
    def test_a_crafted_header_is_refused(self, tmp_path, raw):
        (tmp_path / "s").write_bytes(b"ADSNAP1\n" + len(raw).to_bytes(4, "little") + raw)

        assert "its header is damaged" in refusal(tmp_path / "s")

    def test_a_header_longer_than_any_is_refused_unread(self, tmp_path):
        (tmp_path / "s").write_bytes(b"ADSNAP1\n" + b"\xff\xff\xff\xff" + bytes(100))

        assert "its header claims 4294967295 bytes" in refusal(tmp_path / "s")

    def test_a_file_too_large_is_refused_unread(self, tmp_path):
        (tmp_path / "s").write_bytes(base64.b64decode(GOLDEN))
        os.truncate(tmp_path / "s", 1 << 40)

        assert f"it has {1 << 40} bytes, more than the {16 << 30} allowed" in refusal(tmp_path / "s")


class TestCheck:
    def test_what_fits_passes(self):
        check(FULL, json.loads(json.dumps(ORDER)), FINGERPRINTS)
        assert differences(FULL, ORDER, FINGERPRINTS) == {}

    def test_every_difference_is_told_at_once_in_words_and_as_a_value(self):
        data = DATA | {"digest": "d2", "files": [["a.jsonl", 12, "z"], ["b.jsonl", 20, "y"]]}
        order = ORDER | {"seed": 43, "block_bytes": 65536, "num_blocks": 5}
        fingerprints = FINGERPRINTS | {"data": data, "tokenizer": "t2", "tokenize_fn": "f2"}

        with pytest.raises(SnapshotMismatchError) as caught:
            check(FULL, order, fingerprints)
        text = str(caught.value)
        assert text.startswith("AD603 this snapshot was taken with other data or settings:\n")
        assert "\n  data: a.jsonl size 10 -> 12 bytes: the saved position would point at other rows\n" in text
        assert '\n  tokenizer: saved "t1", present "t2": the samples to come would have other tokens' in text
        assert '\n  tokenize_fn: saved "f1", present "f2": ' in text
        assert "\n  seed: saved 42, present 43: the rows would come in another order" in text
        assert "\n  order.block_bytes: saved 32768, present 65536: " in text
        assert "num_blocks" not in text
        assert text.endswith('allow_changed={"data", "tokenizer", "tokenize_fn", "seed", "order"}.')
        assert caught.value.differences["tokenizer"] == ("t1", "t2")
        assert caught.value.differences["data"] == (DATA, data)
        assert set(caught.value.differences) == {"data", "tokenizer", "tokenize_fn", "seed", "order.block_bytes"}

    @pytest.mark.parametrize("name", ["data", "tokenizer", "template", "tokenize_fn", "seed", "order"])
    def test_each_override_allows_what_it_names_and_no_more(self, name):
        changed = {"data": DATA | {"digest": "d2"}}.get(name, "changed")
        order = ORDER | ({"seed": 1} if name == "seed" else {"shuffle": "full"} if name == "order" else {})
        fingerprints = FINGERPRINTS | ({} if name in ("seed", "order") else {name: changed})
        check(FULL, order, fingerprints, {name})

        others = {"data", "tokenizer", "template", "tokenize_fn", "seed", "order"} - {name}
        with pytest.raises(SnapshotMismatchError) as caught:
            check(FULL, order, fingerprints, others)
        assert len(caught.value.differences) == 1
        assert "allow_changed={" in str(caught.value)

    def test_the_override_it_proposes_includes_those_given(self):
        with pytest.raises(SnapshotMismatchError, match=r'allow_changed=\{"template", "seed"\}\.$'):
            check(FULL, ORDER | {"seed": 1}, FINGERPRINTS | {"template": "p2"}, ["template"])

    @pytest.mark.parametrize("names", [{"tokeniser"}, {"data", "files"}, "tokenizer", [1]])
    def test_an_unknown_override_is_refused(self, names):
        with pytest.raises(
            ConfigError, match="allow_changed must be a set of names out of data, tokenizer, template, "
        ):
            check(FULL, ORDER, FINGERPRINTS, names)


class TestDescribe:
    def test_the_summary_holds_counts_and_no_tokens(self):
        assert describe(FULL) == {
            "schema": 1,
            "library": "0.1.0",
            "epoch": 1,
            "window": 2,
            "row": 3,
            "counters": FULL.counters,
            "order": ORDER,
            "fingerprints": FINGERPRINTS | {"data": {"num_files": 2, "num_bytes": 30, "digest": "d1"}},
            "num_buffered_groups": 2,
            "num_buffered_samples": 4,
            "num_buffered_tokens": 20,
            "num_leased_groups": 1,
            "num_acked": 2,
            "num_journalled_rows": 1,
            "num_canaries": 2,
        }

    def test_samples_of_any_make_are_counted(self):
        odd = Snapshot(position=(0, 0, 0), buffer=[[{"tokens": [1, 2]}, {"tokens": "?"}, {}]])

        assert describe(odd)["num_buffered_tokens"] == 2
        assert describe(odd)["fingerprints"] == {"data": None}

    def test_of_a_file_its_size_and_time_are_told_too(self, tmp_path):
        before = time.time()
        num_bytes = save(tmp_path / "s", FULL)
        summary = describe_file(tmp_path / "s")

        assert (summary["path"], summary["num_bytes"]) == (f"{tmp_path}/s", num_bytes)
        assert before <= summary["created"] <= time.time()
        assert {name: summary[name] for name in describe(FULL)} == describe(FULL)
        json.dumps(summary)
