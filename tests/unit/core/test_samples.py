"""Samples, the columns that they declare, and the plain values that a snapshot holds of them."""

import copy
import gc
import inspect
import json
import pickle
import weakref
from datetime import date
from enum import Enum, StrEnum
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

from asyncdata import Column, Position, Sample, SourceLocation, Status
from asyncdata.core.columns import decoded
from asyncdata.errors import ConfigError
from tests.support.examples import in_ci
from tests.support.parts import Columns, SampleRange, bfloat16_bits, declared, from_builtins, to_builtins

LAZY = ("prompt", "tokens", "label", "metadata", "extra", "position", "source")
VALUES = {"prompt": "hello", "label": [1], "metadata": {"a": [1]}, "extra": None, "spans": [[0, 1], [2, 3]]}
PLACE = Position(1, 2, 3)
LOCATION = SourceLocation("/rows.jsonl", 7, 9)


class Neighbours:
    """A chunk that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _answer(self, name: str, value: object) -> object:
        self.asked.append(name)
        return value

    def tokens_of(self, sample: int) -> object:
        view = np.arange(10, dtype=np.int32)[sample : sample + 3]
        view.flags.writeable = False
        return self._answer("tokens", view)

    def value(self, column: str, sample: int) -> object:
        return self._answer(column, copy.deepcopy(VALUES[column]))

    def arrays(self, sample: int) -> dict[str, object]:
        return {}

    def position(self, sample: int) -> object:
        return self._answer("position", PLACE)

    def location(self, sample: int) -> object:
        return self._answer("source", LOCATION)

    def part(self, sample: int) -> tuple[None, None]:
        return None, None


def made_of(chunk: Neighbours, row: int, index: int = 0, group_index: int = 0) -> Sample:
    """The chunk's sample ``row``, as a loader makes it."""
    return SampleRange(chunk, row, row + 1, index, group_index, 1).samples()[0]


@pytest.fixture
def chunk() -> Neighbours:
    return Neighbours()


@pytest.fixture
def sample(chunk: Neighbours) -> Sample:
    return made_of(chunk, 4, 10, 5)


@given(places=st.lists(st.tuples(*[st.integers(0, 2**70)] * 3)))
def test_positions_are_read_back_as_they_are_written_and_ordered_as_they_come(places):
    positions = [Position(*place) for place in places]

    assert [Position.parse(str(position)) for position in positions] == positions
    assert (sorted(positions), str(Position())) == ([Position(*place) for place in sorted(places)], "0:0:0")


@pytest.mark.parametrize("text", ["", "1", "1:2", "1:2:3:4", "1:2:-3", "1:2:", "a:b:c", " 1:2:3", "1:2:3\n", "1:2:0.5"])
def test_what_is_no_position_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="EPOCH:WINDOW:ROW, as 0:3:128; got") as caught:
        Position.parse(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("name", LAZY)
def test_a_field_is_decoded_when_it_is_touched_once_and_alone_and_never_where_it_was_assigned(sample, chunk, name):
    assigned = made_of(chunk, 4)
    setattr(assigned, name, None)
    assert getattr(assigned, name) is None
    assert (sample.index, sample.group_index, sample.status, chunk.asked) == (10, 5, Status.PENDING, [])

    assert getattr(sample, name) is getattr(sample, name)
    assert chunk.asked == [name]


def test_labels_are_the_tokens_where_the_samples_spans_say_so_and_its_own(chunk, monkeypatch):
    one, other = made_of(chunk, 4), made_of(chunk, 4)

    assert (one.labels.tolist(), one.labels.dtype) == ([4, -100, 6], np.int32)
    assert one.labels is one.labels
    assert chunk.asked == ["spans", "tokens"]
    one.labels[1] = 5
    assert other.labels.tolist() == [4, -100, 6]
    monkeypatch.setitem(VALUES, "spans", None)
    assert made_of(chunk, 4).labels is None
    assert Sample().labels is None


def test_the_fields_of_a_sample_made_by_hand_are_empty_and_its_own():
    one, other = Sample(), Sample()

    assert (one.prompt, one.label, one.metadata, one.extra, one.position, one.source) == ("", None, {}, {}, None, None)
    assert (one.tokens.dtype, one.tokens.shape) == (np.int32, (0,))
    assert one.metadata is one.metadata is not other.metadata
    assert (one.response, one.response_length, one.reward, one.loss_mask) == ("", 0, None, None)


def test_samples_are_equal_only_to_themselves_and_have_no_other_fields(chunk):
    one, other = made_of(chunk, 0, 1, 1), made_of(chunk, 0, 1, 1)

    assert one == one
    assert one != other
    assert len({one, other}) == 2
    with pytest.raises(TypeError, match="token"):
        Sample(token=[1])
    with pytest.raises(AttributeError):
        Sample().rewards = 1


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode, msgspec.to_builtins])
def test_a_sample_that_is_not_decoded_is_never_encoded_unseen(sample, encode):
    for each in (sample, Sample()):
        with pytest.raises(TypeError):
            encode(each)


