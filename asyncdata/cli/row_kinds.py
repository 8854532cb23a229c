"""Finds the kind of the rows (prompts, chats, text, pairs) by the keys of the first rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.core.errors import ConfigError
from asyncdata.loader.mix_file import mix_of_file
from asyncdata.tokenization.rows import RowFault, decode_object

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output

__all__ = ("kind_of", "settle_kind")

_ROWS_LOOKED_AT = 20
_KEYS = {
    "chat": {"messages"},
    "preference": {"chosen", "rejected"},
    "babilong": {"input", "question", "target"},
    "text": {"text"},
}


def kind_of(row: dict[str, Any]) -> str:
    """The kind of rows, by the keys of one."""
    return next((kind for kind, keys in _KEYS.items() if keys <= set(row)), "prompt")


def settle_kind(args: argparse.Namespace, output: Output, *, says_prompt: bool = False) -> None:
    """Set ``args.kind`` to the kind of the rows, unless options set it, and print it.

    With ``--prompt-key`` or ``--apply-chat-template``, rows are prompts.

    :param says_prompt: also print it for prompts, the most common kind.
    :raises ConfigError: if none of the first rows is a JSON object.
    """
    if args.kind is not None or args.tokenizer is None or args.tokenize_fn is not None:
        return

    is_told = args.prompt_key is not None or args.apply_chat_template is not None
    args.kind = kind = "prompt" if is_told else _kind_of_rows(args)
    if says_prompt or kind != "prompt":
        output.say(f"rows are taken to be of the kind {kind!r}; --kind says otherwise", "dim")


def _kind_of_rows(args: argparse.Namespace) -> str:
    mix = getattr(args, "mix", None)
    data: Any = args.data if mix is None else next(mix_of_file(mix).leaves()).part.source
    with OpenedOrder(data, shuffle=False) as opened:
        for row in opened.first(_ROWS_LOOKED_AT):
            try:
                return kind_of(decode_object(row.raw))
            except RowFault:
                continue

    raise ConfigError(f"none of the first {_ROWS_LOOKED_AT} rows is a JSON object; say what rows are by --kind")
