"""Collators: nothing is predicted over a boundary, boundaries are those of documents, and shapes are as promised."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import Document, FixedCollator, PackedCollator, PaddedCollator, PreferenceCollator, Sample
from asyncdata.errors import ConfigError
from asyncdata.xtuner import XTunerCollator
from tests.support.examples import in_ci
from tests.support.parts import to_torch

NONE = -100
"""The label of a token that is not trained on."""


def document(*tokens, **labels):
    return Document(np.array(tokens, np.int32), **{name: np.array(values) for name, values in labels.items()})


def sample(tokens, labels=None, **extra):
    return Sample(tokens=np.array(tokens, np.int32), labels=None if labels is None else np.array(labels), extra=extra)


PACK = [document(1, 2, 3), document(11, 12, 13)]
ROWS = [document(1, 2, 3), document(4), document(5, 6)]
MARKED = [document(1, 2, 3, 4, labels=[NONE, NONE, 30, 40]), document(1, 2, 3, 4, loss_mask=[1, 0, 1, 0])]
BROUGHT = [sample([1, 2, 7, 7], num_padding=2), sample([3, 4, 5], num_padding=0)]
PAIRS = [
    sample([1, 2, 3], [NONE, 2, 3], rejected_input_ids=[1, 4, 5, 6, 7], rejected_spans=[[1, 2], [4, 5]]),
    sample([8, 9], [NONE, 9], rejected_input_ids=[8, 10], rejected_spans=[[1, 2]]),
]

WHOLE = {
    "input_ids": [[1, 2, 3, 11, 12, 13, 99, 99, 99, 99, 99, 99]], "labels": [[NONE, 2, 3, NONE, 12, 13, *[NONE] * 6]],
    "position_ids": [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1]], "seq_idx": [[0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1, -1]],
    "cu_seqlens": [0, 3, 6, 10, 12], "max_seqlen": 4, "num_padding": 6,
}  # fmt: skip
OF_XTUNER = {
    "input_ids": [[1, 2, 3, 11, 12, 0, 0, 0, 0, 0]], "shifted_labels": [[2, 3, 11, 12, 13, *[NONE] * 5]],
    "cu_seqlens": [0, 3, 5, 9, 10], "num_padding": 5,
}  # fmt: skip
LEFT = {
    "input_ids": [[1, 2, 3], [0, 0, 4], [0, 5, 6]], "labels": [[1, 2, 3], [NONE, NONE, NONE], [NONE, NONE, 6]],
    "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 1, 1]], "position_ids": [[0, 1, 2], [0, 0, 0], [0, 0, 1]],
}  # fmt: skip
RIGHT = {
    "input_ids": [[1, 2, 3, 9], [4, 9, 9, 9], [5, 6, 9, 9]],
    "labels": [[1, 2, 3, NONE], [4, NONE, NONE, NONE], [5, 6, NONE, NONE]],
    "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
    "position_ids": [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0]],
}
BROUGHT_RIGHT = {
    "input_ids": [[1, 2, 7, 7, 0], [3, 4, 5, 0, 0]], "labels": [[1, 2, NONE, NONE, NONE], [3, 4, 5, NONE, NONE]],
    "attention_mask": [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]], "position_ids": [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]],
}  # fmt: skip
BROUGHT_LEFT = {
    "labels": [[NONE, NONE, 2, NONE, NONE], [NONE, NONE, NONE, 4, 5]],
    "attention_mask": [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]],
    "position_ids": [[0, 0, 1, 0, 0], [0, 0, 0, 1, 2]],
}
OF_PAIRS = {
    "input_ids": [[1, 2, 3, 99, 99, 99], [8, 9, 99, 99, 99, 99], [1, 4, 5, 6, 7, 99], [8, 10, 99, 99, 99, 99]],
    "attention_mask": [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]],
    "completion_mask": [[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]],
}
PIECE = Document(BROUGHT[0].tokens[:2], None, None, BROUGHT[0])

BATCHES: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "a pack, padded in chunks": (PackedCollator(max_length=12, pad_id=99, pad_chunk=4), [PACK], WHOLE),
    "shifted as XTuner does: over the boundary, without the last token": (
        PackedCollator(max_length=10, pad_chunk=4, shift="pack"), [PACK], OF_XTUNER),
    "of a single token, shifted so, nothing is left": (
        PackedCollator(max_length=3, shift="pack"), [[document(5)]], {"seq_idx": [[-1, -1, -1]]}),
    "what is too long, cut off and counted": (
        PackedCollator(max_length=5, truncate_packs=True), [PACK, [document(*range(8), loss_mask=[1] * 8)], PACK[:1]],
        {"input_ids": [[1, 2, 3, 0, 0], [0, 1, 2, 3, 4], [1, 2, 3, 0, 0]], "num_dropped_tokens": 6}),
    "as much of a document as there is room for": (
        PackedCollator(max_length=5, truncate_packs=True), [[document(0, 1, 2), document(0, 1), document(0, 1, 2, 3)]],
        {"input_ids": [[0, 1, 2, 0, 1]]}),
    "what labels or a mask say is trained on": (
        PackedCollator(), [[*MARKED, document(1, 2, 3, 4)]],
        {"labels": [[NONE, NONE, 30, 40, NONE, NONE, 3, NONE, NONE, 2, 3, 4]]}),
    "rows padded on the right": (PaddedCollator(pad_id=9, pad_to_multiple_of=4, max_length=8), ROWS, RIGHT),
    "on the left, nothing predicts a first token, nor the padding before it": (PaddedCollator(side="left"), ROWS, LEFT),
    "on the left, shifted": (
        PaddedCollator(side="left", shift_labels=True), ROWS,
        {"shifted_labels": [[2, 3, NONE], [NONE, NONE, NONE], [NONE, 6, NONE]]}),
    "rows of a fixed length": (FixedCollator(length=4, pad_id=9), ROWS[1:], {n: RIGHT[n][1:] for n in RIGHT}),
    "of a fixed length, shifted": (
        FixedCollator(length=4, shift_labels=True), ROWS[:1], {"shifted_labels": [[2, 3, NONE, NONE]]}),
    "padding that samples bring along is padding": (FixedCollator(length=5), BROUGHT, BROUGHT_RIGHT),
    "on the left it is where it was": (
        PaddedCollator(side="left", pad_to_multiple_of=5), [Document(one.tokens, None, None, one) for one in BROUGHT],
        BROUGHT_LEFT),
    "and is not predicted": (
        PaddedCollator(shift_labels=True), BROUGHT, {"shifted_labels": [[2, NONE, NONE, NONE], [4, 5, NONE, NONE]]}),
    "nothing but padding, and a piece of a sample, which has none of it": (
        PaddedCollator(), [sample([7, 7], num_padding=2), PIECE],
        {"attention_mask": [[0, 0], [1, 1]], "position_ids": [[0, 0], [0, 1]]}),
    "pairs: chosen answers, then rejected ones": (PreferenceCollator(pad_id=99, pad_to_multiple_of=6), PAIRS, OF_PAIRS),
}  # fmt: skip
FIELDS = {
    PackedCollator(): WHOLE,
    PackedCollator(shift="document"): [name.replace("labels", "shifted_labels") for name in WHOLE],
    PaddedCollator(): LEFT,
    PaddedCollator(shift_labels=True): [name.replace("labels", "shifted_labels") for name in LEFT],
    PreferenceCollator(): OF_PAIRS,
    PreferenceCollator(completion_mask=False): ["input_ids", "attention_mask"],
}


def lists(batch):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in batch.items()}


@pytest.mark.parametrize(("collator", "items", "wanted"), BATCHES.values(), ids=BATCHES)
def test_a_batch_is(collator, items, wanted):
    batch = collator(items)
    assert {name: value for name, value in lists(batch).items() if name in wanted} == wanted
    arrays = {name: value.dtype for name, value in batch.items() if isinstance(value, np.ndarray)}
    of_segments = {"seq_idx", "cu_seqlens", "cu_seqlens_padded"}
    assert arrays == {name: np.int32 if name in of_segments else np.int64 for name in arrays}


@pytest.mark.parametrize(("collator", "names"), FIELDS.items(), ids=str)
def test_a_batch_has_the_fields(collator, names):
    items = PAIRS if isinstance(collator, PreferenceCollator) else ROWS
    batch = collator([items] if isinstance(collator, PackedCollator) else items)
    assert sorted(batch) == sorted(names)


@pytest.mark.parametrize(
    ("collator", "items", "shape"),
    [
        (PackedCollator(pad_to_multiple_of=4), [PACK], (1, 8)),
        (PackedCollator(pad_to_multiple_of=4, segment_multiple_of=8, pad_chunk=8), [PACK], (1, 16)),
        (PackedCollator(max_length=50, pad_to_max_length=False), [PACK], (1, 6)),
        (PackedCollator(max_length=8, segment_multiple_of=4, pad_chunk=4), [PACK], (1, 8)),
        (PaddedCollator(max_length=8, pad_to_multiple_of=4), ROWS, (3, 4)),
    ],
)
def test_rows_have_a_fixed_width_or_are_a_multiple(collator, items, shape):
    assert collator(items)["input_ids"].shape == shape


documents = st.builds(
    lambda size, trained: document(*range(1, size + 1), loss_mask=[trained >> place & 1 for place in range(size)]),
    st.integers(1, 9),
    st.integers(0, 511),
)
batches = st.lists(st.lists(documents, min_size=1, max_size=6), min_size=1, max_size=3)


@in_ci(max_examples=20)
@given(batches, st.integers(1, 3), st.integers(1, 4), st.integers(0, 30), st.sampled_from(["document", "none"]))
def test_documents_are_found_again_by_any_of_the_boundaries(packs, multiple, chunk, room, shift):
    longest = max(sum(-(-len(d.tokens) // multiple) * multiple for d in pack) for pack in packs)
    width = longest + room * multiple
    settings = {"segment_multiple_of": multiple, "pad_chunk": chunk * multiple, "pad_id": 77, "shift": shift}

    batch = PackedCollator(max_length=width, **settings)(packs)

    ends = batch["cu_seqlens_padded" if multiple > 1 else "cu_seqlens"]
    sizes = np.diff(ends)
    assert (ends[0], ends[-1]) == (0, width * len(packs))
    assert (sizes > 0).all()
    assert not (sizes % multiple).any()
    assert batch["max_seqlen"] == sizes.max()
    assert (np.diff(batch["cu_seqlens"]) > 0).all()

    labels = "labels" if shift == "none" else "shifted_labels"
    flat = {name: batch[name].ravel() for name in ("input_ids", labels, "position_ids", "seq_idx")}
    segments = [slice(start, stop) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
    for segment, size in zip(segments, sizes.tolist(), strict=True):
        assert flat["position_ids"][segment].tolist() == list(range(size))
    padding = [segment.stop - segment.start for segment in segments if flat["seq_idx"][segment.start] == -1]
    assert sum(padding) == batch["num_padding"]
    assert max(padding, default=0) <= chunk * multiple

    found = [segment for segment in segments if flat["seq_idx"][segment.start] >= 0]
    wanted = [(number, document) for pack in packs for number, document in enumerate(pack)]
    for segment, (number, one) in zip(found, wanted, strict=True):
        size = len(one.tokens)
        is_token = flat["seq_idx"][segment] == number
        assert is_token.tolist() == [place < size for place in range(len(is_token))]
        assert flat["input_ids"][segment].tolist() == [*one.tokens.tolist(), *[77] * (len(is_token) - size)]
        targets = np.where(one.loss_mask, one.tokens, NONE).tolist()
        targets[0] = NONE  # nothing predicts a first token
        shifted = [*targets[1:], NONE] if shift == "document" else targets
        assert flat[labels][segment].tolist() == shifted + [NONE] * (len(is_token) - size)
    assert (flat[labels][flat["seq_idx"] == -1] == NONE).all()


@pytest.mark.parametrize(
    ("collator", "wanted"),
    [
        (PackedCollator(segment_multiple_of=4, source_names=("b", "a")), [[1, 1, 1, -1, 0, 0, -1, -1]]),
        (PaddedCollator(source_names=("b", "a")), [[1, 1, 1], [0, 0, -1]]),
        (PaddedCollator(side="left", source_names=("b", "a")), [[1, 1, 1], [-1, 0, 0]]),
        (FixedCollator(length=4, source_names=("b", "a")), [[1, 1, 1, -1], [0, 0, -1, -1]]),
    ],
    ids=["packed", "padded", "left", "fixed"],
)
def test_each_token_has_the_number_of_its_part_of_a_mixture(collator, wanted):
    long, short = (Sample(tokens=np.arange(1, size), source_name=name) for size, name in ((4, "a"), (3, "b")))
    other = Sample(tokens=np.arange(1, 3), source_name=None)

    def batch(*samples):
        documents = [Document(one.tokens, sample=one) for one in samples]
        return collator([documents] if collator.takes_packs else documents)

    found = batch(long, short)["source_ids"]
    assert (found.tolist(), found.dtype) == (wanted, np.int32)
    with pytest.raises(ConfigError, match=r"AD452 .* part None of a mixture, and source_names=\('b', 'a'\)"):
        batch(long, other)


def test_collating_does_not_write_into_the_documents_and_xtuners_shape_can_be_of_tensors():
    one = document(*range(5), labels=range(5))
    one.tokens.flags.writeable = one.labels.flags.writeable = False
    batch = PackedCollator()([[one]])
    assert not np.shares_memory(batch["input_ids"], one.tokens)
    assert not np.shares_memory(batch["labels"], one.labels)
    torch = pytest.importorskip("torch")
    (item,) = XTunerCollator(max_length=8, output="tensors", pad_to_max_length=False)([PACK])
    assert item["shifted_labels"].tolist() == [[2, 3, NONE, 12, 13, NONE]]
    assert item["seq_ctx"]["cu_seq_lens_k"].dtype == torch.int32
    assert item["seq_ctx"]["max_length_k"] == 3
    with pytest.raises(ConfigError, match='output="sequence_context" needs XTuner'):
        XTunerCollator(max_length=8, output="sequence_context")([PACK])


EMPTY = document()
OF_FIVE = (PackedCollator(max_length=5), PackedCollator(max_length=5, pad_to_max_length=False))


@pytest.mark.parametrize(
    ("collator", "items", "message"),
    [
        *[(PackedCollator(), packs, "^AD451 ") for packs in ([], [[]], [[EMPTY]])],
        *[(each, rows, "^AD451 ") for each in (PaddedCollator(), FixedCollator(length=2)) for rows in ([], [EMPTY])],
        (PreferenceCollator(), [], "AD451"),
        (PackedCollator(shift="pack"), [[document(5)]], "^AD451 .*leaves nothing"),
        *[(collator, [PACK], "^AD450 a pack of 6 tokens does not fit a row of 5") for collator in OF_FIVE],
        (PackedCollator(max_length=4, segment_multiple_of=4, pad_chunk=4), [PACK], "^AD450 a pack of 8 tokens"),
        (XTunerCollator(max_length=5), [PACK], "^AD450 "),
        (PaddedCollator(max_length=2), ROWS, "^AD450 a document of 3 tokens does not fit a row of 2"),
        (FixedCollator(length=2), ROWS, "^AD450 a document of 3 tokens does not fit a row of 2"),
        (PackedCollator(), [[document(0, 1, 2, 3, labels=[0, 1, 2])]], "^AD452 a document has 4 tokens and 3 labels"),
        (PaddedCollator(), [document(0, 1, 2, 3, loss_mask=[1] * 5)], "^AD452 a document has 4 tokens and 5 labels"),
        *[
            (collator, [sample([1, 2], num_padding=number)], r"^AD452 .* 2 tokens has extra\['num_padding'\]=")
            for collator in (PaddedCollator(), FixedCollator(length=4))
            for number in (-1, 3, "1", None)
        ],
        (PreferenceCollator(), [PAIRS[0], sample([1, 2])], "AD452 .* without a rejected answer"),
    ],
)
def test_what_cannot_be_collated_is_an_error_that_says_so(collator, items, message):
    with pytest.raises(ConfigError, match=message):
        collator(items)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PackedCollator, {"max_length": 10, "segment_multiple_of": 4}, "multiples of segment_multiple_of=4"),
        (PackedCollator, {"pad_chunk": 6, "segment_multiple_of": 4}, "multiples of segment_multiple_of=4"),
        (PackedCollator, {"segment_multiple_of": 4, "shift": "pack"}, "knows no segment_multiple_of"),
        (PackedCollator, {"pad_chunk": 0}, "pad_chunk=0"),
        (PaddedCollator, {"side": "both"}, "side='both'"),
        (PaddedCollator, {"max_length": 10, "pad_to_multiple_of": 4}, "no multiple of pad_to_multiple_of=4"),
        (FixedCollator, {"length": -1}, "length=-1"),
        (XTunerCollator, {"max_length": 10, "shift": "none"}, "shift='none'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_arrays_become_tensors_of_their_shape_and_dtype_and_pinned_ones_need_a_device():
    torch = pytest.importorskip("torch")
    batch = PackedCollator(max_length=8)([PACK])

    tensors = to_torch({"packs": [batch], "name": "x"})

    (converted,) = tensors["packs"]
    assert (tensors["name"], converted["max_seqlen"]) == ("x", 3)
    assert (converted["cu_seqlens"].dtype, converted["input_ids"].dtype) == (torch.int32, torch.int64)
    assert all(converted[name].tolist() == batch[name].tolist() for name in ("input_ids", "labels", "seq_idx"))
    assert not converted["input_ids"].is_pinned()
    if torch.cuda.is_available():
        pinned = to_torch(batch, pin_memory=True)["labels"]
        assert pinned.is_pinned()
        assert pinned.tolist() == batch["labels"].tolist()
    else:
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            to_torch(batch, pin_memory=True)
