"""The interface of slime's streaming datasets, and our loader behind it: the public import path."""

from __future__ import annotations

from asyncdata.integrations.slime.dataset_adapter import AsyncDatasetAdapter, HFDatasetAdapterBase

__all__ = ("AsyncDatasetAdapter", "HFDatasetAdapterBase")
