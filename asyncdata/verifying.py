"""Whether two runs saw the same stream of samples. The public import path."""

from __future__ import annotations

from asyncdata.checkpoint.compare_runs import Comparison, Verdict, compare

__all__ = ("Comparison", "Verdict", "compare")
