"""S14: rendering a chat."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.framework import at_most, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("chat_template",)


def chat_template(bench: Bench) -> None:
    """S14: one user turn, beside the same template compiled by bare Jinja."""
    (found,) = rounds(partial(bench.probe, "chat_template", tokenizer=bench.tokenizer), num_rounds=bench.num_rounds)
    bench.report("S14", "bare Jinja, compiled before", found["bare_us"], "us a chat")
    bench.report("S14", "ours, as any chat is rendered", found["ours_us"], "us a chat")
    bench.report("S14", "ours over bare Jinja", ratios(found["ours_us"], found["bare_us"]), "x", at_most(1.1))
    bench.report("S14", "ours, the template proven", found["proven_us"], "us a chat", at_most(1.5))
