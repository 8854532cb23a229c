"""The snapshot: what it holds comes back, its file is written whole or not at all, and a wrong one is refused."""

import base64
import errno
import functools
import gzip
import json
import math
import os
import pickle
import re
import secrets
import stat
import time
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from asyncdata import DataLoader, Status
from asyncdata.checkpoint.restore import check
from asyncdata.checkpoint.snapshot import load, save
from asyncdata.checkpoint.summary import describe
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError, SnapshotVersionError
from tests.support.parts import Snapshot, change, describe_file, from_state_dict, to_state_dict
from tests.support.snapshots import DATA, FINGERPRINTS, FULL, GOLDEN_SNAPSHOT, LEAST, ORDER, names, wrapped


class TestStateDict:
    def test_it_is_made_of_plain_builtins_alone(self):
        def kinds(value):
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            return {type(value)}.union(*map(kinds, inner))

        odd = msgspec.structs.replace(FULL, order={"weights": (1, (2, 3)), "status": Status.PENDING})
        assert kinds(to_state_dict(odd)) <= {dict, list, str, int, float, bool, type(None)}
        assert to_state_dict(odd)["order"] == {"weights": [1, [2, 3]], "status": "pending"}
        assert to_state_dict(FULL)["format"] == "asyncdata.snapshot"
        by_number = to_state_dict(Snapshot(position=(0, 0, 0), counters={"by": {1: 2}}))
        assert by_number["counters"] == {"by": {"1": 2}}, "its keys are text, as in JSON"

    def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults(self):
        state = {"format": "asyncdata.snapshot", "position": [1, 2, 3], "of_a_later_minor_version": {"a": 1}}
        assert from_state_dict(state) == Snapshot(position=(1, 2, 3))

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            ({"position": [1, "2", 3]}, "Expected `int`, got `str` - at `$.position[1]`"),
            *(({"position": [0, wrong, 0]}, "$.position[1]") for wrong in (-1, True)),
            *(({"position": wrong}, "$.position") for wrong in ([1, 2], None)),
            ({"buffer": [[{}], [5]]}, "$.buffer[1][0]"), ({"acked": [[1, 2]]}, "$.acked[0]"),
            ({"journal": [[0, 0.5]]}, "$.journal[0][1]"), ({"canaries": [1]}, "$.canaries[0]"),
            *(({name: wrong}, f"$.{name}") for name, wrong in (("buffer", "groups"), ("order", []), ("library", 1))),
            *(({"schema": wrong}, "$.schema") for wrong in ("1", 0, True)), ({5: 6, "order": {1: 2}}, ""),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named_with_its_place(self, change, place):
        with pytest.raises(SnapshotError, match=rf"^AD602 this state_dict cannot be loaded: .*{re.escape(place)}"):
            from_state_dict(to_state_dict(FULL) | change)

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ({}, "it is an empty dict, not what asyncdata's state_dict"),
            ({"offset": 3, "epoch_id": 1}, "it is a dict with the keys 'offset', 'epoch_id', not what asyncdata's s"),
            ({"format": "other"}, "it is a dict with the keys 'format', not what asyncdata's state_dict"),
            ([1], "it is a list, not what asyncdata's state_dict"),
            (None, "it is a NoneType, not what asyncdata's state_dict"),
            ({"format": "asyncdata.snapshot"}, "missing required field `position`"),
        ],
    )
    def test_what_is_no_state_dict_of_ours_is_named(self, state, words):
        with pytest.raises(SnapshotError, match=words):
            from_state_dict(state)


class TestSchemas:
    def test_a_newer_schema_is_refused_before_its_content_is_looked_at_and_its_version_is_named(self, tmp_path):
        (tmp_path / "s").write_bytes(wrapped(b"a content of another kind", schema=2, library="7.1.0", encoding="zstd"))
        with pytest.raises(SnapshotVersionError, match=r"schema 9, written by asyncdata 7\.1\.0; .* up to 1: use"):
            from_state_dict(to_state_dict(FULL) | {"schema": 9, "library": "7.1.0"})
        with pytest.raises(SnapshotVersionError, match=r"AD602 .*/s cannot .* schema 2, written by asyncdata 7\.1\.0"):
            load(tmp_path / "s")


