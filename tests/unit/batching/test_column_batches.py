"""Columns in batches: each value stands at its token, beside its label, or with its document; the rest is padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import (
    Column,
    ConfigError,
    Document,
    FixedCollator,
    PackedCollator,
    PaddedCollator,
    PreferenceCollator,
    Sample,
    XTunerCollator,
)
from asyncdata.core.columns import Columns

AT_TOKENS = Column("at_tokens", "int64", shape=(2,), pad=-7)
AT_LABELS = Column("at_labels", "int64", pad=-9, follows="labels")
OF_SAMPLES = Column("of_samples", "float32", "sample", pad=0.5)
ITEMS = Column("items", "int16", "item", (3,))
COLUMNS = (AT_TOKENS, AT_LABELS, OF_SAMPLES, ITEMS)
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


def test_a_piece_of_a_sample_has_the_values_of_its_tokens():
    whole = sample([1, 2, 3, 4, 5])
    batch = PackedCollator()([[Document(whole.tokens[2:4], whole.labels[2:4], None, whole, 2)]])
    assert (batch["at_tokens"][0, :, 0].tolist(), batch["at_labels"].tolist()) == ([3, 4], [[30, 40]])


def test_xtuners_items_have_the_columns_of_their_pack():
    whole = sample([1, 2, 3], num_items=1)
    (item,) = XTunerCollator(max_length=8)([[Document(whole.tokens, whole.labels, None, whole)]])
    assert (item["at_tokens"].shape, item["items"].tolist(), item["items_counts"].tolist()) == (
        (1, 8, 2),
        [[1] * 3],
        [1],
    )


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
    "takes no columns": (PreferenceCollator(), [WHOLE]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_put_into_a_batch_is_refused(reason):
    collator, documents = REFUSED[reason]
    with pytest.raises(ConfigError, match=f"^AD452 .*{reason}"):
        collator(documents)
