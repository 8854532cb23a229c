"""Whether two runs saw the same stream of samples, by their snapshots. The public import path."""

from __future__ import annotations

from asyncdata.checkpoint.compare_runs import Comparison, Verdict, compare
from asyncdata.checkpoint.snapshot import load

__all__ = ("Comparison", "Verdict", "compare", "load")
