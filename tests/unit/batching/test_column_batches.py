"""Columns in batches: each value stands at its token, beside its label, or with its document; the rest is padding."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Column, Document, FixedCollator, PackedCollator, PaddedCollator, PreferenceCollator, Sample
from asyncdata.errors import ConfigError
from tests.support.parts import Columns

AT_TOKENS = Column("at_tokens", "int64", shape=(2,), pad=-7)
AT_LABELS = Column("at_labels", "int64", pad=-9, follows="labels")
OF_SAMPLES = Column("of_samples", "float32", "sample", pad=0.5)
ITEMS = Column("items", "int16", "item", (3,))
PAD, IGNORE = 0, -100


def sample(tokens: list[int], num_items: int = 0, lacks: bool = False) -> Sample:
    """Whose columns say which token, label and sample they are of; one that lacks them only declares them."""
    ids = np.array(tokens, np.int64)
    values = {
        AT_TOKENS: np.stack([ids, -ids], 1),
        AT_LABELS: ids * 10,
        OF_SAMPLES: np.float32(tokens[0]),
        ITEMS: np.full((num_items, 3), tokens[0], np.int16),
    }
    columns = Columns({column: np.asarray(value) for column, value in values.items()})
    if lacks:
        columns.clear()
    return Sample(tokens=ids.astype(np.int32), labels=ids.astype(np.int32), columns=columns)


@st.composite
def packs(draw: st.DrawFn) -> list[list[Document]]:
    numbers = iter(range(1, 10_000))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        pack = []
        for _ in range(draw(st.integers(1, 3))):
            tokens = [next(numbers) for _ in range(draw(st.integers(2, 5)))]
            whole = sample(tokens, draw(st.integers(0, 2)), draw(st.integers(0, 3)) == 0)
            pack.append(Document(whole.tokens, whole.labels, None, whole))
        found.append(pack)
    return found


@given(packs(), st.sampled_from(["none", "document", "pack"]), st.sampled_from([1, 4]))
def test_rows_of_packs_have_each_value_where_its_token_or_its_label_is(drawn, shift, multiple):
    multiple = 1 if shift == "pack" else multiple
    collator = PackedCollator(shift=shift, segment_multiple_of=multiple, pad_chunk=4 * multiple)
    batch = collator(drawn)
    held = [document for pack in drawn for document in pack if document.sample.columns]
    lacking = {int(token) for pack in drawn for each in pack if not each.sample.columns for token in each.tokens}

    ids, labels = batch["input_ids"], batch["labels" if shift == "none" else "shifted_labels"]
    is_at = (ids != PAD) & ~np.isin(ids, list(lacking))
    assert (batch["at_tokens"] == np.where(is_at[..., None], np.stack([ids, -ids], -1), AT_TOKENS.pad)).all()
    is_trained = (labels != IGNORE) & ~np.isin(labels, list(lacking))
    assert (batch["at_labels"][is_trained] == labels[is_trained] * 10).all()
    left = batch["at_labels"][~is_trained]  # the first tokens of documents, which nothing predicts, and padding
    firsts = [int(document.tokens[0]) * 10 for document in held] if shift == "none" else []
    assert sorted(left[left != AT_LABELS.pad].tolist()) == firsts

    documents = [document for pack in drawn for document in pack]
    wanted = [float(each.tokens[0]) if each.sample.columns else 0.5 for each in documents]
    assert (batch["of_samples"].tolist(), batch["of_samples"].dtype) == (wanted, np.float32)
    counts = [len(each.sample.columns.get("items", ())) for each in documents]
    assert batch["items_counts"].tolist() == counts
    firsts = [int(each.tokens[0]) for each, count in zip(documents, counts, strict=True) for _ in range(count)]
    assert batch["items"].tolist() == [[first] * 3 for first in firsts]


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_them_on_the_side_of_the_tokens(side, shift_labels):
    samples = [sample([1, 2, 3]), sample([4, 5], lacks=True)]
    batch = PaddedCollator(side=side, pad_to_multiple_of=4, shift_labels=shift_labels)(samples)
    ids, weights = [1, 2, 3], [20, 30, -9] if shift_labels else [10, 20, 30]
    row, of_labels = ([PAD, *ids], [-9, *weights]) if side == "left" else ([*ids, PAD], [*weights, -9])
    assert batch["at_tokens"][0].tolist() == [[id, -id] if id else [-7, -7] for id in row]
    assert (batch["at_labels"].tolist(), batch["of_samples"].tolist()) == ([of_labels, [-9] * 4], [1.0, 0.5])
    assert FixedCollator(length=4)(samples)["at_tokens"].shape == (2, 4, 2)


def test_a_piece_of_a_sample_has_the_values_of_its_tokens_and_megatrons_mask_is_beside_the_labels():
    whole = sample([1, 2, 3, 4, 5])
    batch = PackedCollator()([[Document(whole.tokens[2:4], whole.labels[2:4], None, whole, 2)]])
    assert (batch["at_tokens"][0, :, 0].tolist(), batch["at_labels"].tolist()) == ([3, 4], [[30, 40]])
    column = Column("loss_mask", "float32", follows="labels")
    ids = np.arange(1, 4, dtype=np.int32)
    whole = Sample(tokens=ids, labels=ids, columns=Columns({column: np.array([0, 0.5, 1], np.float32)}))
    batch = PackedCollator(max_length=5, shift="document")([[Document(ids, ids, None, whole)]])
    assert (batch["loss_mask"].tolist(), batch["loss_mask"].dtype) == ([[0.5, 1, 0, 0, 0]], np.float32)
    assert batch["shifted_labels"].tolist() == [[2, 3, IGNORE, IGNORE, IGNORE]]


PIXELS = Column("pixel_values", "float32", "item", (2,), optional=True)
GRIDS = Column("image_grid_thw", "int64", "item", (3,), optional=True)
COUNTS = Column("num_img_tokens", "int64", "item", optional=True)
TYPES = Column("mm_token_type_ids", "int64", optional=True)
MROPE = Column("mrope", "int64", shape=(3,), optional=True)


def pictured(tokens: list[int], patches: list[int] | None = None) -> Document:
    """A document with a picture of so many patches each, or a text. Its positions are of time, height and width."""
    found: dict[Column, Any] = {}
    if patches:
        found[PIXELS] = np.full((sum(patches), 2), tokens[0], np.float32)
        found[GRIDS] = np.array([[1, 1, number] for number in patches])
        found[COUNTS] = np.array(patches)
        found[TYPES] = np.ones(len(tokens), np.int64)
        found[MROPE] = np.stack([np.arange(len(tokens)) + 10 * axis for axis in range(3)], 1)
    columns = Columns({column: found.get(column, np.empty(0)) for column in (PIXELS, GRIDS, COUNTS, TYPES, MROPE)})
    for column in {PIXELS, GRIDS, COUNTS, TYPES, MROPE} - found.keys():
        del columns[column.name]
    ids = np.array(tokens, np.int32)
    return Document(ids, ids, None, Sample(tokens=ids, labels=ids, columns=columns))


def test_a_pack_has_the_positions_that_qwens_models_take():
    pack = [pictured([1, 2, 3], [2]), pictured([4, 5])]
    batch = PackedCollator(max_length=8, keys="transformers")([pack])
    own, *three = batch["position_ids"].tolist()
    assert own == PackedCollator(max_length=8)([[Document(each.tokens) for each in pack]])["position_ids"].tolist()
    assert three == [[[*(10 * axis + place for place in range(3)), 0, 1, 0, 0, 0]] for axis in range(3)]
    assert batch["mm_token_type_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
    assert (batch["position_ids"].dtype, "mrope" in batch) == (np.int64, False)


def test_a_call_of_a_model_has_pictures_only_where_there_are_some_and_no_counts():
    packed, padded = PackedCollator(keys="transformers"), PaddedCollator(keys="transformers")
    for with_pictures, batch in [
        (True, packed([[pictured([1], [2]), pictured([2])]])),
        (False, packed([[pictured([1])]])),
        (True, padded([pictured([1], [2, 3]), pictured([2])])),
        (False, padded([pictured([1])])),
    ]:
        assert [name for name in batch if name.endswith("_counts")] == []
        assert ("pixel_values" in batch, "image_grid_thw" in batch) == (with_pictures, with_pictures)
    assert packed([[pictured([1], [2]), pictured([7], [1])]])["pixel_values"].tolist() == [[1, 1], [1, 1], [7, 7]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_three_positions_for_each_token(side):
    batch = PaddedCollator(side=side)([pictured([1, 2, 3], [1]), pictured([4, 5])])
    text = [0, 0, 1] if side == "left" else [0, 1, 0]
    assert batch["position_ids"].tolist() == [[[10 * n + place for place in range(3)], text] for n in range(3)]


def test_verls_rows_have_their_own_pictures_and_four_positions():
    documents = [pictured([1, 2, 3], [2, 1]), pictured([4, 5])]
    batch = FixedCollator(length=4, keys="verl")(documents)
    first, second = batch["multi_modal_inputs"]
    shapes = {name: array.shape for name, array in first.items()}
    assert shapes == {"pixel_values": (3, 2), "image_grid_thw": (2, 3), "num_img_tokens": (2,)}
    assert (second, "labels" in batch) == ({}, False)
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["position_ids"].shape == (2, 4, 4)
    assert batch["position_ids"][0].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [10, 11, 12, 0], [20, 21, 22, 0]]
    assert batch["position_ids"][1].tolist() == [[0, 1, 0, 0]] * 4
    assert PaddedCollator(keys="verl")([sample([1, 2])])["multi_modal_inputs"] == [{}]


def test_a_batch_without_a_picture_has_the_dummy_at_the_end_of_its_shortest_pack():
    dummy = pictured([9, 9], [1]).sample
    collate = PackedCollator(max_length=6, dummy=dummy)
    packs = [[pictured([1, 2, 3, 4, 5])], [pictured([6, 7, 8])]]
    batch = collate(packs)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 9, 0]]
    assert batch["labels"][1].tolist() == [IGNORE, 7, 8, IGNORE, IGNORE, IGNORE]
    assert batch["seq_idx"][1].tolist() == [0, 0, 0, 1, 1, -1]
    assert (batch["pixel_values"].tolist(), batch["pixel_values_counts"].tolist()) == ([[9, 9]], [0, 0, 1])

    with_picture = [*packs[1], pictured([5], [1])]
    plain = PackedCollator(max_length=6)([packs[0], with_picture])
    assert all(np.array_equal(array, plain[name]) for name, array in collate([packs[0], with_picture]).items())
    of_words = sample([1, 2, 3], num_items=2)  # items of another kind are no picture
    assert collate([[Document(of_words.tokens, None, None, of_words)]])["pixel_values_counts"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="^AD450 packs of 5 tokens and more leave no room for the dummy of 2"):
        collate(packs[:1])


@pytest.mark.parametrize("keys", ["all", "transformers", "verl"])
def test_padded_rows_without_a_picture_have_the_dummy_as_one_row_more(keys):
    dummy = pictured([9, 9], [1]).sample
    collate = PaddedCollator(keys=keys, max_length=3, dummy=dummy)
    text, with_picture = pictured([6, 7, 8]), pictured([5], [1])
    batch, plain = collate([text]), PaddedCollator(keys=keys)([text])

    assert batch["input_ids"].tolist() == [[6, 7, 8], [9, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    of_labels = "loss_mask" if keys == "verl" else "labels"
    untrained = 0 if keys == "verl" else IGNORE
    assert batch[of_labels].tolist() == [plain[of_labels][0].tolist(), [untrained] * 3]
    items = batch["multi_modal_inputs"][1] if keys == "verl" else batch
    assert items["pixel_values"].tolist() == [[9, 9]]

    without = PaddedCollator(keys=keys)([text, with_picture])
    assert str(collate([text, with_picture])) == str(without)
    with pytest.raises(ConfigError, match="^AD450 a document of 2 tokens"):
        PaddedCollator(max_length=1, dummy=dummy)([pictured([6])])


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (PaddedCollator, {"keys": "verl", "shift_labels": True}, "PaddedCollator: with keys='verl' the trainer shifts"),
        (FixedCollator, {"length": 4, "keys": "transformers", "shift_labels": True}, "FixedCollator: with keys="),
        (PackedCollator, {"dummy": pictured([1]).sample}, "PackedCollator: dummy is a Sample with items"),
        (PaddedCollator, {"dummy": pictured([1]).sample}, "PaddedCollator: dummy is a Sample with items"),
        (PackedCollator, {"dummy": pictured([1], [1]).sample, "truncate_packs": True}, "needs truncate_packs=False"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        kind(**settings)


def declaring(column: Column, value: Any) -> Sample:
    return Sample(tokens=np.arange(3, dtype=np.int32), columns=Columns({column: np.asarray(value)}))


WHOLE = sample([1, 2, 3], num_items=1)
REFUSED = {
    "two kinds": (PaddedCollator(), [declaring(AT_LABELS, [1] * 3), declaring(Column("at_labels", "int8"), [1] * 3)]),
    "has 'max_length_q' already": (
        PackedCollator(keys="transformers"),
        [[Document(np.arange(3), sample=declaring(Column("max_length_q", "int8"), [1] * 3))]],
    ),
    "a piece of a sample with 1 items": (PackedCollator(), [[Document(WHOLE.tokens[:2], sample=WHOLE)]]),
    "at_labels only 2 values": (PaddedCollator(), [declaring(AT_LABELS, [1] * 2)]),
    "what a tokenize function declares": (PaddedCollator(), [Sample(tokens=np.arange(3), columns={"x": np.ones(3)})]),
    "mrope becomes position_ids": (PaddedCollator(), [declaring(Column("mrope", "int64"), [1] * 3)]),
    "already": (PaddedCollator(keys="verl"), [declaring(Column("multi_modal_inputs", "int8", "item"), [1])]),
    "takes no columns": (PreferenceCollator(), [WHOLE]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_put_into_a_batch_is_refused(reason):
    collator, documents = REFUSED[reason]
    with pytest.raises(ConfigError, match=f"^AD452 .*{reason}"):
        collator(documents)
