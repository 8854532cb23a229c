"""What a loader says of itself where it is printed, and in a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from asyncdata.core.errors import redacted
from asyncdata.core.file_refs import all_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.loader.engine import Engine

__all__ = ("facts_of", "html_table")


def facts_of(engine: Engine, closed_because: str) -> dict[str, str]:
    """What the loader reads, where it is, and how it does, by name.

    :param closed_because: why it is closed; empty if it is open.
    """
    if not engine.service.is_here:  # its locks may be held for ever
        return {"belongs to": "the process that forked this one"}

    files, now = engine.files, engine.statistics()
    num_bytes = sum(all_sizes(files))
    facts = {
        "source": redacted(files[0].path) + (f" and {len(files) - 1:,} more files" if len(files) > 1 else ""),
        "size": f"{num_bytes / 1e6:,.1f} MB",
        "position": f"{now.epoch}:{now.window}:{now.row}",
        "delivered": f"{now.samples_total:,} samples, {now.tokens_total:,} tokens",
        "dropped": f"{sum(now.dropped_total.values()):,} rows",
        "ready": f"{now.ready_samples:,} of {now.capacity_samples:,} samples",
        "waited": f"{now.data_wait_seconds_total:.1f} s in {now.waits_total:,} calls",
        "workers": f"{now.num_workers:,}",
    }
    return facts | ({"closed": closed_because} if closed_because else {})


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """A table of two columns."""
    left = "style='text-align: left'"
    rows = [f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(facts[name])}</td></tr>" for name in facts]
    return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"