def test_a_detached_sample_owns_what_it_has_and_lets_go_of_its_chunk():
    chunk = Neighbours()
    sample, gone = made_of(chunk, 4), weakref.ref(chunk)
    sample.label = "mine"
    del chunk
    assert gone() is not None

    sample.detach()
    tokens = sample.tokens
    sample.detach()

    assert gone() is None
    assert sample.tokens is tokens
    assert (tokens.base, tokens.flags.writeable, tokens.tolist()) == (None, True, [4, 5, 6])
    assert (sample.prompt, sample.label, sample.position, sample.source) == ("hello", "mine", PLACE, LOCATION)
    assert sample.labels.tolist() == [4, -100, 6]
    assert Sample.from_dict(sample.to_dict()).labels.tolist() == [4, -100, 6]


@pytest.mark.parametrize("clone", [lambda sample: pickle.loads(pickle.dumps(sample)), copy.deepcopy])  # noqa: S301 - our own
def test_a_clone_has_every_value_and_no_chunk(sample, chunk, clone):
    sample.reward, sample.status, sample.rollout_log_probs = 0.5, Status.COMPLETED, [-0.1]
    found = clone(sample)

    assert found.to_dict() == sample.to_dict()
    assert found.status is Status.COMPLETED
    assert chunk not in gc.get_referents(found)
    found.metadata["a"].append(2)
    assert sample.metadata == {"a": [1]}
    assert [each.index for each in clone(SampleRange(chunk, 0, 1, 0, 0, 4).samples())] == [0, 1, 2, 3]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@in_ci(max_examples=40)
@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), label=json_values,
    extra=st.dictionaries(st.text(max_size=5), json_values, max_size=3), status=st.sampled_from(Status),
    position=st.none() | st.just(PLACE), reward=st.none() | st.floats(allow_nan=False),
)  # fmt: skip
def test_a_sample_comes_back_from_its_dict(tokens, label, extra, status, position, reward):
    fields = {"label": label, "extra": extra, "status": status, "position": position, "reward": reward}
    sample = Sample(tokens=np.array(tokens, np.int32), index=3, group_index=1, source=LOCATION, **fields)

    found = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))

    assert {name: getattr(found, name) for name in fields} == fields
    assert isinstance(found.status, Status)
    assert (found.tokens.dtype, found.tokens.tolist()) == (np.int32, tokens)
    assert (found.index, found.group_index, found.source) == (3, 1, LOCATION)


def test_a_dict_holds_every_public_field_as_builtins_and_one_of_an_older_version_may_lack_some(sample):
    values = sample.to_dict()

    assert list(values) == [name for name in Sample.__struct_fields__ if not name.startswith("_")]
    assert json.loads(json.dumps(values)) == values
    assert (values["position"], values["status"]) == ({"epoch": 1, "window": 2, "row": 3}, "pending")
    found = Sample.from_dict({"index": 3, "what later versions have": 1})
    assert (found.index, found.prompt, found.status, found.tokens.tolist()) == (3, "", Status.PENDING, [])


def test_an_enum_of_text_is_its_value_and_what_no_snapshot_can_hold_is_named():
    class Verdict(str, Enum):  # noqa: UP042 - the kind whose str() is its member's name
        GOOD = "good"

    assert Sample(extra={"verdict": Verdict.GOOD}).to_dict()["extra"] == {"verdict": "good"}
    with pytest.raises(
        TypeError, match=r"^\$\.extra\.images\[1\] is a builtins\.object, which a snapshot cannot hold$"
    ):
        Sample(extra={"images": [1, object()]}).to_dict()


@pytest.mark.parametrize("status", ["done", 3, None])
def test_the_statuses_are_slimes_and_no_other_is_taken(status):
    assert list(Status) == ["pending", "completed", "truncated", "aborted", "failed"]
    with pytest.raises(ValueError, match="is not a valid Status"):
        Sample.from_dict({"status": status})


def test_a_sample_shows_what_it_is_and_not_all_it_holds(sample):
    assert repr(sample) == "Sample(index=10, num_tokens=3, status='pending', position=1:2:3)"
    assert repr(Sample()) == "Sample(index=None, num_tokens=0, status='pending')"


