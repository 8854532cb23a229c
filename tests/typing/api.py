"""The public API as a user's code sees it; checked by mypy --strict and pyright, never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import asyncdata as ad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

prompts = ad.PromptTokenizeFn(
    "path/to/tokenizer",
    prompt_key="input",
    label_key="label",
    metadata_key="metadata",
    apply_chat_template=False,
    max_length=None,
)
chat = ad.ChatTokenizeFn("path/to/tokenizer", max_length=4096)
texts = ad.TextTokenizeFn("path/to/tokenizer", text_key="text", max_length=512)
pairs = ad.PreferenceTokenizeFn("path/to/tokenizer")


def longest_first(buffer: list[list[ad.Sample]], num_groups: int) -> list[list[ad.Sample]]:
    return sorted(buffer, key=lambda group: -group[0].response_length)[:num_groups]


def tokenize(row: dict[str, Any]) -> dict[str, Any] | None:
    return {"input_ids": [len(row)]}


async def rollout(path: Path) -> None:
    async with ad.AsyncDataLoader(
        "prompts/*.jsonl",
        tokenize_fn=prompts,
        seed=42,
        shuffle=True,
        num_workers=None,
        buffer_size=1000,
        dp_size=1,
        n_samples_per_prompt=8,
        buffer_filter=longest_first,
        epochs=None,
        timeout_s=None,
        bad_rows=ad.BadRows(policy="quarantine", max=None),
        limits=ad.Limits(max_workers=4),
        cache=ad.Cache(folder="a"),
        commit="on_delivery",
    ) as loader:
        assert_type(loader, ad.AsyncDataLoader)
        assert_type(await loader.get_next_batch(32), list[ad.Sample])
        groups = await loader.get_samples(8)
        assert_type(groups, list[list[ad.Sample]])
        loader.add_samples(groups)

        state = loader.state_dict()
        assert_type(state, dict[str, Any])
        loader.load_state_dict(state)
        loader.save(path)
        loader.restore(path)
        metrics: Mapping[str, object] = loader.statistics().to_dict()
        del metrics


async def outcomes() -> None:
    async with ad.AsyncDataLoader(
        "a", tokenize_fn=chat, buffer_filter=ad.filters.Chain((ad.filters.ByReward(), ad.filters.first_in_first_out))
    ) as loader:
        groups = await loader.get_samples(4)
        await loader.report(groups, [1.0] * 4)
        await loader.report(groups, {"accuracy": [1.0] * 4, "format": [None, 1.0, [0.5], 0.0]})
        loader.track()
        loader.consume(groups[:1])
        dropped: int = loader.drop(groups[1:], "stale")
        async for group in loader.groups(max_out=8, max_finished=4):
            assert_type(group, list[ad.Sample])
        assert_type(await loader.take_finished(4, at_least=1), list[list[ad.Sample]])
        loader.policy_version = 1
        rows: list[int] = ad.balance(groups, ranks=8, token_budget=4096)[dropped][0]
        del rows
        async for batch in loader:
            assert_type(batch, list[ad.Sample])


def fine_tune() -> None:
    with ad.DataLoader(ad.JsonlSource("prompts.jsonl"), tokenize_fn=tokenize, batch_size=32, epochs=1) as loader:
        loader.set_epoch(1)
        for batch in loader:
            assert_type(batch, list[ad.Sample])
        assert_type(loader.get_next_batch(32), list[ad.Sample])
        assert_type(loader.get_samples(8), list[list[ad.Sample]])


def knobs_are_checked(knobs: dict[str, Any]) -> None:
    ad.DataLoader("a", tokenize_fn=tokenize, **knobs)
    ad.DataLoader("a", tokenize_fn=tokenize, ranks={"rank": 0, "world_size": 2}, bad_rows="skip")
    ad.DataLoader("a", tokenize_fn=tokenize, ranks=ad.Ranks(rank=0, world_size=2))
    ad.DataLoader("a", tokenize_fn=tokenize, on_bad_row="skip")  # type: ignore[arg-type]
    ad.DataLoader("a", tokenize_fn=tokenize, batch_size="32")  # type: ignore[arg-type]
    ad.DataLoader("a", tokenize_fn=tokenize, bad_rows="ignore")  # type: ignore[arg-type]
    ad.Ranks(world=2)  # type: ignore[call-arg]


def rows(epoch: int) -> Iterator[dict[str, Any]]:
    yield {"epoch": epoch}


def sources() -> None:
    for source in (ad.JsonlSource("a"), ad.JsonArraySource(["a"]), ad.ParquetSource("a"), ad.HuggingFaceSource("a")):
        ad.DataLoader(source, tokenize_fn=chat)
    ad.DataLoader(ad.IterableSource(rows), tokenize_fn=chat)
    for paths in (Path("a"), [Path("a")], ["a", "b"]):
        ad.DataLoader(paths, tokenize_fn=chat)
    parts = ad.Mix({"a": ad.Part("a", weight=2, tokenize_fn=chat), "b": "b", "c": ad.Mix({"d": "d"})}, temperature=2)
    ad.DataLoader(parts, tokenize_fn=chat)
    ad.DataLoader(ad.Mix({"a": "a", "b": "b"}), tokenize_fn=chat, outcomes=ad.Outcomes(policy=ad.PassRate(0.1)))


def settings() -> None:
    ad.DataLoader("a", tokenize_fn=ad.RowFn(), executor=ad.RayExecutor(num_workers=2), cache=ad.Cache(folder="a"))
    ad.DataLoader("a", tokenize_fn=ad.xtuner.XTunerTokenizeFn("a:b"), shuffle=ad.Shuffle(window_blocks=3))
    ad.DataLoader("a", tokenize_fn=chat, bad_rows=ad.BadRows(policy="skip"), telemetry=ad.Telemetry(folder="a"))
    ad.DataLoader("a", tokenize_fn=chat, outcomes=ad.Outcomes(policy=ad.PassRate(drop_above=0.9)))
    fixed = ad.FixedLengthTokenizeFn.babilong("path/to/tokenizer", 4096)
    ad.DataLoader("a", tokenize_fn=fixed, shuffle=ad.RowShuffle(part="train"))
    ad.Shuffle(window=3)  # type: ignore[call-arg]
    ad.ChatTokenizeFn("path/to/tokenizer", max_len=4096)  # type: ignore[call-arg]
    ad.Mix(["a", "b"])  # type: ignore[arg-type]


def packs() -> None:
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, packing=ad.SoftPacking(max_length=512))
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, packing=ad.HardPacking(max_length=512, across_epochs=True))
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, packing=ad.xtuner.XTunerPacking(max_length=512, seed=0))
    soft, packed = ad.SoftPacking(max_length=512), ad.PackedCollator()
    ad.DataLoader("a", tokenize_fn=texts, packing=soft, length_grouping=ad.LengthGrouping(), collate_fn=packed)


def chosen(is_hard: bool) -> ad.SoftPacking | ad.HardPacking:
    return ad.HardPacking(max_length=512) if is_hard else ad.SoftPacking(max_length=512)


def longest(batch: list[ad.Document]) -> int:
    return max(len(document.tokens) for document in batch)


def token_counts(samples: list[ad.Sample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def collators() -> None:
    ad.DataLoader("a", tokenize_fn=texts, packing=chosen(True), collate_fn=ad.PackedCollator())
    ad.DataLoader("a", tokenize_fn=texts, packing=chosen(True), collate_fn=ad.xtuner.XTunerCollator(max_length=512))
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, collate_fn=ad.PaddedCollator(pad_id=0))
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, collate_fn=ad.FixedCollator(length=512, pad_id=0))
    ad.DataLoader("a", tokenize_fn=pairs, batch_size=4, collate_fn=ad.PreferenceCollator(pad_id=0))
    ad.DataLoader("a", tokenize_fn=texts, batch_size=4, packing=chosen(False), collate_fn=longest)
    with ad.DataLoader("a", tokenize_fn=prompts, batch_size=32, collate_fn=token_counts) as loader:
        for batch in loader:
            assert_type(batch, list[int])
    packed = ad.PackedCollator(max_length=512)
    loader_of_packs = ad.DataLoader("a", tokenize_fn=texts, packing=chosen(True), collate_fn=packed, batch_size=1)
    for arrays in loader_of_packs:
        assert_type(arrays["input_ids"], Any)
    for pack in ad.DataLoader("a", tokenize_fn=texts, packing=chosen(True)):
        assert_type(pack, list[list[ad.Document]])
    for samples in ad.DataLoader("a", tokenize_fn=texts, length_grouping=ad.LengthGrouping()):
        assert_type(samples, list[ad.Sample])
    ad.DataLoader("a", tokenize_fn=texts, packing=512)  # type: ignore[arg-type]