class TestCheck:
    def test_every_difference_is_told_at_once_in_words_and_as_a_value(self):
        data = DATA | {"digest": "d2", "files": [["a.jsonl", 12, "z"], ["b.jsonl", 20, "y"]]}
        order = ORDER | {"seed": 43, "block_bytes": 65536, "num_blocks": 5}
        fingerprints = FINGERPRINTS | {"data": data, "tokenizer": "t2", "tokenize_fn": "f2"}

        named = '"data", "tokenizer", "tokenize_fn", "seed", "order"'
        reordered = "the rows would come in another order, some a second time and some not at all"
        with pytest.raises(SnapshotMismatchError) as caught:
            check(FULL, order, fingerprints)
        assert str(caught.value).splitlines() == [
            "AD603 this snapshot was taken with other data or settings:",
            "  data: a.jsonl size 10 -> 12 bytes: the saved position would point at other rows",
            '  tokenizer: saved "t1", present "t2": the samples to come would have other tokens than those delivered',
            '  tokenize_fn: saved "f1", present "f2": the rows to come would become other samples',
            f"  order.block_bytes: saved 32768, present 65536: {reordered}",
            f"  seed: saved 42, present 43: {reordered}",
            f"Give back what it was taken with; or, to continue anyway, pass allow_changed={{{named}}}.",
        ]
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

    def test_the_override_it_proposes_includes_those_given_and_an_unknown_one_is_refused(self):
        check(FULL, json.loads(json.dumps(ORDER)), FINGERPRINTS)
        with pytest.raises(SnapshotMismatchError, match=r'allow_changed=\{"template", "seed"\}\.$'):
            check(FULL, ORDER | {"seed": 1}, FINGERPRINTS | {"template": "p2"}, ["template"])
        for allowed in ({"tokeniser"}, {"data", "files"}, "tokenizer", [1]):
            with pytest.raises(ConfigError, match="allow_changed must be a set of names out of data, tokenizer, templ"):
                check(FULL, ORDER, FINGERPRINTS, allowed)