def test_help_shows_what_is_decoded_late_and_no_address_of_an_object():
    parameters = inspect.signature(Sample).parameters

    assert str(parameters["tokens"]).endswith("= <not decoded yet>")
    assert not [text for text in map(str, parameters.values()) if " at 0x" in text]


KINDS = ["int8", "int64", "uint16", "uint64", "float16", "float32", "float64", "bool"]


@st.composite
def valued(draw: st.DrawFn) -> tuple[Column, Any]:
    """A column, and a value of it."""
    dtype, shape = draw(st.sampled_from(KINDS)), draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    per = draw(st.sampled_from(["token", "sample", "item"]))
    whole = shape if per == "sample" else (draw(st.integers(1, 4)), *shape)
    return Column("x", dtype, per, shape), draw(arrays.arrays(dtype, whole))


@given(valued(), st.booleans(), st.integers(0, 3))
def test_a_value_comes_back_from_any_place_in_a_buffer(drawn, as_list, offset):
    column, value = drawn
    data = column.encode(value.tolist() if as_list else value, len(value) if value.ndim else 0)
    (name, found), *others = decoded({column.key: memoryview(b"\0" * offset + data)[offset:]}).items()

    assert (name, others) == ("x", [])
    assert (found.dtype, found.shape, found.flags.writeable, found.flags.aligned) == (value.dtype, value.shape, 0, 1)
    assert np.array_equal(found, value, equal_nan=value.dtype.kind == "f")
    assert declared(column.key) == column


@given(arrays.arrays(np.uint32, 40))
def test_bfloat16_is_rounded_as_torch_does(bits):
    torch = pytest.importorskip("torch")
    values = bits.view(np.float32)
    wanted = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    found = bfloat16_bits(values)
    assert np.array_equal(found[~np.isnan(values)], wanted[~np.isnan(values)])
    assert torch.from_numpy(found).view(torch.bfloat16).isnan().numpy().tolist() == np.isnan(values).tolist()


def test_a_tensor_is_taken_and_bfloat16_is_a_tensor_again():
    torch = pytest.importorskip("torch")
    from tests.support.parts import to_torch

    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        column = Column("x", str(dtype).removeprefix("torch."), shape=(2,))
        value = torch.tensor([[1, 2], [3, 4]]).to(dtype).requires_grad_(dtype.is_floating_point)
        found = to_torch(column.decode(memoryview(column.encode(value, 2))))
        assert (found.dtype, found.tolist()) == (dtype, [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "tokens"}, "the name 'tokens' is none"), ({"name": "two words"}, "the name 'two words' is none"),
        ({"name": "x_counts"}, "the name 'x_counts' is none"), ({"dtype": "int7"}, "there is no dtype 'int7'"),
        ({"per": "row"}, "'token' or 'sample' or 'item'|token.*sample.*item"), ({"shape": (2, 0)}, "a size below 1"),
        ({"pad": 128}, "pad=128.0 is no int8"), ({"per": "item", "pad": 1}, "is not padded"),
        ({"per": "sample", "follows": "labels"}, "can follow labels"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_work_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Column(**{"name": "x", "dtype": "int8", **settings})


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (Column("x", "int8"), [1, 2], r"x has the shape \(2,\), and must have \(3,\)"),
        (Column("x", "int8", "sample"), [1, 2, 3], r"must have \(\)"),
        (Column("x", "int8", "item", (2,)), [[1, 2], [3]], "inhomogeneous|as many in each row"),
        (Column("x", "int8"), [1, 2, 300], "x has np.int64.300., which int8 cannot hold"),
        (Column("x", "uint64"), [1, 2**64 - 1, -1], "out of bounds|cannot hold"),
        (Column("x", "uint64"), [1, 2, 1.5], "has real numbers"),
        (Column("x", "float32"), ["a", "b", "c"], "need numbers"),
        (Column("x", "float32"), {"a": 1}, "need numbers"),
        (Column("x", "int32"), b"12345", "buffer size must be a multiple"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(column, value, reason):
    with pytest.raises((TypeError, ValueError, OverflowError), match=reason):
        column.encode(value, 3)


def test_bytes_are_the_numbers_that_they_have():
    assert Column("x", "uint8", "item").decode(memoryview(b"ab")).tolist() == [97, 98]
    assert Column("x", "uint8", "item").encode(b"ab", 3) == b"ab"
    assert Column("x", "int16").encode(np.arange(3, dtype=np.int16).tobytes(), 3) == b"\0\0\1\0\2\0"


def test_columns_are_copied_and_pickled_with_what_they_are():
    column = Column("x", "bfloat16", pad=1)
    columns = Columns({column: column.padding(2)})
    for found in (copy.copy(columns), copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))):  # noqa: S301 - our own
        assert (found.declared, found["x"].tolist(), found["x"].flags.writeable) == ({"x": column}, [16256] * 2, False)
        assert found["x"].dtype.metadata == {"dtype": "bfloat16"}
        assert not np.shares_memory(found["x"], columns["x"])


