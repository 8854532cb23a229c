"""From a command's options to the library's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.loader import DataLoader
from asyncdata.order import Shuffle
from asyncdata.tokenization.prompt import PromptTokenizeFn

if TYPE_CHECKING:
    import argparse

__all__ = ("loader_of", "shuffle_of", "tokenize_fn_of")


def shuffle_of(args: argparse.Namespace) -> Shuffle:
    """The order's settings."""
    return Shuffle(enabled=args.shuffle, block_bytes=args.block_bytes, window_blocks=args.window_blocks)


def tokenize_fn_of(args: argparse.Namespace) -> PromptTokenizeFn:
    """The tokenize function."""
    return PromptTokenizeFn(
        args.tokenizer,
        prompt_key=args.prompt_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        max_length=args.max_length,
    )


def loader_of(args: argparse.Namespace, **knobs: Any) -> DataLoader:
    """The loader, not yet started."""
    return DataLoader(
        args.data,
        tokenize_fn=tokenize_fn_of(args),
        seed=args.seed,
        shuffle=shuffle_of(args),
        num_workers=args.num_workers,
        on_bad_row=args.on_bad_row,
        max_bad_rows=args.max_bad_rows,
        quarantine_path=args.quarantine_path,
        **knobs,
    )
