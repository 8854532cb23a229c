"""Any snapshot comes back from a file, a state_dict and JSON; and whatever else is given to them is a SnapshotError."""

import json
import tracemalloc
from contextlib import suppress

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.extra import numpy as np_st

from asyncdata import Position, Sample, SourceLocation, Status
from asyncdata.checkpoint.restore import check
from asyncdata.checkpoint.snapshot import load, save
from asyncdata.checkpoint.summary import describe
from asyncdata.core.checksummed_file import pack
from asyncdata.errors import SnapshotError, SnapshotMismatchError
from tests.support.parts import Snapshot, StreamState, from_state_dict, to_state_dict

pytestmark = pytest.mark.thorough

texts = st.text(st.characters(exclude_categories=[]), max_size=20)  # lone surrogates too, as rows may hold them
floats = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers() | floats | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(texts, json_values, max_size=3)
arrays = np_st.arrays(np_st.integer_dtypes() | np_st.floating_dtypes(sizes=32), np_st.array_shapes())
kept_values = st.recursive(
    scalars | st.binary(max_size=8) | arrays,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
counts = st.integers(0, 2**63)
numbers = st.integers(0, 2**46)
places = st.tuples(numbers, numbers, numbers)
samples = st.builds(
    Sample,
    index=st.none() | counts,
    group_index=st.none() | counts,
    prompt=texts | st.lists(objects, max_size=2),
    tokens=np_st.arrays(np.int32, st.integers(0, 20)),
    label=json_values,
    metadata=objects,
    extra=st.dictionaries(texts, kept_values, max_size=3),
    position=st.none() | st.builds(Position, counts, counts, counts),
    source=st.none() | st.builds(SourceLocation, texts, counts, counts),
    response=texts,
    response_length=counts,
    reward=st.none() | floats | st.dictionaries(texts, floats, max_size=2),
    loss_mask=st.none() | st.lists(st.integers(0, 1), max_size=20),
    rollout_log_probs=st.none() | st.lists(floats, max_size=20),
    status=st.sampled_from(Status),
)
groups = st.lists(st.lists(samples.map(Sample.to_dict), min_size=1, max_size=2), max_size=2)
snapshots = st.builds(
    Snapshot,
    library=st.text(max_size=10),
    position=places,
    counters=objects,
    order=objects,
    fingerprints=objects,
    buffer=groups,
    leases=groups,
    acked=st.lists(places, max_size=3),
    journal=st.lists(st.tuples(counts, counts), max_size=3),
    canaries=st.lists(texts, max_size=8),
    stream=st.just(msgspec.UNSET)
    | st.builds(StreamState, window=numbers, at=st.none() | objects, skip=counts, row=texts),
)
small_snapshot = Snapshot(position=(1, 2, 3), buffer=[[{"tokens": [1, 2, 3], "response": "x" * 50}]], canaries=["c"])

some = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots") / "snapshot"


def saved(path, snapshot):
    save(path, snapshot, keep=1)
    return load(path)


@some
@given(snapshot=snapshots)
def test_a_state_dict_and_its_json_give_back_the_snapshot(path, snapshot):
    state = to_state_dict(snapshot)
    assert saved(path, snapshot) == from_state_dict(state) == from_state_dict(json.loads(json.dumps(state))) == snapshot
    assert to_state_dict(from_state_dict(state)) == state


@some
@given(sample=samples)
def test_a_sample_comes_out_of_the_file_as_the_trainer_gave_it_back(path, sample):
    restored = Sample.from_dict(saved(path, Snapshot(position=(0, 0, 0), buffer=[[sample.to_dict()]])).buffer[0][0])
    for name in Sample.__struct_fields__[2:]:
        np.testing.assert_equal(getattr(restored, name), getattr(sample, name), name)


@some
@given(
    changes=st.dictionaries(
        st.sampled_from(["format", *Snapshot.__struct_fields__]) | texts, json_values | kept_values, max_size=4
    )
)
def test_any_state_is_a_snapshot_or_refused_and_can_be_looked_at(changes):
    with suppress(SnapshotError):
        restored = from_state_dict(to_state_dict(small_snapshot) | changes)
        describe(restored)
        with suppress(SnapshotMismatchError):
            check(restored, {"seed": 1, "shuffle": True}, {"data": {"digest": "d"}, "tokenizer": "t"})


@pytest.mark.parametrize("size", [2**16, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_claim_of_a_great_length_takes_no_memory(path, kind, size):
    payload = b"\x82\xa8position\x93\x01\x02\x03\xa6buffer" + kind + size.to_bytes(4, "big")
    path.write_bytes(pack(payload, "msgpack", schema=1, library="x") + payload)
    tracemalloc.start()
    with pytest.raises(SnapshotError):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 << 20