class Colour(StrEnum):
    RED = "red"


class Number(int, Enum):
    ONE = 1


def carried(value: Any) -> Any:
    return from_builtins(json.loads(json.dumps(to_builtins(value))))


PLAIN: list[Any] = [
    None, True, -1, 2**80, 0.1, "\u00fcber", "\ud800", [], [1, [2.5, None]], {}, {"a": {"b": [1]}},
]  # fmt: skip
PLAIN += [(), (1, ("a", [2])), b"", b"\x00\xff"]
LOOK_ALIKES = [{"__ndarray__": 1}, {"__bytes__": "eA=="}, {"__tuple__": [1]}, {"__dict__": {"__dict__": {}}}]


def test_a_value_comes_back_as_it_was():
    for value in (*PLAIN, *LOOK_ALIKES, {"a": {"__dunder__": (b"x",)}}):
        back = carried(value)

        assert back == value
        assert type(back) is type(value)


ARRAYS = [
    np.array(5, np.int64), np.array([[1.5, np.nan]], np.float16), np.array([], np.float32).reshape(0, 4),
    np.arange(6, dtype=np.int16).reshape(2, 3).T, np.arange(10, dtype=np.int64)[::3], np.array([1, 2], ">i4"),
    np.array([1 + 2j], np.complex64), np.array(["a", "bc"]), np.array(["2026-11-20"], "datetime64[D]"),
    *(np.zeros(2, dtype) for dtype in ("<i4", ">f8", "|b1", "|u1", "<U3", "|S7", "<M8[ns]", "<c16", "|V3")),
]  # fmt: skip


def test_an_array_comes_back_with_its_type_shape_and_bits():
    for array in ARRAYS:
        back = carried(array)

        assert (back.dtype.str, back.shape, back.tobytes()) == (array.dtype.str, array.shape, array.tobytes())
        dtype, shape, text = to_builtins(array)["__ndarray__"]
        assert (dtype, tuple(shape), type(text)) == (array.dtype.str, array.shape, str), "no list of numbers"
        assert back.flags.writeable


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"), (Number.ONE, 1), (np.float64(0.5), 0.5), (np.int8(-3), -3), (np.bool_(True), True),
        (np.str_("a"), "a"), ({np.str_("key"): 1, Colour.RED: 2}, {"key": 1, "red": 2}),
        (bytearray(b"x"), {"__bytes__": "eA=="}), (memoryview(b"xyz")[::2], {"__bytes__": "eHo="}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_subclasses_become_what_a_decoder_can_give_back(value, plain):
    found = to_builtins(value)

    assert found == plain
    assert type(found) is type(plain)
    if isinstance(found, dict):
        assert {type(key) for key in found} == {str}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), ({1, 2}, "builtins.set"), (1j, "builtins.complex"),
        (date(2026, 11, 20), "datetime.date"), (np.datetime64("2026-11-20"), "numpy.datetime64"),
        (np.timedelta64(1, "s"), "numpy.timedelta64"), (np.array([object()]), "numpy.ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_kept_without_loss_is_refused_by_name(value, kind):
    with pytest.raises(TypeError) as caught:
        to_builtins({"rollout": [1, {"images": (0, value)}]})

    assert str(caught.value) == f"$.rollout[1].images[1] is a {kind}, which a snapshot cannot hold"


@pytest.mark.parametrize("key", [1, None, b"a", (1,)])
def test_keys_that_are_no_text_are_refused(key):
    with pytest.raises(TypeError, match=r"^\$\.extra has the key .*; only text keys survive JSON$"):
        to_builtins({"extra": {key: 1}})


@pytest.mark.parametrize("dtype", ["9" * 5000 + ",i4", "i4,i4", "(3,)i4", "O", "|O", ["<i4"], 3, None, "<i4\n", ""])
def test_a_type_that_is_not_of_one_number_is_refused_before_numpy_sees_it(dtype):
    with pytest.raises(ValueError, match="not a dtype of numbers"):
        from_builtins({"__ndarray__": [dtype, [1], "AAAAAA=="]})