class TestDescribe:
    def test_the_summary_holds_counts_and_no_tokens(self):
        assert describe(FULL) == {
            "schema": 1, "library": "0.1.0", "epoch": 1, "window": 2, "row": 3, "counters": FULL.counters,
            "order": ORDER, "fingerprints": FINGERPRINTS | {"data": {"num_files": 2, "num_bytes": 30, "digest": "d1"}},
            "num_buffered_groups": 2, "num_buffered_samples": 4, "num_buffered_tokens": 20, "num_leased_groups": 1,
            "num_acked": 2, "num_journalled_rows": 1, "num_excluded_rows": 0, "num_canaries": 2, "outcomes": None,
            "parts": {},
        }  # fmt: skip

    def test_samples_of_any_make_are_counted(self):
        made = [{"__samples__": {"num_samples": 2, "num_tokens": 5}}, {"__samples__": [{"tokens": [3]}, 1]}]
        odd = Snapshot(position=(0, 0, 0), buffer=[[{"tokens": [1, 2]}, {"tokens": "?"}, {}, *made]])
        summary = describe(odd)
        assert (summary["num_buffered_samples"], summary["num_buffered_tokens"]) == (7, 8)
        assert summary["fingerprints"] == {"data": None}

    def test_of_a_file_its_size_and_time_are_told_too(self, tmp_path):
        before = time.time()
        num_bytes = save(tmp_path / "s", FULL)
        summary = describe_file(tmp_path / "s")
        assert (summary["path"], summary["num_bytes"]) == (f"{tmp_path}/s", num_bytes)
        assert before <= summary["created"] <= time.time()
        assert {name: summary[name] for name in describe(FULL)} == describe(FULL)
        json.dumps(summary)


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
GOLDEN_STATE = (
    '{"format": "asyncdata.snapshot", "schema": 1, "library": "0.1.0", "position": [3, 14, 159], "counter'
    's": {"num_groups": 2, "drops": {"too_long": 1}}, "order": {"seed": 42, "shuffle": true, "window_bloc'
    'ks": 1024}, "fingerprints": {"data": {"num_files": 1, "num_bytes": 9, "digest": "d", "files": [["a",'
    ' 9, "x"]]}, "tokenizer": "t"}, "buffer": [[{"index": 0, "tokens": {"__ndarray__": ["<i4", [2], "AQAA'
    'AAIAAAA="]}, "reward": -0.5, "label": null}]], "leases": [[{"index": 1, "response": "f\\u00fcnf"}]],'
    ' "acked": [[3, 14, 160]], "journal": [[0, 4096]], "canaries": ["c"]}'
)
WITH_SURROGATE = GOLDEN_STATE.replace('"format": "asyncdata.snapshot", ', "").replace('["c"]', '["\\ud800"]')
WHOLE = base64.b64decode(GOLDEN)
HEADERS = (b"\xdf\xff\xff\xff\xff", b"\x81\xa1x" + b"\x91" * 60_000 + b"\x90", b"\xc0", b"\x80", b"\xa2\xff\xff")
PAYLOADS = (
    *(b"", b"\xc0", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa2\xff\xff\x01", b"\xdd\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\x91" * 1_000_000 + b"\x90", b"\x81\xa8position" + b"\x91" * 100_000 + b"\x90"),
    *(msgspec.msgpack.encode({"position": [1, 2, 3]}) + b"\x00", pickle.dumps({"position": (1, 2, 3)})),
)
JSON_PAYLOADS = (b"", b"[" * 1_000_000, b"\xff", b'{"position": [1, 2, NaN]}', b"9" * 5000)
OTHERS = {
    "a pickle": pickle.dumps({"position": 1}), "gzip data": gzip.compress(b"x", mtime=0),
    "zstd data": b"\x28\xb5\x2f\xfd....", "a Parquet file": b"PAR1....",
    "JSON text; load it with json and load_state_dict": b'{"format": "asyncdata.snapshot"}', "JSON text": b"[1, 2]",
    "a NumPy array": b"\x93NUMPY\x01", "an HDF5 file": b"\x89HDF\r\n", "an Arrow file": b"ARROW1\x00\x00",
    "some other file": b"hello world", "a zip archive, as torch.save writes": b"PK\x03\x04....",
}  # fmt: skip


def header(raw: bytes) -> bytes:
    return b"ADSNAP1\n" + len(raw).to_bytes(4, "little") + raw


def refusal(path: os.PathLike[str]) -> str:
    with pytest.raises(SnapshotError, match=r"^AD602 ") as caught:
        load(path)
    return str(caught.value)


def refused_save(path: Any, match: str) -> SnapshotError:
    with pytest.raises(SnapshotError, match=match) as caught:
        save(path, FULL)
    return caught.value


def fail(code: int) -> Mock:
    return Mock(side_effect=OSError(code, os.strerror(code)))


class TestFile:
    @pytest.mark.parametrize(
        "snapshot",
        [FULL, LEAST, msgspec.structs.replace(FULL, library="0" * 64, canaries=["0" * 64])],
        ids=["full", "least", "zeros, as the place of the checksum looks"],
    )
    def test_a_snapshot_comes_back_as_it_was_and_only_its_owner_may_read_it(self, tmp_path, snapshot):
        num_bytes = save(tmp_path / "s", snapshot)
        assert load(tmp_path / "s") == load(f"{tmp_path}/s") == snapshot
        assert num_bytes == os.path.getsize(tmp_path / "s")
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600

    @pytest.mark.parametrize(("keep", "kept"), [({}, 3), ({"keep": 1}, 1), ({"keep": 5}, 5)])
    def test_the_last_three_are_kept_or_as_many_as_asked_for(self, tmp_path, keep, kept):
        for number in range(7):
            save(tmp_path / "s", Snapshot(position=(number, 0, 0)), **keep)
        assert [load(tmp_path / name).position[0] for name in names(tmp_path)] == list(range(6, 6 - kept, -1))
        assert names(tmp_path) == ["s", "s.1", "s.2", "s.3", "s.4"][:kept]
        with pytest.raises(ConfigError, match="keep must be 1 or more"):
            save(tmp_path / "s", FULL, keep=0)

    def test_nan_comes_back_too(self, tmp_path):
        for counters in ({"x": float("nan")}, {"x": float("nan"), "big": 2**70}):
            save(tmp_path / "s", Snapshot(position=(0, 0, 0), counters=counters))
            assert math.isnan(load(tmp_path / "s").counters["x"])
        assert math.isnan(from_state_dict(json.loads(json.dumps(to_state_dict(load(tmp_path / "s"))))).counters["x"])

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "make",
        [object, lambda: np.int64(1), lambda: 10**5000, lambda: functools.reduce(lambda a, _: [a], range(100_000), [])],
        ids=["object()", "of numpy", "5000 digits", "too deep"],
    )
    def test_what_no_file_can_hold_is_refused_and_the_old_one_kept(self, tmp_path, make):
        save(tmp_path / "s", FULL)
        with pytest.raises(SnapshotError, match=r"^AD601 the snapshot holds what no file can: .*; nothing was written"):
            save(tmp_path / "s", Snapshot(position=(9, 9, 9), counters={"big": 2**70, "value": make()}))
        assert (load(tmp_path / "s"), names(tmp_path)) == (FULL, ["s"])

    def test_more_than_can_be_loaded_is_not_saved(self, tmp_path, monkeypatch):
        change(monkeypatch, most_bytes_of_a_snapshot=1000)
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
            ("write", "tmp"), ("fsync", "tmp"), ("pread", "tmp"), ("link", "s"), ("replace", "s.1"), ("replace", "s"),
            ("fsync", tmp_path.name),
        ]  # fmt: skip

    def test_a_snapshot_of_the_first_schema_is_the_same_and_loads_for_ever(self, tmp_path, monkeypatch):
        with_surrogate = msgspec.structs.replace(GOLDEN_SNAPSHOT, canaries=["\ud800"])
        monkeypatch.setattr(time, "time", lambda: 1.5)
        save(tmp_path / "s", GOLDEN_SNAPSHOT)
        save(tmp_path / "j", with_surrogate)
        assert (tmp_path / "s").read_bytes() == WHOLE
        assert (tmp_path / "j").read_bytes() == wrapped(WITH_SURROGATE.encode(), encoding="json")
        assert json.dumps(to_state_dict(GOLDEN_SNAPSHOT)) == GOLDEN_STATE
        assert load(tmp_path / "s") == from_state_dict(json.loads(GOLDEN_STATE)) == GOLDEN_SNAPSHOT
        assert load(tmp_path / "j") == with_surrogate


