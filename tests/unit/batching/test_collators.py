"""Collators: nothing is predicted over a boundary, boundaries are those of documents, and shapes are as promised."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import (
    ConfigError,
    Document,
    FixedCollator,
    PackedCollator,
    PaddedCollator,
    PreferenceCollator,
    Sample,
    XTunerCollator,
)
from asyncdata.batching.collators.torch_tensors import to_torch

PACK = [Document(np.array([1, 2, 3], np.int32)), Document(np.array([11, 12, 13], np.int32))]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def test_a_pack_becomes_a_row_with_the_boundaries_of_its_documents() -> None:
    batch = PackedCollator(max_length=12, pad_id=99, pad_chunk=4)([PACK])

    assert lists(batch) == {
        "input_ids": [[1, 2, 3, 11, 12, 13, 99, 99, 99, 99, 99, 99]],
        "labels": [[-100, 2, 3, -100, 12, 13, -100, -100, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1]],
        "seq_idx": [[0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1, -1]],
        "cu_seqlens": [0, 3, 6, 10, 12],
        "max_seqlen": 4,
        "num_padding": 6,
    }
    dtypes = {name: value.dtype for name, value in batch.items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "input_ids": np.int64,
        "labels": np.int64,
        "position_ids": np.int64,
        "seq_idx": np.int32,
        "cu_seqlens": np.int32,
    }


def test_labels_can_be_shifted_within_documents_and_have_a_name_of_their_own_then() -> None:
    batch, unshifted = PackedCollator(shift="document")([PACK]), PackedCollator()([PACK])

    assert batch["shifted_labels"].tolist() == [[2, 3, -100, 12, 13, -100]]
    assert "labels" not in batch
    assert list(batch) == [name.replace("labels", "shifted_labels") for name in unshifted]


def test_xtuners_shift_goes_over_the_boundary_and_leaves_the_last_token_out() -> None:
    batch = PackedCollator(max_length=10, pad_chunk=4, shift="pack")([PACK])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 11, 12, 0, 0, 0, 0, 0]]
    assert batch["shifted_labels"].tolist() == [[2, 3, 11, 12, 13, -100, -100, -100, -100, -100]]
    assert "labels" not in batch
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 9, 10]
    assert (batch["max_seqlen"], batch["num_padding"]) == (4, 5)


def test_xtuners_shift_of_a_single_token_is_all_padding() -> None:
    pack = [Document(np.array([5]))]

    assert PackedCollator(max_length=3, shift="pack")([pack])["seq_idx"].tolist() == [[-1, -1, -1]]
    with pytest.raises(ConfigError, match="^AD451 .*leaves nothing"):
        PackedCollator(shift="pack")([pack])


def test_several_packs_are_rows_of_one_width_whose_segments_follow_one_another() -> None:
    batch = PackedCollator()([PACK, [Document(np.array([7, 8]))]])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 11, 12, 13], [7, 8, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, -1, -1, -1, -1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 8, 12]
    assert batch["num_padding"] == 4


def test_segments_are_filled_up_to_a_multiple() -> None:
    batch = PackedCollator(max_length=16, segment_multiple_of=4, pad_chunk=4)([PACK])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 11, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, 12, 13, *[-100] * 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3] * 4]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, -1, 1, 1, 1, -1, *[-1] * 8]]
    assert batch["cu_seqlens_padded"].tolist() == [0, 4, 8, 12, 16]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 10, 14]
    assert (batch["max_seqlen"], batch["num_padding"]) == (4, 8)


def test_rows_without_a_fixed_width_are_a_multiple() -> None:
    assert PackedCollator(pad_to_multiple_of=4)([PACK])["input_ids"].shape == (1, 8)
    assert PackedCollator(pad_to_multiple_of=4, segment_multiple_of=8, pad_chunk=8)([PACK])["input_ids"].shape == (
        1,
        16,
    )
    assert PackedCollator(max_length=50, pad_to_max_length=False)([PACK])["input_ids"].shape == (1, 6)


def test_labels_or_a_mask_say_what_is_trained_on() -> None:
    tokens = np.array([1, 2, 3, 4], np.int32)
    documents = [
        Document(tokens, labels=np.array([-100, -100, 30, 40], np.int16)),
        Document(tokens, loss_mask=np.array([1, 0, 1, 0], np.uint8)),
        Document(tokens),
    ]

    labels = PackedCollator()([documents])["labels"]

    assert labels.tolist() == [[-100, -100, 30, 40, -100, -100, 3, -100, -100, 2, 3, 4]]


def test_a_pack_that_is_too_long_is_an_error() -> None:
    for collator in (PackedCollator(max_length=5), PackedCollator(max_length=5, pad_to_max_length=False)):
        with pytest.raises(ConfigError, match="^AD450 a pack of 6 tokens does not fit a row of 5"):
            collator([PACK])
    with pytest.raises(ConfigError, match="^AD450 a pack of 8 tokens"):
        PackedCollator(max_length=4, segment_multiple_of=4, pad_chunk=4)([PACK])


def test_a_pack_that_is_too_long_can_be_truncated_and_that_is_counted() -> None:
    collator = PackedCollator(max_length=5, overlong="truncate")
    long = [Document(np.arange(8), loss_mask=np.ones(8))]

    batch = collator([PACK, long, PACK[:1]])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0], [0, 1, 2, 3, 4], [1, 2, 3, 0, 0]]
    assert batch["num_dropped_tokens"] == 6
    full = [Document(np.arange(3)), Document(np.arange(2)), Document(np.arange(4))]
    assert collator([full])["input_ids"].tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("packs", [[], [[]], [[Document(np.empty(0, np.int32))]]])
def test_a_pack_needs_a_document_and_a_document_a_token(packs: Any) -> None:
    with pytest.raises(ConfigError, match="^AD451 "):
        PackedCollator()(packs)


@pytest.mark.parametrize("fields", [{"labels": np.arange(3)}, {"loss_mask": np.ones(5)}])
def test_each_token_has_a_label(fields: Any) -> None:
    for collate in (PackedCollator(), lambda packs: PaddedCollator()(packs[0])):
        with pytest.raises(ConfigError, match="^AD452 a document has 4 tokens and [35] labels"):
            collate([[Document(np.arange(4), **fields)]])


documents = st.builds(
    lambda size, trained: Document(
        np.arange(1, size + 1, dtype=np.int32), loss_mask=np.array([trained >> place & 1 for place in range(size)])
    ),
    st.integers(1, 9),
    st.integers(0, 511),
)
batches = st.lists(st.lists(documents, min_size=1, max_size=6), min_size=1, max_size=3)


@pytest.mark.thorough
@given(
    batches, st.sampled_from([1, 2, 3]), st.integers(1, 4), st.integers(0, 30), st.sampled_from(["document", "none"])
)
def test_documents_are_found_again_by_any_of_the_boundaries(
    packs: list[list[Document]], multiple: int, chunk: int, room: int, shift: Any
) -> None:
    longest = max(sum(-(-len(d.tokens) // multiple) * multiple for d in pack) for pack in packs)
    collator = PackedCollator(
        max_length=longest + room * multiple,
        segment_multiple_of=multiple,
        pad_chunk=chunk * multiple,
        pad_id=77,
        shift=shift,
    )

    batch = collator(packs)

    width = longest + room * multiple
    ends = batch["cu_seqlens_padded" if multiple > 1 else "cu_seqlens"]
    sizes = np.diff(ends)
    assert ends[0] == 0
    assert ends[-1] == width * len(packs)
    assert (sizes > 0).all()
    assert not (sizes % multiple).any()
    assert batch["max_seqlen"] == sizes.max()
    assert (np.diff(batch["cu_seqlens"]) > 0).all()

    labels = "labels" if shift == "none" else "shifted_labels"
    flat = {name: batch[name].ravel() for name in ("input_ids", labels, "position_ids", "seq_idx")}
    segments = [slice(start, stop) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
    assert all(
        flat["position_ids"][segment].tolist() == list(range(segment.stop - segment.start)) for segment in segments
    )
    padding = [s.stop - s.start for s in segments if flat["seq_idx"][s.start] == -1]
    assert sum(padding) == batch["num_padding"]
    assert max(padding, default=0) <= chunk * multiple

    found = [segment for segment in segments if flat["seq_idx"][segment.start] >= 0]
    wanted = [(number, document) for pack in packs for number, document in enumerate(pack)]
    for segment, (number, document) in zip(found, wanted, strict=True):
        size = len(document.tokens)
        is_token = flat["seq_idx"][segment] == number
        assert is_token.tolist() == [place < size for place in range(len(is_token))]
        assert flat["input_ids"][segment][:size].tolist() == document.tokens.tolist()
        assert (flat["input_ids"][segment][size:] == 77).all()
        targets = [t if m else -100 for t, m in zip(document.tokens, document.loss_mask, strict=True)]  # type: ignore[arg-type]
        targets[0] = -100  # nothing predicts a first token
        shifted = [*targets[1:], -100] if shift == "document" else targets
        assert flat[labels][segment].tolist() == shifted + [-100] * (len(is_token) - size)
    assert (flat[labels][flat["seq_idx"] == -1] == -100).all()


def test_collating_does_not_write_into_the_documents() -> None:
    tokens, labels = np.arange(5, dtype=np.int32), np.arange(5)
    tokens.flags.writeable = labels.flags.writeable = False

    batch = PackedCollator()([[Document(tokens, labels)]])

    assert not np.shares_memory(batch["input_ids"], tokens)
    batch["labels"][:] = 0
    assert labels.tolist() == [0, 1, 2, 3, 4]


ROWS = [Document(np.array([1, 2, 3], np.int32)), Document(np.array([4], np.int32)), Document(np.array([5, 6]))]


def test_documents_are_padded_on_the_right() -> None:
    assert lists(PaddedCollator(pad_id=9, pad_to_multiple_of=4, max_length=8)(ROWS)) == {
        "input_ids": [[1, 2, 3, 9], [4, 9, 9, 9], [5, 6, 9, 9]],
        "labels": [[1, 2, 3, -100], [4, -100, -100, -100], [5, 6, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 0], [0, 0, 0, 0], [0, 1, 0, 0]],
    }


def test_documents_are_padded_on_the_left() -> None:
    assert lists(PaddedCollator(side="left", shift_labels=True)(ROWS)) == {
        "input_ids": [[1, 2, 3], [0, 0, 4], [0, 5, 6]],
        "shifted_labels": [[2, 3, -100], [-100, -100, -100], [-100, 6, -100]],
        "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 1, 1]],
        "position_ids": [[0, 1, 2], [0, 0, 0], [0, 0, 1]],
    }


def test_nothing_predicts_a_first_token_not_the_padding_before_it_either() -> None:
    assert PaddedCollator(side="left")(ROWS)["labels"].tolist() == [[1, 2, 3], [-100, -100, -100], [-100, -100, 6]]


def test_labels_of_padded_rows_can_be_shifted() -> None:
    assert PaddedCollator(shift_labels=True)(ROWS)["shifted_labels"].tolist() == [
        [2, 3, -100],
        [-100, -100, -100],
        [6, -100, -100],
    ]


def test_fixed_rows_are_of_one_length_whatever_is_in_them() -> None:
    batch = FixedCollator(length=4, pad_id=9)(ROWS[1:])

    assert batch["input_ids"].tolist() == [[4, 9, 9, 9], [5, 6, 9, 9]]
    assert batch["labels"].tolist() == [[4, -100, -100, -100], [5, 6, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert FixedCollator(length=4, shift_labels=True)(ROWS)["shifted_labels"][0].tolist() == [2, 3, -100, -100]


def padded_sample(tokens: list[int], num_padding: object) -> Sample:
    return Sample(tokens=np.array(tokens, np.int32), extra={"num_padding": num_padding})


def whole(sample: Sample) -> Document:
    return Document(sample.tokens, None, None, sample)


@pytest.mark.parametrize("as_given", [lambda sample: sample, whole], ids=["samples", "documents"])
def test_padding_that_samples_bring_along_is_padding_in_all_but_its_tokens(as_given: Any) -> None:
    documents = [as_given(padded_sample([1, 2, 7, 7], 2)), as_given(padded_sample([3, 4, 5], 0))]

    assert lists(FixedCollator(length=5)(documents)) == {
        "input_ids": [[1, 2, 7, 7, 0], [3, 4, 5, 0, 0]],
        "labels": [[1, 2, -100, -100, -100], [3, 4, 5, -100, -100]],
        "attention_mask": [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        "position_ids": [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]],
    }
    assert lists(PaddedCollator(side="left", pad_to_multiple_of=5)(documents)) == {
        "input_ids": [[0, 1, 2, 7, 7], [0, 0, 3, 4, 5]],
        "labels": [[-100, -100, 2, -100, -100], [-100, -100, -100, 4, 5]],
        "attention_mask": [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]],
        "position_ids": [[0, 0, 1, 0, 0], [0, 0, 0, 1, 2]],
    }
    assert PaddedCollator(shift_labels=True)(documents)["shifted_labels"].tolist() == [
        [2, -100, -100, -100],
        [4, 5, -100, -100],
    ]


def test_a_document_that_is_nothing_but_padding_is_not_attended() -> None:
    batch = PaddedCollator()([padded_sample([7, 7], 2)])

    assert batch["attention_mask"].tolist() == batch["position_ids"].tolist() == [[0, 0]]


def test_a_piece_of_a_sample_has_none_of_its_padding() -> None:
    sample = padded_sample([1, 2, 3, 7], 1)

    assert PaddedCollator()([Document(sample.tokens[:3], None, None, sample)])["attention_mask"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("num_padding", [-1, 3, "1", None])
def test_more_padding_than_tokens_is_an_error(num_padding: object) -> None:
    for collate in (PaddedCollator(), FixedCollator(length=4)):
        with pytest.raises(ConfigError, match=r"^AD452 a document of 2 tokens has extra\['num_padding'\]="):
            collate([padded_sample([1, 2], num_padding)])


@pytest.mark.parametrize("collator", [PaddedCollator(max_length=2), FixedCollator(length=2)])
def test_a_document_that_is_too_long_for_its_row_is_an_error(collator: Any) -> None:
    with pytest.raises(ConfigError, match="^AD450 a document of 3 tokens does not fit a row of 2"):
        collator(ROWS)


@pytest.mark.parametrize("collator", [PaddedCollator(), FixedCollator(length=2)])
@pytest.mark.parametrize("documents", [[], [Document(np.empty(0, np.int32))]])
def test_rows_need_a_document_with_a_token(collator: Any, documents: Any) -> None:
    with pytest.raises(ConfigError, match="^AD451 "):
        collator(documents)


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
def test_a_setting_that_cannot_work_is_named(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


def test_xtuners_shape_is_a_context_and_its_labels_for_each_pack() -> None:
    first, second = XTunerCollator(max_length=8)([PACK, PACK[:1]])

    assert lists(first["seq_ctx"]) == {
        "input_ids": [[1, 2, 3, 11, 12, 13, 0, 0]],
        "cu_seq_lens_q": [0, 3, 6, 8],
        "cu_seq_lens_k": [0, 3, 6, 8],
        "max_length_q": 3,
        "max_length_k": 3,
        "num_padding": 2,
        "position_ids": [[0, 1, 2, 0, 1, 2, 0, 1]],
    }
    assert first["shifted_labels"].tolist() == [[2, 3, -100, 12, 13, -100, -100, -100]]
    assert second["seq_ctx"]["num_padding"] == 5


def test_what_does_not_fit_in_xtuners_shape_is_counted() -> None:
    collator = XTunerCollator(max_length=5, overlong="truncate")

    assert [item["num_dropped_tokens"] for item in collator([PACK, PACK[:1]])] == [3, 0]
    with pytest.raises(ConfigError, match="^AD450 "):
        XTunerCollator(max_length=5)([PACK])


def test_xtuners_shape_can_be_of_tensors() -> None:
    torch = pytest.importorskip("torch")

    (item,) = XTunerCollator(max_length=8, output="tensors", pad_to_max_length=False)([PACK])

    assert item["shifted_labels"].tolist() == [[2, 3, -100, 12, 13, -100]]
    assert item["seq_ctx"]["cu_seq_lens_k"].dtype == torch.int32
    assert item["seq_ctx"]["max_length_k"] == 3


def test_without_xtuner_its_own_class_cannot_be_had() -> None:
    pytest.importorskip("torch")

    with pytest.raises(ConfigError, match='output="sequence_context" needs XTuner'):
        XTunerCollator(max_length=8, output="sequence_context")([PACK])


def test_arrays_become_tensors_of_their_shape_and_dtype() -> None:
    torch = pytest.importorskip("torch")
    batch = PackedCollator(max_length=8)([PACK])

    tensors = to_torch({"packs": [batch], "name": "x"})

    (converted,) = tensors["packs"]
    assert tensors["name"] == "x"
    assert converted["max_seqlen"] == 3
    assert converted["cu_seqlens"].dtype == torch.int32
    assert converted["input_ids"].dtype == torch.int64
    assert all(converted[name].tolist() == batch[name].tolist() for name in ("input_ids", "labels", "seq_idx"))
    assert not converted["input_ids"].is_pinned()


def test_pinned_tensors_need_a_device() -> None:
    torch = pytest.importorskip("torch")
    batch = PackedCollator()([PACK])

    if torch.cuda.is_available():
        assert to_torch(batch, pin_memory=True)["labels"].is_pinned()
        assert to_torch(batch, pin_memory=True)["labels"].tolist() == batch["labels"].tolist()
    else:
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            to_torch(batch, pin_memory=True)


# Pairs


def pair(tokens: list[int], trained: int, rejected: list[int], spans: list[list[int]]) -> Sample:
    labels = np.where(np.arange(len(tokens)) < len(tokens) - trained, -100, np.array(tokens))
    extra = {"rejected_input_ids": rejected, "rejected_spans": spans}
    return Sample(tokens=np.array(tokens, np.int32), labels=labels, extra=extra)


PAIRS = [pair([1, 2, 3], 2, [1, 4, 5, 6, 7], [[1, 2], [4, 5]]), pair([8, 9], 1, [8, 10], [[1, 2]])]


def test_pairs_are_rows_of_chosen_answers_and_then_of_rejected_ones() -> None:
    batch = PreferenceCollator(pad_id=99, pad_to_multiple_of=6)(PAIRS)

    assert lists(batch) == {
        "input_ids": [[1, 2, 3, 99, 99, 99], [8, 9, 99, 99, 99, 99], [1, 4, 5, 6, 7, 99], [8, 10, 99, 99, 99, 99]],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]],
        "completion_mask": [[0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]],
    }
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


def test_a_reward_model_gets_no_mask_of_answers() -> None:
    assert list(PreferenceCollator(completion_mask=False)(PAIRS)) == ["input_ids", "attention_mask"]


def test_a_sample_without_a_rejected_answer_is_no_pair() -> None:
    with pytest.raises(ConfigError, match="AD452 .* without a rejected answer"):
        PreferenceCollator()([PAIRS[0], Sample(tokens=np.array([1, 2], np.int32))])
    with pytest.raises(ConfigError, match="AD451"):
        PreferenceCollator()([])
