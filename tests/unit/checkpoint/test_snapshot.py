"""The snapshot: what it holds comes back, only whole files are taken, and a wrong one is refused in words."""

import json
import re
import time

import msgspec
import pytest

from asyncdata import Status
from asyncdata.checkpoint.restore import check
from asyncdata.checkpoint.snapshot import load, save
from asyncdata.checkpoint.summary import describe
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError, SnapshotVersionError
from tests.support.parts import Snapshot, describe_file, from_state_dict, to_state_dict
from tests.support.snapshots import DATA, FINGERPRINTS, FULL, ORDER, wrapped


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
            (
                {"sample_offset": 3, "epoch_id": 1},
                "it is a dict with the keys 'sample_offset', 'epoch_id', not what asy",
            ),
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
    def test_a_newer_schema_is_refused_before_its_content_is_looked_at_and_the_version_that_wrote_it_named(
        self, tmp_path
    ):
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
        for names in ({"tokeniser"}, {"data", "files"}, "tokenizer", [1]):
            with pytest.raises(ConfigError, match="allow_changed must be a set of names out of data, tokenizer, templ"):
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
            "num_excluded_rows": 0,
            "num_canaries": 2,
            "outcomes": None,
            "parts": {},
        }

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
