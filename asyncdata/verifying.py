"""Whether two runs saw the same stream of samples, by their snapshots. The public import path."""

from __future__ import annotations

from asyncdata.checkpoint.snapshot import load
from asyncdata.checkpoint.summary import Comparison, Verdict, compare

__all__ = ("Comparison", "Verdict", "compare", "load")
