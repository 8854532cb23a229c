"""Which requests wait for a store: one more process, or thread, answers them, while the others tokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.messages import OfPart, Scan

if TYPE_CHECKING:
    from asyncdata.core.messages import Job, Request

__all__ = ("has_stores", "waits_for_a_store")


def has_stores(job: Job) -> bool:
    """Whether a source of the job is in a store."""
    return bool(job.stores) or any(part.stores for part in job.parts)


def waits_for_a_store(job: Job, request: Request) -> bool:
    """Whether the request is for the reader. Only whole windows are; others tokenize what they read."""
    if isinstance(request, OfPart):
        return isinstance(request.request, Scan) and bool(job.parts[request.part].stores)

    return isinstance(request, Scan) and bool(job.stores)
