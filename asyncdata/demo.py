"""Data to try the library on: prompts that every Python installation has, and a small tokenizer of asyncdata.

The prompts are questions about the docstrings of the installed standard library. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from asyncdata.core.errors import ConfigError, SourceError

__all__ = ("CHAT_TEMPLATE", "docstring_prompts", "tokenizer_folder", "write_docstring_prompts")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\\n' -}}
{%- endif -%}
"""
"""The chat template of the demo's tokenizer."""

_QUESTION = "Which {kind} of Python's standard library is described here? Answer with its full name.\n\n{docstring}"
_NOT_THE_LIBRARY = {"__pycache__", "dist-packages", "site-packages", "test", "tests", "idle_test"}
_NO_PROSE = {"encodings", "lib2to3", "pydoc_data"}

Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def tokenizer_folder() -> str:
    """The folder of the demo's tokenizer: byte-level BPE with a chat template, trained on docstrings."""
    return str(Path(__file__).parent / "assets" / "demo_tokenizer")


def write_docstring_prompts(path: str | os.PathLike[str], num_rows: int | None = None) -> int:
    """Write a JSONL file of prompts, ``{"input", "label", "metadata"}``, and return its number of rows.

    The same Python writes the same file every time.

    :param num_rows: the most rows; None for all, some thousands.
    :raises SourceError: if this Python was installed without the source of its standard library.
    """
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"num_rows must be at least 1, got {num_rows}")

    number = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row in islice(docstring_prompts(), num_rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            number += 1
    if number == 0:
        raise SourceError(f"AD201 no docstring was found in {_library()}: this Python has no source of its library")

    return number


def docstring_prompts() -> Iterator[dict[str, Any]]:
    """A row per module, class and function of the standard library that has a docstring; files by name."""
    root = _library()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_THE_LIBRARY - _NO_PROSE)
        for path in sorted(Path(folder) / name for name in files if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield from _prompts_of(_parse(path), module, module)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _parse(path: Path) -> ast.Module:
    """The file's syntax tree; an empty one if this version of Python cannot parse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that are deprecated
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ast.Module(body=[], type_ignores=[])


def _prompts_of(scope: Scope, name: str, module: str) -> Iterator[dict[str, Any]]:
    """The rows of a scope and of those in it. The answer is the label, which a reward function can check."""
    text = ast.get_docstring(scope)
    if text and _is_encodable(text):
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(scope), "function")
        yield {
            "input": _QUESTION.format(kind=kind, docstring=text),
            "label": name,
            "metadata": {"kind": kind, "module": module, "line": getattr(scope, "lineno", 1)},
        }
    for node in scope.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _prompts_of(node, f"{name}.{node.name}", module)


def _is_encodable(text: str) -> bool:
    """Whether it has no lone surrogate, as a docstring may show one."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
