"""What ``asyncdata bench`` found, for people: each figure, what it means, and the knob to turn."""

from __future__ import annotations

import textwrap
from typing import Any

from asyncdata.cli.output import MAX_WIDTH, si

__all__ = ("as_text",)

_INDENT = " " * 15
_RATIO = 0.9
"""Of the tokenizer alone: with less, something beside the tokenizer is worth a look."""

_FIRST_BATCH = (
    "From the start of a new process, whatever the size of the data and wherever a run resumes. Most of it is loading "
    'the vocabulary and, with shuffle="full", the row index.'
)
_MEMORY = (
    "what they share is counted once (PSS). It does not grow with the data; fewer workers, smaller windows "
    "(--window-blocks) and a smaller --buffer-size take less."
)
_FEW_MS = 5.0
_LITTLE_WAIT = 0.001


def as_text(report: dict[str, Any]) -> str:
    """A paragraph per figure."""
    number, memory, tokenizer = report["num_workers"], report["memory_bytes"], report["tokenizer_rows_per_s"]
    processes = f"{number} processes" if number > 1 else "1 process"
    workers = ("a thread of its own", "1 worker")[number] if number < 2 else f"{number} workers"
    found = ""
    if tokenizer is not None:
        meaning = f"Hugging Face's encode_batch_fast over these prompts in {processes}, and nothing else."
        found += _paragraph("tokenizer", f"{si(tokenizer)} rows/s", meaning)
    meaning = f"The tokenize function alone in {processes}: with JSON, template and columns, without a loader."
    found += _paragraph("tokenize fn", f"{si(report['tokenize_fn_rows_per_s'])} rows/s", meaning)
    figure = f"{si(report['rows_per_s'])} rows/s, {si(report['tokens_per_s'])} tokens/s"
    found += _paragraph("loader", figure, _of_loader(report, workers))
    found += _paragraph("first batch", f"{report['first_batch_s']:.2f} s", _FIRST_BATCH)
    meaning = f"Median of {report['num_calls']:,} calls. All in all, the trainer's process spends "
    meaning += f"{report['cpu_us_per_row']:.1f} us of CPU a row. Larger batches are fewer calls."
    found += _paragraph("a call", f"{report['call_us']:.1f} us for 32 ready samples", meaning)
    found += _paragraph("data wait", f"{report['data_wait_share']:.2%} of the time at half that rate", _of_wait(report))
    figure = "unknown" if memory is None else f"{memory / 1e6:,.0f} MB"
    return (found + _paragraph("memory", figure, f"Of this process and {workers}; {_MEMORY}")).rstrip()


def _paragraph(name: str, figure: str, meaning: str) -> str:
    lines = textwrap.wrap(meaning, MAX_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"{name:<{len(_INDENT)}}{figure}", *lines, ""])


def _of_loader(report: dict[str, Any], workers: str) -> str:
    """How near to the limit, and what would bring more."""
    tokenizer, function = report["tokenizer_rows_per_s"], report["tokenize_fn_rows_per_s"]
    is_function = tokenizer is None or _RATIO * function > tokenizer  # one that is faster has another tokenizer
    name, limit = ("function", function) if is_function else ("tokenizer", tokenizer)
    ratio = report["rows_per_s"] / limit
    if report["num_workers"] < report["num_cpus"]:
        advice = "A faster trainer wants a larger --num-workers."
    elif function < _RATIO * limit:
        advice = "What the function does beside tokenizing costs more than the loader: look at the template."
    elif ratio < _RATIO:
        advice = "This process takes CPU time from the workers; a larger --buffer-size makes larger chunks."
    else:
        advice = "More rows need more CPUs, or a faster tokenizer."
    return f"{ratio:.2f} of the {name} alone, with {workers} on {report['num_cpus']} CPUs. {advice}"


def _of_wait(report: dict[str, Any]) -> str:
    slow, longest = report["call_p999_us"] / 1e3, report["longest_call_us"] / 1e3
    advice = "The read-ahead carries a trainer that is half as fast as the loader."
    if report["data_wait_share"] > _LITTLE_WAIT or longest > _FEW_MS:
        advice = f"A larger --buffer-size (now {report['buffer_size']:,}) bridges slow moments."
    return f"99.9 % of the calls took at most {slow:.2g} ms, the longest {longest:.2g} ms. {advice}"