class TestWhatSaveCannotDo:
    def test_a_missing_folder_and_what_is_no_file_in_its_place_are_named(self, tmp_path):
        refused_save(tmp_path / "none" / "s", f"AD601 .*: there is no folder {tmp_path}/none; make it first; there")
        save(tmp_path / "target", LEAST)
        (tmp_path / "link").symlink_to("target")
        (tmp_path / "folder").mkdir()
        for name in ("link", "folder"):
            refused_save(tmp_path / name, r"AD601 .*: a link, folder or device is in its place")
        assert (names(tmp_path), load(tmp_path / "target")) == (["folder", "link", "target"], LEAST)

    def test_a_disk_that_lies_is_found_out(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, offset: bytes([pread(fd, n, offset)[0] ^ 1]))
        refused_save(tmp_path / "s", "reads back otherwise after byte 0; the previous snapshot is kept")
        monkeypatch.setattr(os, "pread", lambda *_: b"")
        refused_save(tmp_path / "s", "reads back otherwise")
        assert (load(tmp_path / "s"), names(tmp_path)) == (LEAST, ["s"])

    def test_without_hard_links_the_message_says_where_the_previous_one_is(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        replace = os.replace
        monkeypatch.setattr(os, "link", fail(errno.EPERM))
        monkeypatch.setattr(os, "replace", lambda a, b: fail(errno.EIO)() if a.endswith("tmp") else replace(a, b))
        refused_save(tmp_path / "s", r"the previous snapshot is kept as s\.1$")
        monkeypatch.undo()
        assert refusal(tmp_path / "s").endswith("s.1 is valid: restore it instead")
        save(tmp_path / "s", FULL)
        assert (load(tmp_path / "s"), load(tmp_path / "s.1"), names(tmp_path)) == (FULL, LEAST, ["s", "s.1"])

    def test_a_file_in_the_way_is_not_written_through(self, tmp_path, monkeypatch):
        monkeypatch.setattr(secrets, "token_hex", lambda _: "0123abcd")
        (tmp_path / "precious").write_bytes(b"precious")
        (tmp_path / f".s.{os.getpid()}.0123abcd.tmp").hardlink_to(tmp_path / "precious")
        refused_save(tmp_path / "s", "AD601 .* File exists")
        assert (tmp_path / "precious").read_bytes() == b"precious"

    def test_a_folder_that_cannot_be_synced_is_told_as_such(self, tmp_path, monkeypatch):
        save(tmp_path / "s", LEAST)
        fsync = os.fsync

        def on_folders(code):
            return lambda fd: fail(code)() if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync(fd)

        monkeypatch.setattr(os, "fsync", on_folders(errno.EIO))
        refused_save(tmp_path / "s", r"AD601 .* is written, but a power loss may undo it: .*; save again")
        monkeypatch.setattr(os, "fsync", on_folders(errno.EINVAL))
        save(tmp_path / "s", FULL)
        assert names(tmp_path) == ["s", "s.1", "s.2"]

    def test_what_killed_processes_left_is_removed_once_it_is_an_hour_old(self, tmp_path, monkeypatch):
        old, young, half_an_hour = ".s.77.0123abcd.tmp", ".s.78.0123abcd.tmp", time.time() - 1800
        kept = [".other.77.0123abcd.tmp", ".s.77.tmp", ".s.my.77.0123abcd.tmp", young]
        for name in (old, ".s.77.0123abcd.old.tmp", *kept):
            (tmp_path / name).write_bytes(b"half")
            os.utime(tmp_path / name, (0, 0) if name != young else (half_an_hour, half_an_hour))
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", fail(errno.EACCES))
            save(tmp_path / "s", LEAST)
            assert load(tmp_path / "s") == LEAST, "what cannot be tidied up fails no save"
        save(tmp_path / "s", FULL, keep=1)
        assert names(tmp_path) == sorted([*kept, "s"])


class TestDamage:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "s cannot be loaded: it is empty (0 bytes); no older snapshot beside it"),
            (WHOLE + b"xyz", "it has 3 bytes too many: expected"),
            (WHOLE[:-1] + b"?", "its checksum does not match"),
            (WHOLE[:1], "bytes or more, got 1;"),
            (WHOLE[:-1], f"it is cut off: expected {len(WHOLE)} bytes or more, got {len(WHOLE) - 1};"),
            (wrapped(b"\xc0", encoding="pickle"), "KeyError('pickle')"),
            (b"ADSNAP1\n" + b"\xff\xff\xff\xff" + bytes(100), "its header claims 4294967295 bytes"),
            *((header(raw), "its header is damaged") for raw in HEADERS),
            *((wrapped(payload), "it") for payload in PAYLOADS),
            *((wrapped(payload, encoding="json"), "it") for payload in JSON_PAYLOADS),
            *((data, f"it is not a snapshot but {kind} (it starts with ") for kind, data in OTHERS.items()),
        ],
        ids=lambda value: value[:60] if isinstance(value, str) else "",
    )
    def test_what_is_wrong_with_a_file_is_named_without_taking_memory(self, tmp_path, data, words):
        (tmp_path / "s").write_bytes(data)
        assert words in refusal(tmp_path / "s")

    def test_a_missing_file_a_folder_a_fifo_and_a_file_too_large_are_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "large").write_bytes(WHOLE)
        os.truncate(tmp_path / "large", 1 << 40)
        assert f"AD602 {tmp_path}/s cannot be read: No such file or directory; no older" in refusal(tmp_path / "s")
        assert "it is not a regular file" in refusal(tmp_path / "fifo")
        assert "Is a directory" in refusal(tmp_path)
        assert f"it has {1 << 40} bytes, more than the {16 << 30} allowed" in refusal(tmp_path / "large")

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


@pytest.mark.parametrize("path", ["s3://bucket/run/", "s3://bucket", "s3://bucket/", "run/", ""])
def test_a_folder_is_no_name_of_a_snapshot(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with DataLoader("rows.jsonl", tokenize_fn=lambda row: [1], num_workers=0) as loader:
        with pytest.raises(SnapshotError, match=rf"^AD601 .*names no file.* {path.rstrip('/')}/data\.state"):
            loader.save(path)
        with pytest.raises(SnapshotError, match=r"^AD602 .*names no file.*data\.state"):
            loader.restore(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
