"""Packings and collators as a user's code gives them to a loader; checked by mypy --strict and pyright, never run."""

from __future__ import annotations

from asyncdata import (
    DataLoader,
    Document,
    FixedCollator,
    HardPacking,
    LengthGrouping,
    PackedCollator,
    PaddedCollator,
    PreferenceCollator,
    PreferenceTokenizeFn,
    SoftPacking,
    TextTokenizeFn,
    XTunerCollator,
    XTunerPacking,
)

texts = TextTokenizeFn("path/to/tokenizer", text_key="text", max_length=512)
pairs = PreferenceTokenizeFn("path/to/tokenizer")


def packs() -> None:
    DataLoader("a", tokenize_fn=texts, batch_size=4, packing=SoftPacking(max_length=512))
    DataLoader("a", tokenize_fn=texts, batch_size=4, packing=HardPacking(max_length=512, across_epochs=True))
    DataLoader("a", tokenize_fn=texts, batch_size=4, packing=XTunerPacking(max_length=512, seed=0))
    DataLoader(
        "a.jsonl",
        tokenize_fn=texts,
        batch_size=4,
        packing=SoftPacking(max_length=512),
        length_grouping=LengthGrouping(),
        collate_fn=PackedCollator(max_length=512),
    )


def chosen(is_hard: bool) -> SoftPacking | HardPacking:
    return HardPacking(max_length=512) if is_hard else SoftPacking(max_length=512)


def collators() -> None:
    DataLoader("a", tokenize_fn=texts, batch_size=4, packing=chosen(True), collate_fn=PackedCollator())
    DataLoader(
        "a.jsonl", tokenize_fn=texts, batch_size=4, packing=chosen(True), collate_fn=XTunerCollator(max_length=512)
    )
    DataLoader("a", tokenize_fn=texts, batch_size=4, collate_fn=PaddedCollator(pad_id=0))
    DataLoader("a", tokenize_fn=texts, batch_size=4, collate_fn=FixedCollator(length=512, pad_id=0))
    DataLoader("a", tokenize_fn=pairs, batch_size=4, collate_fn=PreferenceCollator(pad_id=0))


def longest(batch: list[Document]) -> int:
    return max(len(document.tokens) for document in batch)


def own_collators() -> None:
    DataLoader("a", tokenize_fn=texts, batch_size=4, packing=chosen(False), collate_fn=longest)
