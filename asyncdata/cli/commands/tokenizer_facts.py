"""What ``asyncdata inspect`` says about speed: which shapes of chats are proven, and which library encodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.cli.output import printable
from asyncdata.tokenization.encoders.fast_backends import FAST_BACKENDS, version_of
from asyncdata.tokenization.functions.tokenizer_settings import OfTokenizer
from asyncdata.tokenization.tokenizer_files import TokenizerFiles, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.chat_template.compiled.cache import SeenShape

__all__ = ("backend_line", "encoding_of", "template_lines", "template_of")

_MOST_SHOWN = 5


def template_of(seen: Sequence[SeenShape]) -> list[dict[str, Any]]:
    """The shapes of chats that were rendered, in order of appearance; a shape is proven if all of its chats were."""
    found: dict[tuple[tuple[str, ...], bool], bool] = {}
    for shape in seen:
        key = shape.messages, shape.has_tools
        found[key] = found.get(key, True) and shape.is_proven
    return [
        {"messages": list(messages), "has_tools": has_tools, "is_proven": is_proven}
        for (messages, has_tools), is_proven in found.items()
    ]


def template_lines(shapes: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The shapes as lines of text; none if no chat was rendered."""
    if not shapes:
        return []

    rendered = [_shape_line(shape) for shape in shapes if not shape["is_proven"]]
    head = f"proven for {len(shapes) - len(rendered)} of {len(shapes)} shapes of chats"
    more = [f"... and {len(rendered) - _MOST_SHOWN} more"] if len(rendered) > _MOST_SHOWN else []
    return [("template", head), *[("", f"rendered: {line}") for line in [*rendered[:_MOST_SHOWN], *more]]]


def _shape_line(shape: dict[str, Any]) -> str:
    return printable(" / ".join(shape["messages"]) + (", with tools" if shape["has_tools"] else ""))


def encoding_of(function: Any) -> dict[str, str] | None:
    """The library that encodes, and the reason; None for a function without one of asyncdata's tokenizers."""
    if not isinstance(function, OfTokenizer):
        return None

    if function.tokenizer_backend == "hf":
        return _trusted("as requested")

    from asyncdata.tokenization.encoders.equivalence_records import choose

    files = TokenizerFiles(resolve(function.tokenizer, getattr(function, "revision", None)).folder)
    proof = choose(files, function.tokenizer_backend, needs_offsets=function.needs_offsets)
    if proof is None:
        return _trusted(_why_none(files, needs_offsets=function.needs_offsets))

    subject = proof.subject
    same = "ids and offsets" if function.needs_offsets else "ids"
    return {"backend": subject.backend, "version": subject.backend_version, "reason": f"proven to give the same {same}"}


def _trusted(reason: str) -> dict[str, str]:
    from importlib.metadata import version

    return {"backend": "tokenizers", "version": version("tokenizers"), "reason": reason}


def _why_none(files: TokenizerFiles, *, needs_offsets: bool) -> str:
    from asyncdata.tokenization.encoders.equivalence_records import find, subject_of

    installed = [name for name in FAST_BACKENDS if version_of(name)]
    if not installed:
        return f"none of {', '.join(FAST_BACKENDS)} is installed"

    said = []
    for name in installed:
        subject = subject_of(files, name)
        proof = None if subject is None else find(subject)
        if proof is None:
            said.append(f"{name} is not proven yet")
        elif needs_offsets and not proof.refusal:
            said.append(f"{name} does not tell where the tokens of a text lie: {proof.no_offsets}")
        else:
            said.append(f"{name} is refused: {proof.refusal}")
    return "; ".join(said)


def backend_line(found: dict[str, str]) -> str:
    """The library as one line of text."""
    return printable(f"{found['backend']}: {found['reason']}")
