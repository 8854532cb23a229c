"""The public API as a user's code sees it; checked by mypy --strict, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from asyncdata import (
    AsyncDataLoader,
    BadRows,
    Cache,
    DataLoader,
    JsonlSource,
    Limits,
    PromptTokenizeFn,
    Ranks,
    Sample,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

tokenize_fn = PromptTokenizeFn(
    "path/to/tokenizer",
    prompt_key="input",
    label_key="label",
    metadata_key="metadata",
    apply_chat_template=False,
    max_length=None,
)


def longest_first(buffer: list[list[Sample]], num_groups: int) -> list[list[Sample]]:
    return sorted(buffer, key=lambda group: -group[0].response_length)[:num_groups]


def tokenize(row: dict[str, Any]) -> dict[str, Any] | None:
    return {"input_ids": [len(row)]}


async def rollout(path: Path) -> None:
    async with AsyncDataLoader(
        "prompts/*.jsonl",
        tokenize_fn=tokenize_fn,
        seed=42,
        shuffle=True,
        num_workers=None,
        buffer_size=1000,
        dp_size=1,
        n_samples_per_prompt=8,
        buffer_filter=longest_first,
        epochs=None,
        timeout_s=None,
        bad_rows=BadRows(policy="quarantine", max=None),
        limits=Limits(max_workers=4),
        cache=Cache(tokens=True),
        commit="on_delivery",
    ) as loader:
        assert_type(loader, AsyncDataLoader)
        assert_type(await loader.get_next_batch(32), list[Sample])
        groups = await loader.get_samples(8)
        assert_type(groups, list[list[Sample]])
        loader.add_samples(groups)

        state = loader.state_dict()
        assert_type(state, dict[str, Any])
        loader.load_state_dict(state)
        loader.save(path)
        loader.restore(path)
        metrics: Mapping[str, object] = loader.statistics().to_dict()
        del metrics


def fine_tune() -> None:
    with DataLoader(JsonlSource("prompts.jsonl"), tokenize_fn=tokenize, batch_size=32, epochs=1) as loader:
        loader.set_epoch(1)
        for batch in loader:
            sample: Sample = batch[0]
            assert_type(sample.response, str)

        assert_type(loader.get_next_batch(32), list[Sample])
        assert_type(loader.get_samples(8), list[list[Sample]])


def knobs_are_checked(knobs: dict[str, Any]) -> None:
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, **knobs)
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, ranks={"rank": 0, "world_size": 2}, bad_rows="skip")
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, ranks=Ranks(rank=0, world_size=2))
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, on_bad_row="skip")  # type: ignore[arg-type]
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, batch_size="32")  # type: ignore[arg-type]
    DataLoader("prompts.jsonl", tokenize_fn=tokenize, bad_rows="ignore")  # type: ignore[arg-type]
    Ranks(world=2)  # type: ignore[call-arg]


def token_counts(samples: list[Sample]) -> list[int]:
    return [len(sample.tokens) for sample in samples]


def fine_tune_on_collated_batches() -> None:
    with DataLoader("prompts.jsonl", tokenize_fn=tokenize_fn, batch_size=32, collate_fn=token_counts) as loader:
        for batch in loader:
            counts: list[int] = batch
            del counts
