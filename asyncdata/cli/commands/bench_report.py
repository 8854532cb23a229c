"""What ``asyncdata bench`` found, for people: each figure, what it means, and the knob to turn."""

from __future__ import annotations

import textwrap
from typing import Any

from asyncdata.cli.output import MAX_WIDTH, si

__all__ = ("as_text",)

_INDENT = " " * 15
_RATIO = 0.9
"""Of the tokenizer alone: with less, something beside the tokenizer is worth a look."""

_FEW_MS = 5.0
_LITTLE_WAIT = 0.001


def as_text(report: dict[str, Any]) -> str:
    """A paragraph a figure."""
    paragraphs = [
        *_rates(report),
        ("first batch", f"{report['first_batch_s']:.2f} s", _of_first_batch()),
        ("a call", f"{report['call_us']:.1f} us for 32 ready samples", _of_call(report)),
        ("data wait", f"{report['data_wait_share']:.2%} of the time at half that rate", _of_wait(report)),
        ("memory", _megabytes(report["memory_bytes"]), _of_memory(report)),
    ]
    return "\n".join(_paragraph(*paragraph) for paragraph in paragraphs)


def _paragraph(name: str, figure: str, meaning: str) -> str:
    lines = textwrap.wrap(meaning, MAX_WIDTH - len(_INDENT))
    return "\n".join([f"{name:<{len(_INDENT)}}{figure}", *(_INDENT + line for line in lines)])


def _rates(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    processes = "1 process" if report["num_workers"] < 2 else f"{report['num_workers']} processes"
    found = []
    if report["tokenizer_rows_per_s"] is not None:
        meaning = f"Hugging Face's encode_batch_fast over these prompts in {processes}, and nothing else."
        found.append(("tokenizer", f"{si(report['tokenizer_rows_per_s'])} rows/s", meaning))
    meaning = f"The tokenize function alone in {processes}: with JSON, template and columns, without a loader."
    found.append(("tokenize fn", f"{si(report['tokenize_fn_rows_per_s'])} rows/s", meaning))
    figure = f"{si(report['rows_per_s'])} rows/s, {si(report['tokens_per_s'])} tokens/s"
    return [*found, ("loader", figure, _of_loader(report))]


def _of_loader(report: dict[str, Any]) -> str:
    """How near to the limit, and what would bring more."""
    name, limit = _limit(report)
    ratio = report["rows_per_s"] / limit
    said = f"{ratio:.2f} of the {name} alone, with {_workers(report)} on {report['num_cpus']} CPUs."
    if report["num_workers"] < report["num_cpus"]:
        return f"{said} A faster trainer wants a larger --num-workers."

    if report["tokenize_fn_rows_per_s"] < _RATIO * limit:
        return f"{said} What the function does beside tokenizing costs more than the loader: look at the template."

    if ratio < _RATIO:
        return (
            f"{said} This process takes a CPU of its own from the workers; a larger --buffer-size makes larger chunks."
        )

    return f"{said} More rows need more CPUs, or a faster tokenizer."


def _limit(report: dict[str, Any]) -> tuple[str, float]:
    """What no loader goes beyond. A function that is faster than the tokenizer uses another."""
    tokenizer, function = report["tokenizer_rows_per_s"], report["tokenize_fn_rows_per_s"]
    return ("function", function) if tokenizer is None or _RATIO * function > tokenizer else ("tokenizer", tokenizer)


def _of_first_batch() -> str:
    return (
        "From the birth of a new process, whatever the size of the data and wherever a run goes on. Most of it is "
        'loading the vocabulary and, with shuffle="full", the row index.'
    )


def _of_call(report: dict[str, Any]) -> str:
    return (
        f"Median of {report['num_calls']:,} calls. All in all, the trainer's process spends "
        f"{report['cpu_us_per_row']:.1f} us of CPU a row. Larger batches are fewer calls."
    )


def _of_wait(report: dict[str, Any]) -> str:
    slow, longest = report["call_p999_us"] / 1e3, report["longest_call_us"] / 1e3
    said = f"99.9 % of the calls took at most {slow:.2g} ms, the longest {longest:.2g} ms."
    if report["data_wait_share"] > _LITTLE_WAIT or longest > _FEW_MS:
        return f"{said} A larger --buffer-size (now {report['buffer_size']:,}) carries over what is slow now and then."

    return f"{said} The read-ahead carries a trainer that is half as fast as the loader."


def _workers(report: dict[str, Any]) -> str:
    number = report["num_workers"]
    return "a thread of its own" if number == 0 else "1 worker" if number == 1 else f"{number} workers"


def _megabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:,.0f} MB"


def _of_memory(report: dict[str, Any]) -> str:
    return (
        f"Of this process and {_workers(report)}; what they share is counted once (PSS). It does not "
        "grow with the data; fewer workers, smaller windows (--window-blocks) and a smaller --buffer-size take less."
    )
