"""slime's interface of streaming datasets, implemented with this library's loader: the public import path."""

from __future__ import annotations

from asyncdata.integrations.slime.dataset_adapter import AsyncDatasetAdapter, HFDatasetAdapterBase

__all__ = ("AsyncDatasetAdapter", "HFDatasetAdapterBase")
